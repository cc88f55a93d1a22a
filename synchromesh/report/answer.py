"""The answer of a comparison in sentences: what is quickest, by how much, what it costs."""

from synchromesh.report.numbers import counted, devices, dollars, listed, metric, plain, seconds
from synchromesh.results.derive import throughput
from synchromesh.results.groups import RunComparison, RunGroup

ALIKE = 4  # strategies that are named at most
# Timed steps below which the answer says how few they were. Of two runs whose steps are drawn
# from the same normal distribution the quartiles lie apart in 23 % of cases with 4 steps each, in
# 3.5 % with 10.
FEW = 10
# Predicted times that differ by less are taken as equal; chosen, well below what predictions are
# right to.
PRECISION = 0.01


def answer(comparison: RunComparison) -> tuple[str, ...]:
    """The first sentence is the answer, the others what must be known beside it."""
    timed = [g for g in comparison.groups if g.step_seconds is not None]
    failed = sum(run.status == "failed" for g in comparison.groups for run in g.runs)
    runs = sum(len(g.runs) for g in comparison.groups)
    said = [_quickest(comparison, timed)] if timed else ["No run has timed steps."]
    if timed:
        said += _alone(comparison, timed) + _alike(comparison, timed) + _few(timed)
    said += _accuracy(comparison)
    if failed:
        said.append(f"Failed: {failed} of {counted(runs, 'run')}; the summary has the reasons.")
    return tuple(said)


def _best(comparison: RunComparison, timed: list[RunGroup]) -> RunGroup:
    """Of most samples per second of its steps; with the same batch, of the shortest step. Of
    predictions that are equal, the one on the fewest devices."""
    best = min(timed, key=_row_seconds)
    if not comparison.predicted:
        return best
    equal = [g for g in timed if _equal(comparison, g, best)]
    return min(equal, key=lambda g: (g.first.devices, _row_seconds(g)))


def _equal(comparison: RunComparison, a: RunGroup, b: RunGroup) -> bool:
    """Whether they differ by no more than noise, or than predictions can tell."""
    if comparison.predicted:
        return abs(_row_seconds(a) / _row_seconds(b) - 1) < PRECISION
    return a.within_noise_of(b)


def _row_seconds(group: RunGroup) -> float:
    return _seconds(group) / group.first.batch


def _seconds(group: RunGroup) -> float:
    assert group.step_seconds is not None
    return group.step_seconds.median


def _quickest(comparison: RunComparison, timed: list[RunGroup]) -> str:
    best = _best(comparison, timed)
    name = f"{best.first.strategy} on {devices(best.first.devices)}"
    if len(timed) == 1:
        said = f"{name} was timed alone"
    elif not comparison.predicted:
        said = f"{name} is quickest"
    elif best.first.devices == 1:
        said = f"Nothing is predicted to be quicker than {name}"
    else:
        said = f"{name} is predicted to be quickest"
    epoch = best.epoch_seconds
    time = f"{seconds(_seconds(best))} a step"
    if epoch is not None:
        time += f", {seconds(epoch.median)} an epoch"
    rate = best.median(throughput)
    if rate is not None:
        time += f", {plain(rate)} samples per second"
    against = _against(comparison, best)
    cost = _cost(best)
    return f"{said}: {time}{against}{cost}."


def _against(comparison: RunComparison, best: RunGroup) -> str:
    """By how much over data parallelism on as many devices, and over one device."""
    said = []
    data = [g for g in comparison.on(best.first.devices) if g.step_seconds]
    named = {"data": "data parallelism", "ddp": "DistributedDataParallel"}
    for strategy, name in named.items():
        other = next((g for g in data if g.first.strategy == strategy), None)
        if other is not None and other is not best and best.first.devices > 1:
            within = f"{PRECISION * 100:g} %" if comparison.predicted else "noise"
            near = f" (within {within})" if _equal(comparison, best, other) else ""
            said.append(f"{_times(best, other)} {name}{near}")
            break
    one = comparison.one_device
    if one is not None and one is not best and best.first.devices > 1:
        said.append(f"{_times(best, one)} one device")
    return f"; {listed(said)}" if said else ""


def _times(best: RunGroup, other: RunGroup) -> str:
    return f"{plain(_row_seconds(other) / _row_seconds(best))} times as fast as"


def _cost(best: RunGroup) -> str:
    target = best.median(lambda r: r.to_target.dollars if r.to_target else None)
    if target is not None:
        goal = next(r.to_target.target for r in best.done if r.to_target)
        return f"; {dollars(target)} to {goal}"
    total = best.median(lambda run: run.dollars)
    return f"; the run cost {dollars(total)}" if total is not None else ""


def _alone(comparison: RunComparison, timed: list[RunGroup]) -> list[str]:
    """Where one device is quickest: by how much more of them are slower."""
    best = _best(comparison, timed)
    others = [g for g in timed if g.first.devices > 1]
    if best.first.devices > 1 or not others:
        return []
    second = _best(comparison, others)
    if comparison.predicted and _equal(comparison, second, best):
        return []
    name = f"{second.first.strategy} on {devices(second.first.devices)}"
    return [f"More devices do not pay here: {name} takes {seconds(_seconds(second))} a step."]


def _alike(comparison: RunComparison, timed: list[RunGroup]) -> list[str]:
    """What differs from the quickest by no more than noise, or than predictions can tell."""
    best = _best(comparison, timed)
    alike = [
        g for g in timed
        if g is not best and g.first.batch == best.first.batch and _equal(comparison, g, best)
    ]  # fmt: skip
    if not alike:
        return []
    named = [f"{g.first.strategy} on {g.first.devices} ({seconds(_seconds(g))})" for g in alike]
    more = [f"{len(named) - ALIKE} others"] if len(named) > ALIKE else []
    differ = "differs" if len(named) == 1 else "differ"
    by = "no more than noise: quartiles of steps, or medians of seeds, overlap"
    if comparison.predicted:
        by = f"less than {PRECISION * 100:g} %, which predictions cannot tell apart"
    return [f"{listed([*named[:ALIKE], *more])} {differ} from it by {by}."]


def _few(timed: list[RunGroup]) -> list[str]:
    """Which were timed for so few steps that chance may tell them apart."""
    steps = [(g, min(r.timed_steps for r in g.done if r.step_seconds)) for g in timed]
    named = [f"{n} of {g.first.strategy} on {g.first.devices}" for g, n in steps if 0 < n < FEW]
    if not named:
        return []
    more = [f"as few of {len(named) - ALIKE} others"] if len(named) > ALIKE else []
    return [
        f"Few steps were timed: {listed([*named[:ALIKE], *more])}. With fewer than {FEW} a "
        "difference beyond noise may be chance."
    ]


def _accuracy(comparison: RunComparison) -> list[str]:
    said = []
    for name in comparison.metrics:
        ends = [end for g in comparison.groups if (end := g.ends(name))]
        if len(ends) < 2:
            continue
        least, most = metric(min(e.mean for e in ends)), metric(max(e.mean for e in ends))
        seeds = max(end.count for end in ends)
        of = f" (means of {seeds} seeds)" if seeds > 1 else ""
        where = f"is {most} for all" if least == most else f"lies between {least} and {most}"
        said.append(f"Final {name} {where}{of}.")
    return said
