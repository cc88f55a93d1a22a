"""The figure of peak memory: by kind, a bar for each device, a panel for each strategy."""

from synchromesh.report.drawing import (
    Drawing,
    Grid,
    lines,
    round_numbers,
    small_multiples,
    stacked,
)
from synchromesh.report.figure import PageFigure, PageTable
from synchromesh.report.numbers import devices, size
from synchromesh.report.palette import MEMORY
from synchromesh.report.subject import Subject
from synchromesh.results.groups import RunGroup
from synchromesh.results.run import RunResult

GRID = Grid(left=58, tall=130, below=34)


def figures(subject: Subject) -> tuple[PageFigure, ...]:
    """One, of the number of devices on which most groups were measured."""
    comparison = subject.comparison
    number = comparison.most_devices(_measured)
    if number is None:
        return ()
    shown = [run for group in comparison.on(number) if (run := _measured(group))]
    if number > 1:
        shown = [run for g in comparison.on(1) if (run := _measured(g))] + shown
    every = [run for group in comparison.groups if (run := _measured(group))]
    most = max(shown, key=lambda run: peak(run) or 0)
    return (
        subject.figure(
            "memory",
            f"Peak memory of each device, on {devices(number)}",
            "A panel for each strategy, in it a bar for each device, stacked by kind. Most is "
            f"needed by {most.strategy}: {size(peak(most))} on one device.",
            lambda width: _draw(width, shown),
            PageTable(
                "Peak memory by kind and device, and predicted for the device that needs most",
                ("strategy", "devices", "device", *(f.label for f in MEMORY.values()), "all",
                 "predicted"),
                tuple(row for run in every for row in _rows(run)),
                heads=3,
            ),
            "Activations are all that is none of the other kinds."
            + " A line marks what was predicted." * any(r.predicted_peak_bytes for r in shown),
        ),
    )  # fmt: skip


def peak(run: RunResult) -> int | None:
    """Bytes of the device that needs most."""
    return max((device.total for device in run.peak_memory_bytes), default=None)


def _measured(group: RunGroup) -> RunResult | None:
    return next((run for run in group.done if run.peak_memory_bytes), None)


def _rows(run: RunResult) -> list[tuple[str, ...]]:
    return [
        (run.strategy, str(run.devices), str(i), *(size(getattr(device, k)) for k in MEMORY),
         size(device.total), size(run.predicted_peak_bytes))
        for i, device in enumerate(run.peak_memory_bytes)
    ]  # fmt: skip


def _draw(width: int, shown: list[RunResult]) -> Drawing:
    used = [f for kind, f in MEMORY.items() if any(
        getattr(device, kind) for run in shown for device in run.peak_memory_bytes)]  # fmt: skip
    alone = [len(shown) > 1 and run.devices == 1 for run in shown]
    names = [run.strategy + ", alone" * one for run, one in zip(shown, alone, strict=True)]
    sheet, places = small_multiples(width, used, names, "device", GRID)
    most = max(max(peak(run) or 0, run.predicted_peak_bytes or 0) for run in shown) * 1.05 or 1
    for (axes, first), run in zip(places, shown, strict=True):
        parts = ({MEMORY[k]: getattr(d, k) for k in MEMORY} for d in run.peak_memory_bytes)
        stacked(axes, enumerate(parts), 0.35)
        count = len(run.peak_memory_bytes)
        if predicted := run.predicted_peak_bytes:
            lines(axes, [(-0.5, count - 0.5, predicted, predicted)], linewidth=1.2)
        axes.set(xlim=(-0.6, max(count, 4) - 0.4), ylim=(0, most))
        step = -(-count // 8)
        axes.set_xticks(range(0, count, step), [str(n) for n in range(0, count, step)])
        axes.grid(True, axis="y")
        unit = next((u for u in (2**30, 2**20, 2**10) if most >= u), 1)  # that it is written in
        ticks = [unit * tick for tick in round_numbers(most / unit, 4)]
        axes.set_yticks(ticks, [size(t) if first else "" for t in ticks])
    return sheet
