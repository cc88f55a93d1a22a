"""A run's results: what was measured of one strategy on one setting; seconds, bytes, shares.

Shares are parts of the wall time of a step, as the mean over the devices of a run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import ClassVar, Literal

from synchromesh.values.memory_by_kind import MemoryByKind
from synchromesh.values.staleness import Staleness

Status = Literal["done", "failed"]


@dataclass(frozen=True)
class Quartiles:
    """The middle of some measurements, in their unit, and where a quarter lies below and above."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles | None":
        """Of some values, interpolated between neighbours; of one value that one, of none None."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0]) if values else None
        q1, middle, q3 = quantiles(values, n=4, method="inclusive")
        return cls(middle, q1, q3)


@dataclass(frozen=True)
class CommunicationShares:
    """Communication while a device computes nothing (exposed), and while it computes (hidden)."""

    exposed: float
    hidden: float


@dataclass(frozen=True)
class Epoch:
    """The end of an epoch. seconds: of training since the start, without validation, checkpoints
    and others' turns. loss: mean over its steps. values: of metrics, over validation data."""

    epoch: int
    step: int
    seconds: float
    loss: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reached:
    """A target, as `accuracy=0.9`, and what it took; None: not reached, or no price is known."""

    target: str
    epochs: int | None = None
    seconds: float | None = None
    dollars: float | None = None


@dataclass(frozen=True)
class ComponentLayout:
    """How one component of the model is laid out: the plan's text for it, its pipeline stage."""

    name: str
    layout: str
    stage: int = 0
    parameter_bytes: int = 0  # of the whole component


@dataclass(frozen=True)
class Layouts:
    """The layout of every component from a step on, and why the plan changed there (if it did)."""

    step: int
    plan: str
    components: tuple[ComponentLayout, ...] = ()
    reason: str = ""
    seconds: float | None = None  # since the start, as `Epoch.seconds`
    paused_seconds: float | None = None  # of moving parameters and states
    moved_bytes: int | None = None


@dataclass(frozen=True)
class TimelineSpan:
    """A piece of one recorded step: seconds since its start."""

    device: int
    start: float
    end: float
    kind: Literal["computation", "communication", "waiting"]
    name: str = ""


def joined(pieces: Iterable[tuple[float, float]], least: float) -> list[tuple[float, float]]:
    """(start, end) as they would be seen: in order, without gaps shorter than `least` seconds."""
    seen: list[tuple[float, float]] = []
    for start, end in sorted(pieces):
        if seen and start - seen[-1][1] < least:
            start, before = seen.pop()
            end = max(before, end)
        seen.append((start, end))
    return seen


@dataclass(frozen=True)
class RunResult:
    """One strategy on one setting. What was not or could not be measured is None or empty.
    ValueError for fewer devices than one, and negative counts.

    strategy               as asked: single, data, tensor, pipeline, hybrid, auto, ddp, fsdp2,
                           torch-pipeline, or a plan's text
    plan                   under which it ended; None for strategies that are not ours
    batch                  rows of a global batch
    reason                 why it failed, or what is to be known of it
    step_seconds           of `timed_steps` steps, each from when the last device has its data
    samples_per_second     end to end: with waiting for data
    data_waiting_share     of that time
    seconds_per_epoch      measured, or the steps of an epoch times the median step
    epoch_seconds          where epochs were measured
    speedup, efficiency    over one device on the same batch (strong scaling) or on the batch of
                           one device (weak); efficiency is that over the devices
    computation_share      of a step, as are the next two
    waiting_share          of the exposed communication: for slower devices, not for transfer
    utilisation            of the devices; `utilisation_of` says of what
    flops_utilisation      floating-point operations of the model over the devices' peak
    predicted_step_seconds of the plan that steps are timed under, before the first one, from
                           measurements of components and links
    dollars                price per hour x `seconds`
    seconds                of training, without validation and other runs' turns; in a study by
                           steps those that it asks for at the median step, however many were timed
    predicted              nothing was run: all figures are predictions
    cluster                what it ran on or is predicted for, in words, where a study has several;
                           runs of different ones are not compared
    staleness              of gradients that came to servers one by one
    trace                  the file with the trace of its recorded steps, beside the document"""

    WARM_UP_STEPS: ClassVar = 13  # are not timed: twelve may be trials (engine/pieces.py)

    workload: str
    strategy: str
    devices: int
    batch: int
    seed: int
    status: Status
    plan: str | None = None
    reason: str = ""
    step_seconds: Quartiles | None = None
    timed_steps: int = 0
    samples_per_second: float | None = None
    data_waiting_share: float | None = None
    seconds_per_epoch: float | None = None
    epoch_seconds: Quartiles | None = None
    speedup: float | None = None
    efficiency: float | None = None
    communication_share: CommunicationShares | None = None
    computation_share: float | None = None
    waiting_share: float | None = None
    utilisation: float | None = None
    utilisation_of: str = ""
    flops_utilisation: float | None = None
    peak_memory_bytes: tuple[MemoryByKind, ...] = ()  # by device
    sent_bytes_per_step: tuple[int, ...] = ()  # by device
    metrics: tuple[Epoch, ...] = ()
    to_target: Reached | None = None
    further_targets: tuple[Reached, ...] = ()
    predicted_step_seconds: float | None = None
    predicted_peak_bytes: int | None = None  # of the device that needs most
    dollars: float | None = None
    seconds: float | None = None
    layouts: tuple[Layouts, ...] = ()
    timeline: tuple[TimelineSpan, ...] = ()
    trace: str | None = None
    emulated: bool = False
    predicted: bool = False
    cluster: str = ""
    staleness: Staleness | None = None

    def __post_init__(self) -> None:
        for name, least in (("devices", 1), ("batch", 0), ("timed_steps", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} should be at least {least}, not {getattr(self, name)}")

    @property
    def exposed_share(self) -> float | None:
        return None if self.communication_share is None else self.communication_share.exposed

    @property
    def hidden_share(self) -> float | None:
        return None if self.communication_share is None else self.communication_share.hidden
