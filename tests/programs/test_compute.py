"""The bench: it computes what the model does, times what it says, and counts what is alive."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synchromesh.programs.borders import StandIns, record, tiled
from synchromesh.programs.compute import TUNING, Bench, Bytes
from synchromesh.trace.capture.capture import trace
from synchromesh.trace.partition.local import LocalComponent, Partition
from synchromesh.trace.partition.partition import partition
from synchromesh.trace.step import Step
from synchromesh.values.component import Rows
from synchromesh.values.layout import Layout
from tests.models import family, traced

CPU = torch.device("cpu")
FEW = 3  # rows that are recorded


def benches(
    step: Step, model: nn.Module, batch: Any, layout: Layout, rows: int
) -> Iterator[tuple[Partition, LocalComponent, Bench, dict[str, Tensor]]]:
    """Every component of the step on a bench, with the values that cross its borders."""
    held = {n: x.detach() for n, x in (*model.named_parameters(), *model.named_buffers())}
    tensors = StandIns(step.chain, held, CPU)
    borders = record(step, batch, tensors, CPU)
    made = partition(step, (layout,) * len(step.chain.components), rows=rows)
    for local in made.components:
        yield made, local, Bench(step, made, local, tensors, borders, rows, CPU), borders


@pytest.mark.parametrize("rows", [FEW, 8])
@pytest.mark.parametrize("name", ["gpt2", "cnn", "unet", "swin", "lstm", "padded"])
def test_a_program_that_nothing_splits_is_the_models_own(name: str, rows: int) -> None:
    model, _, make = family(name)
    batch = make(FEW, dtype=torch.float64)
    compared = 0
    for _, local, bench, borders in benches(traced(name), model, batch, Layout(2, 1), rows):
        for output, y in zip(local.outputs, bench.forward(), strict=True):
            if output.value.name in borders:  # all but the loss
                expected = tiled(borders[output.value.name], output.value.rows, rows)
                torch.testing.assert_close(y.detach(), expected, rtol=1e-12, atol=1e-12)
                compared += 1
    assert compared >= len(traced(name).chain.components) - 1


def test_backward_gives_the_operators_gradients_and_clears_them() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()
    batch = torch.randn(FEW, 6, dtype=torch.float64)
    step = trace(model, lambda m, b: m(b).square().mean(), batch, training=True)
    (_, _, first, _), (_, _, second, _) = benches(step, model, batch, Layout(2, 1), 5)
    x = tiled(batch, Rows(), 5)
    h = model[0](x)
    h.backward(torch.full_like(h, 1e-3))
    cut = h.detach().requires_grad_()
    model[1](cut).square().mean().backward(torch.tensor(1e-3, dtype=torch.float64))
    for bench, inputs, layer in ((first, [None], model[0]), (second, [cut.grad], model[1])):
        bench.backward(bench.seeds(bench.forward()))
        expected = [*inputs, layer.weight.grad, layer.bias.grad]
        for mine, gradient in zip((*bench.inputs, *bench.tensors), expected, strict=True):
            assert (mine.grad is None) == (gradient is None), "a leaf of the batch has none"
            if gradient is not None:
                torch.testing.assert_close(mine.grad, gradient, rtol=1e-12, atol=1e-15)
        bench.clear()
        assert min(bench.once()) > 0.0
        assert all(x.grad is None for x in (*bench.inputs, *bench.tensors))


@pytest.mark.parametrize("name", ["gpt2", "cnn", "unet", "llama"])
def test_a_rank_of_two_has_its_shapes_and_finite_numbers(name: str) -> None:
    model, _, make = family(name)
    batch = make(FEW, dtype=torch.float64)
    sharded = 0
    for made, local, bench, _ in benches(traced(name), model, batch, Layout(1, 2), 4):
        names = (*local.parameters, *local.buffers)
        assert [tuple(x.shape) for x in bench.tensors] == [
            made.local_shape(local, n) for n in names
        ]
        sharded += sum(made.placements[n, local.layout].sharded for n in local.parameters)
        outputs = bench.forward()
        for output, y in zip(local.outputs, outputs, strict=True):
            shape = list(output.value.shape)
            if output.value.rows is not None:
                shape[output.value.rows.dim] *= 4
            assert tuple(y.shape) == output.placement.local_shape(tuple(shape), 2)
            assert not y.is_floating_point() or y.isfinite().all()
        bench.backward(bench.seeds(outputs))
        for x in (*bench.inputs, *bench.tensors):
            assert x.grad is None or x.grad.isfinite().all()
        bench.clear()
    assert sharded, "nothing of it was split"


class Clocked(Bench):
    """Runs take what a script says; that of `bytes` was too short to count."""

    def __init__(self, taken: list[tuple[float, float]], operators: int = 1_000_000) -> None:
        self.taken, self.operators = iter(taken), operators
        self.watched = (2.0, 5.0)

    def once(self) -> tuple[float, float]:
        return next(self.taken)


def test_a_timing_is_the_median_of_blocks_and_a_block_the_mean_of_its_runs() -> None:
    blocks = [
        (1.0, 2.0), (3.0, 4.0),  # 10 s of the 8 asked for: a mean of 2 and 3
        (4.0, 5.0),  # one run suffices
        (0.5, 1.5), (0.5, 1.5), (0.5, 1.5), (0.5, 1.5),
    ]  # fmt: skip
    assert TUNING.blocks == 3
    found = Clocked(blocks).timing(8.0)
    assert (found.forward, found.backward) == (2.0, 3.0)
    assert found.spread == pytest.approx((4 + 5 - 5) / 5), "the block farthest off"
    assert Clocked([(0.0, 0.0)] * 9).timing(0.0).spread == 0.0


def test_two_blocks_that_agree_are_enough() -> None:
    found = Clocked([(4.0, 5.0), (4.0, 5.1)]).timing(8.0)
    assert (found.forward, found.backward) == (4.0, pytest.approx(5.05))


def test_long_runs_are_timed_while_they_are_watched() -> None:
    """The quickest of the watched run and two that are not."""
    found = Clocked([(1.5, 4.0), (1.0, 4.0)], operators=3).timing(8.0)
    assert (found.forward, found.backward) == (1.0, 4.0)


class Steps(nn.Module):
    """Two components: a linear layer with an exponential that keeps its output, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32, bias=False)
        self.second = nn.Linear(32, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).exp())  # type: ignore[no-any-return]


class Twice(nn.Module):
    """One component with two parameters, the first of which is large."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(128, 8)), nn.Parameter(torch.ones(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a @ self.b


SEED = 4  # bytes of the number that backward begins from


def told(model: nn.Module, width: int) -> list[Bytes]:
    x = torch.randn(FEW, width)
    step = trace(model, lambda m, b: (m(b).sum(), b.shape[0]), x, training=True)
    return [b.bytes() for _, _, b, _ in benches(step, model, x, Layout(1, 1), 16)]


def test_bytes_by_hand() -> None:
    """float32, 16 rows: 32 numbers a row are 2048 bytes, as many as the output of `first`."""
    first, second = told(Steps(), 8)
    assert first == Bytes(
        kept=2048,  # e, what the exponential gave
        forward=2048 + 2048,  # the linear layer's output and e
        backward=2048 + 2048 + 2048 + SEED,  # e, its gradient, the linear layer's
        staying=2048 + 2048 + 2048 + SEED,
        kept_inputs=(0,),
        kept_outputs=(0,),
    )
    assert second == Bytes(
        kept=0,
        forward=256 + 4 + 4,  # the layer's output, its sum and the number of rows
        backward=2048 + 512 + 4 + SEED,  # gradients of e, of the weight, of the sum
        staying=2048 + 512 + 4 + SEED,
        kept_inputs=(0,),
        kept_outputs=(),
    )


def test_a_gradient_that_stays_counts_while_others_are_made() -> None:
    (found,) = told(Twice(), 128)
    assert found.kept == 512 and found.forward == 512 + 256 + 4 + 4
    # gradients of x a, then of a; that of b (128 bytes) has gone into its bucket, or stays
    assert found.backward == 512 + 4096 + SEED
    assert found.staying == found.backward + 128
