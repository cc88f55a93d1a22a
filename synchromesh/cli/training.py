"""The training of one rank of `train`: `fit` with a display, a log and a run folder around it."""

import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from synchromesh.adapt.decision import Decision
from synchromesh.cli import options, ranks
from synchromesh.cli.choice import choice_table, component_table, notes, prediction_text
from synchromesh.cli.console import Display, metric, noise_rows, shown, summary
from synchromesh.launcher.generation import Regrouped
from synchromesh.report.numbers import counted
from synchromesh.runs import events as logged
from synchromesh.runs.run_folder import Job, RunFolder, finite
from synchromesh.runs.tensorboard import TensorBoard
from synchromesh.runs.trainer_events import StepLog, layout_in_force, started
from synchromesh.runs.utilisation import Utilisation
from synchromesh.runs.watches import StepWatch
from synchromesh.training import events
from synchromesh.training.batch_sizes import BatchChange
from synchromesh.training.events import FitEvent
from synchromesh.training.fit import fit
from synchromesh.training.stop import SIGNALS
from synchromesh.training.trainer import Trainer
from synchromesh.values.fault import Stopped
from synchromesh.values.fields import to_plain


def train(job: Job, document: TextIO | None) -> int:
    """Trains to the end, or to a signal: Stopped, on all ranks. document: gets the result."""
    display = Display(ranks.first())
    report = _Report(job, display, document)
    try:
        result = fit(
            job.workload, job.plan, epochs=None if job.steps else job.epochs, steps=job.steps,
            seed=job.seed, checkpoints=job.folder.checkpoints, checkpoint_every=job.every,
            resume=None if job.resumed is None else job.resumed.checkpoint, adapt=job.adapt,
            autocast=options.precision(job.bf16), headroom=job.headroom, allow=job.allow,
            keep=job.keep, replicate=job.replicate, skip_non_finite=job.skip_non_finite,
            check_replicas=job.check_replicas, roll_back_spikes=job.roll_back_spikes,
            best=job.best, patience=job.patience, noise_scale=job.noise_scale, batches=job.batches,
            on_event=report.take, say=display.say,
        )  # fmt: skip
    finally:
        report.close()
    if result.stopped:
        for number in SIGNALS:  # one that comes late, to ranks that have stopped already
            signal.signal(number, signal.SIG_IGN)
        raise Stopped(signal.Signals[result.stopped])
    return 0


class _Report:
    """Writes the events of a run to its folder and shows them; on rank 0."""

    def __init__(self, job: Job, display: Display, document: TextIO | None) -> None:
        self.job, self.display, self.document = job, display, document
        self.folder = job.folder
        self.trainer: Trainer | None = None
        self.predicted: float | None = None  # seconds of a step, before the first one
        self.unwritten = False  # whether the log misses something
        self.began = time.monotonic()
        self.watch: StepWatch | None = None
        self.steps: StepLog | None = None
        self.used: Utilisation | None = None  # of the epoch that goes on
        self.share: float | None = None  # of the last one
        self.board: TensorBoard | None = None
        self.epoch: events.EpochStarted | None = None
        self.done = 0  # steps of it
        self._decided_in_step = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.Started: self._started, events.EpochStarted: self._epoch_started,
            events.Losses: self._losses, events.StepDone: self._step_done,
            events.EpochTrained: self._epoch_trained, events.EpochEnded: self._epoch_ended,
            events.Saved: self._saved,
            events.NotSaved: self._not_saved, events.Interrupted: self._interrupted,
            events.Finished: self._finished, Decision: self._decided, BatchChange: self._resized,
            Regrouped: self._regrouped,
        }  # fmt: skip

    def close(self) -> None:
        """Ends what goes on, however the run has ended."""
        if self.watch is not None:
            self.watch.close()
        if self.board is not None:
            self.board.close()

    @events.only_reads
    def take(self, event: FitEvent) -> None:
        """One event; all ranks call alike."""
        self._handlers[type(event)](event)

    def _log(self, event: logged.RunEvent) -> None:
        if self.display.shown:
            self._write(lambda: self.folder.log(event))
        if self.board is not None:
            self.board.log(event)

    def _write(self, do: Callable[[], None]) -> None:
        """Training goes on where the run folder has no room; that is said once."""
        try:
            do()
        except OSError as error:
            if not self.unwritten:
                self.display.say(
                    f"{self.folder.path} cannot be written to ({error.strerror}): training goes "
                    "on, and its log misses what comes until there is room"
                )
            self.unwritten = True

    def _started(self, event: events.Started) -> None:
        job, self.trainer, trainer = self.job, event.trainer, event.trainer
        self._takes_over(trainer)
        path = trainer.world.everyone.broadcast_json(str(job.folder.path))  # clocks differ
        self.folder = RunFolder(Path(path))
        if self.display.shown:
            self.folder.make()
            if job.tensorboard:
                self.board = TensorBoard(self.folder.path / "tensorboard")
        self._note_plan(trainer)
        self._log(started(job, trainer))
        self._log(layout_in_force(trainer))
        # steps to look at: those asked for, else one after warm-up; on CUDA (untried) none
        self.steps, asked = StepLog(trainer.world), job.trace_steps
        cpu = trainer.world.device.type == "cpu"
        if not trainer.world.alone and (asked is not None or cpu):  # one that comes would be late
            first, last = asked or (trainer.steps + StepWatch.DEFAULT_STEP,) * 2
            self.watch = StepWatch(trainer, first, last)
        if event.resumed is not None:
            self._log(logged.RunResumed(checkpoint=str(event.resumed), step=trainer.steps))
            self.display.say(f"resumed from {event.resumed} at step {trainer.steps}")
        self.display.say(
            f"{job.workload.name} under plan {trainer.plan} on "
            f"{counted(trainer.world.size, 'rank')} ({trainer.world.device.type}), "
            f"batch {trainer.planning.rows}; run folder {self.folder.path}"
        )
        if job.rate is not None and job.rate.rule != "none":
            self.display.say(str(job.rate))
        if not trainer.world.alone:
            self._predict(trainer)
        if not event.more:
            self.display.say(self._nothing_left(trainer.steps, event.epochs))

    def _takes_over(self, trainer: Trainer) -> bool:
        """Whether this rank speaks from now on, as the one that did is lost."""
        if trainer.rank or trainer.world.alone or self.display.shown:
            return False
        self.display.take_over()
        return True

    def _note_plan(self, trainer: Trainer) -> None:
        if self.display.shown:
            job = self.job
            asked: dict[str, Any] = {
                "workload": job.workload.name, "seed": job.seed,
                "batch_size": job.workload.batch_size, "plan": str(trainer.plan),
                "ranks": trainer.world.size, "bf16": job.bf16, "adapt": job.adapt,
                "allow": job.allow,
            }  # fmt: skip
            if job.rate is not None:
                asked |= {"lr_rule": job.rate.rule, "warm_up": job.rate.epochs}
            if job.batches is not None:
                asked |= {"batches": str(job.batches)}
            self._write(lambda: self.folder.write(asked, trainer.plan.to_yaml()))

    def _predict(self, trainer: Trainer) -> None:
        """What a step should take, said before the first one; how the plan was found."""
        predicted = trainer.predict()
        self.predicted = None if predicted.time is None else predicted.seconds
        self._log(logged.StepPredicted.saying(predicted.to_dict()))
        choice = trainer.planning.explained(trainer.traced) if self.display.shown else None
        if choice is not None and len(choice.candidates) > 1:
            self._log(logged.PlanChosen.saying(choice.to_dict()))
            self.display.table(choice_table(choice))
            self.display.table(component_table(trainer))
            for line in notes(choice):
                self.display.say(line)
        self.display.say(prediction_text(predicted))

    def _nothing_left(self, steps_done: int, epochs_done: int) -> str:
        """Only a resumed run can have reached its end before it begins."""
        job = self.job
        if job.steps is not None:
            asked, more = f"--steps {job.steps}", f"--steps above {steps_done}"
        else:
            asked, more = f"{job.epochs} epochs", f"--epochs above {epochs_done}, or --steps"
        return (
            f"nothing is left to do: the resumed run has done {counted(steps_done, 'step')} and "
            f"{counted(epochs_done, 'epoch')}, and {asked} were asked for; ask for {more}"
        )

    def _epoch_started(self, event: events.EpochStarted) -> None:
        assert self.trainer is not None and self.steps is not None
        self.epoch, self.done = event, event.done
        self.display.start_epoch(f"epoch {event.epoch}", event.done, event.length)
        self.used = Utilisation(self.trainer.world.device)
        self.steps.begin()
        if self.watch is not None:
            self.watch.ahead(self.trainer.steps + 1)

    def _step_done(self, event: events.StepDone) -> None:
        assert self.steps is not None and self.epoch is not None
        watch, self.done = self.watch, event.done
        self.display.step(event.done, event.loss)
        watched = watch is not None and watch.special(event.step)
        self.steps.add(event, self._decided_in_step or watched)
        self._decided_in_step = False
        if event.loss is not None:
            self._log_steps()
        if watch is None:
            return
        seen = watch.done(event.step, event.seconds, self.folder, self._write)
        if seen is not None:
            self._log(seen)
        if event.done != self.epoch.length:
            watch.ahead(event.step + 1)

    def _log_steps(self) -> None:
        taken = None if self.steps is None else self.steps.take()
        if taken is not None:
            self._log(taken)

    def _epoch_trained(self, event: events.EpochTrained) -> None:
        self._log_steps()
        self.display.end_epoch()
        self.share = None if self.used is None else self.used.end()

    def _losses(self, event: events.Losses) -> None:
        for step, loss in enumerate(event.values, event.first):
            self._log(logged.StepLoss(step=step, epoch=event.epoch, loss=loss))

    def _saved(self, event: events.Saved) -> None:
        self._log(logged.CheckpointSaved(path=str(event.path), step=event.step))

    def _not_saved(self, event: events.NotSaved) -> None:
        path, reason = str(event.path), event.reason
        self._log(logged.CheckpointNotSaved(path=path, step=event.step, reason=reason))
        self.display.say(f"no checkpoint at step {event.step}: {event.reason}")

    def _interrupted(self, event: events.Interrupted) -> None:
        self._log(logged.RunStopped(signal=event.cause, step=event.step))
        self.display.say(
            f"{event.cause}: stopped after step {event.step}; go on with --resume "
            f"{event.checkpoint}"
        )

    def _decided(self, decision: Decision) -> None:
        """A decision of the adapter, logged and shown with its reasons; later what came of it."""
        assert self.trainer is not None
        if decision.measured_after is not None:
            self._log(logged.SwitchMeasured.saying(decision.to_dict()))
            return self.display.say(
                f"since the switch at step {decision.step} a step takes "
                f"{decision.measured_after * 1e3:.0f} ms ({decision.measured_before * 1e3:.0f} ms "
                f"before; {decision.predicted_after * 1e3:.0f} ms were predicted)"
            )
        self._log(logged.PlanDecided.saying(decision.to_dict()))
        self._decided_in_step = True
        if decision.switched:
            self._note_plan(self.trainer)
            self._log(layout_in_force(self.trainer, decision))
            self.predicted = decision.predicted_after
        done = f"switched to {decision.plan_to}" if decision.switched else "kept the plan"
        pause = f"; {decision.bytes_moved:,} bytes in {decision.pause_seconds:.2f} s"
        self.display.say(
            f"step {decision.step}: {decision.noticed}; measured for "
            f"{decision.measuring_seconds:.1f} s; {done}: {decision.reason}"
            f"{pause if decision.switched else ''}"
        )

    def _resized(self, change: BatchChange) -> None:
        """Batches have other rows, with the plan and the learning rate that go with them."""
        assert self.trainer is not None
        self._log(logged.BatchSizeChanged.saying(change.to_dict()))
        self._decided_in_step = True
        sizes = self.trainer.adaptation.batches
        if self.epoch is not None and self.epoch.length is not None and sizes is not None:
            done = sizes.loader.done if sizes.of_ranks else self.done + 1  # with this step
            length = done + len(sizes.loader)
            self.epoch = replace(self.epoch, length=length)
            self.display.resize_epoch(length)
        if change.plan_to != change.plan_from:
            self._note_plan(self.trainer)
            self._log(layout_in_force(self.trainer))
        self.predicted = None  # of steps of other rows
        worth = (change.goodput_before, change.goodput_after)
        before, after = (shown("{:,.0f}", goodput) for goodput in worth)
        goodput = "" if worth[1] is None else f"; goodput {before} -> {after} rows/s"
        moved = change.plan_to != change.plan_from
        self.display.say(
            f"step {change.step}: {change.reason}; batches of {change.after:,} rows, "
            f"{change.before:,} before{goodput}; {'switched to' if moved else 'kept the plan'} "
            f"{change.plan_to}; learning rate {change.learning_rate:.4g}; {change.seconds:.1f} s"
        )

    def _regrouped(self, event: Regrouped) -> None:
        """Other ranks are lost; the first of those that are left speaks from now on."""
        assert self.trainer is not None
        if self._takes_over(self.trainer):
            if self.epoch is not None:
                self.display.start_epoch(f"epoch {self.epoch.epoch}", self.done, self.epoch.length)
            if self.job.tensorboard:
                self.board = TensorBoard(self.folder.path / "tensorboard")
        if self.trainer.rank:  # which was the first before it came to leave
            self.display.shown = False
        self._note_plan(self.trainer)
        self._log(logged.RanksRegrouped.saying(event.to_dict()))
        self._log(layout_in_force(self.trainer))
        if self.watch is not None:
            self.watch.close()
        self.predicted = self.watch = None
        self.display.say(str(event))

    def _epoch_ended(self, event: events.EpochEnded) -> None:
        assert self.trainer is not None and self.steps is not None
        used = self.trainer.world.everyone.all_gather_json(self.share)
        self._log(
            logged.EpochMeasured(
                epoch=event.epoch, step=event.step, loss=event.loss,
                seconds=round(event.seconds, 3),
                samples_per_second=round(event.samples_per_second, 1),
                trained_seconds=round(self.steps.trained_seconds, 3),
                elapsed_seconds=round(time.monotonic() - self.began, 3), utilisation=tuple(used),
                metrics=event.metrics,
            )
        )  # fmt: skip
        metrics = logged.logged_metrics(event.metrics)
        values = "".join(f"  {name} {metric(value)}" for name, value in metrics.items())
        if (noise := self.trainer.noise_scale) is not None:
            known = {"epoch": event.epoch, "step": event.step, **to_plain(noise)}
            self._log(logged.NoiseScaleMeasured.saying(known))
            values += "".join(f"  {name} {text}" for name, text in noise_rows(noise).items())
        length = None if self.epoch is None else self.epoch.length
        part = "" if length in (None, self.done) else f" ({self.done} of {length} steps)"
        self.display.say(
            f"epoch {event.epoch}{part}  step {event.step}  loss {shown('{:.4f}', event.loss)}"
            f"{values}  {event.samples_per_second:,.0f} samples/s"
        )

    def _finished(self, event: events.Finished) -> None:
        result = event.result
        asked = self.job.trace_steps
        if asked is not None and self.watch is not None and not self.watch.recorded:
            self.display.say(
                f"--trace-steps {asked[0]}-{asked[1]}: nothing was recorded, since this call did "
                f"not begin and end these steps (it ended after step {result.steps})"
            )
        if self.display.shown:
            self._conclude(event.trainer, result)
        if result.stopped:  # what starts ranks may end them all with the first: rank 0 is done
            event.trainer.world.everyone.broadcast_json(None)

    def _conclude(self, trainer: Trainer, result: events.FitResult) -> None:
        metrics, speed = logged.logged_metrics(result.metrics), result.samples_per_second
        values: dict[str, Any] = {
            "workload": self.job.workload.name, "plan": str(result.plan), "ranks": result.ranks,
            "steps": result.steps, "epochs": result.epochs, "loss": result.loss,
            "metrics": metrics, "best": result.best, "samples_per_second": round(speed, 1),
            "seconds": round(result.seconds, 3), "predicted_step_seconds": self.predicted,
            "measured_step_seconds": result.step_seconds,
            "switches": [d.to_dict() for d in result.decisions if d.switched],
            "run_directory": str(self.folder.path), "stopped": result.stopped or None,
            "noise_scale": to_plain(result.noise_scale),
            "batch_sizes": [change.to_dict() for change in result.batch_sizes],
            "synchronisation": result.plan.synchronisation,
            "compression": result.plan.compression,
            "sent_bytes_per_step": list(result.sent_bytes_per_step),
            "staleness": result.staleness, "updates": result.updates,
            "generations": [regrouped.to_dict() for regrouped in result.recoveries],
            "useful_share": result.useful_share, "skipped_steps": list(result.skipped_steps),
            "loss_spikes": to_plain(result.loss_spikes),
        }  # fmt: skip
        self._log(logged.RunEnded.saying(values))
        if self.document is not None:
            return print(json.dumps(finite(values)), file=self.document, flush=True)
        measured, predicted = (
            shown("{:.1f} ms", None if seconds is None else seconds * 1e3)
            for seconds in (result.step_seconds, self.predicted)
        )
        begun = self.epoch is not None and self.epoch.epoch > result.epochs
        part = f" and {counted(self.done, 'step')} of the next" if begun else ""
        rows = {
            "epochs": f"{result.epochs}{part} ({counted(result.steps, 'step')})",
            "loss": shown("{:.4f}", result.loss),
            **{name: metric(value) for name, value in metrics.items()},
            "best": metric(result.best), "samples per second": f"{speed:,.0f}",
            "seconds": f"{result.seconds:.1f}",
            "step": f"{measured} measured, {predicted} predicted",
            "plan": f"{result.plan} on {counted(trainer.world.size, 'rank')}",
            **noise_rows(result.noise_scale), "run folder": str(self.folder.path),
        }  # fmt: skip
        summary(f"{self.job.workload.name}", rows)
