"""The training loop: epochs, validation, checkpoints and a clean stop, under a plan."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from synchromesh.adapt.decision import Decision
from synchromesh.checkpoint import manifest
from synchromesh.checkpoint.agreement import on_first
from synchromesh.checkpoint.manifest import CheckpointError, check_writable
from synchromesh.engine.agreement import require_alike
from synchromesh.engine.batches import row_count
from synchromesh.results.run import RunResult
from synchromesh.training import events
from synchromesh.training.active_plan import checked_plan
from synchromesh.training.batch_sizes import BatchChange
from synchromesh.training.best import Best, remove_older
from synchromesh.training.events import EpochEnded, FitEvent, FitResult
from synchromesh.training.learning_rate import RateFactor, ScaledRate
from synchromesh.training.prepare import prepare
from synchromesh.training.stop import Stop
from synchromesh.training.trainer import Trainer
from synchromesh.values.batch_sizes import BatchRange, BatchSchedule, batches_of
from synchromesh.values.caution import caution
from synchromesh.values.plan import Plan
from synchromesh.workloads.workload import Workload, is_stream


def fit(
    workload: Workload, plan: Plan | str = "auto", *, epochs: int | None = None,
    steps: int | None = None, seed: int = 0, checkpoints: str | Path | None = None,
    checkpoint_every: int | None = None, keep: int | None = None, best: str | None = None,
    patience: int | None = None, resume: str | Path | None = None,
    adapt: bool | None = None, autocast: torch.dtype | None = None, headroom: str | None = None,
    on_event: Callable[[FitEvent], None] | None = None, stop: Callable[[], bool] | None = None,
    say: Callable[[str], None] | None = None, noise_scale: bool = False,
    batches: BatchRange | BatchSchedule | str | None = None, allow: str = "",
) -> FitResult:  # fmt: skip
    """Trains `workload` under `plan` on the ranks of this run; validates after each epoch.

    epochs, steps: in all, with those of a resumed run; default: the workload's epochs.
    seed: of the initial weights, the order of samples and random operators.
    checkpoints: a folder that gets `epoch-N`, `best` and, every `checkpoint_every` steps,
    `step-N`. keep: how many of the newest stay, besides `best` (default: all).
    best: the metric by which an epoch is, `loss` that of training; of losses, errors and
    perplexities the least one, else the greatest, or as `NAME:min` and `NAME:max` say; default:
    the greatest of the first metric. patience: epochs without a better one until training ends.
    resume: a checkpoint, or a folder of them, of which the newest good one is taken.
    adapt: whether the plan may change while training runs; default: where it is `auto`.
    autocast, headroom, noise_scale, allow: as of `prepare`.
    batches: `auto`, `auto:MIN-MAX`: as the gradient noise scale says, or `EPOCH:xTIMES,...`: they
    grow behind epochs; default: all have the workload's batch size. Learning rates follow where
    the workload's come of `scaled` (training/learning_rate.py).
    on_event: receives the values of training/events.py, on every rank (`events.only_reads`).
    stop: is asked before each step, on each rank; SIGTERM and SIGINT stop as well. Either leads to
    a checkpoint and to a result that says so.
    say: receives a sentence at a time what is measured.

    Raises ValueError for arguments, data or plans that do not fit, CheckpointError where the last
    checkpoint could not be written."""
    if not isinstance(workload, Workload):
        raise ValueError(f"fit trains a synchromesh.Workload, not {type(workload).__name__}")
    numbers = {"epochs": epochs, "steps": steps, "keep": keep, "patience": patience}
    numbers["checkpoint_every"] = checkpoint_every
    functions = {"on_event": on_event, "stop": stop, "say": say}
    if faults := [*_faults(numbers, functions, autocast, checkpoints)]:
        raise ValueError(f"fit: {'; '.join(faults)}")
    if isinstance(batches, str):
        batches = batches_of(batches)
    by = Best.parse(best or ("" if workload.metric else "loss"))
    workload.check_batch()
    plan = checked_plan(plan)
    torch.manual_seed(seed)
    model = workload.build()
    optimizer = workload.build_optimizer(model.parameters())
    trainer = prepare(
        model, optimizer, workload.loss, workload.example(seed=seed), plan=plan,
        scheduler=_scheduler(workload, optimizer, batches is not None), seed=seed,
        autocast=autocast, carry=workload.carry, headroom=headroom, noise_scale=noise_scale,
        say=say, allow=allow,
    )  # fmt: skip
    requests = Stop(trainer, stop)
    loop = _Loop(
        workload, trainer, requests, on_event or events.ignore, epochs or workload.epochs,
        steps, None if checkpoints is None else Path(checkpoints), checkpoint_every, seed, by,
        keep, patience, batches,
    )  # fmt: skip
    adapts = plan.automatic if adapt is None else adapt
    with requests.on_signals():
        try:
            return loop.run(None if resume is None else Path(resume), adapts)
        finally:
            trainer.close()


def _scheduler(workload: Workload, optimizer: Optimizer, changing: bool) -> Any:
    """The workload's, which goes on by rows where batches are changing."""
    made, rows = workload.build_scheduler(optimizer), workload.batch_size
    if changing and not isinstance(made, ScaledRate):
        return ScaledRate(optimizer, made, RateFactor("none", rows, rows))
    return made


def _faults(
    numbers: Mapping[str, Any], functions: Mapping[str, Any], autocast: Any, folder: Any
) -> Iterator[str]:
    given = {name: number for name, number in numbers.items() if number is not None}
    if given.keys() >= {"epochs", "steps"}:
        yield f"epochs ({given['epochs']}) and steps ({given['steps']}) exclude each other"
    for name, n in given.items():
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            yield f"{name} must be a whole number of at least 1, not {n!r}"
    if not isinstance(autocast, torch.dtype | None):
        yield f"autocast must be a torch.dtype like torch.bfloat16, not {autocast!r}"
    for name, function in functions.items():
        if not (function is None or callable(function)):
            yield f"{name} must be a function, not {function!r}"
    for name in ("checkpoint_every", "keep"):
        if name in given and folder is None:
            yield f"{name} needs a folder: checkpoints=..."


@dataclass
class _Loop:
    READ_EVERY: ClassVar = 10  # steps between readings of the loss, each waits for the device

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
    batches: BatchRange | BatchSchedule | None  # that change
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
    aside: float = 0.0  # seconds of this epoch in which whoever sees the events did something

    def _require_alike(self, resume: Path | None, adapt: bool) -> None:
        """ValueError where ranks were asked for what would end, or be saved, at other steps."""
        asked = {
            "the number of epochs": self.epochs, "the number of steps": self.steps,
            "the steps between checkpoints": self.checkpoint_every,
            "the best epoch": [self.by.name, self.by.least, self.patience],
            "whether checkpoints are written": self.folder is not None,
            "whether the run is resumed": resume is not None, "whether the plan is adapted": adapt,
            "whether there is validation": self._validates, "the batches": str(self.batches),
        }  # fmt: skip
        require_alike(self.trainer.world.everyone, asked)

    @property
    def _carries(self) -> bool:
        return self.workload.carry is not None

    @property
    def _validates(self) -> bool:
        return self.workload.valid_data is not None and self.workload.metric is not None

    def _checkpoint_at(self, path: Path) -> Path:
        """The checkpoint that rank 0 finds at `path`, or the newest good one in it."""

        def find() -> str:
            if not path.is_dir() or (path / manifest.NAME).exists():
                return str(path)
            damaged: list[str] = []
            newest = manifest.newest(path, passed_over=damaged)
            if newest is None:
                raise CheckpointError("; ".join(damaged) or f"{path}: no checkpoint lies in it")
            for text in damaged:
                caution(f"{text}; the run goes on from {newest}, which is older")
            return str(newest)

        return Path(on_first(self.trainer.world.everyone, find, str(path)))

    def run(self, resume: Path | None, adapt: bool) -> FitResult:
        """Trains to the end; resume: a checkpoint, or a folder of them, to go on from."""
        trainer, w = self.trainer, self.workload
        self._require_alike(resume, adapt)
        # rank 0's: those with a time in their name differ
        folder = trainer.world.everyone.broadcast_json(self.folder and str(self.folder))
        self.folder = None if folder is None else Path(folder)
        size = str(self.batches) if isinstance(self.batches, BatchRange) else w.batch_size
        self.loader = trainer.loader(
            w.train_data, size, shuffle=not (is_stream(w.train_data) or self._carries),
            seed=self.seed, collate=w.collate, continuing=self._carries, **w.loading,
        )  # fmt: skip
        self.by.require(w, trainer, self.seed)
        if resume is not None:
            resume = self._checkpoint_at(resume)
            saved = trainer.resume(resume)
            self.since, self.best = int(saved.get("since", 0)), saved.get("best")
        trainer.on_event, reads = self._decided, events.reads_only(self.emit)
        trainer.workers.early.allowed = reads
        self.emit(events.Started(trainer, resume, self.loader.cursor.epoch, self._more()))
        if folder is not None:
            on_first(trainer.world.everyone, lambda: check_writable(Path(folder)), "")
        if adapt:
            trainer.adapt()
        began = time.monotonic()
        while not self.stopped and self._more():
            self._epoch()
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

    def _epoch(self) -> None:
        """The rest of the current epoch, its validation and its checkpoint."""
        loader, trainer = self.loader, self.trainer
        self._grow()
        done, trained = loader.done, 0
        epoch, before = loader.cursor.epoch + 1, len(self.losses)
        self.emit(events.EpochStarted(epoch, done, loader.batches))
        began, self.aside = time.monotonic(), 0.0
        asked = began
        for batch in loader:
            waited = time.monotonic() - asked
            trainer.steps_to_come = self._steps_left()
            done += 1
            trained += loader.rows
            seconds = self._step(batch, full=loader.rows == loader.batch_size)
            self._after_step(epoch, done, loader.rows, seconds, waited)
            asked = time.monotonic()
            if self.stopped or (self.steps == trainer.steps and not loader.last):
                break
        if trainer.world.device.type == "cuda":
            torch.cuda.synchronize(trainer.world.device)
        self.sent += trainer.workers.end()
        seconds = trainer.workers.longest(time.monotonic() - began - self.aside)
        self._read(epoch)
        self.emit(events.EpochTrained(epoch))
        if self.stopped:
            return self._save_stopped()
        self._validate(epoch, self.losses[before:], seconds, trained / seconds if seconds else 0.0)
        ended = loader.cursor.epoch >= epoch
        self._save(f"epoch-{epoch}" if ended else f"step-{trainer.steps}")

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
        read, filled = step % self.READ_EVERY == 0, self.trainer.workers.filled
        if read:
            self._read(epoch, filled.late if filled else 0)
        loss = self.losses[-1] if read and self.losses else None
        began = time.monotonic()
        self.emit(events.StepDone(epoch, step, done, loss, rows, seconds, waited))
        self.aside += time.monotonic() - began
        saves = bool(every) and step % (every or 1) == 0
        self.stopped = self.stop.answer(saves or self.loader.last)
        # the end of an epoch has a checkpoint of its own
        if saves and not self.loader.last and not self.stopped:
            self._save(f"step-{step}")

    def _read(self, epoch: int, under_way: int = 0) -> None:
        first, count = self.trainer.steps - len(self.unread) + 1, len(self.unread) - under_way
        if count > 0:
            values = tuple(map(float, self.unread[:count]))
            del self.unread[:count]
            self.losses += values
            self.emit(events.Losses(epoch, first, values))

    def _validate(
        self, epoch: int, losses: list[float], seconds: float, samples_per_second: float
    ) -> None:
        w, metrics = self.workload, dict[str, float]()
        if w.valid_data is not None and w.metric is not None:
            loader = self.trainer.loader(
                w.valid_data, w.batch_size, collate=w.collate, continuing=self._carries,
                **w.loading,
            )  # fmt: skip
            means = self.trainer.evaluate(loader, w.metric)
            metrics = {name: float(value) for name, value in means.items()}
        loss = self._mean(losses)
        steps = self.trainer.steps
        self.ended = EpochEnded(epoch, steps, loss, metrics, seconds, samples_per_second)
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
        try:
            self.trainer.save(path, extra={"best": self.best, "since": self.since})
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
            trainer.workers.staleness(), trainer.workers.updates(),
        )  # fmt: skip
