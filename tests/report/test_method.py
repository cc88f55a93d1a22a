"""How a study was measured: what ran where."""

from dataclasses import replace

from synchromesh.report.method import method
from tests.report import sample

STUDY = sample.minimal()
DATA, AUTO = STUDY.runs
PREDICTED = replace(DATA, predicted=True, cluster="v100")


def test_measured_and_predicted_clusters_are_told_apart() -> None:
    def cluster(*runs: object) -> str | None:
        return dict(method(replace(STUDY, runs=runs))).get("Cluster")  # type: ignore[arg-type]

    assert cluster(DATA, AUTO) == "local processes on this machine"
    assert cluster(DATA, PREDICTED) == (
        "local processes on this machine; predicted for v100, where nothing ran"
    )
    assert cluster(PREDICTED) == "predicted for v100, where nothing ran"
    assert cluster(replace(DATA, cluster="a"), replace(DATA, cluster="b")) == "a and b"
    assert dict(method(sample.full()))["Cluster"] == "8 hosts, emulated"
