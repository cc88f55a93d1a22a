"""Events of a run: written as lines of a log and read from these again."""

import pytest

from synchromesh.runs.events import (
    EpochMeasured,
    LayoutInForce,
    MemoryTracked,
    PlanDecided,
    RunEvent,
    RunStarted,
    StepsTimed,
)


@pytest.mark.parametrize(
    "event",
    [
        EpochMeasured(epoch=1, step=9, loss=0.5, metrics={"accuracy": 0.5, "loss": 0.25}),
        LayoutInForce(step=3, plan="data", reason="slow links", bytes_moved=7),
        StepsTimed(first=1, seconds=(0.5,), loading=(0.0,), rows=(8,), special=(1,)),
        PlanDecided(switched=True, predicted_after=0.5, more={"from": "data", "to": "tensor"}),
    ],
)
def test_what_is_written_is_read(event: RunEvent) -> None:
    line = {"event": event.name, **event.to_dict()}
    assert type(event).of({**line, "components": []} if "plan" in line else line) == event


def test_an_epoch_has_its_metrics_beside_its_fields() -> None:
    line = EpochMeasured(epoch=1, step=9, metrics={"accuracy": 0.5, "loss": 0.25}).to_dict()
    assert (line["accuracy"], line["valid_loss"], line["loss"]) == (0.5, 0.25, None)
    assert "metrics" not in line and "more" not in line


def test_what_a_layout_does_not_say_is_left_out() -> None:
    assert LayoutInForce(step=0, plan="data").to_dict() == {
        "step": 0, "plan": "data", "components": [],
    }  # fmt: skip


def test_faults_are_named_and_what_another_version_says_is_passed_over() -> None:
    line = {"workload": "w", "ranks": 1, "batch_size": 4, "machines": [{"cores": 2, "new": 1}]}
    assert RunStarted.of(line).machines[0].cores == 2.0
    with pytest.raises(ValueError, match=r"^start.ranks: should be from 1 to"):
        RunStarted.of({**line, "ranks": 0})
    with pytest.raises(ValueError, match=r"^memory.peak_bytes\[0\].optimizer: should be"):
        MemoryTracked.of({"peak_bytes": [{"optimizer": "many"}]})
