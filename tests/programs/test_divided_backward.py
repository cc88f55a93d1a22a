"""A divided backward: each product beside autograd, weights with several uses, what is made of
weights, and what needs no gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.programs.divided_backward import PRODUCTS, DividedBackward

WORDS = torch.tensor([[3, 1, 0], [3, 2, 3]])


def numbers(*shape: int) -> Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def called(name: str, *told: Any) -> Callable[..., Tensor]:
    """The product's operator by torch's own function."""
    if name == "addmm":
        return lambda x, w, b: torch.addmm(b, x, w)
    if name == "embedding":
        padding, _ = told
        return lambda x, w, _: F.embedding(x, w, padding_idx=padding if padding >= 0 else None)
    own: Callable[..., Tensor] = getattr(F, name)
    return lambda x, w, b: own(x, w, b, *told)


CASES: list[tuple[str, Tensor, Tensor, Tensor | None, tuple[Any, ...]]] = [
    ("linear", numbers(4, 3), numbers(5, 3), numbers(5), ()),
    ("linear", numbers(2, 4, 3), numbers(5, 3), None, ()),
    ("linear", numbers(3), numbers(5, 3), numbers(5), ()),
    ("addmm", numbers(4, 3), numbers(3, 5), numbers(5), ()),
    ("addmm", numbers(4, 3), numbers(3, 5), numbers(4, 5), ()),
    ("embedding", WORDS, numbers(4, 6), None, (-1, False)),
    ("embedding", WORDS, numbers(4, 6), None, (1, False)),
    ("conv1d", numbers(2, 4, 9), numbers(6, 2, 3), numbers(6), ([2], [1], [1], 2)),
    ("conv2d", numbers(2, 3, 7, 6), numbers(4, 3, 3, 2), None, ([1, 2], [1, 0], [1, 1], 1)),
    ("conv2d", numbers(2, 3, 7, 6), numbers(4, 3, 3, 3), numbers(4), ([1, 1], [2, 2], [2, 2], 1)),
    (
        "conv3d", numbers(1, 2, 4, 4, 4), numbers(3, 2, 2, 2, 2), numbers(3),
        ([1] * 3, [0] * 3, [1] * 3, 1),
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case[0] for case in CASES])
def test_both_parts_make_what_autograd_makes(number: int) -> None:
    name, x, weight, bias, told = CASES[number]
    given = [t if t is None else t.clone() for t in (x, weight, bias)]
    leaves = [t.requires_grad_() for t in given if t is not None and t.is_floating_point()]
    expected = called(name, *told)(*given)
    d = numbers(*expected.shape)
    wanted = torch.autograd.grad(expected, leaves, d)
    divided = DividedBackward()
    result = divided.product(name, *given, *told)
    assert torch.equal(result, expected)
    result.backward(d)
    before = [t.grad is None for t in leaves]
    assert before == [t is not given[0] for t in leaves], "the input's gradient alone"
    divided.weights()
    for leaf, gradient in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-13, atol=1e-13)


def test_complex_numbers_get_both_gradients_at_once() -> None:
    given = [numbers(2, k, 3).to(torch.complex128) * (1 + 2j) for k in (4, 5)]
    x, w = (t[0].detach().requires_grad_() for t in given)
    wanted = torch.autograd.grad(F.linear(x, w).abs().sum(), (x, w))
    divided = DividedBackward()
    divided.product("linear", x, w, None).abs().sum().backward()  # type: ignore[no-untyped-call]
    assert w.grad is None
    divided.weights()
    torch.testing.assert_close((x.grad, w.grad), wanted)


def test_every_product_is_compared() -> None:
    assert {name for name, *_ in CASES} == PRODUCTS.keys()


def test_a_weight_of_several_uses_gets_their_sum_once() -> None:
    x, w = numbers(4, 3).requires_grad_(), nn.Parameter(numbers(3, 3))
    gain = nn.Parameter(numbers(3))
    complete: list[str] = []
    for name, p in (("w", w), ("gain", gain)):
        p.register_post_accumulate_grad_hook(lambda _, name=name: complete.append(name))  # type: ignore[misc]

    def forward(divided: DividedBackward | None) -> Tensor:
        h = x
        for _ in range(2):
            if divided is None:
                h = torch.tanh(F.linear(h, w)) * gain
            else:
                h = torch.tanh(divided.product("linear", h, w, None)) * divided.joined(gain)
        return h.square().sum()

    wanted = torch.autograd.grad(forward(None), (x, w, gain))
    for count in (1, 2):  # gradients of micro-batches add up
        divided = DividedBackward()
        forward(divided).backward()  # type: ignore[no-untyped-call]
        assert len(complete) == 2 * (count - 1), "nothing is complete in the first part"
        divided.weights()
        assert sorted(complete[-2:]) == ["gain", "w"] and len(complete) == 2 * count
        for p, gradient in zip((x, w, gain), wanted, strict=True):
            torch.testing.assert_close(p.grad, count * gradient)


def test_products_are_made_from_the_last_to_the_first() -> None:
    weights = [nn.Parameter(numbers(3, 3)) for _ in range(4)]
    order: list[int] = []
    for i, w in enumerate(weights):
        w.register_post_accumulate_grad_hook(lambda _, i=i: order.append(i))  # type: ignore[misc]
    divided, h = DividedBackward(), numbers(2, 3)
    for w in weights:
        h = divided.product("linear", h, w, None)
    h.sum().backward()  # type: ignore[no-untyped-call]
    divided.weights()
    assert order == [3, 2, 1, 0], "so that buckets leave while others are made"


class _Counted(torch.autograd.Function):
    """Twice a weight, as a move over ranks would be; counts its backwards."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        _Counted.backwards += 1
        return 2 * gradient


def test_what_a_weight_is_made_with_runs_back_once_and_later() -> None:
    x, w = numbers(2, 3), nn.Parameter(numbers(3, 3))
    _Counted.backwards = 0
    made = _Counted.apply(w)
    divided = DividedBackward()
    h = divided.product("linear", divided.product("linear", x, made, None), made, None)
    (h + divided.joined(made).sum()).sum().backward()
    assert _Counted.backwards == 0
    divided.weights()
    assert _Counted.backwards == 1
    wanted = torch.autograd.grad((F.linear(F.linear(x, 2 * w), 2 * w) + 2 * w.sum()).sum(), w)
    torch.testing.assert_close(w.grad, *wanted)


def test_what_is_frozen_or_not_reached_gets_no_gradient() -> None:
    x, frozen, unused = numbers(2, 3).requires_grad_(), numbers(3, 3), nn.Parameter(numbers(3, 3))
    bias = nn.Parameter(numbers(3))
    divided = DividedBackward()
    assert divided.joined(frozen) is frozen
    divided.product("linear", x, unused, None)
    stand_in = divided.joined(unused)
    assert stand_in is not unused and stand_in.data_ptr() == unused.data_ptr()
    y = divided.product("linear", divided.product("linear", x, frozen, None), frozen, bias)
    y.sum().backward()  # type: ignore[no-untyped-call]
    divided.weights()
    assert unused.grad is None and frozen.grad is None
    assert bias.grad is not None and bias.grad.tolist() == [2, 2, 2] and x.grad is not None
    divided.weights()
    assert bias.grad.tolist() == [2, 2, 2], "nothing is left"
