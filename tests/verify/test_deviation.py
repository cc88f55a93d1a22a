"""Deviations: what is compared, from when on a difference is an error, and that every rank
compares its own shards, replicas and idle ranks included."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from synchromesh.verify.deviation import KINDS, MARGIN, Deviation, Deviations, merged, number
from synchromesh.verify.reference import Computed
from tests.ranks import run
from tests.traces import shared

LIMIT = 1e-10


def deviation(value: list[float], reference: list[float], noise: float = 0.0) -> Deviation:
    d = Deviation(LIMIT)
    d.add(*(torch.tensor(x, dtype=torch.float64) for x in (value, reference)), noise, "w", 2)
    return d


def test_a_deviation_is_the_largest_difference_by_the_largest_value() -> None:
    d = Deviation(LIMIT)
    d.add(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), noise=0.4)
    d.add(torch.tensor(0.5), torch.tensor(0.0))
    d.add(torch.empty(0), torch.empty(0))
    assert d.relative == 0.5 and d.noise_floor == 0.1
    d.add(torch.tensor(float("nan")), torch.tensor(1.0))
    d.add(torch.tensor(1.0), torch.tensor(1.0))
    assert d.relative != d.relative and d.wrong, "a NaN is never forgotten"


@pytest.mark.parametrize("noise", [0.0, 1e-16, 1e-9])
def test_an_error_exceeds_the_tolerance_and_the_margin_of_noise_together(noise: float) -> None:
    for y in (1e-3, 1.0):
        allowed = LIMIT * y + MARGIN * noise
        assert not deviation([1.0, y + 0.99 * allowed], [1.0, y], noise).wrong
        assert deviation([1.0, y + 1.02 * allowed], [1.0, y], noise).wrong


def test_a_small_entry_is_judged_by_its_own_size() -> None:
    worst = deviation([1.0, 1e-6 * (1 + 1e-7)], [1.0, 1e-6], noise=1e-16).worst
    assert worst.excess > 1 and (worst.name, worst.step) == ("w", 2)
    assert worst.deviation == pytest.approx(1e-7, rel=1e-3)
    assert worst.noise_floor == pytest.approx(1e-10)


def test_equal_infinities_agree_and_others_do_not() -> None:
    inf = float("inf")
    d = deviation([inf, -inf, 1.0], [inf, -inf, 1.0])
    assert not d.wrong and d.relative == 0.0 and d.reference == 1.0
    assert deviation([inf], [-inf]).wrong and deviation([inf], [1.0]).wrong
    assert deviation([1.0], [-inf]).wrong and deviation([float("nan")], [float("nan")]).wrong


def test_imaginary_parts_count() -> None:
    d = Deviation(LIMIT)
    d.add(torch.tensor([1 + 2j]), torch.tensor([1 + 1j]))
    assert d.difference == 1.0


def test_over_ranks_the_worst_counts_with_its_rank() -> None:
    right, wrong = deviation([1.0], [1.0]), deviation([1.5], [1.0])
    over = merged([d.to_dict() for d in (right, wrong, right)])
    assert over.wrong and over.worst.rank == 1 and over.relative == 0.5
    assert not merged([right.to_dict(), right.to_dict()]).wrong


def test_numbers_fit_into_json() -> None:
    assert number(0.5) == 0.5
    assert number(float("inf")) == number(float("nan")) == sys.float_info.max


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
    deviations = Deviations(trainer, 1e-10)
    shards = {n: p.clone() for n, p in trainer.parameters().items()}
    if trainer.rank == culprit and shards["0.weight"].numel():
        shards["0.weight"].view(-1)[5] *= 1 + 1e-7
    deviations.shards("parameter", shards, made, 3)
    deviations.loss(torch.tensor(2.0 if trainer.rank != culprit else 2.5), made, 3)
    return deviations.document()


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
