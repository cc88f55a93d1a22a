"""Random rounding: every result that depends on parameters moves in its last place, and nothing
else does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from synchromesh.verify.random_rounding import RandomRounding

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_move_by_one_rounding_and_zeros_stay(dtype: torch.dtype) -> None:
    x = torch.randn(1000).to(dtype)
    x[::10] = 0
    moved = x.clone()
    RandomRounding(CPU).move_(moved)
    apart = ((moved - x).abs() / x.abs())[x != 0].double()
    eps = torch.finfo(dtype).eps
    assert apart.min() > 0 and apart.max() <= 1.5 * eps  # the product rounds, too
    larger = (moved.abs() > x.abs())[x != 0]
    assert 0.4 < larger.double().mean() < 0.6 and (moved[::10] == 0).all()


def test_the_largest_numbers_stay_finite() -> None:
    x = torch.full((50,), torch.finfo(torch.float32).min)
    x[0] = -torch.inf
    RandomRounding(CPU).move_(x)
    assert x[1:].isfinite().all() and x[0] == -torch.inf


def test_what_depends_on_no_parameter_is_left_alone() -> None:
    weight, x = nn.Parameter(torch.ones(64)), torch.rand(64)
    with RandomRounding(CPU):
        mask, product, view = x * 3, weight * x, (weight * x).view(8, 8)
        index = (weight * x).argmax()
    assert torch.equal(mask, x * 3) and not torch.equal(product, x)
    assert index.dtype is torch.int64 and view.shape == (8, 8)
    assert torch.equal(weight, torch.ones(64))


def test_a_view_moves_nothing() -> None:
    weight = nn.Parameter(torch.rand(64))
    with RandomRounding(CPU):
        views = weight.view(8, 8).t()[1:].detach()
    assert torch.equal(views, weight.view(8, 8).t()[1:])


def gradient(function: Callable[[Tensor], Tensor], seed: int | None) -> Tensor:
    weight = nn.Parameter(torch.linspace(1, 2, 64, dtype=torch.float64))
    if seed is None:
        function(weight).backward()
    else:
        with RandomRounding(CPU, seed):
            function(weight).backward()
    assert weight.grad is not None
    return weight.grad


def test_gradients_move_and_the_seed_repeats_them() -> None:
    def inverse(w: Tensor) -> Tensor:
        return (1 / w.detach() * w).sum()  # its forward has nothing to do with its gradient

    exact = gradient(inverse, None)
    first, again, other = (gradient(inverse, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert 0 < ((first - exact) / exact).abs().max() < 1e-15


def test_single_precision_inside_shows_as_that() -> None:
    def inside(dtype: torch.dtype) -> float:
        def norm(w: Tensor) -> Tensor:
            return (w * w.to(dtype).pow(2).mean().rsqrt().to(w.dtype)).pow(3).sum()

        exact = gradient(norm, None)
        return float((gradient(norm, 0) - exact).abs().max() / exact.abs().max())

    assert inside(torch.float64) < 1e-13 and 1e-9 < inside(torch.float32) < 1e-5


def test_in_place_operators_move_too() -> None:
    weight = nn.Parameter(torch.rand(64))
    with RandomRounding(CPU):
        x = weight.detach().clone().requires_grad_() * 1.0
        before = x.detach().clone()
        x.mul_(2.0)
    assert 0 < (x / before - 2).abs().max() < 1e-6


def test_a_cast_to_single_precision_rounds() -> None:
    weight = nn.Parameter(torch.rand(64, dtype=torch.float64))
    with RandomRounding(CPU):
        x = weight.to(torch.float32)
    assert (x - weight.float()).abs().max() > 1e-9


def test_what_is_chosen_or_whole_stays_exact() -> None:
    weight = nn.Parameter(torch.rand(64))
    with RandomRounding(CPU):
        x = weight * 10
        best, places = x.topk(5)
        kept = (x >= best[-1]).sum()
        counted = (x / 2).round().long()
    assert kept == 5 and torch.equal(best, x[places])
    assert torch.equal(counted, (x.detach() / 2).round().long())


def test_batch_norm_shows_what_the_order_of_its_sums_does() -> None:
    """On a CPU it adds 65,536 values one after another, and is off by far more than its last
    place: a synchronised batch norm, or one on another device, adds otherwise."""
    torch.manual_seed(0)
    x = torch.rand(16, 4, 64, 64, dtype=torch.float64) + 1
    weight = nn.Parameter(torch.ones(4, 1, 1, dtype=torch.float64))

    def run(norm: nn.Module) -> tuple[Tensor, Tensor]:
        weight.grad = None
        y = norm(x * weight)
        (y.sigmoid() * torch.linspace(0, 1, 64)).sum().backward()
        assert weight.grad is not None
        return norm.running_mean, y.detach()

    plain, moved = (nn.BatchNorm2d(4, momentum=1.0, dtype=torch.float64) for _ in range(2))
    mean, y = run(plain)
    with RandomRounding(CPU):
        other_mean, other_y = run(moved)
    off = (mean / x.mean((0, 2, 3)) - 1).abs().max()
    apart = (mean / other_mean - 1).abs().max()
    assert off > 10 * torch.finfo(torch.float64).eps and off / 3 < apart < 1e-12
    assert torch.allclose(y, other_y, rtol=0, atol=1e-11)
