"""Events of a run, a record for each kind; docs/runs.md has the fields. `train` keeps them in its
log, ranks of a study send them to it; of both `result.py` makes a `RunResult`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Self, dataclass_transform

from synchromesh.results.run import ComponentLayout, Layouts
from synchromesh.results.study import StudyMachine
from synchromesh.runs.spans import Recording
from synchromesh.values import document
from synchromesh.values.fields import Within, of_plain, to_plain
from synchromesh.values.memory_by_kind import MemoryByKind
from synchromesh.values.staleness import Staleness

Count = Annotated[int, Within(0, 2**40)]
Positive = Annotated[int, Within(1, 2**40)]
Seconds = Annotated[float, Within(0)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Something that a run says, under `name`; its kinds are frozen dataclasses. time: seconds
    since the Unix epoch, in a log. more: what is said besides the fields of its class."""

    name: ClassVar[str]
    omitted: ClassVar[tuple[str, ...]] = ()  # fields that the log leaves out where they are None

    time: Seconds | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def __init_subclass__(cls, name: str) -> None:
        cls.name = name
        dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    def saying(cls, values: Mapping[str, Any]) -> Self:
        """The event that says so, unchecked; what is none of its fields is `more`."""
        known = cls._known()
        said = {key: value for key, value in values.items() if key in known}
        more = {k: v for k, v in values.items() if k not in known and k != "event"}
        return cls(**said, more=more)

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self:
        """The event of a line of a log. ValueError begins with the name of the field at fault."""
        said = {key: value for key, value in line.items() if key in cls._known()}
        return replace(of_plain(cls, said, cls.name), more=cls.saying(line).more)

    def to_dict(self) -> dict[str, Any]:
        """As a log has it, but for `event` and `time`."""
        said = {name: getattr(self, name) for name in self._known() if name != "time"}
        kept = {k: to_plain(v) for k, v in said.items() if v is not None or k not in self.omitted}
        return {**self.more, **kept}

    @classmethod
    def _known(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls) if f.name != "more")


@dataclass(frozen=True)
class RankMachine:
    """The machine as a rank has it. boot: equal on one kernel. device: `cpu`, or a GPU's name.
    cores: that the rank may use, maybe a fraction. memory_bytes: of the device."""

    host: str = ""
    boot: str = ""
    device: str = "cpu"
    processor: str = ""
    cores: float = 0.0
    threads: int = 0
    memory_bytes: int = 0
    system: str = ""

    @classmethod
    def from_plain(cls, value: Any, path: str) -> Self:
        """As a log has it; what other versions say besides is passed over."""
        known = {f.name for f in fields(cls)}
        if isinstance(value, Mapping):
            value = {k: v for k, v in value.items() if k in known and v is not None}
        return of_plain(cls, value, path)

    @property
    def of_study(self) -> StudyMachine:
        devices, cores = () if self.device == "cpu" else (self.device,), int(self.cores)
        return StudyMachine(self.processor, cores, self.memory_bytes, devices, self.system)


class RunStarted(RunEvent, name="start"):
    """Before the first step: what was asked, of which machines (by rank)."""

    workload: str
    plan: str = ""
    ranks: Positive
    seed: Annotated[int, Within(0, 2**63)] = 0
    batch_size: Positive
    bf16: bool = False
    adapt: bool = False
    lr_rule: str = "none"
    lr_factor: float = 1.0  # of the workload's own learning rates, after the warm-up
    warm_up_steps: Count = 0
    command: Any = ()  # words; of an older version text
    versions: Mapping[str, Any] = field(default_factory=dict)
    emulated: bool = False
    parameter_bytes: Count = 0
    machines: tuple[RankMachine, ...] = ()

    @property
    def first_machine(self) -> RankMachine:
        return self.machines[0] if self.machines else RankMachine()


class RunResumed(RunEvent, name="resume"):
    """Training goes on from a checkpoint, after `step`."""

    checkpoint: str
    step: Count


class LayoutInForce(RunEvent, name="layout"):
    """The plan that holds after `step`; where it was switched to, why and what that took. seconds:
    of training so far, in a study."""

    omitted = ("reason", "pause_seconds", "bytes_moved", "seconds")

    step: Count = 0
    plan: str
    components: tuple[ComponentLayout, ...] = ()
    reason: str | None = None
    pause_seconds: Seconds | None = None
    bytes_moved: Count | None = None
    seconds: Seconds | None = None

    @property
    def layouts(self) -> Layouts:
        return Layouts(
            self.step, self.plan, self.components, self.reason or "", self.seconds,
            self.pause_seconds, self.bytes_moved,
        )  # fmt: skip


class StepPredicted(RunEvent, name="prediction"):
    """What steps should take under the plan in force, as `Candidate.to_dict` has it."""

    step_seconds: Seconds | None = None
    memory_bytes: tuple[int | None, ...] = ()

    @property
    def peak_bytes(self) -> int | None:
        """Of the rank that needs most."""
        return max((size for size in self.memory_bytes if size is not None), default=None)


class PlanChosen(RunEvent, name="choice"):
    """How the plan was found, as `Choice.to_dict` has it."""


class StepLoss(RunEvent, name="step"):
    step: Count
    epoch: Count
    loss: float | None


class StepsTimed(RunEvent, name="steps"):
    """What steps `first`, `first` + 1 ... took on a rank: columns with an entry for each.

    waited    of its seconds, for other ranks
    loading   seconds for its batch, before it
    rows      of the global batch
    special   the numbers of those that are no sample of what a step takes"""

    first: Count
    epoch: Count = 0
    seconds: tuple[Seconds | None, ...]
    waited: tuple[Seconds | None, ...] | None = None
    loading: tuple[Seconds | None, ...]
    rows: tuple[int, ...]
    special: tuple[int, ...] = ()


class TurnEnded(StepsTimed, name="turn"):
    """The steps of a turn that a study granted a rank.

    mode          what they were for (study/turns.py)
    utilisation   of the rank's device; None where nobody tells
    wall          seconds from its grant to its end
    settled       whether nothing is tried any more"""

    mode: str
    utilisation: float | None = None
    wall: float
    settled: bool = True


class RankPrepared(RunEvent, name="prepared"):
    """A rank of a study is ready for its first turn, on a device of that type."""

    device: str


class RankRecorded(RunEvent, name="rank recording"):
    """What one rank recorded, and the bytes that it sent in such a step; None: not known."""

    recording: Recording
    sent: int | None


class StepsRecorded(RunEvent, name="recording"):
    """The recorded steps (first and last) of all ranks: `Shares` by rank, their mean over those
    that work, bytes that each rank sent in a step, the trace's file, its spans, and operators left
    out of it."""

    steps: tuple[int, ...] = ()
    shares: tuple[Mapping[str, Any], ...] = ()
    mean: Mapping[str, Any] = field(default_factory=dict)
    sent_bytes_per_step: tuple[int, ...] = ()
    trace: str | None = None
    spans: int = 0
    left_out: int = 0

    def share(self, name: str) -> float | None:
        """A share of the mean; None where the log does not have it."""
        value = self.mean.get(name)
        return None if value is None else document.number(value, f"{self.name}.mean.{name}")


class MemoryPeak(RunEvent, name="rank memory"):
    peak: MemoryByKind


class MemoryTracked(RunEvent, name="memory"):
    """The memory of all ranks at the peak of a step; by: who tells."""

    step: Count = 0
    peak_bytes: tuple[MemoryByKind, ...] = ()
    by: str = ""


class PlanDecided(RunEvent, name="adapt"):
    """The adapter's decision, as `Decision.to_dict` has it."""

    switched: bool = False
    predicted_after: Seconds | None = None


class BatchSizeChanged(RunEvent, name="batch size"):
    """Batches have `to` rows from the step after `step` on, as `BatchChange.to_dict` has it."""

    step: Count
    to: Positive


class SwitchMeasured(RunEvent, name="adapted"):
    """What steps take since a switch, as `Decision.to_dict` has it."""


# what a line of a log may say besides metrics: one whose name is among them is `valid_NAME` there
LOGGED = frozenset({
    "event", "time", "epoch", "epochs", "step", "steps", "loss", "seconds", "workload", "plan",
    "ranks", "best", "samples_per_second", "stopped", "samples per second", "run folder",
    "trained_seconds", "elapsed_seconds", "utilisation",
})  # fmt: skip


def logged_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics by their names in a log, which has words of its own: `loss` is of training."""
    return {f"valid_{n}" if n in LOGGED else n: value for n, value in metrics.items()}


class EpochMeasured(RunEvent, name="epoch"):
    """An epoch and its validation.

    loss              mean over its steps
    seconds           of its steps
    trained_seconds   of steps and loading since the start of this call
    elapsed_seconds   of all since then
    utilisation       by rank
    metrics           by the workload's own names"""

    epoch: Count
    step: Count
    loss: float | None = None
    seconds: Seconds | None = None
    samples_per_second: float | None = None
    trained_seconds: Seconds | None = None
    elapsed_seconds: float | None = None
    utilisation: tuple[Seconds | None, ...] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def _known(cls) -> tuple[str, ...]:
        return tuple(name for name in super()._known() if name != "metrics")

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self:
        """The event of a line, in which metrics stand beside the fields."""
        event = super().of(line)
        metrics = {
            re.sub(r"^valid_", "", key): document.number(value, f"epoch.{key}", float("-inf"))
            for key, value in event.more.items()
            if value is not None
        }
        return replace(event, metrics=metrics, more={})

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), **logged_metrics(self.metrics)}


class NoiseScaleMeasured(RunEvent, name="noise scale"):
    """What is known of it behind an epoch, with the fields of `NoiseScale`; value: in rows."""

    epoch: Count
    step: Count
    value: float | None = None


class CheckpointSaved(RunEvent, name="checkpoint"):
    path: str
    step: Count


class CheckpointNotSaved(RunEvent, name="unsaved"):
    path: str
    step: Count
    reason: str


class RanksRegrouped(RunEvent, name="generation"):
    from_step: Count
    hosts: Positive
    ranks: Positive
    plan: str
    cause: str
    culprit: tuple[Count, ...]
    noticed_seconds: Seconds
    recovered_seconds: Seconds
    lost_steps: Count
    state_from: str
    left_out: Count = 0


class RunStopped(RunEvent, name="stop"):
    signal: str
    step: Count


class RunEnded(RunEvent, name="end"):
    """The last thing that a run says; plan: the last one, None of rivals of ours. staleness: None
    but of plans whose servers step by each worker's gradient when it comes."""

    plan: str | None = None
    staleness: Staleness | None = None
