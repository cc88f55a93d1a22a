"""The parts of an epoch, one after the other, while ranks are lost or come."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from synchromesh.data.loader import Loader
from synchromesh.engine.batches import fingerprint
from synchromesh.launcher.generation import Regrouped
from synchromesh.launcher.member import Member
from synchromesh.training import events
from synchromesh.training.events import EpochEnded, FitEvent
from synchromesh.training.recovery import Comes
from synchromesh.training.trainer import Trainer
from synchromesh.values.fields import of_plain, to_plain
from synchromesh.values.optimizer import kind_of
from synchromesh.values.version import VERSION
from synchromesh.workloads.workload import Workload


@dataclass(frozen=True)
class _Place:
    """Where a run is, of which a rank that comes knows nothing; names as of `EpochRun`."""

    epoch: int
    part: int  # of the epoch, that is over but for what was written; 0: it is in its steps
    first: int
    rows: float
    before: int
    since: int
    best: float | None
    since_then: int  # when the epoch began
    best_then: float | None
    ended: EpochEnded | None
    recoveries: tuple[Regrouped, ...]
    stopped: str
    folder: str | None


def marks(
    trainer: Trainer, w: Workload, samples: int | None, asked: Mapping[str, Any]
) -> dict[str, str]:
    """By which a rank that would come is told from the others. asked: what its run is."""
    described = trainer.model.described.values()
    asked = {name: asked[name] for name in asked if name != "whether the run is resumed"}
    settings = {k: v for k, v in trainer.optimizer.defaults.items() if k != "lr"}
    code = getattr(w.loss, "__code__", None)
    compared = {
        "model": [[d.name, list(d.shape), d.dtype, d.trainable] for d in described],
        "data": [samples, w.batch_size, trainer.options.seed], "settings": asked,
        "optimizer": [kind_of(trainer.optimizer), settings],
        "loss": None if code is None else [code.co_code, code.co_names, *code.co_consts[1:]],
    }  # fmt: skip
    versions = f"synchromesh {VERSION}, torch {torch.__version__}"
    return {n: str(fingerprint(repr(m))) for n, m in compared.items()} | {"version": versions}


class EpochRun(Protocol):
    """What of a training loop ranks have alike; its fields stand there."""

    trainer: Trainer
    loader: Loader
    folder: Path | None
    losses: list[float]
    unread: list[torch.Tensor]
    step_seconds: list[float]
    recoveries: list[Regrouped]
    ended: EpochEnded | None
    stopped: str
    epoch: int
    part: int
    first: int
    rows: float
    trained: int
    began: float
    aside: float
    before: int
    known: dict[int, int]
    since: int
    best: float | None
    since_best: tuple[int, float | None]

    @property
    def emit(self) -> Callable[[FitEvent], None]: ...

    def follow_ranks(self, ranks: int) -> None: ...


@dataclass(frozen=True)
class EpochParts:
    run: EpochRun

    def do(self, parts: Sequence[Callable[[int], None]], comes: bool) -> None:
        """Does them one after the other. Where ranks are lost or come meanwhile, and the run goes
        on with others, all do again what one of them has not done."""
        untold, at = list[Regrouped](), 0
        while at < len(parts):
            try:
                if comes:
                    raise Comes
                if untold:  # others may be lost meanwhile, too
                    at = self._meet(at, len(parts))
                    self._share_losses()
                while untold:
                    self.run.emit(untold[0])
                    self.run.follow_ranks(untold[0].ranks - untold[0].leave)
                    del untold[0]
                if at < len(parts):
                    self.run.part = at
                    parts[at](self.run.epoch)
                at += 1
            except Exception as error:
                untold.append(self.run.trainer.recover(error))
                comes = False
                self.run.recoveries.append(untold[-1])
                self.run.step_seconds.clear()
                back = self.run.trainer.survival.replication.back
                if back is not None and self.run.epoch:
                    recoveries, place = self.run.recoveries, of_plain(_Place, back[-1], "place")
                    at = place.part + 1 if place.part else 0
                    self._come(place)
                    self.run.recoveries = recoveries

    def begin_anew(self, own: Member, path: Path | None) -> float:
        """All ranks were lost: those that are there now go on with the checkpoint, or begin again.
        Seconds that it took."""
        trainer, took = self.run.trainer, max(0.0, time.time() - own.ended)
        regrouped = Regrouped(
            trainer.steps, len({*own.hosts}), trainer.world.size, str(trainer.plan), own.lost,
            0, 0, took, max(0, own.done - trainer.steps), "start" if path is None else "disk",
        )  # fmt: skip
        self.run.recoveries.append(regrouped)
        self.run.emit(regrouped)
        return took

    def _meet(self, at: int, end: int) -> int:
        """The part of an epoch that all ranks do next. A rank is in the epoch behind where it has
        seen the end of this one's last part, which others then need not do again; one that comes
        is in none."""
        everyone = self.run.trainer.world.everyone
        table = everyone.all_gather_json([self.run.epoch, at])
        latest = max(of for of, _ in table)
        epochs = [int(of) for of, _ in table]
        if 0 in epochs:
            place = everyone.broadcast_json(self.place(), epochs.index(latest))
            if self.run.epoch == 0:
                self._come(of_plain(_Place, place, "place"))
        if self.run.epoch < latest:
            return end
        at = min(int(part) for of, part in table if of == latest)
        if at == 0:
            self.run.stopped = ""  # it is asked again
        return at

    def place(self, part: int = 0) -> Any:
        """Where this rank is, as JSON. part: that makes a checkpoint."""
        run = self.run
        return to_plain(_Place(
            run.epoch, part, run.first, run.rows, run.before, run.since, run.best,
            *run.since_best, run.ended, tuple(run.recoveries), run.stopped,
            None if run.folder is None else str(run.folder),
        ))  # fmt: skip

    def _come(self, place: _Place) -> None:
        """This rank is where the others are, or were. Losses that it knows are from `first` on,
        and of its own where workers go on without each other."""
        run = self.run
        before = place.before if run.epoch == 0 or place.first == run.first else 0
        run.first = run.first if run.epoch else place.first
        run.epoch, run.before = place.epoch, run.known.get(place.epoch, before)
        end = run.known.get(place.epoch + 1)
        if end is not None and end <= len(run.losses):  # of epochs that are made again
            del run.losses[end:]
            run.unread.clear()
        run.known = {epoch: n for epoch, n in run.known.items() if epoch <= place.epoch}
        run.trained, run.began, run.aside = 0, time.monotonic(), 0.0
        run.rows = place.rows
        run.ended, run.stopped = place.ended, place.stopped
        run.since, run.best = place.since, place.best
        run.since_best = place.since_then, place.best_then
        run.recoveries = [*place.recoveries]
        run.folder = None if place.folder is None else Path(place.folder)
        if not place.part:
            run.emit(events.EpochStarted(run.epoch, run.loader.done, run.loader.batches))

    def _share_losses(self) -> None:
        """Of steps that not all ranks have seen the end of; one that none has is not a number.
        Workers that go on without each other keep their own."""
        everyone = self.run.trainer.world.everyone
        done = max(0, self.run.trainer.steps - self.run.first)
        own = [*self.run.losses, *map(float, self.run.unread)][:done]
        if self.run.trainer.plan.sync.asynchronous:
            self.run.before = min(self.run.before, len(own))
        else:
            counts = [int(n) for n in everyone.all_gather_json(len(own))]
            rest = everyone.broadcast_json(own[min(counts) :], counts.index(max(counts)))
            own += rest[len(own) - min(counts) :]
            own += [math.nan] * (done - len(own))
        read = max(len(self.run.losses), min(self.run.before, done))  # one that comes has none
        self.run.losses = own[:read]
        self.run.unread = [torch.tensor(loss, dtype=torch.float64) for loss in own[read:]]
