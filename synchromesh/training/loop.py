"""The training loop: epochs, validation, checkpoints and a clean stop, under a plan."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch

from synchromesh.adapt.decision import Decision
from synchromesh.checkpoint.agreement import found, on_first
from synchromesh.checkpoint.manifest import CheckpointError, check_writable
from synchromesh.engine.agreement import require_alike
from synchromesh.engine.batches import row_count
from synchromesh.launcher.generation import Regrouped
from synchromesh.results.run import RunResult
from synchromesh.training import events
from synchromesh.training.batch_sizes import BatchChange
from synchromesh.training.best import Best, remove_older
from synchromesh.training.epoch_parts import EpochParts, marks
from synchromesh.training.events import EpochEnded, FitEvent, FitResult
from synchromesh.training.integrity import Spikes
from synchromesh.training.roll_back import RollBack
from synchromesh.training.stop import Stop
from synchromesh.training.trainer import Trainer
from synchromesh.values.batch_sizes import BatchRange, BatchSchedule, RankBatches
from synchromesh.workloads.workload import Workload, is_stream


@dataclass
class Loop:
    """One call of `fit`; its fields are what that was asked for, then what has come of it."""

    READ_EVERY: ClassVar = 10  # steps between readings of the loss, each waits for the device
    SETTLED: ClassVar = 16  # steps behind a loss of ranks, until the plan is adapted again; chosen

    workload: Workload
    trainer: Trainer
    stop: Stop
    emit: Callable[[FitEvent], None]
    epochs: int
    steps: int | None  # instead of epochs
    folder: Path | None  # of checkpoints
    checkpoint_every: int | None  # steps
    seed: int
    by: Best
    keep: int | None  # checkpoints
    patience: int | None  # epochs
    batches: BatchRange | BatchSchedule | RankBatches | None  # that change
    rolls_back: bool = False  # behind loss spikes
    rows: float = 0.0  # of a batch, of each rank when the run began
    since: int = 0  # epochs without a better one
    stopped: str = ""  # what has stopped it
    saved: Path | None = None
    unsaved: CheckpointError | None = None  # why the last checkpoint is missing
    losses: list[float] = field(default_factory=list)  # of all steps, as far as they were read
    unread: list[torch.Tensor] = field(default_factory=list)
    best: float | None = None
    ended: EpochEnded | None = None  # the last epoch
    step_seconds: list[float] = field(default_factory=list)  # of full-size steps after warm-up
    sent: int = 0  # bytes of this rank, in steps
    first: int = 0  # steps that were done before this call
    # of this epoch:
    epoch: int = 0  # from 1
    part: int = 0  # of `EpochParts`
    trained: int = 0  # rows
    before: int = 0  # losses of earlier ones, of this rank
    known: dict[int, int] = field(default_factory=dict)  # the same, by epoch
    began: float = 0.0
    seconds: float = 0.0  # of its steps
    since_best: tuple[int, float | None] = (0, None)  # as `since` and `best` were when it began
    adapts: bool = False  # the plan
    recoveries: list[Regrouped] = field(default_factory=list)
    spikes: Spikes = field(default_factory=Spikes)
    aside: float = 0.0  # seconds of this epoch in which whoever sees the events did something

    def _require_alike(self, resume: Path | None, adapt: bool) -> dict[str, Any]:
        """What ranks are asked for. ValueError where it would end, or be saved, at other steps."""
        asked = {
            "the number of epochs": self.epochs, "the number of steps": self.steps,
            "the steps between checkpoints": self.checkpoint_every,
            "the best epoch": [self.by.name, self.by.least, self.patience],
            "whether checkpoints are written": self.folder is not None,
            "whether the run is resumed": resume is not None, "whether the plan is adapted": adapt,
            "whether there is validation": self._validates, "the batches": str(self.batches),
            "what is looked at": self.trainer.survival.integrity.asked,
        }  # fmt: skip
        require_alike(self.trainer.world.everyone, asked)
        return asked

    @property
    def _carries(self) -> bool:
        return self.workload.carry is not None

    @property
    def _validates(self) -> bool:
        return self.workload.valid_data is not None and self.workload.metric is not None

    def _newest(self) -> Path | None:
        """Of this run's checkpoints; None where it has written none."""
        own, folder, everyone = self.trainer.world.member, self.folder, self.trainer.world.everyone
        if own is None or folder is None:
            return None
        try:
            return found(folder, everyone, own.began)
        except CheckpointError as error:  # the same on all ranks
            self.trainer.options.say(str(error))
            return None

    def _resume(self, asked: Path | None) -> Path | None:
        """The checkpoint from which this rank goes on."""
        trainer, own = self.trainer, self.trainer.world.member
        again = own is not None and own.anew  # all ranks were lost
        path = (self._newest() if again else None) or asked
        if path is None:
            return None
        path = found(path, trainer.world.everyone)
        saved = trainer.resume(path)
        self.since, self.best = int(saved.get("since", 0)), saved.get("best")
        if saved.get("batch_size") == self.workload.batch_size:
            self.rows = float(saved["rows"])
        return path

    def run(self, resume: Path | None, adapt: bool) -> FitResult:
        """Trains to the end; resume: a checkpoint, or a folder of them, to go on from."""
        trainer, w, comes = self.trainer, self.workload, self.trainer.world.alone
        asked = self._require_alike(resume, adapt)
        # rank 0's: those with a time in their name differ
        folder = trainer.world.everyone.broadcast_json(self.folder and str(self.folder))
        self.folder = None if folder is None else Path(folder)
        size = str(self.batches) if isinstance(self.batches, BatchRange) else w.batch_size
        self.loader = trainer.loader(
            w.train_data, size, shuffle=not (is_stream(w.train_data) or self._carries),
            seed=self.seed, collate=w.collate, continuing=self._carries, **w.loading,
        )  # fmt: skip
        self.by.require(w, trainer, self.seed)
        resume = None if comes else self._resume(resume)
        self.rows = self.rows or w.batch_size / trainer.world.size
        self.first = trainer.steps
        trainer.on_event, reads = self._decided, events.reads_only(self.emit)
        trainer.workers.early.allowed = reads
        self.emit(events.Started(trainer, resume, self.loader.cursor.epoch, self._more()))
        if folder is not None:
            on_first(trainer.world.everyone, lambda: check_writable(Path(folder)), "")
        self.adapts, self.parts, self.rolled = adapt, EpochParts(self), RollBack(trainer)
        trainer.survival.replication.place = self.parts.place
        trainer.survival.replication.newest = None if folder is None else self._newest
        if adapt and not comes:
            trainer.adapt()
        self.follow_ranks(trainer.world.size)
        began, own = time.monotonic(), trainer.world.member
        if own is not None and own.anew:
            began -= self.parts.begin_anew(own, resume)
        trainer.survival.offer(marks(trainer, w, self.loader.samples, asked), trainer.steps)
        while comes or (not self.stopped and self._more()):
            self._epoch(comes)
            comes = False
        if trainer.plan.sync.alone:
            trainer.buffers()  # settles them, and parameters
        result = self._result(time.monotonic() - began)
        self.emit(events.Finished(trainer, result))
        if self.unsaved:
            raise self.unsaved
        return result

    def _decided(self, event: Decision | BatchChange) -> None:
        if isinstance(event, BatchChange) or (event.switched and event.measured_after is None):
            self.step_seconds.clear()  # of another plan, or of other batches
        self.emit(event)

    def _grow(self) -> None:
        """The batches of the epoch that begins, where a schedule says them."""
        if isinstance(self.batches, BatchSchedule):
            done = self.loader.cursor.epoch
            rows = round(self.workload.batch_size * self.batches.grown(done))
            sizes = self.trainer.adaptation.sizes(self.loader, self.trainer.scheduler)
            change = sizes.grow(rows, self.trainer.steps, f"behind epoch {done}")
            if change is not None:
                self._decided(change)

    def follow_ranks(self, ranks: int) -> None:
        """The batches of so many, where each keeps its rows."""
        if isinstance(self.batches, RankBatches):
            sizes = self.trainer.adaptation.sizes(self.loader, self.trainer.scheduler)
            reason = f"{ranks} rank{'s have' if ranks > 1 else ' has'} {self.rows:g} rows each"
            change = sizes.follow(round(self.rows * ranks), self.trainer.steps, reason)
            if change is not None:
                self._decided(change)

    def _more(self) -> bool:
        if self.patience is not None and self.since >= self.patience:
            return False
        if self.steps is not None:
            return self.trainer.steps < self.steps
        return self.loader.cursor.epoch < self.epochs

    def _steps_left(self) -> int:
        """Steps until the run is over, with the one whose batch was handed out; 0: not known."""
        if self.steps is not None:
            return self.steps - self.trainer.steps
        length = self.loader.batches
        if length is None:
            return 0
        return max(0, (self.epochs - self.loader.cursor.epoch - 1) * length + len(self.loader) + 1)

    def _epoch(self, comes: bool) -> None:
        """The rest of the current epoch, its validation and its checkpoint. comes: of that in
        which the others are."""
        self.began, self.aside = time.monotonic(), 0.0
        self.epoch = 0
        if not comes:
            self._grow()
            self.epoch, self.trained = self.loader.cursor.epoch + 1, 0
            self.before = self.known[self.epoch] = len(self.losses)
            self.since_best = self.since, self.best
            self.emit(events.EpochStarted(self.epoch, self.loader.done, self.loader.batches))
        parts = self._steps_of, self._end_steps, self._validate, self._save_epoch, self._close
        self.parts.do(parts, comes)

    def _steps_of(self, epoch: int) -> None:
        """The rest of an epoch's steps, from the loader's cursor on."""
        loader, trainer = self.loader, self.trainer
        if loader.cursor.epoch >= epoch or (self.steps == trainer.steps and not loader.last):
            return
        if trainer.steps == self.first and trainer.survival.from_disk:
            self._save(f"step-{trainer.steps}")
        done, asked = loader.done, time.monotonic()
        for batch in loader:
            waited = time.monotonic() - asked
            trainer.steps_to_come = self._steps_left()
            done += 1
            seconds = self._step(batch, full=loader.rows == loader.batch_size)
            self.trained += loader.rows
            self._after_step(epoch, done, loader.rows, seconds, waited)
            trainer.survival.integrity.replicas(trainer.steps)
            trainer.survival.replication.step(trainer.steps, trainer.scheduler)
            asked = time.monotonic()
            if self.stopped or (self.steps == trainer.steps and not loader.last):
                break

    def _end_steps(self, epoch: int) -> None:
        trainer = self.trainer
        if trainer.world.device.type == "cuda":
            torch.cuda.synchronize(trainer.world.device)
        self.sent += trainer.workers.end()
        self.seconds = trainer.workers.longest(time.monotonic() - self.began - self.aside)
        self._read(epoch)
        self.emit(events.EpochTrained(epoch))

    def _close(self, epoch: int) -> None:
        if (self.stopped or not self._more()) and self.trainer.world.member is not None:
            self.trainer.survival.close()
            self.trainer.world.everyone.all_gather_json(0)  # no rank is ahead of others' parts

    def _save_epoch(self, epoch: int) -> None:
        if self.stopped:
            return self._save_stopped()
        ended = self.loader.cursor.epoch >= epoch
        self._save(f"epoch-{epoch}" if ended else f"step-{self.trainer.steps}")

    def _step(self, batch: object, full: bool) -> float:
        """Seconds of one step, on a GPU until its forward is over (a span as long as a step, which
        waiting for its end would prolong); kept where a sample of full steps."""
        trainer = self.trainer
        self.stop.ask()
        began, events = time.perf_counter(), trainer.adaptation.events
        sent = trainer.world.ledger.sent
        loss = trainer.step(batch)
        if computes := not trainer.plan.sync.asynchronous or bool(row_count(batch)):
            self.unread.append(loss)
        seconds = time.perf_counter() - began
        self.sent += trainer.world.ledger.sent - sent
        warm_up = RunResult.WARM_UP_STEPS
        warm_up = min(warm_up, (self.steps or warm_up) // 2)
        if full and computes and trainer.steps > warm_up and trainer.adaptation.events == events:
            self.step_seconds.append(seconds)
        return seconds

    def _after_step(self, epoch: int, done: int, rows: int, seconds: float, waited: float) -> None:
        step, every = self.trainer.steps, self.checkpoint_every
        saves, filled = bool(every) and step % (every or 1) == 0, self.trainer.workers.filled
        read = step % self.READ_EVERY == 0 or (saves and self.rolls_back)
        loss = self._read(epoch, filled.late if filled else 0) if read else None
        began = time.monotonic()
        self.emit(events.StepDone(epoch, step, done, loss, rows, seconds, waited))
        self.aside += time.monotonic() - began
        saves = saves and step == self.trainer.steps  # it has not gone back
        self.stopped = self.stop.answer(saves or self.loader.last)
        settled = step - self.SETTLED in {r.from_step for r in self.recoveries[-1:]}
        if self.adapts and settled and self.trainer.adaptation.adapter is None:
            self.trainer.adapt()
        # the end of an epoch has a checkpoint of its own
        if saves and not self.loader.last and not self.stopped:
            self._save(f"step-{step}")

    def _read(self, epoch: int, under_way: int = 0) -> float | None:
        """The last loss that is known."""
        trainer, step = self.trainer, self.trainer.steps
        first, count = step - len(self.unread) + 1, max(0, len(self.unread) - under_way)
        values = tuple(map(float, self.unread[:count]))
        if values:
            del self.unread[:count]
            self.losses += values
            self.emit(events.Losses(epoch, first, values))
        loss = self.losses[-1] if self.losses else None
        for spike in self.spikes.look(first, values):
            trainer.options.say(str(spike))
        if self.rolls_back and self.rolled.back(self.spikes, self.folder or Path()):
            done = max(0, trainer.steps - self.first)
            del self.losses[done:]
            self.before = min(self.before, done)
            self.known = {epoch: min(n, done) for epoch, n in self.known.items()}
            self.follow_ranks(trainer.world.size)
            trainer.options.say(
                f"training goes on from step {trainer.steps}, with the data behind step {step}"
            )
            self._save(f"step-{trainer.steps}")  # with this place in the data
        return loss

    def _validate(self, epoch: int) -> None:
        if self.stopped:
            return
        self.since, self.best = self.since_best
        speed = self.trained / self.seconds if self.seconds else 0.0
        w, metrics = self.workload, dict[str, float]()
        if w.valid_data is not None and w.metric is not None:
            loader = self.trainer.loader(
                w.valid_data, w.batch_size, collate=w.collate, continuing=self._carries,
                **w.loading,
            )  # fmt: skip
            means = self.trainer.evaluate(loader, w.metric)
            metrics = {name: float(value) for name, value in means.items()}
        loss = self._mean(self.losses[self.before :])
        steps = self.trainer.steps
        self.ended = EpochEnded(epoch, steps, loss, metrics, self.seconds, speed)
        self.emit(self.ended)
        value = self.by.value(loss, metrics)
        self.since += self.loader.cursor.epoch >= epoch  # a part of one is validated again
        if self.by.better(value, self.best):
            self.best, self.since = value, 0
            self._save("best")
        elif self.since == self.patience:
            self.trainer.options.say(f"training ends: {self.since} epochs brought no better one")

    def _mean(self, losses: list[float]) -> float | None:
        """Of a part of an epoch, over all workers where they go on without each other."""
        sums = [[sum(losses), len(losses)]]
        if self.trainer.plan.sync.asynchronous:
            sums = self.trainer.world.everyone.all_gather_json(sums[0])
        total, count = map(sum, zip(*sums, strict=True))
        before = None if self.ended is None else self.ended.loss
        return float(total) / count if count else before

    def _save(self, name: str) -> None:
        """A checkpoint; where it cannot be written, training goes on and the next one may do."""
        if self.folder is None:
            return
        path, steps = self.folder / name, self.trainer.steps
        self.trainer.survival.integrity.replicas(steps, saves=True)
        try:
            extra: dict[str, Any] = {"best": self.best, "since": self.since}
            if self.trainer.world.member is not None:
                extra["place"] = self.parts.place(self.part)
            if isinstance(self.batches, RankBatches):
                extra |= {"rows": self.rows, "batch_size": self.workload.batch_size}
            self.trainer.save(path, extra=extra)
        except CheckpointError as error:  # the same on all ranks
            self.unsaved = error
            return self.emit(events.NotSaved(path, steps, str(error)))
        if self.trainer.rank == 0:
            shutil.rmtree(self.folder / "best.previous", ignore_errors=True)
            if self.keep is not None:
                remove_older(self.folder, self.keep)
        self.saved, self.unsaved = path, None
        self.emit(events.Saved(path, steps))

    def _save_stopped(self) -> None:
        self._save(f"step-{self.trainer.steps}")
        if self.unsaved:
            raise self.unsaved
        self.emit(events.Interrupted(self.stopped, self.trainer.steps, self.saved))

    def _result(self, seconds: float) -> FitResult:
        trainer, ended = self.trainer, self.ended
        return FitResult(
            trainer.plan, trainer.world.size, trainer.steps, self.loader.cursor.epoch,
            tuple(self.losses), None if ended is None else ended.loss,
            {} if ended is None else ended.metrics, self.best, seconds,
            0.0 if ended is None else ended.samples_per_second,
            median(self.step_seconds) if self.step_seconds else None, tuple(trainer.decisions),
            self.saved, self.stopped, trainer.noise_scale,
            () if (sizes := trainer.adaptation.batches) is None else tuple(sizes.changes),
            tuple(trainer.gather_numbers(self.sent // max(1, len(self.losses)))),
            trainer.workers.staleness(), trainer.workers.updates(), tuple(self.recoveries),
            tuple(trainer.survival.integrity.skipped), tuple(self.spikes.found),
        )  # fmt: skip
