"""The step log: what steps took on this rank, for the run's log; fields as in docs/runs.md."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from synchromesh.engine.groups import World
from synchromesh.training.events import StepDone


@dataclass
class StepLog:
    """Collects steps until `take` hands them over.

    trained_seconds: of all steps so far with loading; one that was special counts as the median of
    the others."""

    world: World
    _steps: list[StepDone] = field(default_factory=list)
    _waited: list[float] = field(default_factory=list)
    _special: list[int] = field(default_factory=list)
    _seconds: list[float] = field(default_factory=list)  # of all steps that are not special
    _specials: int = 0
    _loading: float = 0.0
    _before: float = 0.0  # what the world had waited when the last step ended

    def begin(self) -> None:
        """Before the first step of an epoch: waiting until now was for something else."""
        self._before = self.world.waited

    def add(self, event: StepDone, special: bool) -> None:
        """A step. special: it held something that others do not."""
        now = self.world.waited
        self._waited.append(min(now - self._before, event.seconds))
        self._before = now
        self._steps.append(event)
        self._loading += event.waited
        if special:
            self._special.append(event.step)
            self._specials += 1
        else:
            self._seconds.append(event.seconds)

    @property
    def trained_seconds(self) -> float:
        """Seconds of steps and loading since the start."""
        usual = median(self._seconds) if self._specials and self._seconds else 0.0
        return sum(self._seconds) + self._specials * usual + self._loading

    def take(self) -> dict[str, Any] | None:
        """The fields of `steps` for those since the last call; None where there are none."""
        if not self._steps:
            return None
        on_cuda = self.world.device.type == "cuda"  # where the host does not wait
        values = {
            "first": self._steps[0].step,
            "epoch": self._steps[0].epoch,
            "seconds": [round(e.seconds, 6) for e in self._steps],
            "waited": None if on_cuda else [round(w, 6) for w in self._waited],
            "loading": [round(e.waited, 6) for e in self._steps],
            "rows": [e.rows for e in self._steps],
            "special": self._special,
        }
        self._steps, self._waited, self._special = [], [], []
        return values
