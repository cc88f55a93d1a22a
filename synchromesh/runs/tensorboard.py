"""TensorBoard logs of a run: what the log says as curves, and each switch of the plan as text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoard:
    """Writes into a folder from events of the run's log (docs/runs.md); opened on rank 0 alone.

    loss and step seconds by step, metrics and samples per second by epoch, shares of time and
    memory where they were measured."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """One event with its fields; those that are no curve are passed over."""
        match event:
            case "step":
                self._curve("loss", values["loss"], values["step"])
            case "steps":
                for step, seconds in enumerate(values["seconds"], values["first"]):
                    self._curve("step_seconds", seconds, step)
            case "epoch":
                known = ("event", "time", "epoch", "step", "utilisation")
                for name, value in values.items():
                    if name not in known:
                        self._curve(f"epoch/{name}", value, values["step"])
            case "recording":
                step = values["steps"][-1]
                for name in ("computation", "exposed", "hidden", "waiting", "other"):
                    self._curve(f"share/{name}", values["mean"][name], step)
            case "memory":
                for rank, kinds in enumerate(values["peak_bytes"]):
                    for kind, size in kinds.items():
                        self._curve(f"memory/rank{rank}/{kind}", size, values["step"])
            case "layout" | "adapt":
                lines = [f"{name}: {value}" for name, value in values.items()]
                self._writer.add_text(event, "    " + "\n    ".join(lines), values["step"])

    def flush(self) -> None:
        """What was logged is in the files."""
        self._writer.flush()

    def close(self) -> None:
        """After the last event."""
        self._writer.close()

    def _curve(self, name: str, value: Any, step: int) -> None:
        if isinstance(value, int | float):
            self._writer.add_scalar(name, value, step)
