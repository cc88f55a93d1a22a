"""TensorBoard logs of a run: what its events say as curves, each switch of the plan as text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from synchromesh.runs import events

Point = tuple[str, Any, int]  # of the curve of that name: value, step


class TensorBoard:
    """Writes the curves of a run into a folder; opened on rank 0 alone."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, event: events.RunEvent) -> None:
        """What an event says; one that is no curve is passed over."""
        for kind, points in CURVES.items():
            if isinstance(event, kind):
                self._draw(points(event))
        if isinstance(event, events.LayoutInForce | events.PlanDecided):
            values = event.to_dict()
            lines = [f"{name}: {value}" for name, value in values.items()]
            self._writer.add_text(event.name, "    " + "\n    ".join(lines), values["step"])

    def close(self) -> None:
        self._writer.close()

    def _draw(self, points: Iterator[Point]) -> None:
        for name, value, step in points:
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)


def _loss(event: events.StepLoss) -> Iterator[Point]:
    yield "loss", event.loss, event.step


def _seconds(event: events.StepsTimed) -> Iterator[Point]:
    for step, seconds in enumerate(event.seconds, event.first):
        yield "step_seconds", seconds, step


def _epoch(event: events.EpochMeasured) -> Iterator[Point]:
    for name, value in event.to_dict().items():
        if name not in ("epoch", "step", "utilisation"):
            yield f"epoch/{name}", value, event.step


def _shares(event: events.StepsRecorded) -> Iterator[Point]:
    for name in ("computation", "exposed", "hidden", "waiting", "other"):
        yield f"share/{name}", event.mean[name], event.steps[-1]


def _memory(event: events.MemoryTracked) -> Iterator[Point]:
    for rank, peak in enumerate(event.peak_bytes):
        for kind, size in peak.to_plain().items():
            yield f"memory/rank{rank}/{kind}", size, event.step


CURVES: dict[type[events.RunEvent], Any] = {
    events.StepLoss: _loss, events.StepsTimed: _seconds, events.EpochMeasured: _epoch,
    events.StepsRecorded: _shares, events.MemoryTracked: _memory,
}  # fmt: skip
