"""Predicted rows: marked so, without any device, with a reason where there is no plan."""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from synchromesh.results.derive import derive
from synchromesh.results.study import StudyMachine, StudyResults, StudySettings
from synchromesh.study.prediction import cluster, predicted
from synchromesh.workloads.target import load

ASKED = StudySettings(("single", "data", "pipeline", "hybrid", "auto", "ddp"), (2,), (64,), (0, 1))


def test_strategies_of_ours_are_predicted_for_devices_of_the_catalogue() -> None:
    workload = load("digits/cnn", synthetic=True)
    rows = {r.strategy: r for r in predicted(workload, ASKED, ["v100"])}
    assert set(rows) == {"single", "data", "pipeline", "hybrid", "auto"}
    assert all(r.predicted and r.cluster == "v100" and not r.emulated for r in rows.values())
    assert "hybrid needs at least 4 devices" in rows["hybrid"].reason
    done = [r for r in rows.values() if r.status == "done"]
    assert len(done) == 4 and all(r.step_seconds and r.predicted_peak_bytes for r in done)
    least = min(r.step_seconds.median for r in done if r.step_seconds)
    auto = rows["auto"].step_seconds
    assert auto is not None and auto.median <= 1.05 * least
    study = derive(StudyResults("t", "now", "c", StudyMachine(), tuple(rows.values()), ASKED))
    assert [r.speedup for r in study.runs if r.strategy == "single"] == [1.0]


def test_a_model_that_carries_a_state_is_predicted() -> None:
    asked = StudySettings(("single", "data"), (2,), (4,), (0,))
    rows = predicted(load("ptb/lstm_small", synthetic=True), asked, ["v100"])
    assert [r.status for r in rows] == ["done", "done"], [r.reason for r in rows]


def test_a_model_without_a_graph_is_rows_that_say_why() -> None:
    def branching(model: nn.Module, batch: Any) -> Tensor:
        value = model(batch[0]).mean()
        return value if value.item() > 0 else -value

    workload = replace(load("digits/cnn", synthetic=True), loss=branching)
    rows = predicted(workload, ASKED, ["v100"])
    assert {r.status for r in rows} == {"failed"} and len(rows) == 5
    assert all("nothing can be estimated of a model that runs whole" in r.reason for r in rows)


def test_what_the_catalogue_lacks_is_said() -> None:
    assert len(cluster("v100-ethernet25", 16).ranks) == 16
    with pytest.raises(ValueError, match="has no cluster 'v10x4'"):
        cluster("v10", 4)
