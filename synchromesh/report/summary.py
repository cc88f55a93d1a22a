"""The summary: a row for each group of runs with all that was measured, and for each failure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from synchromesh.report.memory import peak
from synchromesh.report.numbers import (
    NONE,
    dollars,
    metric,
    plain,
    seconds,
    share,
    short,
    size,
    spread,
)
from synchromesh.results.breakdown import overhead
from synchromesh.results.derive import throughput
from synchromesh.results.groups import RunComparison, RunGroup
from synchromesh.results.run import RunResult

Cell = Callable[[RunGroup], str]  # what a column says of the runs of a group


@dataclass(frozen=True)
class RunRemark:
    """Of a run that failed, or of which something is to be known: what it was, and that."""

    strategy: str
    devices: int
    seed: int
    failed: bool
    text: str


@dataclass(frozen=True)
class Summary:
    """Columns in groups (label, columns), rows of as many cells, and remarks on runs."""

    groups: tuple[tuple[str, tuple[str, ...]], ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[RunRemark, ...]

    @property
    def columns(self) -> int:
        return sum(len(names) for _, names in self.groups)


def summary(comparison: RunComparison) -> Summary:
    """Of all runs of a comparison; columns of which nothing is known are left out."""
    groups = [group for group in comparison.groups if group.done]
    kept: dict[str, dict[str, list[str]]] = {}
    for label, columns in _columns(comparison).items():
        for name, cell in columns.items():
            texts = [cell(group) for group in groups]
            if label == "Run" or set(texts) - {NONE}:
                kept.setdefault(label, {})[name] = texts
    texts_of_columns = [texts for columns in kept.values() for texts in columns.values()]
    return Summary(
        tuple((label, tuple(columns)) for label, columns in kept.items()),
        tuple(zip(*texts_of_columns, strict=True)),
        tuple(_remarks(comparison)),
    )


def _remarks(comparison: RunComparison, most: int = 600) -> Iterator[RunRemark]:
    """Of a reason `most` characters are shown."""
    for run in (run for group in comparison.groups for run in group.runs):
        failed = run.status == "failed"
        if failed or run.reason:
            text = short(run.reason or "no reason is known", most)
            yield RunRemark(run.strategy, run.devices, run.seed, failed, text)


def _columns(comparison: RunComparison) -> dict[str, dict[str, Cell]]:
    return {
        "Run": {
            "strategy": lambda g: g.first.strategy, "devices": lambda g: str(g.first.devices),
            "plan": _plans, "batch": lambda g: str(g.first.batch),
            "seeds": lambda g: str(len(g.done)),
        },
        "Time": {
            "step, median": lambda g: seconds(g.step_seconds.median if g.step_seconds else None),
            "quartiles": _quartiles,
            "timed steps": lambda g: str(sum(run.timed_steps for run in g.done) or NONE),
            "samples/s": _median(plain, throughput),
            "waiting for data": _median(share, lambda r: r.data_waiting_share),
            "epoch": lambda g: seconds(g.epoch_seconds.median if g.epoch_seconds else None),
            "training": _median(seconds, lambda r: r.seconds),
        },
        "Scaling": {
            "speedup": _median(plain, lambda r: r.speedup),
            "efficiency": _median(share, lambda r: r.efficiency),
            "T_comm": lambda g: seconds(_beyond_ideal(comparison, g)),
        },
        "Share of a step": {
            "computation": _median(share, lambda r: r.computation_share),
            "communication exposed": _median(share, lambda r: r.exposed_share),
            "communication hidden": _median(share, lambda r: r.hidden_share),
            "waiting for slower devices": _median(share, lambda r: r.waiting_share),
        },
        "Devices": {
            _utilisation(comparison): _median(share, lambda r: r.utilisation),
            "model FLOPs utilisation": _median(share, lambda r: r.flops_utilisation),
            "peak memory": _median(size, peak),
            "sent in a step, most": _median(
                size, lambda r: max(r.sent_bytes_per_step, default=None)
            ),
        },
        "Predicted": {
            "step (predicted)": _median(seconds, lambda r: r.predicted_step_seconds),
            "peak memory (predicted)": _median(size, lambda r: r.predicted_peak_bytes),
        },
        "Metrics at the end": {name: _end(name) for name in comparison.metrics},
        "To target": {name: _target(i) for i, name in enumerate(TARGET)},
        "Cost": {"of the run": _median(dollars, lambda r: r.dollars)},
    }  # fmt: skip


def _median(write: Callable[[float | None], str], of: Callable[[RunResult], float | None]) -> Cell:
    return lambda group: write(group.median(of))


def _end(metric: str) -> Cell:
    return lambda group: spread(group.ends(metric))


def _quartiles(group: RunGroup) -> str:
    step = group.step_seconds
    return NONE if step is None else f"{seconds(step.q1)} to {seconds(step.q3)}"


def _beyond_ideal(comparison: RunComparison, group: RunGroup) -> float | None:
    if group.first.devices == 1:
        return None
    parts = overhead(group, comparison.one_device, comparison.weak)
    return None if parts is None else parts.total


def _utilisation(comparison: RunComparison) -> str:
    runs = [run for group in comparison.groups for run in group.done]
    of = {run.utilisation_of for run in runs if run.utilisation is not None}
    return f"utilisation: {short(of.pop(), 60)}" if len(of) == 1 else "utilisation"


def _plans(group: RunGroup) -> str:
    return "; or ".join(dict.fromkeys(run.plan for run in group.done if run.plan)) or NONE


TARGET = ("target", "epochs", "time", "dollars")


def _target(column: int) -> Cell:
    return lambda group: _targets(group)[column]


def _targets(group: RunGroup) -> tuple[str, str, str, str]:
    """Of the first target; of several seeds the medians of those that reached it."""
    targets = [run.to_target for run in group.done if run.to_target]
    if not targets:
        return (NONE,) * 4
    reached = RunGroup(tuple(r for r in group.done if r.to_target and r.to_target.epochs))
    name = short(targets[0].target, 40)
    missed = len(targets) - len(reached.runs)
    if missed:
        name += f" (not reached by {missed} of {len(targets)})"
    if not reached.runs:
        return name, NONE, NONE, NONE

    def median(of: str) -> float | None:
        return reached.median(lambda run: getattr(run.to_target, of))

    return name, metric(median("epochs")), seconds(median("seconds")), dollars(median("dollars"))
