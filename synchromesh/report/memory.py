"""The figure of peak memory: by kind, a bar for each device, a panel for each strategy."""

from collections.abc import Iterator

from synchromesh.report.drawing import Drawing
from synchromesh.report.figure import PageFigure, PageTable, Subject
from synchromesh.report.numbers import devices, size, size_unit
from synchromesh.report.palette import MEMORY
from synchromesh.report.panels import ColumnPanel, ColumnPanels
from synchromesh.results.groups import RunGroup
from synchromesh.results.run import RunResult

PANELS = ColumnPanels(
    left=62, tall=130, below=34, half=0.35, line=1.2, places="device", unit=size_unit
)


def figures(subject: Subject) -> Iterator[PageFigure]:
    """One, of the number of devices on which most groups were measured."""
    runs = [run for _, run in subject.known(_measured)]
    number = subject.comparison.most_devices(_measured)
    if number is None:
        return
    shown = sorted((r for r in runs if r.devices in (1, number)), key=lambda r: r.devices)
    most = max(shown, key=lambda run: peak(run) or 0)
    predicted = any(run.predicted_peak_bytes for run in shown)
    yield subject.figure(
        "memory",
        f"Peak memory of each device, on {devices(number)}",
        "A panel for each strategy, in it a bar for each device, stacked by kind. Most is "
        f"needed by {most.strategy}: {size(peak(most))} on one device.",
        lambda width: _draw(width, shown),
        PageTable(
            "Peak memory by kind and device, and predicted for the device that needs most",
            ("strategy", "devices", "device", *(fill.label for fill in MEMORY.values()), "all",
             "predicted"),
            tuple(row for run in runs for row in _rows(run)), heads=3,
        ),
        "Activations are all that is none of the other kinds."
        + " A line marks what was predicted." * predicted,
    )  # fmt: skip


def peak(run: RunResult) -> int | None:
    """Bytes of the device that needs most."""
    return max((device.total for device in run.peak_memory_bytes), default=None)


def _measured(group: RunGroup) -> RunResult | None:
    return next((run for run in group.done if run.peak_memory_bytes), None)


def _rows(run: RunResult) -> Iterator[tuple[str, ...]]:
    for i, device in enumerate(run.peak_memory_bytes):
        kinds = (size(getattr(device, kind)) for kind in MEMORY)
        predicted = size(run.predicted_peak_bytes)
        yield run.strategy, str(run.devices), str(i), *kinds, size(device.total), predicted


def _draw(width: int, shown: list[RunResult]) -> Drawing:
    measured = [device for run in shown for device in run.peak_memory_bytes]
    used = [fill for kind, fill in MEMORY.items() if any(getattr(d, kind) for d in measured)]
    most = max(max(peak(run) or 0, run.predicted_peak_bytes or 0) for run in shown) * 1.05 or 1
    panels = [_panel(run, several=len(shown) > 1) for run in shown]
    return PANELS.draw(width, used, panels, most)


def _panel(run: RunResult, several: bool) -> ColumnPanel:
    """A stack for each device, a line at what was predicted; of few devices as narrow as of 4."""
    count, predicted = len(run.peak_memory_bytes), run.predicted_peak_bytes
    stacks = [
        (i, [(fill, getattr(device, kind)) for kind, fill in MEMORY.items()])
        for i, device in enumerate(run.peak_memory_bytes)
    ]
    title = run.strategy + ", alone" * (several and run.devices == 1)
    names = {i: str(i) for i in range(0, count, -(-count // 8))}
    lines = [(-0.5, count - 0.5, predicted, predicted)] if predicted else []
    return ColumnPanel(title, stacks, names, lines, max(count, 4))
