"""Transparency: every plan computes what one process computes, for every family of models."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from synchromesh.training.prepare import prepare
from synchromesh.verify.verify import cast, without_dropout
from tests.models import FAMILIES, traced
from tests.ranks import run
from tests.traces import shared

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")  # what cannot be sharded
ROWS = (12, 12, 5)  # the last batch is short: 2, 1, 1, 1 rows on four ranks
SINGLE_PRECISION_INSIDE = {"llama": 1e-6, "t5": 1e-6}


def build(family: str) -> tuple[nn.Module, Any, list[Any]]:
    torch.manual_seed(0)
    model, loss, make = FAMILIES[family]()
    model = model.double()
    without_dropout(model)
    return model, loss, [cast(make(rows, seed=i), torch.float64) for i, rows in enumerate(ROWS)]


def alone(
    family: str, mode: bool = True
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, gradients of the first step and weights after the last, of a plain loop."""
    model, loss, batches = build(family)
    model.train(mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, gradients = [], {}
    for index, batch in enumerate(batches):
        optimizer.zero_grad()
        value = loss(model, batch)
        value = value[0] / value[1] if isinstance(value, tuple) else value
        value.backward()
        if not index:
            gradients = {
                n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
            }
        optimizer.step()
        losses.append(value.item())
    return losses, gradients, {n: t.clone() for n, t in model.state_dict().items()}


def planned(
    family: str, plan: str
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, loss, batches = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = prepare(model, optimizer, loss, batches[0], plan, sync_batch_norm=True)
    losses, gradients = [], {}
    for index, batch in enumerate(batches):
        value = trainer.backward(trainer.shard(batch))
        if not index:
            gradients = {n: g.clone() for n, g in trainer.state.gathered(trainer.gradients())}
        trainer.update()
        losses.append(float(value))
    state = trainer.state_dict()
    trainer.close()
    return losses, gradients, state


def largest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference over the largest value; infinite where anything is not a number."""
    reference = max(
        float(t.abs().max()) for t in b.values() if t.numel() and t.is_floating_point()
    )
    gaps = [float((a[n].double() - t.double()).abs().max()) for n, t in b.items() if t.numel()]
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps) / reference


def check(family: str, plan: str, ranks: int) -> None:
    losses, gradients, state = alone(family)
    model, loss, (batch, *_) = build(family)
    with shared(family, model, loss, batch, plan, ranks=ranks):
        answers = run(ranks, planned, family, plan, timeout=90)
    for got in answers:
        tolerance = SINGLE_PRECISION_INSIDE.get(family, 1e-10)
        assert got[0] == pytest.approx(losses, rel=tolerance), (got[0], losses)
        assert got[1].keys() >= gradients.keys()
        assert largest(got[1], gradients) < tolerance
        assert got[2].keys() == state.keys()
        assert largest(got[2], state) < tolerance


@pytest.mark.wide(6)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_split_over_two_ranks(family: str) -> None:
    check(family, "tensor", 2)


@pytest.mark.parametrize("plan", ["data", "hybrid:tensor=2"])
@pytest.mark.parametrize("family", ["bert", "resnet", "padded"])
def test_rows_divided_over_four_ranks(family: str, plan: str) -> None:
    """All families under all plans on four ranks: `python -m benchmarks.equality`."""
    check(family, plan, 4)


def mixed(family: str) -> str:
    """Different degrees in neighbouring components: every third is cut over all ranks, every third
    over two."""
    names = traced(family).chain.names
    words = ("data", "tensor", "hybrid:tensor=2")
    return "; ".join(["data", *(f"{n}={words[i % 3]}" for i, n in enumerate(names) if i % 3)])


@pytest.mark.wide(3)
# but those that take longest: benchmarks/equality.py has them too
@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f not in ("bert_eager", "llama", "t5", "swin")]
)
def test_different_degrees_in_neighbouring_components(family: str) -> None:
    check(family, mixed(family), 4)


def test_one_rank_is_not_a_special_case() -> None:
    check("bert", "data", 1)


def test_an_idle_rank_changes_nothing() -> None:
    check("cnn", "single", 2)
