"""From the ranges of a profile to spans.

On CPUs, of the ranges that PyTorch's profiler writes:

    main thread    aten::mm ..  [annotation [c10d::allreduce_]] .. aten::mm .......... aten::add_
    gloo's thread                                 gloo:all_reduce ----------|
                   computation  host                            host  waits  host

gloo's ranges last from when one of its threads takes up a collective to its end; those of
messages from the call to the end of the wait for it. A collective counts from the end of its
call, and where it is awaited to the end of the wait. Annotations (calls.py) say the name and
ranks of a collective (within a process group they are carried out in the order of the calls), and
when a thread waits. Computation is operators, and as `host` what goes on between two operators of
a step but waiting: Python, autograd, calls. DDP's reducer calls and waits in C++, where nothing
is annotated: a gap in which such a collective ends counts as a wait.

On CUDA, kernels and copies of the device's streams; NCCL's communicate (not tested here)."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from synchromesh.runs.calls import ANNOTATION, MESSAGES, WAIT, communication_name
from synchromesh.runs.spans import Interval, Span, by_start, minus, union

NOT_COMPUTING = ("c10d", "_c10d_functional", "autograd", "profiler", "synchromesh")
GLOO = "gloo:"
AUTOGRAD = "autograd::engine::"
BUILT_OF = {"reduce_scatter": "all_reduce"}  # what gloo carries a collective out by, if not itself
HOST = "host"


class Range(NamedTuple):
    """A range of a profile: seconds, the thread's number, whether it is a dispatched operator."""

    start: float
    end: float
    name: str
    thread: int
    operator: bool = False


@dataclass(frozen=True)
class _Issued:
    """A collective or message as this rank called it."""

    start: float
    end: float
    thread: int
    name: str
    ranks: tuple[int, ...]
    annotated: bool = True


def cpu_spans(
    ranges: Iterable[Range], everyone: tuple[int, ...], steps: Sequence[Interval], main: int
) -> tuple[Span, ...]:
    """The spans of a rank that computes on CPUs.

    everyone: the ranks of a collective that was called without an annotation. main: the number of
    the thread that runs the steps."""
    ordered = sorted(ranges, key=lambda r: (r.start, -r.end))
    gloo = [(r, communication_name(r.name)) for r in ordered if r.name.startswith(GLOO)]
    collectives = [r for r, name in gloo if name not in MESSAGES]
    messages = [r for r, name in gloo if name in MESSAGES]
    calls = _calls(ordered, everyone)
    operators = _outermost(_computations(ordered, main))
    gaps = minus(union(steps), union((s.start, s.end) for s in operators))
    reduced, inferred = _inferred_waits(_collectives(collectives, calls), gaps)
    annotated = [(r.start, r.end) for r in ordered if r.name == WAIT and r.thread == main]
    traffic = _until_waits_end(reduced, annotated) + _messages(messages, calls)
    between = minus(gaps, union([*annotated, *inferred]))
    host = [Span(start, end, "computation", HOST, _lane(main)) for start, end in between]
    return by_start([*traffic, *operators, *host])


def _computations(ordered: Sequence[Range], main: int) -> Iterator[Range]:
    """Operators of the main thread and of autograd's; gloo's threads run some, too."""
    computing = {main} | {r.thread for r in ordered if r.name.startswith(AUTOGRAD)}
    for r in ordered:
        library, colons, _ = r.name.partition("::")
        if r.operator and colons and library not in NOT_COMPUTING and r.thread in computing:
            yield r


def _lane(thread: int) -> str:
    return f"thread {thread}"


def _outermost(operators: Iterable[Range]) -> list[Span]:
    """Operators that no other one of their thread has called."""
    until: dict[int, float] = {}
    spans = []
    for r in operators:
        if r.start >= until.get(r.thread, 0.0):
            until[r.thread] = r.end
            spans.append(Span(r.start, r.end, "computation", r.name, _lane(r.thread)))
    return spans


def _calls(ordered: Iterable[Range], everyone: tuple[int, ...]) -> list[_Issued]:
    """By their starts; an operator inside an annotation is the same call."""
    calls: list[_Issued] = []
    annotated: dict[int, float] = {}  # until when, by thread
    for r in ordered:
        if r.name.startswith(ANNOTATION) and r.name != WAIT:
            name, _, ranks = r.name.removeprefix(ANNOTATION).partition(" ")
            annotated[r.thread] = r.end
            members = tuple(int(n) for n in ranks.split(","))
            calls.append(_Issued(r.start, r.end, r.thread, name, members))
        elif (
            r.name.startswith("c10d::")
            and r.start >= annotated.get(r.thread, 0.0)
            and (known := communication_name(r.name))
        ):
            calls.append(_Issued(r.start, r.end, r.thread, known, everyone, annotated=False))
    return calls


def _collectives(ranges: Iterable[Range], calls: Iterable[_Issued]) -> list[tuple[Span, bool]]:
    """Each range with the name and the ranks of its call, of each process group the first that is
    open, and whether that was annotated. A worker thread serves one process group, which decides
    where several are possible."""
    open_: dict[tuple[int, ...], deque[_Issued]] = {}
    for call in calls:
        if call.name not in MESSAGES:
            open_.setdefault(call.ranks, deque()).append(call)
    serves: dict[int, tuple[int, ...]] = {}
    spans = []
    for r in ranges:
        title = communication_name(r.name) or r.name
        waiting = (calls[0] for calls in open_.values() if calls and calls[0].start <= r.start)
        heads = [call for call in waiting if title in (call.name, BUILT_OF.get(call.name))]
        heads.sort(key=lambda call: (call.ranks != serves.get(r.thread), call.start))
        call = open_[heads[0].ranks].popleft() if heads else _Issued(*r[:2], r.thread, title, ())
        serves[r.thread] = call.ranks
        begun = min(r.start, call.end)
        span = Span(begun, r.end, "communication", call.name, _lane(r.thread), call.ranks)
        spans.append((span, call.annotated))
    return spans


def _messages(ranges: Iterable[Range], calls: Iterable[_Issued]) -> list[Span]:
    """Each range with the ranks of the call that it begins in."""
    ordered = [call for call in calls if call.name in MESSAGES]
    starts = [call.start for call in ordered]
    spans = []
    for r in ranges:
        name, at = communication_name(r.name) or r.name, bisect_right(starts, r.start) - 1
        call = ordered[at] if at >= 0 else None
        ranks = call.ranks if call and call.end >= r.start and call.name == name else ()
        spans.append(Span(r.start, r.end, "communication", name, f"{name}s", ranks))
    return spans


def _until_waits_end(collectives: Sequence[Span], waits: Sequence[Interval]) -> list[Span]:
    """The last collective that ends within a wait lasts until the wait does: then it is known."""
    spans = list(collectives)
    by_end = sorted(range(len(spans)), key=lambda i: spans[i].end)
    ends = [spans[i].end for i in by_end]
    for start, end in waits:
        last = bisect_right(ends, end) - 1
        if last >= 0 and ends[last] >= start:
            spans[by_end[last]] = replace(spans[by_end[last]], end=end)
    return spans


def _inferred_waits(
    collectives: Iterable[tuple[Span, bool]], gaps: Sequence[Interval]
) -> tuple[list[Span], list[Interval]]:
    """Waits for collectives that nobody annotated: the gap between operators in which one ends,
    from its start on; the longest where several are possible. And the collectives, which end with
    the wait for them.

    gloo's thread may note the end after the waiting one has gone on (5 to 15 ms later where a
    quota stops both): as long after the gap as that has lasted, it still counts as its end."""
    spans, waits = [], list[Interval]()
    for span, annotated in collectives:
        possible = [
            (end - start, start, end)
            for start, end in ([] if annotated else gaps)
            if start < span.end <= 2 * end - start and span.start < end
        ]
        if possible:
            _, start, end = max(possible)
            span = replace(span, end=min(span.end, end))
            waits.append((max(start, span.start), span.end))
        spans.append(span)
    return spans, waits
