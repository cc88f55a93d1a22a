"""The table `results.csv`: a row for each run, flat columns with units in their names."""

import csv
import io
from collections.abc import Callable, Mapping
from operator import attrgetter

from synchromesh.results.run import RunResult
from synchromesh.results.study import StudyResults
from synchromesh.values.memory_by_kind import STORED_KINDS, MemoryByKind

Cell = str | int | float | None
Column = Callable[[RunResult], Cell]
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


def _peak(kind: str) -> Column:
    return lambda run: max((getattr(m, kind) for m in run.peak_memory_bytes), default=None)


def _inside(field: str, name: str) -> Column:
    """What a field has under a name; None where the field is None."""
    return lambda run: getattr(getattr(run, field), name, None)


def _fields(*names: str) -> dict[str, Column]:
    return {name: attrgetter(name) for name in names}


QUARTILES = ("median", "q1", "q3")
COLUMNS: Mapping[str, Column] = {
    **_fields(
        "workload", "strategy", "plan", "devices", "batch", "seed", "status", "reason", "cluster",
        "emulated", "predicted",
    ),
    **{f"step_seconds_{q}": _inside("step_seconds", q) for q in QUARTILES},
    **_fields("timed_steps", "samples_per_second", "data_waiting_share", "seconds_per_epoch"),
    **{f"epoch_seconds_{q}": _inside("epoch_seconds", q) for q in QUARTILES},
    **_fields("speedup", "efficiency", "computation_share"),
    "exposed_communication_share": attrgetter("exposed_share"),
    "hidden_communication_share": attrgetter("hidden_share"),
    **_fields("waiting_share", "utilisation", "utilisation_of", "flops_utilisation"),
    "peak_memory_bytes": _peak("total"),
    **{f"peak_{STORED_KINDS.get(k, k)}_bytes": _peak(k) for k in vars(MemoryByKind())},
    "sent_bytes_per_step_most": lambda run: max(run.sent_bytes_per_step, default=None),
    **{f"staleness_{x}": _inside("staleness", x) for x in ("mean", "max", "lead")},
    **_fields("predicted_step_seconds", "predicted_peak_bytes", "seconds", "dollars"),
    "target": _inside("to_target", "target"),
    **{f"target_{x}": _inside("to_target", x) for x in ("epochs", "seconds", "dollars")},
    "switches": lambda run: max(len(run.layouts) - 1, 0),
    "epochs": lambda run: run.metrics[-1].epoch if run.metrics else None,
    "final_training_loss": lambda run: run.metrics[-1].loss if run.metrics else None,
}  # fmt: skip
