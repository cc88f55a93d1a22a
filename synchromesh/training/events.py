"""Events of `fit`, in the order in which they come; every rank sees all of them.

    Started   ( EpochStarted  ( StepDone ... Losses )*  EpochTrained  EpochEnded )*   Finished

with `Saved` or `NotSaved` after each checkpoint, a `Decision` (adapt/decision.py) where the plan
was reconsidered, a `BatchChange` (training/batch_sizes.py) where batches have changed, `Regrouped`
where ranks were lost and the others go on, and `Interrupted` where the run was asked to stop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from synchromesh.adapt.decision import Decision
from synchromesh.engine.noise_averages import NoiseScale
from synchromesh.launcher.generation import Regrouped
from synchromesh.training.batch_sizes import BatchChange
from synchromesh.training.integrity import Spike
from synchromesh.training.trainer import Trainer
from synchromesh.values.plan import Plan


@dataclass(frozen=True)
class Started:
    """Before the first step. `trainer.predict()` may be called here."""

    trainer: Trainer
    resumed: Path | None  # the checkpoint that training goes on from
    epochs: int  # that were done before
    more: bool  # whether anything is left to do


@dataclass(frozen=True)
class EpochStarted:
    """An epoch, counted from 1, of `length` steps (None: not known), `done` of them before."""

    epoch: int
    done: int
    length: int | None


@dataclass(frozen=True)
class StepDone:
    """A step. loss: global mean, at some steps only, since reading it waits for the device."""

    epoch: int
    step: int  # of the run, counted from 1
    done: int  # of the epoch
    loss: float | None
    rows: int  # of the global batch
    seconds: float  # of the step on this rank
    waited: float  # seconds for its batch, before it


@dataclass(frozen=True)
class Losses:
    """Global mean losses of steps `first`, `first` + 1, ..."""

    epoch: int
    first: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class EpochTrained:
    """All steps of an epoch are done, or the run stops; validation and checkpoint may follow."""

    epoch: int


@dataclass(frozen=True)
class EpochEnded:
    """An epoch, as far as this call has trained it, and its validation."""

    epoch: int
    step: int
    loss: float | None  # mean over its steps
    metrics: dict[str, float]
    seconds: float  # of its steps
    samples_per_second: float


@dataclass(frozen=True)
class Saved:
    path: Path
    step: int


@dataclass(frozen=True)
class NotSaved:
    """A checkpoint could not be written; training goes on, and the next one may be."""

    path: Path
    step: int
    reason: str


@dataclass(frozen=True)
class Interrupted:
    """The run stops after `step`, as a signal (its name) or the caller (`request`) asked."""

    cause: str
    step: int
    checkpoint: Path | None


@dataclass(frozen=True)
class FitResult:
    plan: Plan  # the last one
    ranks: int
    steps: int  # of the run, as are epochs, of which whole ones count
    epochs: int
    # global mean loss of each step of this call; where workers go on without each other, this
    # one's of those that it has made
    losses: tuple[float, ...]
    loss: float | None  # mean over the steps of the last epoch
    metrics: dict[str, float]  # of the last validation
    best: float | None  # of the number by which epochs are compared (`fit`: best)
    seconds: float  # of training, validation and checkpoints
    samples_per_second: float  # of the last epoch
    step_seconds: float | None  # median of full-size steps; None where there were too few
    decisions: tuple[Decision, ...]  # of the adapter
    checkpoint: Path | None  # the last one written
    stopped: str  # the cause where the run was stopped: SIGTERM, SIGINT, request; else empty
    noise_scale: NoiseScale | None = None  # of the gradient, where it was asked for
    batch_sizes: tuple[BatchChange, ...] = ()
    sent_bytes_per_step: tuple[int, ...] = ()  # by each rank, the mean of the steps of this call
    staleness: Mapping[str, Any] | None = None  # of an asynchronous plan: `Workers.staleness`
    updates: int | None = None  # of its servers
    recoveries: tuple[Regrouped, ...] = ()  # of an elastic run
    skipped_steps: tuple[int, ...] = ()  # whose gradients were not finite, where that is looked at
    loss_spikes: tuple[Spike, ...] = ()

    @property
    def useful_share(self) -> float:
        """Of `seconds`, those that were not spent on going on without lost ranks."""
        lost = sum(regrouped.recovered_seconds for regrouped in self.recoveries)
        return max(0.0, 1 - lost / self.seconds) if self.seconds else 1.0


@dataclass(frozen=True)
class Finished:
    """After the last step; the trainer can still evaluate, export or save."""

    trainer: Trainer
    result: FitResult


FitEvent = (
    Started | EpochStarted | StepDone | Losses | EpochTrained | EpochEnded | Saved | NotSaved
    | Interrupted | Decision | BatchChange | Regrouped | Finished
)  # fmt: skip

_Taking = TypeVar("_Taking", bound=Callable[..., None])


def only_reads(take: _Taking) -> _Taking:
    """Says of a function for `on_event` that it changes no parameter: servers then send what they
    have stepped for the next step at once, while other sums still come (`server:S`)."""
    take.only_reads = True  # type: ignore[attr-defined]
    return take


def reads_only(take: Callable[[FitEvent], None]) -> bool:
    return getattr(take, "only_reads", False)


@only_reads
def ignore(event: FitEvent) -> None:
    """Where nobody asks for events."""
