"""The roofline: operators counted by hand, the two roofs, types that a device lacks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn import functional as F

from synchromesh.estimate.datasheet import plain_operators
from synchromesh.estimate.roofline import LAUNCH_SECONDS, Operation, Operations, rate, seconds
from synchromesh.values.cluster import Device

DEVICE = Device("d", 10**9, {"float32": 1e12, "tf32": 8e12, "bfloat16": 16e12}, 1e11)


def operations(function: Callable[[], Any]) -> list[Operation]:
    with Operations() as ran:
        function()
    return ran.operators


def test_a_linear_by_hand() -> None:
    n, i, o = 7, 32, 16
    x, w, b = torch.ones(n, i), torch.ones(o, i, requires_grad=True), torch.ones(o)
    (ran,) = operations(lambda: F.linear(x, w, b))
    assert ran == Operation(2 * n * i * o, 4 * (n * i + o * i + o + n * o), "float32")


def test_backward_of_a_linear_is_twice_its_forward() -> None:
    x, w = torch.ones(7, 32, requires_grad=True), torch.ones(16, 32, requires_grad=True)
    y = F.linear(x, w)
    forward = 2 * 7 * 32 * 16
    ran = operations(lambda: torch.autograd.backward([y], [torch.ones_like(y)]))
    assert sum(o.flops for o in ran) == 2 * forward


def test_attention_is_counted_under_its_name_on_a_cpu() -> None:
    q, k, v = (torch.ones(2, 3, 8, 4, requires_grad=True) for _ in range(3))
    found: list[Tensor] = []
    ran = operations(lambda: found.append(F.scaled_dot_product_attention(q, k, v)))
    products = 2 * (2 * 2 * 3 * 8 * 8 * 4)  # scores, and what they weigh
    assert sum(o.flops for o in ran) == products
    back = operations(lambda: found[0].sum().backward())
    assert sum(o.flops for o in back) == 2.5 * products  # scores again, and four gradients


def test_views_cost_nothing_and_a_copy_is_read_and_written() -> None:
    x = torch.ones(4, 6)
    assert operations(lambda: x.t()[1:].unsqueeze(0).expand(3, -1, -1).detach()) == []
    assert operations(lambda: torch.empty(5)) == []
    assert [o.bytes for o in operations(lambda: x.t().contiguous())] == [2 * x.nbytes]


def test_what_is_expanded_is_read_once_and_a_table_only_where_it_is_looked_up() -> None:
    row, x = torch.ones(1, 6), torch.ones(4, 6)
    assert [o.bytes for o in operations(lambda: row.expand(4, 6) + x)] == [24 + 96 + 96]
    table, index = torch.ones(1000, 8), torch.tensor([3, 5])
    (ran,) = operations(lambda: F.embedding(index, table))
    assert ran.bytes == 2 * 2 * 8 * 4 + index.nbytes


def test_operators_in_place_write_what_they_read() -> None:
    x, y = torch.ones(10), torch.ones(10)
    assert [o.bytes for o in operations(lambda: x.add_(y))] == [3 * 40]
    assert [o.bytes for o in operations(lambda: torch._foreach_add_([x, y], [y, x]))] == [6 * 40]


def test_the_lower_roof_counts() -> None:
    computes = Operation(10**9, 10**6, "float32")  # 1 ms of flops, 0.01 ms of bytes
    moves = Operation(10**6, 10**9, "float32")  # 0.001 ms of flops, 10 ms of bytes
    assert seconds([computes], DEVICE) == pytest.approx(1e-3 + LAUNCH_SECONDS)
    assert seconds([moves], DEVICE) == pytest.approx(1e-2 + LAUNCH_SECONDS)
    both = seconds([computes], DEVICE) + seconds([moves], DEVICE)
    assert seconds([computes, moves], DEVICE) == pytest.approx(both)
    assert seconds([moves], Device("d", 1, DEVICE.flops)) < seconds([computes], DEVICE)


def test_rates_of_types() -> None:
    assert rate(DEVICE, "float32") == 1e12
    assert rate(DEVICE, "float32", convolution=True) == 8e12
    assert rate(DEVICE, "bfloat16") == rate(DEVICE, "bfloat16", convolution=True) == 16e12
    assert rate(DEVICE, "float16") == 1e12 and rate(DEVICE, "float64") == 0.5e12
    with pytest.raises(ValueError, match=r"no rate of float32 .* `synchromesh doctor`"):
        rate(Device("bare", 1), "float32")


def test_operators_on_fake_tensors_are_those_on_real_ones() -> None:
    """Asking a fake tensor for its device runs nothing, wherever it happens."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Softmax(1))

    def step(model: Callable[[Tensor], Tensor]) -> None:
        y = model(torch.empty(2, 3, 8, 8))
        torch.autograd.backward([y], [torch.empty_like(y)])

    with plain_operators():
        real = operations(lambda: step(model))
        model.zero_grad()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            parameters = {n: mode.from_tensor(p) for n, p in model.named_parameters()}
            buffers = {n: mode.from_tensor(b) for n, b in model.named_buffers()}

            def call(x: Tensor) -> Tensor:
                y: Tensor = functional_call(model, {**parameters, **buffers}, x)
                return y

            fake = operations(lambda: step(call))
    assert fake == real and len(real) == 6, real
