"""A study shown: its progress on standard error, its summary on standard output."""

import sys
import time
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from synchromesh.cli.console import Console, shown, table
from synchromesh.report.numbers import joined
from synchromesh.results.groups import RunComparison, RunGroup, comparisons
from synchromesh.results.study import StudyResults
from synchromesh.study.contest import Progress as Report
from synchromesh.values.fault import printable
from synchromesh.values.size import readable


class StudyDisplay:
    """A live line on a terminal; elsewhere a line for each thing done, and how long is left."""

    LINE_SECONDS = 60.0  # between lines that say nothing but how long it takes; chosen

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._task: Any = None
        self._said = time.monotonic()

    def take(self, report: Report) -> None:
        """How far the study is."""
        left = "" if report.left is None else f", {_duration(report.left)} left of these"
        if not self._console.is_terminal:
            now = time.monotonic()
            if report.stays or (left and now > self._said + self.LINE_SECONDS):
                line = f"[{report.done}/{report.runs}] {report.doing}{left}"
                print(printable(line), file=sys.stderr, flush=True)
                self._said = now
            return
        if self._bar is None:
            self._bar = Progress(
                BarColumn(), MofNCompleteColumn(), TextColumn("runs, {task.description}"),
                console=self._console, transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=report.runs)
            self._bar.start()
        doing = printable(report.doing + left)
        self._bar.update(self._task, completed=report.done, description=doing)
        if report.stays:
            self._bar.console.print(Text(printable(report.doing)))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def show(results: StudyResults, folder: Path) -> None:
    """A table for each workload and batch, and where everything lies."""
    console = Console(highlight=False)
    for comparison in comparisons(results):
        metric = next(iter(comparison.metrics), "")
        columns = ("strategy", "devices", "step", "speedup", "waits", "memory", metric, "plan")
        rows = (_cells(group, metric) for group in comparison.groups)
        known = [name for name in columns if name]
        console.print(table(_title(comparison), known, rows, left=("strategy", "plan")))
    console.print(Text(printable(f"{folder}/report.html, results.json, results.csv")))


def _title(comparison: RunComparison) -> str:
    kind = "rows a device" if comparison.weak else "rows"
    what = f"{comparison.workload}, {float(comparison.rows):g} {kind}"
    marks = ("predicted" * comparison.predicted, "emulated" * comparison.emulated)
    return joined([what, comparison.cluster, *marks])


def _cells(group: RunGroup, metric: str) -> list[str]:
    step, end = group.step_seconds, group.ends(metric) if metric else None
    memory = max((m.total for run in group.done for m in run.peak_memory_bytes), default=0)
    cells = [
        group.first.strategy, str(group.first.devices),
        shown("{:.1f} ms", step.median * 1e3 if step else None),
        shown("{:.2f}", group.median(lambda run: run.speedup) or None),
        shown("{:.0%}", group.median(lambda run: run.exposed_share)),
        readable(memory) if memory else "-",
    ]  # fmt: skip
    if metric:
        cells.append(shown("{:.4g}", end.mean if end else None))
    return [*cells, _plans(group)]


def _plans(group: RunGroup) -> str:
    plans = dict.fromkeys(run.plan for run in group.done if run.plan)
    failed = dict.fromkeys(run.reason for run in group.runs if run.status == "failed")
    return "; ".join([*plans, *(f"failed: {reason}" for reason in failed)])
