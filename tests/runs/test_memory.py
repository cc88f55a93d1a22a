"""Peak memory by kind against steps whose tensors are counted by hand, and against LiveBytes."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synchromesh.programs.memory import LiveBytes
from synchromesh.runs.memory import MemoryTracker
from synchromesh.values.memory_by_kind import MemoryByKind
from tests import ranks

KB = 1000


def peak_memory(step: Callable[[], object], *tracked: Any) -> MemoryByKind:
    """Of `step`, which runs once."""
    with MemoryTracker(*tracked) as memory:
        step()
    return memory.by_kind


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(50, 80), nn.BatchNorm1d(80), nn.Linear(80, 10))


def _known(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, Tensor)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.parameters(), *model.buffers(), *states, *gradients]


def test_what_is_traced_meanwhile_takes_no_memory() -> None:
    """Its sizes may be symbols, which no process can be told."""
    model, batch = _model(), torch.randn(64, 50)
    optimizer = torch.optim.SGD(model.parameters())
    rows = {0: torch.export.Dim("rows")}

    def step() -> None:
        torch.export.export(model, (batch,), dynamic_shapes=(rows,))
        model(batch)

    traced = peak_memory(step, model.parameters(), model.buffers(), optimizer)
    plain = peak_memory(lambda: model(batch), model.parameters(), model.buffers(), optimizer)
    assert all(type(size) is int for size in vars(traced).values())
    assert traced.parameters == plain.parameters and traced.buffers == plain.buffers


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_peak_is_that_of_live_bytes(set_to_none: bool) -> None:
    model, batch = _model(), torch.randn(64, 50)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch).square().mean().backward()
        optimizer.step()

    weights = sum(p.nbytes for p in model.parameters())
    step()
    with LiveBytes([batch, *_known(model, optimizer)]) as live:
        step()
    gc.collect()
    found = peak_memory(step, model.parameters(), model.buffers(), optimizer, batch)
    assert found.total == live.peak
    assert found.parameters == weights and found.buffers == sum(b.nbytes for b in model.buffers())
    assert 2 * weights <= found.states <= 2 * weights + 8 * 6  # steps are tensors, too
    assert 0 < found.gradients <= weights and found.activations >= batch.nbytes
    assert (found.gradients == weights) or set_to_none


def test_gradients_count_as_they_are_alive_at_the_peak() -> None:
    weight = torch.ones(KB // 4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], momentum=0.9)

    def step() -> None:
        kept = [weight * 2 for _ in range(10)]  # the peak, before there is a gradient
        del kept
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    first = peak_memory(step, [weight], [], optimizer)
    assert first == MemoryByKind(parameters=KB, activations=10 * KB)
    assert peak_memory(step, [weight], [], optimizer) == MemoryByKind(
        parameters=KB, states=KB, activations=10 * KB
    )

    def freed() -> None:
        weight.sum().backward()
        optimizer.step()
        weight.grad = None

    assert peak_memory(freed, [weight], [], optimizer).gradients == KB


def _sharded() -> MemoryByKind:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(8)))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return peak_memory(step, model.parameters(), model.buffers(), optimizer)


def test_fsdp2_frees_what_it_has_gathered() -> None:
    layer, layers = 40_000, 8
    for found in ranks.run(2, _sharded):
        assert found.parameters == layers * layer / 2
        assert found.states - layers * layer <= 8 * layers
        assert found.gradients <= layers * layer / 2
        assert found.activations < layers * layer, "not all layers are gathered at once"


def test_sparse_gradients() -> None:
    table = nn.Embedding(100, 25, sparse=True)
    optimizer = torch.optim.SGD(table.parameters())

    def step() -> None:
        table(torch.tensor([3, 5])).sum().backward()
        optimizer.step()

    found = peak_memory(step, table.parameters(), [], optimizer)
    assert found.parameters == 100 * 100 and found.gradients in (2 * 108, 2 * 100 + 8 * 2)
