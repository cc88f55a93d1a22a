"""The table `results.csv`: a row for each run, flat columns with units in their names."""

import csv
import io
from collections.abc import Callable, Mapping
from typing import Any

from synchromesh.results.run import Epoch, MemoryByKind, Quartiles, RunResult
from synchromesh.results.study import StudyResults

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
    """What a spreadsheet shows: numbers as they are, a text that it would run with an apostrophe
    in front."""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str) and cell.lstrip(" ")[:1] in tuple(FORMULA):
        return f"'{cell}"
    return cell


def _quartile(of: str, which: str) -> Callable[[RunResult], Cell]:
    def cell(run: RunResult) -> Cell:
        found: Quartiles | None = getattr(run, of)
        return None if found is None else float(getattr(found, which))

    return cell


def _peak(kind: str) -> Callable[[RunResult], Cell]:
    """Of the device that needs most of that kind."""

    def cell(run: RunResult) -> Cell:
        return max((_bytes(device, kind) for device in run.peak_memory_bytes), default=None)

    return cell


def _bytes(memory: MemoryByKind, kind: str) -> int:
    return int(getattr(memory, kind))


def _target(of: str) -> Callable[[RunResult], Cell]:
    def cell(run: RunResult) -> Cell:
        value: Any = None if run.to_target is None else getattr(run.to_target, of)
        found: Cell = value
        return found

    return cell


def _field(name: str) -> Callable[[RunResult], Cell]:
    def cell(run: RunResult) -> Cell:
        value: Cell = getattr(run, name)
        return value

    return cell


def _last(run: RunResult) -> Epoch | None:
    return run.metrics[-1] if run.metrics else None


SETTING = (
    "workload", "strategy", "plan", "devices", "batch", "seed", "status", "reason", "cluster",
    "emulated", "predicted",
)  # fmt: skip
COLUMNS: Mapping[str, Callable[[RunResult], Cell]] = {
    **{name: _field(name) for name in SETTING},
    **{f"step_seconds_{q}": _quartile("step_seconds", q) for q in ("median", "q1", "q3")},
    "timed_steps": _field("timed_steps"),
    "samples_per_second": _field("samples_per_second"),
    "data_waiting_share": _field("data_waiting_share"),
    "seconds_per_epoch": _field("seconds_per_epoch"),
    **{f"epoch_seconds_{q}": _quartile("epoch_seconds", q) for q in ("median", "q1", "q3")},
    "speedup": _field("speedup"),
    "efficiency": _field("efficiency"),
    "computation_share": _field("computation_share"),
    "exposed_communication_share": _field("exposed_share"),
    "hidden_communication_share": _field("hidden_share"),
    "waiting_share": _field("waiting_share"),
    "utilisation": _field("utilisation"),
    "utilisation_of": _field("utilisation_of"),
    "flops_utilisation": _field("flops_utilisation"),
    "peak_memory_bytes": _peak("total"),
    **{
        f"peak_{kind}_bytes": _peak(kind)
        for kind in ("parameters", "gradients", "optimizer", "buffers", "activations")
    },
    "sent_bytes_per_step_most": lambda run: max(run.sent_bytes_per_step, default=None),
    "predicted_step_seconds": _field("predicted_step_seconds"),
    "predicted_peak_bytes": _field("predicted_peak_bytes"),
    "seconds": _field("seconds"),
    "dollars": _field("dollars"),
    "target": _target("target"),
    "target_epochs": _target("epochs"),
    "target_seconds": _target("seconds"),
    "target_dollars": _target("dollars"),
    "switches": lambda run: max(len(run.layouts) - 1, 0),
    "epochs": lambda run: end.epoch if (end := _last(run)) else None,
    "final_training_loss": lambda run: end.loss if (end := _last(run)) else None,
}
