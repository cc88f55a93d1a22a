"""A contestant of ours: `fit` under the strategy's plan, metered."""

from synchromesh.adapt.decision import Decision
from synchromesh.runs.events import StepPredicted
from synchromesh.runs.trainer_events import layout_in_force, memory_tracker
from synchromesh.study.cell import CellJob
from synchromesh.study.meter import Meter
from synchromesh.training import events
from synchromesh.training.events import FitEvent
from synchromesh.training.fit import fit
from synchromesh.training.trainer import Trainer


def train(job: CellJob, meter: Meter) -> None:
    """Trains until the epochs are over or the study ends the run."""
    first = job.plans[0] if len(job.plans) == 1 else "data"
    fit(
        job.workload(), first, epochs=job.epochs, steps=None if job.epochs else Meter.ENDLESS,
        seed=job.cell.seed, autocast=job.autocast, allow=job.allow, stop=lambda: meter.over,
        on_event=_Reporter(job, meter).take,
    )  # fmt: skip


class _Reporter:
    """What the events of `fit` say, for the study."""

    def __init__(self, job: CellJob, meter: Meter) -> None:
        self.job, self.meter = job, meter
        self.trainer: Trainer | None = None

    @events.only_reads
    def take(self, event: FitEvent) -> None:
        """One event; all ranks call alike."""
        match event:
            case events.Started():
                self._started(event.trainer)
            case events.StepDone():
                self.meter.step(event.seconds, event.waited, event.rows)
            case events.EpochEnded() if self.job.epochs is not None:
                self.meter.epoch(event.epoch, event.step, event.loss, event.metrics)
            case Decision() if event.switched and event.measured_after is None:
                self._switched(event)
            case events.Finished():
                self.meter.finish(str(event.trainer.plan), event.result.staleness)

    def _started(self, trainer: Trainer) -> None:
        self.trainer, world, meter = trainer, trainer.world, self.meter
        if len(self.job.plans) > 1:
            trainer.switch(trainer.planning.quickest(trainer.traced, self.job.plans).plan)
        predicted = trainer.predict()
        meter.prepare(world.device, lambda: world.ledger.sent, lambda: memory_tracker(trainer))
        meter.say(StepPredicted.saying(predicted.to_dict()))
        meter.say(layout_in_force(trainer, seconds=meter.seconds))
        meter.settled = lambda: trainer.settled
        meter.begin()

    def _switched(self, decision: Decision) -> None:
        trainer = self.trainer
        assert trainer is not None
        known = trainer.planning.candidates()
        plan = next((c for c in known if str(c.plan) == decision.plan_to), None)
        peaks = () if plan is None else tuple(m.peak for m in plan.memory)
        self.meter.say(StepPredicted(step_seconds=decision.predicted_after, memory_bytes=peaks))
        self.meter.say(layout_in_force(trainer, decision, self.meter.seconds))
