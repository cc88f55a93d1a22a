"""How a run goes back behind a loss spike (training/integrity.py)."""

import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from synchromesh.checkpoint import checkpoint
from synchromesh.checkpoint.manifest import CheckpointError, by_age
from synchromesh.training.integrity import Spikes
from synchromesh.training.trainer import Trainer
from synchromesh.training.trainer_state import TrainerState


class RollBack:
    """Behind a loss spike the state goes back to the newest checkpoint from before it, and the
    data does not, so that the batches between are left out (Chowdhery et al. 2022, "PaLM: Scaling
    Language Modeling with Pathways", section 5.1: such spikes did not come again)."""

    OFTEN: ClassVar = 3  # times to one checkpoint; chosen

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._began = trainer, time.time()
        self._times = Counter[str]()

    def back(self, spikes: Spikes, folder: Path) -> bool:
        """Whether that was done, for one of the last look of rank 0. All ranks call alike."""
        trainer, everyone = self._trainer, self._trainer.world.everyone
        first = min((spike.step for spike in spikes.new), default=0)
        own = trainer.world.member  # of one that comes the run began before
        first, began = everyone.broadcast_json([first, own.began if own else self._began])
        if not first:
            return False
        known = [str(path) for path in by_age(folder, began)]
        paths = [path for path in known if self._times[path] < self.OFTEN]
        for path in everyone.broadcast_json(paths):
            with suppress(CheckpointError):  # the same on all ranks; an older one may do
                if self._resumed(Path(path), first):
                    break
        else:
            trainer.options.say("no checkpoint is from before that: the run goes on")
            return False
        survival = trainer.survival
        survival.replication.forget()
        survival.integrity.restored(trainer.steps)
        if trainer.world.member is not None:
            trainer.world.member.steps = trainer.steps
        spikes.went_back(trainer.steps)
        return True

    def _resumed(self, path: Path, step: int) -> bool:
        """Whether it is from before `step`."""
        trainer = self._trainer
        saved = TrainerState.from_dict(checkpoint.read_extra(path, trainer.world), path)
        if saved.steps >= step:
            return False
        loaders, places = trainer.survival.loaders, list(trainer.survival.loaders.places())
        trainer.state.torn = True  # until all of it is read
        try:
            trainer.resume(path)
        except CheckpointError:  # which comes before anything is read
            trainer.state.torn = False
            raise
        trainer.state.torn = False
        for i, then in enumerate(saved.cursors[: len(places)]):  # rates are of batches of then
            places[i] = replace(places[i], batch_size=then.batch_size)
        loaders.go_on(places)
        self._times[str(path)] += 1
        return True
