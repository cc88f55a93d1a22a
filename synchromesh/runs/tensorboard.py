"""TensorBoard logs of a run: what its events say as curves, each switch of the plan as text."""

from collections.abc import Mapping
from pathlib import Path

from synchromesh.runs import events

SHARES = ("computation", "exposed", "hidden", "waiting", "other")


class TensorBoard:
    """Writes the curves of a run into a folder; opened on rank 0 alone."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, event: events.RunEvent) -> None:
        """What an event says; one that is no curve is passed over."""
        match event:
            case events.StepLoss():
                self._draw(event.step, {"loss": event.loss})
            case events.StepsTimed():
                for step, seconds in enumerate(event.seconds, event.first):
                    self._draw(step, {"step_seconds": seconds})
            case events.EpochMeasured():
                values = event.to_dict().items()
                left_out = ("epoch", "step", "utilisation")
                self._draw(event.step, {f"epoch/{n}": x for n, x in values if n not in left_out})
            case events.NoiseScaleMeasured():
                self._draw(event.step, {"noise_scale": event.value})
            case events.BatchSizeChanged():
                self._draw(event.step, {"batch_size": event.to})
            case events.StepsRecorded():
                self._draw(event.steps[-1], {f"share/{n}": event.mean[n] for n in SHARES})
            case events.MemoryTracked():
                for rank, peak in enumerate(event.peak_bytes):
                    sizes = {f"memory/rank{rank}/{n}": x for n, x in peak.to_plain().items()}
                    self._draw(event.step, sizes)
            case events.LayoutInForce() | events.PlanDecided():
                said = event.to_dict()
                lines = [f"{name}: {value}" for name, value in said.items()]
                self._writer.add_text(event.name, "    " + "\n    ".join(lines), said["step"])

    def close(self) -> None:
        self._writer.close()

    def _draw(self, step: int, values: Mapping[str, object]) -> None:
        """A point of each curve whose value is a number."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
