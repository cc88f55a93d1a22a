"""A study shown: its progress on standard error, its summary on standard output."""

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from synchromesh.cli.console import Console
from synchromesh.results.groups import RunGroup, comparisons
from synchromesh.results.study import StudyResults
from synchromesh.study.contest import Progress as Report
from synchromesh.values.fault import printable
from synchromesh.values.size import readable

LINE_SECONDS = 60.0  # between lines that say nothing but how long it takes; chosen


class StudyDisplay:
    """A live line on a terminal; elsewhere a line for each thing that is done, and now and then
    how long it still takes."""

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
            if report.stays or (left and now > self._said + LINE_SECONDS):
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
        self._bar.update(
            self._task, completed=report.done, description=printable(report.doing + left)
        )
        if report.stays:
            self._bar.console.print(Text(printable(report.doing)))

    def close(self) -> None:
        """Removes the live line."""
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
        kind = "rows a device" if comparison.weak else "rows"
        title = f"{comparison.workload}, {float(comparison.rows):g} {kind}"
        title += f", {comparison.cluster}" if comparison.cluster else ""
        title += ", predicted" if comparison.predicted else ""
        title += ", emulated" if comparison.emulated else ""
        metric = next(iter(comparison.metrics), "")
        table = Table(title=Text(printable(title)), title_justify="left")
        for name in ("strategy", "devices", "step", "speedup", "waits", "memory", metric, "plan"):
            if name:
                left = name in ("strategy", "plan")
                table.add_column(Text(printable(name)), justify="left" if left else "right")
        for group in comparison.groups:
            table.add_row(*(Text(printable(cell)) for cell in _cells(group, metric)))
        console.print(table)
    console.print(Text(printable(f"{folder}/report.html, results.json, results.csv")))


def _cells(group: RunGroup, metric: str) -> list[str]:
    first, step = group.first, group.step_seconds
    failed = [run.reason for run in group.runs if run.status == "failed"]
    speedup = group.median(lambda run: run.speedup)
    shares = [run.communication_share for run in group.done if run.communication_share]
    exposed = median(share.exposed for share in shares) if shares else None
    memory = max((m.total for run in group.done for m in run.peak_memory_bytes), default=0)
    end = group.ends(metric) if metric else None
    shown = [
        first.strategy,
        str(first.devices),
        f"{step.median * 1e3:.1f} ms" if step else "-",
        f"{speedup:.2f}" if speedup else "-",
        f"{exposed:.0%}" if exposed is not None else "-",
        readable(memory) if memory else "-",
    ]
    if metric:
        shown.append(f"{end.mean:.4g}" if end else "-")
    plans = dict.fromkeys(run.plan for run in group.done if run.plan)
    why = [f"failed: {reason}" for reason in dict.fromkeys(failed)]
    return [*shown, "; ".join([*plans, *why])]
