"""The answer of a comparison in sentences: what is quickest, by how much, what it costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from synchromesh.report.numbers import (
    counted,
    devices,
    dollars,
    joined,
    listed,
    metric,
    plain,
    seconds,
)
from synchromesh.results.derive import throughput
from synchromesh.results.groups import RunComparison, RunGroup


@dataclass(frozen=True)
class AnswerTuning:
    named: int = 4  # strategies in a sentence at most; chosen
    # Timed steps below which the answer says how few they were. Of two runs whose steps are drawn
    # from the same normal distribution the quartiles lie apart in 23 % of cases with 4 steps each,
    # in 3.5 % with 10.
    few: int = 10
    # Part by which predicted times may differ and count as equal; chosen, well below their errors.
    precision: float = 0.01


TUNING = AnswerTuning()


def answer(comparison: RunComparison) -> tuple[str, ...]:
    """The first sentence is the answer, the others what must be known beside it."""
    return tuple(_sentences(comparison))


def _sentences(comparison: RunComparison) -> Iterator[str]:
    timed = [g for g in comparison.groups if g.step_seconds is not None]
    if timed:
        best = _best(comparison, timed)
        yield f"{_quickest(comparison, best, len(timed))}: {_figures(comparison, best)}."
        yield from _alone(comparison, best, timed)
        yield from _alike(comparison, best, timed)
        yield from _few(timed)
    else:
        yield "No run has timed steps."
    yield from _accuracy(comparison)
    runs = [run for group in comparison.groups for run in group.runs]
    if failed := sum(run.status == "failed" for run in runs):
        yield f"Failed: {failed} of {counted(len(runs), 'run')}; the summary has the reasons."


def _best(comparison: RunComparison, timed: Sequence[RunGroup]) -> RunGroup:
    """Of most samples per second; of predictions that are equal, the one on the fewest devices."""
    best = min(timed, key=_row_seconds)
    if not comparison.predicted:
        return best
    equal = [g for g in timed if _equal(comparison, g, best)]
    return min(equal, key=lambda g: (g.first.devices, _row_seconds(g)))


def _equal(comparison: RunComparison, a: RunGroup, b: RunGroup) -> bool:
    if comparison.predicted:
        return abs(_row_seconds(a) / _row_seconds(b) - 1) < TUNING.precision
    return a.within_noise_of(b)


def _row_seconds(group: RunGroup) -> float:
    return _seconds(group) / group.first.batch


def _seconds(group: RunGroup) -> float:
    assert group.step_seconds is not None
    return group.step_seconds.median


def _name(group: RunGroup) -> str:
    return f"{group.first.strategy} on {devices(group.first.devices)}"


def _quickest(comparison: RunComparison, best: RunGroup, timed: int) -> str:
    if timed == 1:
        return f"{_name(best)} was timed alone"
    if not comparison.predicted:
        return f"{_name(best)} is quickest"
    if best.first.devices == 1:
        return f"Nothing is predicted to be quicker than {_name(best)}"
    return f"{_name(best)} is predicted to be quickest"


def _figures(comparison: RunComparison, best: RunGroup) -> str:
    times = [f"{seconds(_seconds(best))} a step"]
    if best.epoch_seconds is not None:
        times.append(f"{seconds(best.epoch_seconds.median)} an epoch")
    if (rate := best.median(throughput)) is not None:
        times.append(f"{plain(rate)} samples per second")
    against = listed(list(_against(comparison, best)))
    return joined([", ".join(times), against, _cost(best)], "; ")


def _against(comparison: RunComparison, best: RunGroup) -> Iterator[str]:
    """By how much over data parallelism on as many devices, and over one device."""
    if best.first.devices == 1:
        return
    alike = [g for g in comparison.on(best.first.devices) if g.step_seconds and g is not best]
    timed = {group.first.strategy: group for group in alike}
    if data := timed.get("data") or timed.get("ddp"):
        names = {"data": "data parallelism", "ddp": "DistributedDataParallel"}
        within = f"{TUNING.precision * 100:g} %" if comparison.predicted else "noise"
        equal = f" (within {within})" if _equal(comparison, best, data) else ""
        yield f"{_times(best, data)} {names[data.first.strategy]}{equal}"
    if one := comparison.one_device:
        yield f"{_times(best, one)} one device"


def _times(best: RunGroup, other: RunGroup) -> str:
    return f"{plain(_row_seconds(other) / _row_seconds(best))} times as fast as"


def _cost(best: RunGroup) -> str:
    target = best.median(lambda r: r.to_target.dollars if r.to_target else None)
    if target is not None:
        goal = next(r.to_target.target for r in best.done if r.to_target)
        return f"{dollars(target)} to {goal}"
    total = best.median(lambda run: run.dollars)
    return f"the run cost {dollars(total)}" if total is not None else ""


def _alone(comparison: RunComparison, best: RunGroup, timed: Sequence[RunGroup]) -> Iterator[str]:
    """Where one device is quickest: by how much more of them are slower."""
    others = [g for g in timed if g.first.devices > 1]
    if best.first.devices > 1 or not others:
        return
    second = _best(comparison, others)
    if not (comparison.predicted and _equal(comparison, second, best)):
        yield (
            f"More devices do not pay here: {_name(second)} takes {seconds(_seconds(second))} a "
            "step."
        )


def _alike(comparison: RunComparison, best: RunGroup, timed: Sequence[RunGroup]) -> Iterator[str]:
    """What differs from the quickest by no more than noise, or than predictions can tell."""
    alike = [
        f"{g.first.strategy} on {g.first.devices} ({seconds(_seconds(g))})"
        for g in timed
        if g is not best and g.first.batch == best.first.batch and _equal(comparison, g, best)
    ]
    if alike:
        differ = "differs" if len(alike) == 1 else "differ"
        by = "no more than noise: quartiles of steps, or medians of seeds, overlap"
        if comparison.predicted:
            by = f"less than {TUNING.precision * 100:g} %, which predictions cannot tell apart"
        yield f"{_some(alike)} {differ} from it by {by}."


def _few(timed: Sequence[RunGroup]) -> Iterator[str]:
    steps = [(g.first, min(r.timed_steps for r in g.done if r.step_seconds)) for g in timed]
    few = [f"{n} of {run.strategy} on {run.devices}" for run, n in steps if 0 < n < TUNING.few]
    if few:
        yield (
            f"Few steps were timed: {_some(few, 'as few of ')}. With fewer than {TUNING.few} a "
            "difference beyond noise may be chance."
        )


def _some(names: list[str], before: str = "") -> str:
    more = len(names) - TUNING.named
    others = [f"{before}{more} others"] if more > 0 else []
    return listed([*names[: TUNING.named], *others])


def _accuracy(comparison: RunComparison) -> Iterator[str]:
    for name in comparison.metrics:
        ends = [end for g in comparison.groups if (end := g.ends(name))]
        if len(ends) < 2:
            continue
        least, most = metric(min(e.mean for e in ends)), metric(max(e.mean for e in ends))
        seeds = max(end.count for end in ends)
        of = f" (means of {seeds} seeds)" if seeds > 1 else ""
        where = f"is {most} for all" if least == most else f"lies between {least} and {most}"
        yield f"Final {name} {where}{of}."
