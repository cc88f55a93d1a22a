"""A divided graph: a picture, the gradients of the whole backward, and what waits for them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synchromesh.programs.compute import Bench
from synchromesh.programs.divided_backward import PRODUCTS as FORMULAS
from synchromesh.programs.divided_backward import DividedBackward
from synchromesh.programs.walk import walking
from synchromesh.trace.capture.capture import trace
from synchromesh.trace.partition.division import PRODUCTS, divided
from synchromesh.trace.partition.local import LocalComponent
from synchromesh.trace.partition.partition import partition
from synchromesh.values.layout import Layout
from tests.models import family, traced
from tests.programs.test_compute import benches


class Mixed(nn.Module):
    """A norm, a frozen bias, a weight that is normalised, and a product of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(4), nn.Linear(4, 6)
        self.down = nn.Parameter(torch.randn(3, 6))
        self.low, self.high = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2, 3))
        self.up.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(self.norm(x)))
        h = torch.nn.functional.linear(h, self.down / self.down.norm())
        return h @ (self.low @ self.high)  # type: ignore[no-any-return]


def mixed() -> tuple[Any, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Mixed().double(), torch.randn(5, 4, dtype=torch.float64)
    return trace(model, lambda m, b: m(b).square().mean(), x, training=True), model, x


def lines(local: LocalComponent) -> list[str]:
    graph = divided(local, local.graph.graph)
    shown = [node.format_node() or "" for node in graph.nodes if node.op == "call_method"]
    return [line.partition("target=")[2].replace("(args = (%axis, ", "(") for line in shown]


def test_a_picture() -> None:
    step, _, _ = mixed()
    (local,) = partition(step, (Layout(1, 1),), rows=5).components
    found = " ".join(lines(local))
    # products are told their operator; every other weight is joined, the made one where it is used
    assert found.count("product](linear") == 2 and found.count("joined](") == 3
    assert "norm_weight), kw" in found and "norm_bias), kw" in found
    assert "product](linear, %layer_norm_default, %parameter_p_model_up_weight, %" in found
    assert "model_up_bias), kw" in found.partition("product](linear, %relu")[0], "it is frozen"
    assert "joined](%matmul_default)" in found, "what is made of two weights"
    assert "product](linear, %relu_default, %div_tensor, None)" in found


def test_the_graph_and_the_program_know_the_same_products() -> None:
    assert PRODUCTS.keys() == FORMULAS.keys()


def gradients(bench: Bench) -> list[Tensor | None]:
    """Of inputs and tensors after a backward."""
    bench.backward(bench.seeds(bench.forward()))
    found = [x.grad for x in (*bench.inputs, *bench.tensors)]
    bench.clear()
    return found


NAMES = "gpt2 bert llama t5 cnn resnet unet swin lstm gru padded"


@pytest.mark.parametrize("name", NAMES.split())
def test_both_parts_make_the_gradients_of_the_whole(name: str) -> None:
    model, _, make = family(name)
    batch = make(3, dtype=torch.float64)
    for _, local, bench, _ in benches(traced(name), model, batch, Layout(1, 1), 4):
        whole = gradients(bench)
        bench.walk = walking(torch.fx.GraphModule({}, divided(local, local.graph.graph)))
        bench.axis.divided = left = DividedBackward()
        bench.backward(bench.seeds(bench.forward()))
        assert all(t.grad is None for t in bench.tensors), "the first part makes none of weights"
        for x, expected in zip(bench.inputs, whole, strict=False):
            torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-14)
        left.weights()
        for x, expected in zip(bench.tensors, whole[len(bench.inputs) :], strict=True):
            assert (x.grad is None) == (expected is None), f"{name}: {local.component.name}"
            if expected is not None:
                torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-14)
        bench.clear()


def test_what_waits_and_its_share_of_the_work() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3, bias=False)).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    step = trace(model, lambda m, b: m(b).square().mean(), x, training=True)
    made = partition(step, (Layout(1, 1),) * len(step.chain.components), rows=5)
    first, *_, last = (local.division for local in made.components)
    assert [value.shape for value, _ in first.waiting] == [(1, 6), (1, 8)], "its x and its d"
    assert first.weights == 1.0, "nobody asks for the gradient of the batch"
    assert 0.0 < last.weights < 0.5, "its product's two gradients take as long, its norm's come"
    waiting = [value.shape for local in made.components[1:] for value, _ in local.division.waiting]
    assert waiting == [(8,), (8,), (1, 8), (1, 3)], "gradients of the norm, x and d of the product"
