"""Verification: what a plan computes, holds and sends is what one process computes and `explain`
says; errors are found, and rounding is none.
"""

import json
import os
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from synchromesh.verify import verify as verifying
from synchromesh.verify.verify import cast, global_batches, verify, without_dropout
from synchromesh.workloads.workload import Workload
from tests.models import FAMILIES
from tests.planted import Planted, planted
from tests.ranks import RankFailed, run
from tests.targets import MODELS, Rows, target
from tests.traces import shared

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")
FAMILY_PLANS = {
    "bert": "hybrid:tensor=2; *.attention=tensor; *.intermediate=data",
    "resnet": "hybrid:tensor=2; resnet.encoder.stages.1=tensor; classifier=data",
}
KINDS = ("loss", "gradient", "buffer", "parameter")


def test_the_last_batch_is_short() -> None:
    sizes = [len(x) for x, _ in global_batches(target("cnn"), 3, torch.float64)]
    assert sizes == [12, 12, 5]


def test_dropout_is_set_to_zero_wherever_a_module_keeps_it() -> None:
    model = FAMILIES["bert"](dropout=0.1)[0]
    assert without_dropout(model) > 0 and without_dropout(model) == 0
    lstm = nn.LSTM(2, 2, num_layers=2, dropout=0.3)
    assert without_dropout(lstm) == 1 and lstm.dropout == 0.0


def one_trace(
    name: str, *plans: str, ranks: int = 2, dtype: torch.dtype = torch.float64
) -> AbstractContextManager[None]:
    job = target(name)
    model, example = job.model().to(dtype), cast(job.example(), dtype)
    return shared(name, model, job.loss, example, *plans, ranks=ranks)


def verified(family: str, plans: list[str], dtype: str = "float64") -> list[dict[str, Any]]:
    return [verify(target(family), plan, 2, dtype) for plan in plans]


@pytest.mark.parametrize("name", list(FAMILY_PLANS))
def test_plans_compute_hold_and_send_what_is_said(name: str) -> None:
    plans = ["data", "tensor", "hybrid:tensor=2", FAMILY_PLANS[name]]
    with one_trace(name, *plans, ranks=4):
        first, *others = run(4, verified, name, plans, timeout=110)
    assert all(documents == first for documents in others), "all ranks return rank 0's document"
    for plan, document in zip(plans, first, strict=True):
        assert document["sent_bytes_per_step"] == document["explained_sent_bytes_per_step"], plan
        explained = document["explained_parameter_bytes_per_rank"]
        assert document["parameter_bytes_per_rank"] == explained, plan
        assert document["tolerance"] == 1e-10 and set(document["noise_floor"]) == set(KINDS)
        for kind in KINDS:
            assert document[f"max_{kind}_deviation"] <= 1e-12, (plan, kind)
            assert document["noise_floor"][kind] <= 1e-12, (plan, kind)
        assert document["passed"] and document["ranks"] == 4 and document["steps"] == 2
        assert json.loads(json.dumps(document, allow_nan=False)) == document
    whole = sum(p.numel() for p in FAMILIES[name]()[0].parameters()) * 8
    assert max(first[0]["parameter_bytes_per_rank"]) <= whole
    assert max(first[1]["parameter_bytes_per_rank"]) < 0.5 * whole


@pytest.mark.wide(1)
@pytest.mark.parametrize("name", ["qwen3", "bloom", "t5"])
def test_single_precision_inside_a_model_is_no_error(name: str) -> None:
    """Norms and softmaxes that compute in float32 round by 1e-7, in a model of float64."""
    with one_trace(name, "tensor"):
        (document,), _ = run(2, verified, name, ["tensor"])
    assert document["passed"], document["faults"]
    assert name == "bloom" or document["max_gradient_deviation"] > document["tolerance"] == 1e-10
    assert document["noise_floor"]["gradient"] > 1e-10 > document["max_parameter_deviation"]


@pytest.mark.parametrize("name", ["mobilenet", "experts"])
def test_gradients_that_cancel_are_no_error(name: str) -> None:
    with one_trace(name, "data", "tensor"):
        documents, _ = run(2, verified, name, ["data", "tensor"])
    for document in documents:
        assert document["passed"], document["faults"]
        assert document["noise_floor"]["gradient"] < 1e-12


def test_single_precision_has_its_tolerance() -> None:
    with one_trace("cnn", "tensor", dtype=torch.float32):
        (document,), _ = run(2, verified, "cnn", ["tensor"], "float32")
    assert document["tolerance"] == 1e-4 and document["passed"]
    assert 1e-9 < document["noise_floor"]["gradient"] < 1e-4


ERRORS = {
    "mobilenet": [
        Planted("element", 1, 1e-7, seed=3), Planted("rank", 1, 1e-7), Planted("row", 0),
        Planted("bucket twice", 0), Planted("stale bucket", 1), Planted("stale buffer", 1),
    ],
    "bert": [Planted("element", r, 1e-7, seed=r) for r in range(2)] + [Planted("rank", 0, 1e-7)],
    "qwen3": [Planted("element", 1, 1e-3), Planted("rank", 0, 1e-3), Planted("bucket twice", 0)],
}  # fmt: skip


def with_errors(name: str, errors: list[Planted]) -> list[dict[str, Any]]:
    documents = []
    for error in errors:
        with planted(error):
            documents.append(verify(target(name), "data", 2))
    return documents


@pytest.mark.parametrize("name", list(ERRORS))
def test_planted_errors_are_found(name: str) -> None:
    """A part of `benchmarks.verify_power`."""
    with one_trace(name, "data"):
        documents = run(2, with_errors, name, ERRORS[name], timeout=110)[0]
    for error, document in zip(ERRORS[name], documents, strict=True):
        assert not document["passed"] and document["faults"], error
        kinds = {fault["kind"] for fault in document["faults"]}
        if error.kind == "element":  # one rank has it, and it is no larger than it is said to be
            fault = next(f for f in document["faults"] if f["kind"] == "gradient")
            assert fault["rank"] == error.rank and fault["name"], error
            assert fault["deviation"] == pytest.approx(error.size, rel=0.01)
        elif error.kind == "stale buffer":
            assert kinds == {"buffer"}
        elif error.kind == "stale bucket":
            assert all(fault["step"] == 2 for fault in document["faults"])
        else:
            assert "gradient" in kinds


def test_a_model_that_has_no_float64_says_so() -> None:
    with (
        one_trace("mixtral", "data"),
        pytest.raises(
            RankFailed,
            match=r"does not compute in float64 .*--dtype float32, or set experts_implementation=",
        ),
    ):
        run(2, verified, "mixtral", ["data"])


@pytest.mark.filterwarnings("ignore:the model runs whole")
def test_a_model_that_fails_in_every_type_shows_its_own_error() -> None:
    class Broken(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("this layer is broken")

    job = replace(target("odd_mlp"), model=lambda: Broken(13, 5))
    with pytest.raises(RuntimeError, match="broken"):
        verify(job, "single", 1)


def uneven() -> list[dict[str, Any]]:
    plans = ("data", "data; hidden=tensor")
    job = replace(target("cnn"), batch_size=7)
    return [verify(job, plan, 2) for plan in plans]


def test_rows_that_do_not_divide() -> None:
    """Edges between layouts are not compared then: `explain` knows their mean."""
    with one_trace("cnn", "data", "data; hidden=tensor"):
        answers = run(2, uneven)
    for plain, mixed in answers:
        assert plain["passed"] and plain["sent_bytes_compared"]
        assert mixed["passed"] and not mixed["sent_bytes_compared"]


def apart() -> str:
    _, _, make = MODELS["cnn"]()
    rows = Rows(make(24 + int(os.environ["RANK"])))
    with pytest.raises(ValueError) as raised:
        verify(replace(target("cnn"), train_data=rows), "data", 1)
    return str(raised.value)


def test_data_that_ranks_do_not_share_are_not_blamed_on_the_plan() -> None:
    with one_trace("cnn", "data"):
        first, second = run(2, apart)
    assert first == second and "ranks [1] read another batch than rank 0 in step 1" in first


class Normed(nn.Sequential):
    """An instance norm, whose running statistics are a mean over rows, and a frozen batch norm."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True),
            nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 8),
        )  # fmt: skip
        self[2].eval()


def normed() -> dict[str, Any]:
    _, loss, make = MODELS["cnn"]()
    adamw = target("cnn").optimizer
    return verify(Workload(Normed, loss, adamw, Rows(make(24)), batch_size=12), "data", 3)


@pytest.mark.filterwarnings("ignore:.*evaluation mode")
def test_running_statistics_and_frozen_norms_agree() -> None:
    document = run(2, normed)[0]
    assert document["passed"], document["faults"]
    assert document["max_buffer_deviation"] < 1e-14


def under_autocast(family: str, plans: list[str]) -> list[dict[str, Any]]:
    return [verify(target(family), plan, 3, autocast=torch.bfloat16) for plan in plans]


@pytest.mark.parametrize("family", ["cnn", "resnet"])
def test_plans_under_autocast_are_what_one_process_computes_under_it(family: str) -> None:
    """Within rounding of bfloat16, which norms over few rows enlarge; what is held and sent is
    exactly what is said."""
    plans, job = ["data", "tensor"], target(family)
    example = cast(job.example(), torch.float32)
    with shared(family, job.model(), job.loss, example, *plans, ranks=2, autocast=torch.bfloat16):
        documents, _ = run(2, under_autocast, family, plans, timeout=110)
    for plan, document in zip(plans, documents, strict=True):
        assert (document["dtype"], document["autocast"]) == ("float32", "bfloat16")
        assert document["passed"], (plan, document["faults"])
        assert document["max_gradient_deviation"] > 1e-6, "it is not float32"


def wrong(job: Workload, what: str, autocast: torch.dtype | None) -> dict[str, Any]:
    if what == "explanation":  # it says otherwise
        said = verifying.explain
        # type: ignore[attr-defined]
        verifying.explain = lambda *a: replace(said(*a), sent_bytes_per_step=(1, 2))
    return verify(job, "data", 2, autocast=autocast)


@pytest.mark.filterwarnings("ignore:the loss is not seen")  # it deviates on purpose
@pytest.mark.filterwarnings("ignore:the model runs whole")
@pytest.mark.parametrize("what", ["loss", "explanation"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_what_deviates_does_not_pass(what: str, autocast: torch.dtype | None) -> None:
    job = target("cnn")
    job_loss: Any = job.loss
    if what == "loss":  # depends on how many rows a rank has: no mean over rows
        job = replace(job, loss=lambda m, b: job_loss(m, b) * len(b[1].tolist()))
    dtype = torch.float64 if autocast is None else torch.float32
    example = cast(job.example(), dtype)
    with shared("cnn", job.model().to(dtype), job.loss, example, "data", autocast=autocast):
        answers = run(2, wrong, job, what, autocast)
    for document in answers:
        assert not document["passed"]
        assert (document["max_loss_deviation"] > 0.1) == (what == "loss")
        assert bool(document["faults"]) == (what == "loss")
