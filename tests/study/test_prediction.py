"""Predicted rows: marked so, without any device, with a reason where there is no plan."""

import pytest

from synchromesh.results.derive import derive
from synchromesh.results.study import Machine, Settings, StudyResults
from synchromesh.study.prediction import cluster, predicted
from synchromesh.workloads.target import load

ASKED = Settings(("single", "data", "pipeline", "hybrid", "auto", "ddp"), (2,), (64,), (0, 1))


def test_strategies_of_ours_are_predicted_for_devices_of_the_catalogue() -> None:
    workload = load("digits/cnn", synthetic=True)
    rows = {r.strategy: r for r in predicted(workload, ASKED, ["v100"])}
    assert set(rows) == {"single", "data", "pipeline", "hybrid", "auto"}
    assert all(r.predicted and r.cluster == "v100" and not r.emulated for r in rows.values())
    assert "hybrid has no plan on 2 devices" in rows["hybrid"].reason
    done = [r for r in rows.values() if r.status == "done"]
    assert len(done) == 4 and all(r.step_seconds and r.predicted_peak_bytes for r in done)
    least = min(r.step_seconds.median for r in done if r.step_seconds)
    auto = rows["auto"].step_seconds
    assert auto is not None and auto.median <= 1.05 * least
    study = derive(StudyResults("t", "now", "c", Machine(), tuple(rows.values()), ASKED))
    assert [r.speedup for r in study.runs if r.strategy == "single"] == [1.0]


def test_what_the_catalogue_lacks_is_said() -> None:
    assert len(cluster("v100-ethernet25", 16).ranks) == 16
    with pytest.raises(ValueError, match="has no cluster 'v10x4'"):
        cluster("v10", 4)
