"""The training of one rank of `train`: epochs, validation, log, checkpoints, a clean stop."""

import json
import math
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from synchromesh.adapt.adapter import Decision
from synchromesh.cli import ranks
from synchromesh.cli.choice import choice_table, component_table, prediction_text
from synchromesh.cli.job import Job
from synchromesh.cli.progress import Display, summary
from synchromesh.cli.run_folder import Resumed, RunFolder, finite
from synchromesh.cli.stop import Stop
from synchromesh.state.manifest import CheckpointError
from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from synchromesh.values.fault import Stopped

WARM_UP = 13  # steps: twelve may be trials of how the rows walk (engine/overlap.py)
LOGGED = frozenset(
    {
        "event", "time", "epoch", "epochs", "step", "steps", "loss", "seconds", "workload", "plan",
        "ranks", "best", "samples_per_second", "stopped", "samples per second",
        "run folder",
    }
)  # fmt: skip
READ_EVERY = 10  # steps between readings of the loss, each of which waits for the device


@dataclass
class Tally:
    """How far the run is; what a checkpoint carries besides the trainer's own state."""

    best: float | None = None
    loss: float | None = None  # mean over the last epoch's steps
    metrics: dict[str, float] = field(default_factory=dict)
    speed: float = 0.0  # samples per second of the last epoch
    seconds: list[float] = field(default_factory=list)  # of full-size steps after warm-up
    predicted: float | None = None  # seconds of a step, before the first one

    @property
    def measured(self) -> float | None:
        """Median seconds of a full-size step; None where the run was too short to know."""
        return median(self.seconds) if self.seconds else None

    def carried(self) -> dict[str, Any]:
        return {"best": self.best}


def train(job: Job, as_json: bool) -> int:
    """Trains to the end, or to a signal: Stopped, on all ranks."""
    torch.manual_seed(job.seed)
    workload = job.workload
    display = Display(ranks.first())
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    trainer = prepare(
        model, optimizer, workload.loss, workload.example(seed=job.seed), plan=job.plan,
        scheduler=workload.scheduler(optimizer) if workload.scheduler else None,
        seed=job.seed, autocast=torch.bfloat16 if job.bf16 else None, say=display.say,
    )  # fmt: skip
    try:
        training = _Training(job, trainer, display)
        training.run(as_json)
    finally:
        trainer.close()
    if training.stopped:
        raise Stopped(training.stopped)
    return 0


class _Training:
    def __init__(self, job: Job, trainer: Trainer, display: Display) -> None:
        self.job, self.trainer, self.tally = job, trainer, Tally()
        world = trainer.world
        self.first = world.rank == 0
        path = world.everyone.broadcast_json(str(job.folder.path))  # under torchrun clocks differ
        self.folder = RunFolder(Path(path))
        self.display = display
        self.stop = Stop(world.everyone, world.device)
        self.stopped = 0
        self.unsaved: CheckpointError | None = None  # why the last checkpoint is missing
        self.losses: list[Tensor] = []  # of this epoch; the first `logged` are in the log
        self.logged = 0
        w = job.workload
        self.loader = trainer.loader(
            w.train_data, w.batch_size, shuffle=True, seed=job.seed, collate=w.collate
        )

    def run(self, as_json: bool) -> None:
        self._begin()
        if not self._more():
            self.display.say(self._nothing_left())
        started = time.monotonic()
        while self._more():
            self._epoch()
        self._end(as_json, time.monotonic() - started)
        if self.stopped:  # what starts ranks may end them all with the first: rank 0 speaks before
            self.trainer.world.everyone.broadcast_json(None)
        if self.unsaved:
            raise self.unsaved

    def _begin(self) -> None:
        job, trainer = self.job, self.trainer
        if self.first:
            self.folder.make()
            self._note_plan()
        if job.resumed:
            self._resume(job.resumed)
        self.display.say(
            f"{job.workload.name} under plan {trainer.plan} on {_ranks(trainer)} "
            f"({trainer.world.device.type}), batch {job.workload.batch_size}; "
            f"run folder {self.folder.path}"
        )
        self._predict()

    def _note_plan(self) -> None:
        """Writes what was asked and the plan in force, from which a resumed run goes on."""
        job, trainer = self.job, self.trainer
        if self.first:
            self.folder.write(
                {
                    "workload": job.workload.name, "seed": job.seed,
                    "batch_size": job.workload.batch_size, "plan": str(trainer.plan),
                    "ranks": trainer.world.size, "bf16": job.bf16, "adapt": job.adapt,
                },
                trainer.plan.to_yaml(),
            )  # fmt: skip

    def _predict(self) -> None:
        """What a step should take, said before the first one; how the plan was found."""
        trainer = self.trainer
        found = trainer.predict()
        self.tally.predicted = None if found.time is None else found.seconds
        self._log("prediction", **found.to_dict())
        choice = trainer.explained() if self.first else None
        if choice is not None and len(choice.candidates) > 1:
            self._log("choice", **choice.to_dict())
            self.display.table(choice_table(choice))
            self.display.table(component_table(trainer))
            if choice.alone:
                self.display.say(choice.alone)
        self.display.say(prediction_text(found))
        if self.job.adapt:
            trainer.adapt()
            trainer.on_event = self._decided

    def _decided(self, event: Decision) -> None:
        """A decision of the adapter, logged and shown with its reasons; later what came of it."""
        if event.measured_after is not None:
            self._log("adapted", **event.to_dict())
            return self.display.say(
                f"since the switch at step {event.step} a step takes "
                f"{event.measured_after * 1e3:.0f} ms ({event.measured_before * 1e3:.0f} ms "
                f"before; {event.predicted_after * 1e3:.0f} ms were predicted)"
            )
        self._log("adapt", **event.to_dict())
        if event.switched:
            self._note_plan()
            self.tally.seconds.clear()  # of another plan
            self.tally.predicted = event.predicted_after
        done = f"switched to {event.plan_to}" if event.switched else "kept the plan"
        pause = f"; {event.bytes_moved:,} bytes in {event.pause_seconds:.2f} s"
        self.display.say(
            f"step {event.step}: {event.noticed}; measured for {event.measuring_seconds:.1f} s; "
            f"{done}: {event.reason}{pause if event.switched else ''}"
        )

    def _resume(self, resumed: Resumed) -> None:
        carried = self.trainer.resume(resumed.checkpoint)
        best = carried.get("best")
        self.tally.best = None if best is None else float(best)
        self._log("resume", checkpoint=str(resumed.checkpoint), step=self.trainer.steps)
        self.display.say(f"resumed from {resumed.checkpoint} at step {self.trainer.steps}")

    def _more(self) -> bool:
        if self.stopped:
            return False
        if self.job.steps is not None:
            return self.trainer.steps < self.job.steps
        return self.loader.cursor.epoch < self.job.epochs

    def _nothing_left(self) -> str:
        """Only a resumed run can have reached its end before it begins."""
        job, done = self.job, self.loader.cursor.epoch
        steps = f"{self.trainer.steps} {'step' if self.trainer.steps == 1 else 'steps'}"
        if job.steps is not None:
            asked, more = f"--steps {job.steps}", f"--steps above {self.trainer.steps}"
        else:
            asked, more = f"{job.epochs} epochs", f"--epochs above {done}, or --steps"
        return (
            f"nothing is left to do: the resumed run has done {steps} and {done} epochs, and "
            f"{asked} were asked for; ask for {more}"
        )

    def _epoch(self) -> None:
        """The rest of the current epoch, its validation and its checkpoint."""
        loader, limit = self.loader, self.job.steps
        length = -(-loader.samples // loader.batch_size)
        first = done = length - len(loader)
        epoch = loader.cursor.epoch + 1
        self.losses, self.logged = [], 0
        self.display.start_epoch(f"epoch {epoch}", done, length)
        started = time.monotonic()
        for batch in loader:
            self.stop.ask()
            self.trainer.steps_to_come = self._to_come(length - done)
            began = time.perf_counter()
            decisions = len(self.trainer.decisions)
            self.losses.append(self.trainer.step(batch))
            done += 1
            if len(self.trainer.decisions) == decisions:  # else the step held measuring or a move
                self._time(began, full=done * loader.batch_size <= loader.samples)
            self._after_step(epoch, done, length)
            if self.stopped or (limit == self.trainer.steps and done < length):
                break
        seconds = time.monotonic() - started
        self._read(epoch)
        self.display.end_epoch()
        if self.stopped:
            return self._save_stopped()
        self._measure(done - first, seconds)
        self._validate(epoch, seconds)
        self._save(f"epoch-{epoch}" if done == length else f"step-{self.trainer.steps}")

    def _to_come(self, in_epoch: int) -> int:
        """Steps until the run is over."""
        if self.job.steps is not None:
            return self.job.steps - self.trainer.steps
        loader = self.loader
        epochs = self.job.epochs - loader.cursor.epoch - 1
        return in_epoch + max(0, epochs) * -(-loader.samples // loader.batch_size)

    def _time(self, began: float, full: bool) -> None:
        """Notes what a step took, on a GPU only where its end is waited for."""
        step, device = self.trainer.steps, self.trainer.world.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if full and step > min(WARM_UP, (self.job.steps or WARM_UP) // 2):
            self.tally.seconds.append(time.perf_counter() - began)

    def _measure(self, steps: int, seconds: float) -> None:
        """Loss and speed of the epoch, of which this process may have done a part only."""
        tally = self.tally
        if steps:
            rows = min(steps * self.loader.batch_size, self.loader.samples)
            tally.speed = rows / seconds if seconds else 0.0
            tally.loss = sum(float(x) for x in self.losses) / len(self.losses)

    def _after_step(self, epoch: int, done: int, length: int) -> None:
        step, every = self.trainer.steps, self.job.every
        read = step % READ_EVERY == 0
        if read:
            self._read(epoch)
        self.display.step(done, float(self.losses[-1]) if read else None)
        self.stopped = self.stop.answer()
        # the end of an epoch has a checkpoint of its own
        if every and step % every == 0 and done < length and not self.stopped:
            self._save(f"step-{step}")

    def _read(self, epoch: int) -> None:
        """Writes the losses since the last reading to the log."""
        first = self.trainer.steps - len(self.losses) + 1
        for i in range(self.logged, len(self.losses)):
            loss = float(self.losses[i])
            self._log("step", step=first + i, epoch=epoch, loss=loss)
        self.logged = len(self.losses)

    def _validate(self, epoch: int, seconds: float) -> None:
        tally, w = self.tally, self.job.workload
        if w.valid_data is not None and w.metric is not None:
            loader = self.trainer.loader(w.valid_data, w.batch_size, collate=w.collate)
            found = self.trainer.evaluate(loader, w.metric)
            tally.metrics = {_name(k): float(v) for k, v in found.items()}
        self._log(
            "epoch", epoch=epoch, step=self.trainer.steps, loss=tally.loss,
            seconds=round(seconds, 3), samples_per_second=round(tally.speed, 1), **tally.metrics,
        )  # fmt: skip
        shown = "".join(f"  {name} {_shown(value)}" for name, value in tally.metrics.items())
        self.display.say(
            f"epoch {epoch}  step {self.trainer.steps}  loss {_number(tally.loss)}"
            f"{shown}  {tally.speed:,.0f} samples/s"
        )
        value = next(iter(tally.metrics.values()), None)
        if value is None or math.isnan(value):
            return
        if tally.best is None or value > tally.best:
            tally.best = value
            self._save("best")

    def _save(self, name: str) -> Path:
        """A checkpoint; where it cannot be written, training goes on and the next one may do."""
        path = self.folder.checkpoints / name
        try:
            self.trainer.save(path, extra=self.tally.carried())
            self.unsaved = None
            self._log("checkpoint", path=str(path), step=self.trainer.steps)
        except CheckpointError as error:  # the same on all ranks
            self.unsaved = error
            self._log("unsaved", path=str(path), step=self.trainer.steps, reason=str(error))
            self.display.say(f"no checkpoint at step {self.trainer.steps}: {error}")
        return path

    def _save_stopped(self) -> None:
        path = self._save(f"step-{self.trainer.steps}")
        if self.unsaved:
            raise self.unsaved
        name = signal.Signals(self.stopped).name
        self._log("stop", signal=name, step=self.trainer.steps)
        self.display.say(
            f"{name}: stopped after step {self.trainer.steps}; go on with --resume {path}"
        )

    def _log(self, event: str, **values: Any) -> None:
        if self.first:
            self.folder.log(event, **values)

    def _end(self, as_json: bool, seconds: float) -> None:
        tally, trainer = self.tally, self.trainer
        values: dict[str, Any] = {
            "workload": self.job.workload.name, "plan": str(trainer.plan),
            "ranks": trainer.world.size, "steps": trainer.steps,
            "epochs": self.loader.cursor.epoch,
            "loss": tally.loss, "metrics": tally.metrics, "best": tally.best,
            "samples_per_second": round(tally.speed, 1), "seconds": round(seconds, 3),
            "predicted_step_seconds": tally.predicted, "measured_step_seconds": tally.measured,
            "switches": [e.to_dict() for e in trainer.decisions if e.switched],
            "run_directory": str(self.folder.path),
            "stopped": signal.Signals(self.stopped).name if self.stopped else None,
        }  # fmt: skip
        if not self.first:
            return
        self.folder.log("end", **values)
        if as_json:
            print(json.dumps(finite(values)))
            sys.stdout.flush()
            return
        rows = {
            "epochs": f"{self.loader.cursor.epoch} ({trainer.steps} steps)",
            "loss": _number(tally.loss),
            **{name: _shown(value) for name, value in tally.metrics.items()},
            "best": "-" if tally.best is None else _shown(tally.best),
            "samples per second": f"{tally.speed:,.0f}",
            "seconds": f"{seconds:.1f}",
            "step": f"{_milliseconds(tally.measured)} measured, "
            f"{_milliseconds(tally.predicted)} predicted",
            "plan": f"{trainer.plan} on {_ranks(trainer)}",
            "run folder": str(self.folder.path),
        }
        summary(f"{self.job.workload.name}", rows)


def _ranks(trainer: Trainer) -> str:
    size = trainer.world.size
    return "1 rank" if size == 1 else f"{size} ranks"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _name(metric: str) -> str:
    """A metric's name in the log, which has words of its own: `loss` is the training loss."""
    return f"valid_{metric}" if metric in LOGGED else metric


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _shown(value: float) -> str:
    """A share as a percentage, any other number as it is."""
    return f"{value:.2%}" if 0 <= value <= 1 else f"{value:.4g}"
