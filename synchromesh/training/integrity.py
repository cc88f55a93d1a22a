"""What goes wrong in numbers: gradients that are not finite, replicas that differ, loss spikes.

Ranks that hold an equal part of a parameter compute the same update of it, bit by bit: one whose
part differs has a fault in its memory or its arithmetic (Hochschild et al. 2021, "Cores that don't
count", HotOS)."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor

from synchromesh.checkpoint.model_state import checksum
from synchromesh.engine.batches import fingerprint
from synchromesh.training.execution import Execution
from synchromesh.values.boxes import Box


class Integrity:
    """skips: so many steps in a row whose gradients are not finite are left out, 0: it is not
    looked at. every: steps between two comparisons of replicas, 0: there are none.
    skipped: the steps that were left out. spoiled: why what ranks have in memory does not count"""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self.skips = self.every = 0
        self.rolls_back = False
        self.skipped: list[int] = []
        self.spoiled = ""
        self._equal = 0  # the last step behind which replicas were

    def require(self, skips: int, every: int, back: bool = False) -> None:
        """Looks at so much from now on. back: runs go back behind loss spikes. ValueError where
        the plan does not let it."""
        plan = self._execution.active.plan
        apart = bool(plan.sync.asynchronous or plan.sync.servers or plan.sync.late or plan.kept)
        refused = {
            f"skip_non_finite: under {str(plan)!r} parts of the model step by themselves, before "
            "all gradients are known": skips and apart,
            f"check_replicas: under {str(plan)!r} ranks have other parameters than each other "
            "between steps": every and (apart or plan.sync.alone),
            f"roll_back_spikes: under {str(plan)!r} losses are known late, or of one rank alone":
                back and bool(plan.sync.asynchronous or plan.sync.late or plan.kept),
            "roll_back_spikes: a carry is of the batch before":
                back and self._execution.options.carry is not None,
        }  # fmt: skip
        if why := next((why for why, found in refused.items() if found), ""):
            raise ValueError(f"{why}: leave it out, or take another plan")
        self.skips, self.every, self.rolls_back = skips, every, back

    @property
    def asked(self) -> list[Any]:
        """The same on all ranks."""
        return [self.skips, self.every, self.rolls_back]

    def gradients(self, steps: int) -> None:
        """Before the update behind `steps`: lets go of all gradients where one is not finite, so
        that nothing is updated. RuntimeError where it was so too often. All ranks call alike."""
        if not self.skips:
            return
        leaves, everyone = self._execution.workers.leaves, self._execution.world.everyone
        odd = next((n for n, p in leaves.items() if not _finite(p.grad)), "")
        table = everyone.all_gather_json(odd)
        if any(table):
            names = [f"rank {rank} of {name}" for rank, name in enumerate(table) if name]
            self._skip(steps + 1, ", ".join(names[:4]))

    def _skip(self, step: int, where: str) -> None:
        self._execution.workers.forget_gradients()
        self.skipped = [n for n in self.skipped if n < step] + [step]
        self._execution.options.say(
            f"step {step} is left out, for gradients are not finite ({where})"
        )
        if self.skipped[-self.skips :] == [*range(step + 1 - self.skips, step + 1)]:
            raise RuntimeError(
                f"gradients were not finite in {self.skips} steps in a row, up to step {step} "
                f"({where}): lower the learning rate, or go on with a checkpoint of before, "
                "--resume"
            )

    def replicas(self, steps: int, saves: bool = False) -> None:
        """Behind a step: RuntimeError where ranks have not the same of what they hold alike. All
        ranks call alike. saves: a checkpoint of it is next."""
        if not self.every or (steps % self.every and not saves):
            return
        state, everyone = self._execution.state, self._execution.world.everyone
        mine = {
            n: fingerprint(
                tuple(map(checksum, (p.detach(), *state.optimizer_state.moving(n).values())))
            )
            for n, p in state.model.parameters.items()
        }
        table: list[dict[str, int]] = everyone.all_gather_json(mine)
        for name in mine:
            marks = [of[name] for of in table]
            odd, known = _differing(state.sides(state.holdings[name], state.ranks), marks)
            if odd:
                self._differ(name, odd, known, steps)
        self._equal = steps

    def _differ(self, name: str, odd: Sequence[int], known: bool, steps: int) -> None:
        """RuntimeError; in an elastic run the rank that differs is lost before, where it is known
        which one does, and others go on with what they had when all were equal."""
        what = f"{name}, or its optimizer state, is not the same on all ranks that have it"
        text = f"that of rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} differs"
        text = text if known else f"one of ranks {odd} differs"
        world = self._execution.world
        if world.member is not None and known:
            self.spoiled = f"{what}: since step {self._equal} its gradients are in all others'"
            if world.rank in odd:
                world.member.give_up(f"differs from its replicas in {name} behind step {steps}")
            world.member.hears_of_loss("")
        raise RuntimeError(
            f"{what}: {text} behind step {steps} (all were equal behind step {self._equal}), so "
            "that a device computes wrongly or has changed memory: go on without it, with "
            f"a checkpoint of step {self._equal} or before, --resume"
        )

    def restored(self, steps: int) -> None:
        """Ranks have what they had behind an earlier step, when all were equal."""
        self.spoiled, self._equal = "", steps
        self.skipped = [n for n in self.skipped if n <= steps]


def _finite(gradient: Tensor | None) -> bool:
    """Whether all of it is; a sum of finite numbers that is not tells nothing yet."""
    if gradient is None:
        return True
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def _differing(sides: Sequence[Sequence[Box]], marks: Sequence[int]) -> tuple[Sequence[int], bool]:
    """Of ranks with equal boxes, those whose mark is not that of most; not known: one of them is
    so. Empty: all are equal."""
    alike = defaultdict[tuple[Box, ...], list[int]](list)
    for rank, boxes in enumerate(sides):
        if boxes:
            alike[tuple(boxes)].append(rank)
    for ranks in alike.values():
        counts = Counter(marks[rank] for rank in ranks).most_common()
        if len(counts) > 1:
            most, count = counts[0]
            known = count > counts[1][1]
            return [rank for rank in ranks if not known or marks[rank] != most], known
    return [], True


@dataclass(frozen=True)
class Spike:
    """A loss far above those before. deviations: from their median, in robust standard deviations
    (1.4826 times the median of absolute deviations)."""

    step: int
    loss: float
    median: float
    deviations: float
    back_to: int | None = None  # the step from which the run went on

    def stays(self, first: int) -> bool:
        """Whether it is not made again where steps are, from `first` on."""
        return self.step < first or self.back_to is not None

    def __str__(self) -> str:
        return (
            f"the loss of step {self.step}, {self.loss:.4g}, is {self.deviations:.0f} standard "
            f"deviations above the {self.median:.4g} of the steps before"
        )


class Spikes:
    """Looks for them in losses as they come. With 64 losses and 20 deviations there was none in
    250 steps of digits/cnn, digits/vit, shakespeare/gpt2_small, cifar100/resnet_small, sst2/bags
    and ptb/lstm_small."""

    WINDOW: ClassVar = 64
    LEAST: ClassVar = 16  # losses, before it looks
    FAR: ClassVar = 20.0  # deviations
    SMALL: ClassVar = 0.01  # of the median, at least a deviation

    def __init__(self) -> None:
        self._before = deque[float](maxlen=self.WINDOW)
        self.found: list[Spike] = []
        self.new: list[Spike] = []  # of the last look

    def look(self, first: int, losses: Sequence[float]) -> list[Spike]:
        """Spikes of steps `first`, `first` + 1, ..., which do not count for those behind them."""
        new = []
        for step, loss in enumerate(losses, first):
            if len(self._before) >= self.LEAST and isfinite(loss):
                middle = median(self._before)
                spread = 1.4826 * median(abs(x - middle) for x in self._before)
                deviations = (loss - middle) / max(spread, self.SMALL * abs(middle), 1e-12)
                if deviations > self.FAR:
                    new.append(Spike(step, loss, middle, deviations))
                    continue
            if isfinite(loss):
                self._before.append(loss)
        if losses:  # those of steps that are made again are found again
            self.found = [spike for spike in self.found if spike.stays(first)] + new
        self.new = new
        return new

    def went_back(self, step: int) -> None:
        """Behind those of the last look, to `step`."""
        self.found = [replace(s, back_to=step) if s in self.new else s for s in self.found]
