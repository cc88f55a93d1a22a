"""A contestant of ours: `fit` under the strategy's plan, metered."""

from dataclasses import asdict, replace
from typing import Any

from synchromesh.adapt.decision import Decision
from synchromesh.planner.candidate import Candidate
from synchromesh.runs.layouts import component_layouts
from synchromesh.runs.memory import MemoryTracker
from synchromesh.runs.watches import Recorded, Remembered
from synchromesh.study.job import CellJob
from synchromesh.study.meter import Meter
from synchromesh.training import events
from synchromesh.training.events import FitEvent
from synchromesh.training.loop import fit
from synchromesh.training.trainer import Trainer
from synchromesh.values import fields

ENDLESS = 10**9


def train(job: CellJob, meter: Meter) -> None:
    """Trains until the epochs are over or the study ends the run."""
    first = job.plans[0] if len(job.plans) == 1 else "data"
    run, workload = _Reporter(job, meter), job.workload()
    if job.epochs is None:  # speed alone: nothing is validated
        workload = replace(workload, valid_data=None)
    fit(
        workload, first, epochs=job.epochs, steps=None if job.epochs else ENDLESS,
        seed=job.cell.seed, autocast=job.autocast, on_event=run.take, stop=lambda: meter.over,
    )  # fmt: skip


class _Reporter:
    """What the events of `fit` say, for the study."""

    def __init__(self, job: CellJob, meter: Meter) -> None:
        self.job, self.meter = job, meter
        self.trainer: Trainer | None = None

    def take(self, event: FitEvent) -> None:
        """One event; all ranks call alike."""
        match event:
            case events.Started():
                self._started(event.trainer)
            case events.StepDone():
                self.meter.step(event.seconds, event.waited, event.rows)
            case events.EpochEnded() if self.job.epochs is not None:
                self.meter.epoch(event.epoch, event.step, event.loss, event.metrics)
            case Decision():
                self._decided(event)
            case events.Finished():
                self.meter.finish(plan=str(event.trainer.plan))

    def _started(self, trainer: Trainer) -> None:
        self.trainer = trainer
        if len(self.job.plans) > 1:
            best = trainer.planning.quickest(trainer.traced, self.job.plans)
            trainer.switch(best.plan)
        found = trainer.predict()
        self.meter.device = trainer.world.device
        self.meter.channel.say(
            "prepared", device=trainer.world.device.type, plan=str(trainer.plan)
        )
        self._predicted(None if found.time is None else found.seconds, found)
        self._layouts("")
        world = trainer.world
        self.meter.settled = lambda: trainer.settled
        self.meter.watches = {
            "recorded": Recorded(world.device, lambda: world.ledger.sent),
            "memory": Remembered(lambda: _memory(trainer)),
        }
        self.meter.begin()

    def _predicted(self, seconds: float | None, found: Candidate | None) -> None:
        """What a step and memory are predicted to be under the plan in force, before its steps."""
        peaks = [] if found is None else [m.peak for m in found.memory]
        self.meter.channel.say("predicted", seconds=seconds, bytes=max(peaks, default=None))

    def _layouts(self, reason: str, **moved: Any) -> None:
        trainer = self.trainer
        assert trainer is not None
        self.meter.channel.say(
            "layouts", step=trainer.steps, plan=str(trainer.plan), reason=reason,
            seconds=self.meter.seconds, components=fields.to_plain(component_layouts(trainer)),
            **moved,
        )  # fmt: skip

    def _decided(self, decision: Decision) -> None:
        if decision.measured_after is not None:
            self.meter.channel.say("switched", **asdict(decision))
        elif decision.switched:
            assert self.trainer is not None
            known = self.trainer.planning.candidates()
            plan = next((c for c in known if str(c.plan) == decision.plan_to), None)
            self._predicted(decision.predicted_after, plan)
            self._layouts(
                f"{decision.noticed}: {decision.reason}",
                paused_seconds=decision.pause_seconds, moved_bytes=decision.bytes_moved,
            )  # fmt: skip


def _memory(trainer: Trainer) -> MemoryTracker:
    """Of this rank, under the plan in force."""
    model = trainer.model
    return MemoryTracker(model.parameters.values(), model.buffers.values(), trainer.optimizer)
