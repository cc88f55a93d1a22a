"""The timeline of a step, of recordings that are drawn."""

from synchromesh.results.run import TimelineSpan
from synchromesh.runs.timeline import timeline
from tests.runs.drawn import drawn


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
