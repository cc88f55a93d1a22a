"""Where the seconds of a step go, from its shares; medians over the runs of a group.

step  = computation + exposed transfer + waiting + other            [seconds]
        computation       computation share x step, of which hidden share x step goes on
                          while communication is in flight
        waiting           waiting share x step: for slower devices
        exposed transfer  (exposed share - waiting share) x step
T_N   = T_1 / N + T_comm, so T_comm = T_N - T_1 / N
      = exposed transfer + waiting + other"""

from dataclasses import dataclass

from synchromesh.results.groups import RunGroup


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step; `hidden` is part of `computation`."""

    step: float
    computation: float
    hidden: float
    transfer: float
    waiting: float

    @property
    def other(self) -> float:
        """What is none of the others: Python between operators, waiting for data."""
        return max(self.step - self.computation - self.transfer - self.waiting, 0.0)


@dataclass(frozen=True)
class Overhead:
    """T_comm, what a step on N devices takes beyond T_1 / N, in seconds.

    `other` is computation beyond T_1 / N; it is negative where N devices compute with less work
    than one, or with faster caches."""

    step: float
    ideal: float  # T_1 / N
    transfer: float
    waiting: float

    @property
    def total(self) -> float:
        """T_comm."""
        return self.step - self.ideal

    @property
    def other(self) -> float:
        """T_comm without exposed transfer and waiting."""
        return self.total - self.transfer - self.waiting


def step_parts(group: RunGroup) -> StepParts | None:
    """Of a step of a group; None where step or shares are not known."""
    step = group.step_seconds
    exposed = group.median(lambda run: run.exposed_share)
    hidden = group.median(lambda run: run.hidden_share)
    if step is None or exposed is None or hidden is None:
        return None
    computation = group.median(lambda r: r.computation_share)
    waiting = min(group.median(lambda r: r.waiting_share) or 0.0, exposed)
    computation = 1 - exposed if computation is None else computation
    parts = (computation, hidden, exposed - waiting, waiting)
    return StepParts(step.median, *(part * step.median for part in parts))


def overhead(group: RunGroup, one_device: RunGroup | None, weak: bool) -> Overhead | None:
    """T_comm of a group, against one device on the same batch (`weak`: on a device's part)."""
    parts = step_parts(group)
    if parts is None or one_device is None or one_device.step_seconds is None:
        return None
    ideal = one_device.step_seconds.median / (1 if weak else group.first.devices)
    return Overhead(parts.step, ideal, parts.transfer, parts.waiting)
