"""What a run says of its trainer, as events: what began, the layout in force, what steps took."""

import os
from dataclasses import dataclass, field, replace
from statistics import median

from synchromesh.adapt.decision import Decision
from synchromesh.engine.world import World
from synchromesh.launcher.machine import LAB
from synchromesh.planner.wording import spec_of
from synchromesh.results.run import ComponentLayout
from synchromesh.runs.events import LayoutInForce, RankMachine, RunStarted, StepsTimed
from synchromesh.runs.machine import rank_machine, versions
from synchromesh.runs.memory import MemoryTracker
from synchromesh.runs.run_folder import Job
from synchromesh.training.events import StepDone
from synchromesh.training.learning_rate import RateFactor
from synchromesh.training.trainer import Trainer
from synchromesh.values.fields import to_plain
from synchromesh.values.layout import Layout


def started(job: Job, trainer: Trainer) -> RunStarted:
    """All ranks call alike."""
    rate = job.rate or RateFactor()
    machines = trainer.world.everyone.all_gather_json(to_plain(rank_machine(trainer.world.device)))
    return RunStarted(
        workload=job.workload.name or "", plan=str(trainer.plan), ranks=trainer.world.size,
        seed=job.seed, batch_size=trainer.planning.rows, bf16=job.bf16, adapt=job.adapt,
        lr_rule=rate.rule, lr_factor=rate.factor, warm_up_steps=rate.warm_up,
        command=job.command, versions=versions(), emulated=bool(os.environ.get(LAB)),
        parameter_bytes=sum(c.parameter_bytes for c in trainer.traced.chain.components),
        machines=tuple(RankMachine(**machine) for machine in machines),
    )  # fmt: skip


def layout_in_force(
    trainer: Trainer, switch: Decision | None = None, seconds: float | None = None
) -> LayoutInForce:
    """The trainer's, in words of plans. switch: what brought it; seconds: of training so far."""
    made = trainer.partition.components
    firsts = sorted({local.layout.first for local in made})  # of stages, groups of devices
    components = (
        ComponentLayout(
            local.component.name, word(local.layout), firsts.index(local.layout.first),
            local.component.parameter_bytes,
        )
        for local in made
    )  # fmt: skip
    event = LayoutInForce(
        step=trainer.steps, plan=str(trainer.plan), components=tuple(components), seconds=seconds
    )
    if switch is None:
        return event
    why, pause = f"{switch.noticed}: {switch.reason}", switch.pause_seconds
    return replace(event, reason=why, pause_seconds=pause, bytes_moved=switch.bytes_moved)


def word(layout: Layout) -> str:
    """The word of a plan that has this layout on its devices: `hybrid:tensor=2`."""
    return "single" if layout.devices == 1 else str(spec_of(Layout(layout.data, layout.tensor)))


def memory_tracker(trainer: Trainer) -> MemoryTracker:
    """Of this rank, under the plan in force."""
    model = trainer.model
    return MemoryTracker(
        model.parameters.values(), model.buffers.values(), trainer.optimizer,
        states=(*trainer.state.outer, *trainer.state.residuals),
    )  # fmt: skip


@dataclass
class StepLog:
    """Collects the steps of this rank until `take` hands them over. trained_seconds: of all so
    far, with loading; special ones count as the others' median."""

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

    def take(self) -> StepsTimed | None:
        """Those since the last call; None where there are none."""
        if not self._steps:
            return None
        on_cuda = self.world.device.type == "cuda"  # where the host does not wait
        event = StepsTimed(
            first=self._steps[0].step, epoch=self._steps[0].epoch,
            seconds=tuple(round(e.seconds, 6) for e in self._steps),
            waited=None if on_cuda else tuple(round(w, 6) for w in self._waited),
            loading=tuple(round(e.waited, 6) for e in self._steps),
            rows=tuple(e.rows for e in self._steps), special=tuple(self._special),
        )  # fmt: skip
        self._steps, self._waited, self._special = [], [], []
        return event
