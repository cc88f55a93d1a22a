"""Verification: what a plan computes, holds and sends is what one process computes and `explain`
says.
"""

import json
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from synchromesh.training import verify as verifying
from synchromesh.training.verify import (
    AUTOCAST,
    Alone,
    Deviation,
    cast,
    global_batches,
    verify,
    without_dropout,
)
from synchromesh.workloads.workload import Workload
from tests.models import FAMILIES
from tests.ranks import run
from tests.targets import Rows
from tests.traces import known, shared

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


def under_autocast(family: str, plans: list[str]) -> list[dict[str, Any]]:
    return [verify(workload(family), plan, 3, autocast=torch.bfloat16) for plan in plans]


def test_plans_under_autocast_are_what_one_process_computes_under_it() -> None:
    """Within rounding of bfloat16; what is held and sent is exactly what is said."""
    plans, job = ["data", "tensor"], workload("cnn")
    example = cast(job.example(), torch.float32)
    with shared("cnn", job.model(), job.loss, example, *plans, autocast=torch.bfloat16):
        documents, _ = run(2, under_autocast, "cnn", plans, timeout=110)
    for plan, document in zip(plans, documents, strict=True):
        assert (document["dtype"], document["autocast"]) == ("float32", "bfloat16")
        assert document["passed"] and AUTOCAST <= document["tolerance"] < 0.05, (plan, document)
        assert document["max_gradient_deviation"] > 1e-6, "it is not float32"


def test_a_limit_of_autocast_is_the_rounding_of_the_model_itself() -> None:
    """Of ill-conditioned gradients bfloat16 leaves little on one process, too."""
    for name, least, most in (("cnn", 1e-3, 0.05), ("resnet", 0.1, 2.0)):
        job = workload(name)
        model = job.model().float()
        without_dropout(model)
        alone = Alone(deepcopy(model), job, torch.bfloat16, Alone(model, job))
        for index, batch in enumerate(global_batches(job, 2, torch.float32)):
            alone.step(batch, None if index else Deviation())
        assert least < alone.rounding() < most, name


def wrong(what: str, autocast: torch.dtype | None = None) -> dict[str, Any]:
    job = workload("cnn")
    job_loss: Any = job.loss
    if what == "loss":  # depends on how many rows a rank has: no mean over rows
        job = replace(job, loss=lambda m, b: job_loss(m, b) * torch.ones_like(b[1]).sum())
    else:  # the explanation says otherwise
        said = verifying.explain
        # type: ignore[attr-defined]
        verifying.explain = lambda *a: replace(said(*a), sent_bytes_per_step=(1, 2))
    return verify(job, "data", 2, autocast=autocast)


@pytest.mark.filterwarnings("ignore:the loss of .* rows")  # it deviates on purpose
@pytest.mark.parametrize("what", ["loss", "explanation"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_what_deviates_does_not_pass(what: str, autocast: torch.dtype | None) -> None:
    with known("cnn that deviates"):
        answers = run(2, wrong, what, autocast)
    for document in answers:
        assert not document["passed"]
        assert (document["max_loss_deviation"] > 0.1) == (what == "loss")
