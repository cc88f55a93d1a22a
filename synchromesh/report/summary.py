"""The summary: a row for each group of runs with all that was measured, and for each failure."""

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
from synchromesh.report.subject import Subject
from synchromesh.results.breakdown import overhead
from synchromesh.results.derive import throughput
from synchromesh.results.groups import RunGroup

REASON = 600  # characters that are shown


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


def summary(subject: Subject) -> Summary:
    """Of all runs of a comparison; columns of which nothing is known are left out."""
    groups = [group for group in subject.comparison.groups if group.done]
    columns = [(label, name) for label, names in _columns(subject).items() for name in names]
    rows = [_cells(subject, group) for group in groups]
    assert all(len(row) == len(columns) for row in rows)
    kept = [
        i
        for i, (label, _) in enumerate(columns)
        if label == "Run" or any(row[i] != NONE for row in rows)
    ]
    labels = dict.fromkeys(columns[i][0] for i in kept)
    return Summary(
        tuple(
            (label, tuple(columns[i][1] for i in kept if columns[i][0] == label))
            for label in labels
        ),
        tuple(tuple(row[i] for i in kept) for row in rows),
        tuple(
            RunRemark(
                run.strategy,
                run.devices,
                run.seed,
                run.status == "failed",
                short(run.reason or "no reason is known", REASON),
            )
            for group in subject.comparison.groups
            for run in group.runs
            if run.status == "failed" or run.reason
        ),
    )


def _columns(subject: Subject) -> dict[str, tuple[str, ...]]:
    return {
        "Run": ("strategy", "devices", "plan", "batch", "seeds"),
        "Time": (
            "step, median", "quartiles", "timed steps", "samples/s", "waiting for data",
            "epoch", "training",
        ),
        "Scaling": ("speedup", "efficiency", "T_comm"),
        "Share of a step": (
            "computation", "communication exposed", "communication hidden",
            "waiting for slower devices",
        ),
        "Devices": (
            _utilisation(subject), "model FLOPs utilisation", "peak memory",
            "sent in a step, most",
        ),
        "Predicted": ("step (predicted)", "peak memory (predicted)"),
        "Metrics at the end": subject.comparison.metrics,
        "To target": ("target", "epochs", "time", "dollars"),
        "Cost": ("of the run",),
    }  # fmt: skip


def _utilisation(subject: Subject) -> str:
    """The column's name, with what it is a share of where all say the same."""
    runs = [run for group in subject.comparison.groups for run in group.done]
    of = {run.utilisation_of for run in runs if run.utilisation is not None}
    return f"utilisation: {short(of.pop(), 60)}" if len(of) == 1 else "utilisation"


def _cells(subject: Subject, group: RunGroup) -> tuple[str, ...]:
    epoch = group.epoch_seconds
    run, step, comparison = group.first, group.step_seconds, subject.comparison
    cost = overhead(group, comparison.one_device, comparison.weak) if run.devices > 1 else None
    return (
        run.strategy, str(run.devices), _plans(group), str(run.batch), str(len(group.done)),
        seconds(step.median if step else None),
        NONE if step is None else f"{seconds(step.q1)} to {seconds(step.q3)}",
        str(sum(r.timed_steps for r in group.done) or NONE),
        plain(group.median(throughput)), share(group.median(lambda r: r.data_waiting_share)),
        seconds(epoch.median if epoch else None),
        seconds(group.median(lambda r: r.seconds)),
        plain(group.median(lambda r: r.speedup)), share(group.median(lambda r: r.efficiency)),
        seconds(cost.total if cost else None),
        share(group.median(lambda r: r.computation_share)),
        share(group.median(lambda r: r.exposed_share)),
        share(group.median(lambda r: r.hidden_share)),
        share(group.median(lambda r: r.waiting_share)),
        share(group.median(lambda r: r.utilisation)),
        share(group.median(lambda r: r.flops_utilisation)),
        size(group.median(peak)),
        size(group.median(lambda r: max(r.sent_bytes_per_step, default=None))),
        seconds(group.median(lambda r: r.predicted_step_seconds)),
        size(group.median(lambda r: r.predicted_peak_bytes)),
        *(spread(group.ends(name)) for name in comparison.metrics),
        *_targets(group), dollars(group.median(lambda r: r.dollars)),
    )  # fmt: skip


def _plans(group: RunGroup) -> str:
    plans = dict.fromkeys(run.plan for run in group.done if run.plan)
    return "; or ".join(plans) or NONE


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
