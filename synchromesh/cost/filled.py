"""A pipeline that stays filled (`values/weight_versions.py`): the time of one of many steps, and
what its walk has more than another schedule's.

    seconds  =  walk(n + 1 steps) - walk(n steps)              n: until it goes evenly

In both, the pipeline is filled and drained once; what is left is a step without either, and of
equal stages of f, b and u seconds (an update), M (f + b + u) of M micro-batches, where updates are
of each."""

from collections.abc import Sequence

from synchromesh.cost.gradients import sum_seconds
from synchromesh.cost.planned_step import PlannedStep, update_seconds
from synchromesh.cost.timeline import RecordedSpan, RecordedTransfer
from synchromesh.values.profile import Profile


def runs(planned: PlannedStep) -> tuple[PlannedStep, PlannedStep]:
    """Several steps, of twice as many micro-batches as stages at least, and one more."""
    kept, count = planned.plan.kept, planned.plan.micro_batches
    assert kept is not None
    steps = 2 * kept.steps(count)
    return planned.of_micro_batches(steps * count), planned.of_micro_batches((steps + 1) * count)


def seconds_within(planned: PlannedStep, profile: Profile) -> list[float]:
    """Of updates, on each device group, behind each micro-batch's backward: sums over data ranks,
    the optimizer's step, and the copy of a version that others are still computed with."""
    kept = planned.plan.kept
    assert kept is not None
    made = planned.plan.micro_batches if kept.of_step else 1  # micro-batches of an update
    seconds = []
    for group, positions in enumerate(planned.positions):
        (stage,) = planned.stages_on(group)
        own = sum(h.kept_bytes for h in planned.held(positions[0]) if h.tensor.trained)
        copied = profile.copy_byte * own * (kept.behind(stage) > 0)
        sums = sum_seconds(planned, profile, group)
        seconds.append((sums + update_seconds(planned, profile, positions) + copied) / made)
    return seconds


def last_step(
    groups: Sequence[Sequence[RecordedSpan]], seconds: float
) -> tuple[tuple[RecordedSpan, ...], ...]:
    """What each group does in the step's seconds until the first group has no forward left, which
    begin at 0."""
    ends = [s.end for s in groups[0] if isinstance(s.of, tuple) and s.of[1].kind == "F"]
    if not ends:
        return ()
    began, end = max(ends) - seconds, max(ends)
    moved: dict[int, RecordedTransfer] = {}

    def transfer(of: RecordedTransfer) -> RecordedTransfer:
        if id(of) not in moved:
            moved[id(of)] = RecordedTransfer(of.kind, of.lane, of.begin - began, of.end - began)
        return moved[id(of)]

    def cut(span: RecordedSpan) -> RecordedSpan:
        begin, stop = max(span.begin, began) - began, min(span.end, end) - began
        return span._replace(begin=begin, end=stop, transfers=(*map(transfer, span.transfers),))

    return tuple(
        tuple(cut(s) for s in spans if began < s.end and s.begin < end) for spans in groups
    )
