"""How a study was measured: what ran where."""

from dataclasses import replace

import pytest

from synchromesh.catalogue.prices import HourlyPrice
from synchromesh.report.method import method, notices
from synchromesh.results.derive import derive
from synchromesh.results.study import StudyMachine
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


@pytest.mark.parametrize(
    ("device", "accelerators", "measured"),
    [
        ("V100-16", (), "CPUs"),
        ("V100-16", ("NVIDIA H100 80GB HBM3",) * 2, "NVIDIA H100 80GB HBM3"),
        ("V100-16", ("Tesla V100-SXM2-16GB",), None),
        ("A10G", ("NVIDIA A10",), "NVIDIA A10"),
        ("", (), None),
    ],
)
def test_a_price_of_another_device_is_said(
    device: str, accelerators: tuple[str, ...], measured: str | None
) -> None:
    price = HourlyPrice(3.06, name="p3.2xlarge", device=device)
    runs = tuple(replace(run, seconds=60.0) for run in STUDY.runs)
    machine = StudyMachine("cpu", 2, devices=accelerators)
    said = notices(derive(replace(STUDY, runs=runs, price=price, machine=machine)))
    expected = f"an instance with {device}, times were measured on {measured}: dollars"
    assert [expected in text for text in said] == [True] * (measured is not None)
    assert not notices(replace(STUDY, price=price)), "nothing has a cost"


def test_a_price_beside_emulated_hosts_is_said() -> None:
    study = sample.full()
    assert study.price is not None
    priced = replace(study, price=replace(study.price, device="V100-16"))
    assert "times were measured on emulated hosts" in notices(priced)[-1]
    assert "V100-16" not in dict(method(priced))["Emulated or predicted"]
