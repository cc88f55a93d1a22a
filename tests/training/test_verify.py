"""Verification: what a plan computes, holds and sends is what one process computes and `explain`
says.
"""

import json
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from synchromesh.training import verify as verifying
from synchromesh.training.verify import Deviation, cast, global_batches, verify, without_dropout
from synchromesh.workloads.workload import Workload
from tests.models import FAMILIES
from tests.ranks import run
from tests.targets import Rows
from tests.traces import shared

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")
FAMILY_PLANS = {
    "bert": "hybrid:tensor=2; *.attention=tensor; *.intermediate=data",
    "gpt2": "data; transformer.h.*.attn=hybrid:tensor=2; *.mlp=tensor",
    "resnet": "hybrid:tensor=2; resnet.encoder.stages.1=tensor; classifier=data",
}


def workload(family: str, rows: int = 12) -> Workload:
    _, loss, make = FAMILIES[family]()

    def model() -> nn.Module:
        made: nn.Module = FAMILIES[family]()[0]
        return made

    return Workload(
        model=model,
        loss=loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        train_data=Rows(make(24)),
        batch_size=rows,
        name=family,
    )


def test_a_deviation_is_the_largest_difference_by_the_largest_value() -> None:
    d = Deviation()
    d.add(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    d.add(torch.tensor(0.5), torch.tensor(0.0))
    d.add(torch.empty(0), torch.empty(0))
    assert d.relative == 0.5
    d.add(torch.tensor(float("nan")), torch.tensor(1.0))
    d.add(torch.tensor(1.0), torch.tensor(1.0))
    assert d.relative != d.relative, "a NaN is never forgotten"


def test_the_last_batch_is_short() -> None:
    sizes = [len(x) for x, _ in global_batches(workload("cnn"), 3, torch.float64)]
    assert sizes == [12, 12, 5]


def test_dropout_is_set_to_zero_wherever_a_module_keeps_it() -> None:
    model = FAMILIES["bert"](dropout=0.1)[0]
    assert without_dropout(model) > 0 and without_dropout(model) == 0
    lstm = nn.LSTM(2, 2, num_layers=2, dropout=0.3)
    assert without_dropout(lstm) == 1 and lstm.dropout == 0.0


def one_trace(
    name: str, *plans: str, dtype: torch.dtype = torch.float64
) -> AbstractContextManager[None]:
    job = workload(name)
    return shared(name, job.model().to(dtype), job.loss, cast(job.example(), dtype), *plans)


def verified(family: str, plans: list[str], dtype: str = "float64") -> list[dict[str, Any]]:
    return [verify(workload(family), plan, 3, dtype) for plan in plans]


@pytest.mark.parametrize("name", list(FAMILY_PLANS))
def test_plans_compute_hold_and_send_what_is_said(name: str) -> None:
    plans = ["data", "tensor", "hybrid:tensor=2", FAMILY_PLANS[name]]
    with one_trace(name, *plans):
        first, *others = run(4, verified, name, plans, timeout=110)
    assert all(documents == first for documents in others), "all ranks return rank 0's document"
    for plan, document in zip(plans, first, strict=True):
        assert document["sent_bytes_per_step"] == document["explained_sent_bytes_per_step"], plan
        explained = document["explained_parameter_bytes_per_rank"]
        assert document["parameter_bytes_per_rank"] == explained, plan
        for key in ("loss", "gradient", "parameter"):
            assert document[f"max_{key}_deviation"] <= document["tolerance"] == 1e-10, (plan, key)
        assert document["passed"] and document["ranks"] == 4 and document["steps"] == 3
        assert json.loads(json.dumps(document, allow_nan=False)) == document
    whole = sum(p.numel() for p in FAMILIES[name]()[0].parameters()) * 8
    assert max(first[0]["parameter_bytes_per_rank"]) <= whole
    assert max(first[1]["parameter_bytes_per_rank"]) < 0.5 * whole


def test_models_that_compute_in_single_precision_have_their_tolerance() -> None:
    with one_trace("llama", "tensor"):
        (document,), _ = run(2, verified, "llama", ["tensor"])
    assert document["tolerance"] == 1e-6 and document["passed"]
    with one_trace("cnn", "tensor", dtype=torch.float32):
        (document,), _ = run(2, verified, "cnn", ["tensor"], "float32")
    assert document["tolerance"] == 1e-4 and document["passed"]


def uneven() -> list[dict[str, Any]]:
    plans = ("data", "data; hidden=tensor")
    return [verify(workload("cnn", rows=7), plan, 2) for plan in plans]


def test_rows_that_do_not_divide() -> None:
    """Edges between layouts are not compared then: `explain` knows their mean."""
    with one_trace("cnn", "data", "data; hidden=tensor"):
        answers = run(2, uneven)
    for plain, mixed in answers:
        assert plain["passed"] and plain["sent_bytes_compared"]
        assert mixed["passed"] and not mixed["sent_bytes_compared"]


def wrong(what: str) -> dict[str, Any]:
    job = workload("cnn")
    job_loss: Any = job.loss
    if what == "loss":  # depends on how many rows a rank has: no mean over rows
        job = replace(job, loss=lambda m, b: job_loss(m, b) * torch.ones_like(b[1]).sum())
    else:  # the explanation says otherwise
        said = verifying.explain
        # type: ignore[attr-defined]
        verifying.explain = lambda *a: replace(said(*a), sent_bytes_per_step=(1, 2))
    return verify(job, "data", 2)


@pytest.mark.filterwarnings("ignore:the loss of .* rows")  # it deviates on purpose
@pytest.mark.parametrize("what", ["loss", "explanation"])
def test_what_deviates_does_not_pass(what: str) -> None:
    with one_trace("cnn", "data"):
        answers = run(2, wrong, what)
    for document in answers:
        assert not document["passed"]
        assert (document["max_loss_deviation"] > 0.1) == (what == "loss")
