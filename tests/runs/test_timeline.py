"""The Chrome trace against the trace event format; the timeline of a step, of recordings that are
drawn."""

import gzip
import json
from pathlib import Path

from synchromesh.results.run import TimelineSpan
from synchromesh.runs.spans import Recording, Span
from synchromesh.runs.timeline import chrome_trace, timeline, write_chrome_trace
from tests.runs.drawn import drawn

REQUIRED = {
    "X": {"ts", "dur", "pid", "tid", "name", "cat"},
    "M": {"pid", "name", "args"},
    "i": {"ts", "s"},
}


def test_a_process_for_each_rank_and_a_thread_for_each_lane(tmp_path: Path) -> None:
    ranks = [drawn(r, compute="##..##", all_reduce="..aa..") for r in (0, 1)]
    write_chrome_trace(tmp_path / "trace.json.gz", chrome_trace(ranks, workload="digits/<cnn>"))
    document = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    events = document["traceEvents"]
    for event in events:
        assert REQUIRED[event["ph"]] <= set(event), event
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        assert isinstance(event["pid"], int) and isinstance(event.get("tid", 0), int)
        assert event["ph"] != "i" or event["s"] in "gpt"
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {
        (rank, n): lane
        for rank in (0, 1)
        for n, lane in enumerate(("steps", "compute", "all_reduce"))
    }
    drawn_events = {
        (e["pid"], names[e["pid"], e["tid"]], e["ts"], e["dur"]) for e in events if e["ph"] == "X"
    }
    assert {
        (0, "steps", 0.0, 6e6),
        (0, "compute", 4e6, 2e6),
        (1, "all_reduce", 2e6, 2e6),
    } <= drawn_events
    (sent,) = [e for e in events if e["name"] == "all_reduce" and e["pid"] == 0]
    assert sent["args"] == {"ranks": [0, 1]}
    assert document["otherData"] == {
        "workload": "digits/<cnn>", "computations_left_out": 0, "shorter_than_us": 5.0,
    }  # fmt: skip


def test_short_operators_and_the_host_are_left_out_and_counted() -> None:
    spans = (
        Span(1.0, 1.0 + 2e-6, "computation", "add", "thread 1"),
        Span(1.1, 1.2, "computation", "host", "thread 1"),
        Span(1.2, 1.2 + 1e-6, "communication", "barrier", "thread 2"),
    )
    document = chrome_trace([Recording(3, ((1.0, 2.0),), spans)])
    assert {e["name"] for e in document["traceEvents"] if e["ph"] == "X"} == {"step 1", "barrier"}
    assert document["otherData"]["computations_left_out"] == 1
    everything = chrome_trace([Recording(3, ((1.0, 2.0),), spans)], shortest_us=0.0)
    assert any(e["name"] == "add" for e in everything["traceEvents"])


def test_waiting_for_other_ranks_has_a_thread() -> None:
    early, late = drawn(0, all_reduce="aaaa"), drawn(1, all_reduce=".aaa")
    events = chrome_trace([early, late])["traceEvents"]
    (waiting,) = [e for e in events if e.get("cat") == "waiting"]
    assert (waiting["pid"], waiting["ts"], waiting["dur"]) == (0, 0.0, 1e6)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[0, waiting["tid"]] == "waiting for other ranks" and (1, 2) not in names


def test_a_rank_that_waits_for_another_one_is_seen() -> None:
    found = timeline([
        drawn(0, compute="#.........", all_reduce=".aaaaaa..."),
        drawn(1, compute="####......", all_reduce="...aaaa..."),
    ])  # fmt: skip
    assert found == (
        TimelineSpan(0, 0.0, 1.0, "computation"),
        TimelineSpan(0, 1.0, 7.0, "communication", "all_reduce"),
        TimelineSpan(0, 1.0, 3.0, "waiting"),
        TimelineSpan(1, 0.0, 4.0, "computation"),
        TimelineSpan(1, 3.0, 7.0, "communication", "all_reduce"),
    )


def test_pauses_and_spans_that_no_picture_shows_are_left_out() -> None:
    long = "#" * 800 + "." + "#" * 798 + "."
    (span,) = timeline([drawn(0, (0,), compute=long, all_reduce="." * 1598 + "a.")])
    assert (span.kind, span.start, span.end) == ("computation", 0.0, 1599.0)
