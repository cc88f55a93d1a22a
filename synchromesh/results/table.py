"""The table `results.csv`: a row for each run, flat columns with units in their names."""

import csv
import io
from collections.abc import Callable, Mapping
from typing import Any

from synchromesh.results.run import RunResult
from synchromesh.results.study import StudyResults
from synchromesh.values.memory_by_kind import STORED_KINDS, MemoryByKind

Cell = str | int | float | None
FORMULA = "=+-@\t\r\n"  # a spreadsheet runs a text that begins so (OWASP, "CSV Injection")


def table(results: StudyResults) -> str:
    """The CSV text of all runs (RFC 4180), with a column for each metric's last value."""
    metrics = sorted({n for run in results.runs for e in run.metrics for n in e.values})
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(map(harmless, [*COLUMNS, *(f"final_{name}" for name in metrics)]))
    for run in results.runs:
        cells = [cell(run) for cell in COLUMNS.values()]
        last = run.metrics[-1].values if run.metrics else {}
        writer.writerow(map(harmless, [*cells, *(last.get(name) for name in metrics)]))
    return out.getvalue()


def harmless(cell: Cell | bool) -> Cell:
    """What a spreadsheet shows: numbers as they are, text that it would run after a quote."""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"'{cell}" if isinstance(cell, str) and cell.lstrip(" ")[:1] in tuple(FORMULA) else cell


def _peak(kind: str) -> Callable[[RunResult], Cell]:
    def cell(run: RunResult) -> Cell:
        return max((int(getattr(m, kind)) for m in run.peak_memory_bytes), default=None)

    return cell


def _field(*names: str) -> Callable[[RunResult], Cell]:
    """The field of a field that names lead to; None where one of them is None."""

    def cell(run: RunResult) -> Cell:
        value: Any = run
        for name in names:
            value = None if value is None else getattr(value, name)
        shown: Cell = value
        return shown

    return cell


def _fields(*names: str) -> dict[str, Callable[[RunResult], Cell]]:
    return {name: _field(name) for name in names}


QUARTILES = ("median", "q1", "q3")
COLUMNS: Mapping[str, Callable[[RunResult], Cell]] = {
    **_fields(
        "workload", "strategy", "plan", "devices", "batch", "seed", "status", "reason", "cluster",
        "emulated", "predicted",
    ),
    **{f"step_seconds_{q}": _field("step_seconds", q) for q in QUARTILES},
    **_fields("timed_steps", "samples_per_second", "data_waiting_share", "seconds_per_epoch"),
    **{f"epoch_seconds_{q}": _field("epoch_seconds", q) for q in QUARTILES},
    **_fields("speedup", "efficiency", "computation_share"),
    "exposed_communication_share": _field("exposed_share"),
    "hidden_communication_share": _field("hidden_share"),
    **_fields("waiting_share", "utilisation", "utilisation_of", "flops_utilisation"),
    "peak_memory_bytes": _peak("total"),
    **{f"peak_{STORED_KINDS.get(k, k)}_bytes": _peak(k) for k in vars(MemoryByKind())},
    "sent_bytes_per_step_most": lambda run: max(run.sent_bytes_per_step, default=None),
    **_fields("predicted_step_seconds", "predicted_peak_bytes", "seconds", "dollars"),
    "target": _field("to_target", "target"),
    **{f"target_{x}": _field("to_target", x) for x in ("epochs", "seconds", "dollars")},
    "switches": lambda run: max(len(run.layouts) - 1, 0),
    "epochs": lambda run: run.metrics[-1].epoch if run.metrics else None,
    "final_training_loss": lambda run: run.metrics[-1].loss if run.metrics else None,
}  # fmt: skip
