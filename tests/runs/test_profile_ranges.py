"""Spans of ranges that are written by hand."""

from synchromesh.runs.profile_ranges import Range, cpu_spans
from synchromesh.runs.spans import Span

MAIN, WORKER, OTHER = 7, 8, 9


def spans(*ranges: Range, step: tuple[float, float] = (0.0, 20.0)) -> tuple[Span, ...]:
    return cpu_spans(ranges, (0, 1, 2, 3), [step], MAIN)


def pictures(found: tuple[Span, ...]) -> list[tuple[str, float, float]]:
    return [(s.name, s.start, s.end) for s in found]


def test_host_and_a_wait_that_is_inferred() -> None:
    found = spans(
        Range(1, 4, "aten::linear", MAIN, True),
        Range(2, 3, "aten::addmm", MAIN, True),
        Range(5, 6, "c10d::allreduce_", MAIN, True),
        Range(7, 16, "gloo:all_reduce", WORKER),
        Range(8, 9, "aten::add_", WORKER, True),  # gloo's own work
        Range(16, 17, "aten::add_", OTHER, True),
        Range(10, 12, "aten::mm", MAIN, True),
        Range(18, 19, "aten::add_", MAIN, True),
    )
    assert pictures(found) == [
        ("host", 0, 1), ("aten::linear", 1, 4), ("host", 4, 10), ("all_reduce", 6, 16),
        ("aten::mm", 10, 12), ("host", 16, 18), ("aten::add_", 18, 19), ("host", 19, 20),
    ]  # fmt: skip
    reduced = next(s for s in found if s.kind == "communication")
    assert reduced.ranks == (0, 1, 2, 3) and reduced.lane == f"thread {WORKER}"


def test_gloo_may_note_an_end_after_the_one_who_waited() -> None:
    found = spans(
        Range(0, 1, "c10d::allreduce_", MAIN, True),
        Range(1, 14, "gloo:all_reduce", WORKER),
        Range(2, 4, "aten::mm", MAIN, True),
        *(Range(10 + i, 10.9 + i, "aten::copy_", MAIN, True) for i in range(10)),
    )
    assert ("all_reduce", 1, 10) in pictures(found)
    hosts = [p for p in pictures(found) if p[0] == "host" and p[1] < 12]
    assert hosts == [("host", 0, 2), ("host", 10.9, 11), ("host", 11.9, 12)]


def test_a_collective_has_the_ranks_of_its_call() -> None:
    found = spans(
        Range(0, 1, "synchromesh::reduce_scatter 0,1", MAIN),
        Range(1, 2, "synchromesh::all_reduce 0,2", MAIN),
        Range(2, 3, "c10d::allreduce_", MAIN, True),  # from C++
        Range(1.5, 9, "gloo:all_reduce", WORKER),
        Range(3, 9, "gloo:all_reduce", OTHER),
        Range(3.5, 9, "gloo:all_reduce", 10),
        Range(10, 11, "synchromesh::all_reduce 0,1", MAIN),
        Range(10, 11, "synchromesh::all_reduce 0,2", MAIN),
        Range(12, 13, "gloo:all_reduce", OTHER),
        Range(12.5, 13, "gloo:all_reduce", WORKER),
        Range(14, 15, "gloo:all_gather", WORKER),
    )
    traffic = [(s.name, s.ranks) for s in found if s.kind == "communication"]
    assert traffic == [
        ("reduce_scatter", (0, 1)), ("all_reduce", (0, 2)), ("all_reduce", (0, 1, 2, 3)),
        ("all_reduce", (0, 2)), ("all_reduce", (0, 1)), ("all_gather", ()),
    ]  # fmt: skip


def test_messages_are_those_of_the_call_they_begin_in() -> None:
    found = spans(
        Range(0, 1, "synchromesh::receive 1,0", MAIN),
        Range(0.5, 9, "gloo:recv", MAIN),
        Range(2, 3, "synchromesh::send 0,1", MAIN),
        Range(2.2, 2.8, "c10d::send", MAIN, True),
        Range(2.5, 8, "gloo:send", MAIN),
        Range(3, 8.5, "aten::mm", MAIN, True),
        Range(8.5, 9, "synchromesh::wait", MAIN),
    )
    assert [(s.name, s.ranks, s.lane) for s in found if s.kind == "communication"] == [
        ("receive", (1, 0), "receives"), ("send", (0, 1), "sends"),
    ]  # fmt: skip
    assert [p for p in pictures(found) if p[0] == "host"] == [("host", 0, 3), ("host", 9, 20)]


def test_an_annotated_wait_says_when_a_rank_waits_and_until_when_it_is_under_way() -> None:
    found = spans(
        Range(0, 1, "aten::mm", MAIN, True),
        Range(1, 2, "synchromesh::all_reduce 0,1", MAIN),
        Range(2, 8, "gloo:all_reduce", WORKER),
        Range(5, 9, "synchromesh::wait", MAIN),
        Range(12, 20, "aten::mm", MAIN, True),
    )
    assert pictures(found)[1:-1] == [("host", 1, 5), ("all_reduce", 2, 9), ("host", 9, 12)]


def test_autograds_threads_compute_too() -> None:
    found = spans(
        Range(1, 4, "autograd::engine::evaluate_function: MmBackward0", OTHER),
        Range(2, 3, "aten::mm", OTHER, True),
        step=(0, 5),
    )
    assert pictures(found) == [("host", 0, 2), ("aten::mm", 2, 3), ("host", 3, 5)]
    assert found[1].lane == f"thread {OTHER}"
