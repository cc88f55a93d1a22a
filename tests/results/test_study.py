"""The document of a study: read as it was written, other formats refused."""

from dataclasses import replace

import pytest

from synchromesh.catalogue.prices import HourlyPrice
from synchromesh.results.run import (
    CommunicationShares,
    ComponentLayout,
    Epoch,
    Layouts,
    Quartiles,
    Reached,
    RunResult,
    TimelineSpan,
)
from synchromesh.results.study import StudyMachine, StudyResults, StudySettings
from synchromesh.values import document
from synchromesh.values.memory_by_kind import MemoryByKind

RUN = RunResult(
    "digits/cnn", "auto", 2, 64, 0, "done", "data; classifier=tensor",
    step_seconds=Quartiles(0.02, 0.019, 0.022), timed_steps=30, samples_per_second=3000.0,
    communication_share=CommunicationShares(0.2, 0.1), computation_share=0.7, waiting_share=0.05,
    peak_memory_bytes=(MemoryByKind(1, 2, 3, 4, 5),) * 2, sent_bytes_per_step=(10, 12),
    metrics=(Epoch(1, 23, 1.5, 0.4, {"accuracy": 0.9}),), to_target=Reached("accuracy=0.9", 1),
    layouts=(Layouts(0, "data", (ComponentLayout("classifier", "tensor"),)),),
    timeline=(TimelineSpan(0, 0.0, 0.1, "computation", "aten::mm"),),
)  # fmt: skip
STUDY = StudyResults(
    "digits/cnn", "2026-11-22T12:00:00+00:00", "synchromesh compare digits/cnn",
    StudyMachine("cpu", 2),
    (RUN, RunResult("digits/cnn", "single", 1, 64, 0, "failed", reason="out of memory")),
    StudySettings(("single", "auto"), (2,), (64,), (0,), steps=30), cluster={"hosts": []},
    versions={"torch": "2.13.0"}, price=HourlyPrice(3.06, 1, "p3.2xlarge"),
)  # fmt: skip


def test_the_document_is_read_as_it_was_written() -> None:
    assert StudyResults.from_json(STUDY.to_json(), "results.json") == STUDY
    assert StudyResults.from_yaml(STUDY.to_yaml(), "results.yaml") == STUDY


def test_what_is_no_document_of_a_study_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"results.json: title, created"):
        StudyResults.from_json("{}", "results.json")
    with pytest.raises(ValueError, match="is of format 7, this version reads 1"):
        StudyResults.from_json('{"format": 7}', "results.json")
    text = STUDY.to_json().replace('"failed"', '"perhaps"')
    with pytest.raises(ValueError, match=r"runs\[1\].status: should be one of done, failed"):
        StudyResults.from_json(text, "results.json")
    text = STUDY.to_json().replace('"devices": 1,\n      "batch"', '"devices": -2,\n      "batch"')
    with pytest.raises(ValueError, match=r"json\.runs\[1\]: devices should be at least 1, not -2"):
        StudyResults.from_json(text, "results.json")


def test_a_large_study_is_read() -> None:
    """Timelines of many runs are more than other documents may have."""
    spans = tuple(
        TimelineSpan(0, i / 1e5, i / 1e5, "computation", "x" * 40) for i in range(30_000)
    )
    large = replace(STUDY, runs=(replace(RUN, timeline=spans),))
    assert len(large.to_json()) > document.MAX_BYTES
    assert StudyResults.from_json(large.to_json()) == large


def test_instances_are_paid_for_entirely() -> None:
    """Nine devices in instances of four are three instances."""
    assert HourlyPrice(12.0, devices=4).dollars(1800, 9) == 12.0 * 3 / 2
    assert MemoryByKind(1, 2, 3, 4, 5).total == 15


def test_memory_has_its_stored_names() -> None:
    peak = MemoryByKind(1, 2, 3, 4, 5)
    plain = peak.to_plain()
    assert list(plain) == ["parameters", "gradients", "optimizer", "buffers", "activations"]
    assert MemoryByKind.from_plain(plain, "m") == peak
    with pytest.raises(ValueError, match=r"m.optimizer: should be a whole number"):
        MemoryByKind.from_plain({"optimizer": "3"}, "m")
