"""The comparison: every rank compares its own shards, replicas and idle ranks included."""

from typing import Any

import pytest
import torch
from torch import nn

from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from synchromesh.verify.comparison import KINDS, Comparison
from synchromesh.verify.reference import Computed
from tests.ranks import run
from tests.traces import shared

PLANS = ("data", "tensor", "single")


EXAMPLE = torch.ones(4, 6, dtype=torch.float64)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def judged(plan: str) -> list[dict[str, Any]]:
    """What is found where no rank, rank 0 and rank 1 is to blame."""
    model = net()
    complete = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = prepare(model, optimizer, loss, EXAMPLE, plan=plan)
    documents = [compared(trainer, complete, culprit) for culprit in (-1, 0, 1)]
    trainer.close()
    return documents


def compared(trainer: Trainer, complete: dict[str, torch.Tensor], culprit: int) -> dict[str, Any]:
    """Parameters against themselves, but for one entry of `culprit`'s own shard."""
    computed = Computed(
        {"parameter": complete, "loss": {"": torch.tensor(2.0)}},
        {"parameter": dict.fromkeys(complete, 1e-16), "loss": {"": 0.0}},
    )
    made = computed if trainer.rank == 0 else None
    comparison = Comparison(trainer, 1e-10)
    shards = {n: p.clone() for n, p in trainer.parameters().items()}
    if trainer.rank == culprit and shards["0.weight"].numel():
        shards["0.weight"].view(-1)[5] *= 1 + 1e-7
    comparison.shards("parameter", shards, made, 3)
    comparison.loss(torch.tensor(2.0 if trainer.rank != culprit else 2.5), made, 3)
    return comparison.document()


@pytest.mark.parametrize("plan", PLANS)
def test_each_rank_compares_what_it_has(plan: str) -> None:
    with shared("net", net(), loss, EXAMPLE, plan):
        answers = run(2, judged, plan)
    (good, *others), documents = answers[0], answers[1]
    for document in (good, documents[0]):
        assert not document["faults"] and set(document["noise_floor"]) == set(KINDS)
        assert not any(document[f"max_{kind}_deviation"] for kind in KINDS)
    for culprit, (first, second) in enumerate(zip(others, documents[1:], strict=True)):
        assert first == second, "all ranks give one document"
        faults = {fault.pop("kind"): fault for fault in first["faults"]}
        assert faults["loss"]["rank"] == culprit and faults["loss"]["deviation"] == 0.25
        if plan == "single" and culprit:
            assert "parameter" not in faults, "an idle rank has none"
        else:
            where = {k: faults["parameter"][k] for k in ("name", "rank", "step")}
            assert where == {"name": "0.weight", "rank": culprit, "step": 3}
            assert faults["parameter"]["deviation"] == pytest.approx(1e-7, rel=1e-6)
