"""What a user may change between steps, and what is refused: frozen layers, accumulations,
metrics."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.training.prepare import prepare
from tests.ranks import run
from tests.traces import shared


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 6, generator=g, dtype=torch.float64)
    return x, torch.randint(0, 4, (rows,), generator=g)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def thawed(plan: str, switch: bool = False) -> dict[str, Tensor]:
    net = network()
    net[0].requires_grad_(False)
    trainer = prepare(net, sgd(net), loss, batch(), plan)
    for step in range(6):
        if step in (2, 4):
            net[0].requires_grad_(step == 2)  # released, then frozen again
            if switch:  # what has just been released moves, and is trained after
                trainer.switch("data" if step == 2 else "tensor")
        trainer.step(trainer.shard(batch()))
    state = trainer.state_dict()
    trainer.close()
    return state


@pytest.mark.parametrize("plan", ["data", "tensor"])
def test_layers_may_be_released_and_frozen_while_training(plan: str) -> None:
    net = network()
    net[0].requires_grad_(False)
    optimizer = sgd(net)
    for step in range(6):
        if step in (2, 4):
            net[0].requires_grad_(step == 2)
        optimizer.zero_grad()
        loss(net, batch()).backward()
        optimizer.step()
    frozen = network()
    frozen[0].requires_grad_(False)
    with (
        shared("network", network(), loss, batch(), plan),
        shared("network", frozen, loss, batch(), plan),
    ):
        states = run(2, thawed, plan) + run(2, thawed, plan, True)
    for state in states:
        for name, tensor in net.state_dict().items():
            assert torch.allclose(state[name], tensor, rtol=1e-12, atol=1e-14), name


def accumulating(folder: str) -> list[str]:
    net = network()
    trainer = prepare(net, sgd(net), loss, batch(), "data")
    sentences = []
    trainer.backward(trainer.shard(batch()), last=False)
    for forbidden in (lambda: trainer.switch("tensor"), lambda: trainer.save(Path(folder) / "x")):
        with pytest.raises(ValueError, match="call update first") as caught:
            forbidden()
        sentences.append(str(caught.value))
    trainer.backward(trainer.shard(batch()))
    trainer.update()
    trainer.save(Path(folder) / "kept")
    loss_after = trainer.step(trainer.shard(batch()))
    trainer.backward(trainer.shard(batch()), last=False)
    trainer.resume(Path(folder) / "kept")  # whose gradients are forgotten
    assert torch.equal(trainer.step(trainer.shard(batch())), loss_after)
    trainer.switch("tensor")
    trainer.close()
    return sentences


def test_nothing_moves_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    with shared("network", network(), loss, batch(), "data"):
        answers = run(2, accumulating, str(tmp_path))
    for sentences in answers:
        assert sentences[0].startswith("switch in the middle of an accumulation (backward")
        assert sentences[1].startswith("save in the middle")
    assert not (tmp_path / "x").exists()


def test_a_metric_that_is_defined_anew_is_traced_once() -> None:
    net = network()
    trainer = prepare(net, sgd(net), loss, batch(), "data")

    def measured(scale: float) -> float:
        values = trainer.evaluate([batch()], lambda m, b: {"s": scale * m(b[0]).sum()})
        return values["s"]

    one = 1.0
    first = measured(one)
    assert measured(one) == first and len(trainer._execution.programs._made) == 1
    assert (
        measured(2.0) == pytest.approx(2 * first) and len(trainer._execution.programs._made) == 2
    )
    trainer.close()


WEIGHT = torch.tensor([1.0, 5.0, 0.2, 1.0], dtype=torch.float64)


def weighted_mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHT)


def disguised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return weighted_mean(model, batch).sqrt().square()


def told_of(function: Any) -> list[str]:
    net = network()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare(net, sgd(net), function, batch(), "data").close()
    return [str(w.message) for w in caught]


def test_a_mean_that_does_not_weigh_rows_alike_earns_a_warning() -> None:
    first, second = run(2, told_of, disguised)
    assert len(first) == 1 and "each of the 2 ranks computes all rows" in first[0] and not second
    assert run(2, told_of, weighted_mean) == [[], []]  # as (sum, weight) it is exact
    assert run(2, told_of, loss) == [[], []]
