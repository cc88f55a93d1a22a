"""The log of `train` read as results."""

from typing import Any

import pytest

from synchromesh.results.run import CommunicationShares, Quartiles, RunResult
from synchromesh.runs.result import of_log
from synchromesh.values.memory_by_kind import MemoryByKind

WARM_UP = RunResult.WARM_UP_STEPS
START: dict[str, Any] = {
    "event": "start", "time": 1795395107.9, "workload": "digits/cnn", "plan": "data", "ranks": 2,
    "seed": 3, "batch_size": 64, "command": ["train", "digits/cnn", "--plan", "data"],
    "versions": {"torch": "2.13.0"}, "emulated": False,
    "machines": [{"device": "cpu", "processor": "cpu", "cores": 2.0, "memory_bytes": 8,
                  "system": "Linux"}],
}  # fmt: skip
LAYOUT = {
    "event": "layout", "step": 0, "plan": "data",
    "components": [{"name": "a", "layout": "data", "stage": 0, "parameter_bytes": 4}],
}  # fmt: skip


def steps(first: int, seconds: list[float], **more: Any) -> dict[str, Any]:
    count = len(seconds)
    return {"event": "steps", "first": first, "epoch": 1, "seconds": seconds, "special": [],
            "loading": [0.1] * count, "rows": [64] * count, **more}  # fmt: skip


def epoch(number: int, trained: float, **more: Any) -> dict[str, Any]:
    return {"event": "epoch", "epoch": number, "step": number * 9, "loss": 0.5, "seconds": 2.0,
            "trained_seconds": trained, "utilisation": [0.4, 0.6], **more}  # fmt: skip


LOG: list[dict[str, Any]] = [
    START,
    LAYOUT,
    {"event": "prediction", "plan": "data", "step_seconds": 0.2, "memory_bytes": [7, 9]},
    {"event": "recording", "mean": {"computation": 0.5, "exposed": 0.4, "hidden": 0.1,
                                    "waiting": 0.3}, "sent_bytes_per_step": [5, 6]},
    {"event": "memory", "peak_bytes": [dict.fromkeys(
        ("parameters", "gradients", "optimizer", "buffers", "activations"), 1)] * 2},
    steps(1, [9.0] * WARM_UP),
    {"event": "adapt", "switched": True, "predicted_after": 0.25},
    {**LAYOUT, "step": WARM_UP, "plan": "data; a=tensor", "reason": "slow links",
     "pause_seconds": 0.5, "bytes_moved": 12},
    steps(WARM_UP + 1, [0.2, 0.3, 0.4, 7.0, 8.0], special=[WARM_UP + 4],
          rows=[64, 64, 64, 64, 30]),
    epoch(1, 3.0, accuracy=0.8, valid_loss=0.7),
    {"event": "end"},
]  # fmt: skip


def test_a_log_is_one_run() -> None:
    study = of_log(LOG, "log.jsonl", "trace.json.gz")
    (run,) = study.runs
    assert (run.strategy, run.devices, run.seed, run.status) == ("data", 2, 3, "done")
    assert run.step_seconds == Quartiles(0.3, 0.25, 0.35) and run.timed_steps == 3
    assert run.samples_per_second == pytest.approx(3 * 64 / (0.9 + 0.3))
    assert run.data_waiting_share == pytest.approx(0.25)
    assert run.communication_share == CommunicationShares(0.4, 0.1) and run.waiting_share == 0.3
    assert run.peak_memory_bytes == (MemoryByKind(1, 1, 1, 1, 1),) * 2
    assert (run.predicted_step_seconds, run.predicted_peak_bytes) == (0.25, None)
    assert run.metrics[0].values == {"accuracy": 0.8, "loss": 0.7} and run.seconds == 3.0
    assert run.utilisation == 0.5 and run.trace == "trace.json.gz"
    assert [(s.step, s.plan, s.moved_bytes) for s in run.layouts] == [
        (0, "data", None), (WARM_UP, "data; a=tensor", 12),
    ]  # fmt: skip
    assert study.command == "synchromesh train digits/cnn --plan data"
    assert study.machine.cores == 2


def test_a_plan_that_was_found_is_auto() -> None:
    (run,) = of_log([*LOG, {"event": "choice"}], "log.jsonl").runs
    assert run.strategy == "auto" and run.plan == "data; a=tensor"


def test_a_resumed_run_goes_on_with_its_seconds() -> None:
    (run,) = of_log([*LOG[:-1], START, LAYOUT, epoch(2, 2.5), LOG[-1]], "log.jsonl").runs
    assert [end.seconds for end in run.metrics] == [3.0, 5.5]


def test_a_resumed_run_is_that_of_its_last_plan() -> None:
    again = [
        {**START, "ranks": 1, "plan": "single"},
        {**LAYOUT, "plan": "single"},
        {"event": "prediction", "plan": "single", "step_seconds": 0.6, "memory_bytes": [3]},
        steps(40, [9.0] * WARM_UP),
        steps(40 + WARM_UP, [0.7, 0.7]),
        epoch(2, 2.5),
    ]
    (run,) = of_log([*LOG, *again, LOG[-1]], "log.jsonl").runs
    assert (run.strategy, run.plan, run.devices) == ("single", "single", 1)
    assert run.step_seconds == Quartiles(0.7, 0.7, 0.7) and run.timed_steps == 2
    assert (run.predicted_step_seconds, run.predicted_peak_bytes) == (0.6, 3)
    assert not run.peak_memory_bytes and run.seconds == 5.5


def test_a_run_that_has_not_ended_says_so() -> None:
    (run,) = of_log(LOG[:-1], "log.jsonl").runs
    assert run.status == "done" and "has not ended" in run.reason
    (run,) = of_log(LOG[:2], "log.jsonl").runs
    assert run.status == "failed" and run.step_seconds is None


def test_what_is_broken_is_named() -> None:
    with pytest.raises(ValueError, match=r"x/log.jsonl: has no `start` event"):
        of_log([], "x/log.jsonl")
    with pytest.raises(ValueError, match=r"x/log.jsonl: start.batch_size: should be a whole"):
        of_log([{**START, "batch_size": "many"}], "x/log.jsonl")
