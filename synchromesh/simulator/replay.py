"""A step once more, on devices that are not alike: each device has a clock of its own.

What a step does was recorded while it was walked for devices that are all alike (`cost/`). Here
every device of a group takes a factor of the seconds of each computation, and meets the others
where the step lets them meet:

    computation   clock += seconds x factor
    collective    begins when the last device of its group has come, and takes what it took
    message       reaches the devices of the same rows
    step          the last clock + update; of workers that train alone, that of each

    factor  =  (1 + jitter x Z) / speed of the device        Z: normal, of each action; at least 0

With factors of 1 it is the recorded step. Draws are of as many steps as asked, all at once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from synchromesh.cost.step_time import Recorded
from synchromesh.cost.timeline import RecordedSpan, RecordedTransfer
from synchromesh.values.cluster import Cluster
from synchromesh.values.profile import Pattern, ServerMessages

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Variation:
    """How devices differ. jitter: standard deviation of the seconds of an action, as a share of
    them. speeds: of a rank, as a share of what it was predicted with; 1 for those left out."""

    jitter: float = 0.0
    speeds: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    SPEEDS: ClassVar = (1e-6, 1e3)  # the least and the most

    def check(self, cluster: Cluster) -> None:
        """ValueError for speeds of devices that it does not have, or that are none."""
        low, high = self.SPEEDS
        if wrong := [s for s in self.speeds.values() if not low <= s <= high]:
            raise ValueError(f"a device's speed is from {low:g} to {high:g}, not {wrong[0]:g}")
        most = len(cluster.ranks) - 1
        if unknown := sorted(rank for rank in self.speeds if not 0 <= rank <= most):
            raise ValueError(f"there is no device {unknown[0]}: {cluster.name} has 0 to {most}")


class Replay:
    """ranks: of each device group. draws: how many steps."""

    def __init__(
        self, recorded: Recorded, ranks: Sequence[Sequence[int]], variation: Variation, draws: int
    ) -> None:
        self.recorded, self.variation = recorded, variation
        self._draw = np.random.default_rng(variation.seed)
        self.clocks = [np.zeros((draws, len(its))) for its in ranks]
        self._slow = [
            np.array([1.0 / variation.speeds.get(rank, 1.0) for rank in its]) for its in ranks
        ]
        self._came: dict[int, dict[int, Floats]] = {}  # by transfer: each group's clocks
        self._parties: dict[int, int] = {}
        for spans in recorded.groups:
            for span in spans:
                if span.what == "come":
                    key = id(span.transfers[0])
                    self._parties[key] = self._parties.get(key, 0) + 1

    def seconds(self) -> Floats:
        """Of each drawn step."""
        last: Floats = np.max([ends.max(axis=1) for ends in self._ends()], axis=0) + self._rest
        return last

    def worker_seconds(self, workers: Sequence[Sequence[int]]) -> Floats:
        """Of each drawn step of each worker, (draws, workers), without what workers send each
        other. workers: of each device group, the worker that each of its devices is of."""
        made = np.zeros((len(self.clocks[0]), 1 + max(map(max, workers))))
        for ends, of in zip(self._ends(), workers, strict=True):
            for device, worker in enumerate(of):
                made[:, worker] = np.maximum(made[:, worker], ends[:, device])
        return made + (self._rest - self.recorded.time.exchanged)

    @property
    def _rest(self) -> float:
        """What a step takes besides: calls, and exchanges behind its end."""
        time = self.recorded.time
        return time.seconds - time.forward - time.backward - time.update

    def _ends(self) -> list[Floats]:
        """The ends of drawn steps of each device group, (draws, devices)."""
        walks = [self._walk(group, spans) for group, spans in enumerate(self.recorded.groups)]
        going = dict(enumerate(walks))
        while going:
            before = len(going), sum(map(len, self._came.values()))
            going = {group: walk for group, walk in going.items() if next(walk, "end") != "end"}
            assert (len(going), sum(map(len, self._came.values()))) != before, "nothing goes on"
        return [
            clock + update * self._factors(group, clock.shape)
            for group, (clock, update) in enumerate(
                zip(self.clocks, self.recorded.updates, strict=True)
            )
        ]

    def _factors(self, group: int, shape: tuple[int, ...]) -> Floats:
        drawn = np.ones(shape)
        if self.variation.jitter:
            drawn += self.variation.jitter * self._draw.standard_normal(shape)
        factors: Floats = np.maximum(drawn, 0.0) * self._slow[group]
        return factors

    def _walk(self, group: int, spans: Sequence[RecordedSpan]) -> Iterator[str]:
        """Pauses where a transfer has not begun."""
        clock = self.clocks[group]
        for span in spans:
            if span.what == "compute":
                clock += (span.end - span.begin) * self._factors(group, clock.shape)
            elif span.what == "come":
                self._came.setdefault(id(span.transfers[0]), {})[group] = clock.copy()
            for transfer in span.transfers if span.what == "wait" else ():
                while len(self._came.get(id(transfer), ())) < self._parties[id(transfer)]:
                    yield "waits"
                np.maximum(clock, self._arrival(transfer, group), out=clock)

    def _arrival(self, transfer: RecordedTransfer, group: int) -> Floats:
        """When it is there, at each device of the group."""
        came, devices = self._came[id(transfer)], self.clocks[group].shape[1]
        lane, when = transfer.lane, came[group]
        ranks = lane.ranks if isinstance(lane, ServerMessages) else lane
        if all_meet := isinstance(ranks, Pattern):
            when = _met(when, ranks)
        for other, clocks in came.items():
            if other != group:
                there = (
                    clocks.max(axis=1, keepdims=True) if all_meet else _of_rows(clocks, devices)
                )
                when = np.maximum(when, there)
        return when + (transfer.end - transfer.begin)


def _met(clocks: Floats, pattern: Pattern) -> Floats:
    """The last clock of each group of a pattern, at all of its devices."""
    draws, devices = clocks.shape
    block = pattern.size * pattern.stride
    if devices % block:
        last: Floats = clocks.max(axis=1, keepdims=True)
        return last
    shaped = clocks.reshape(draws, devices // block, pattern.size, pattern.stride)
    last = np.repeat(shaped.max(axis=2, keepdims=True), pattern.size, axis=2)
    return last.reshape(clocks.shape)


def _of_rows(clocks: Floats, devices: int) -> Floats:
    """The clocks of another group's devices, at the devices here that have the same rows."""
    there = clocks.shape[1]
    found: Floats = clocks.max(axis=1, keepdims=True)
    if there % devices == 0:
        found = clocks.reshape(len(clocks), devices, -1).max(axis=2)
    elif devices % there == 0:
        found = np.repeat(clocks, devices // there, axis=1)
    return found
