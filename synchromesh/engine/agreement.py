"""An agreement: what all ranks must have alike in each step, and else an error on all of them."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from synchromesh.engine import batches
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.control_channel import STEP, start_checked_gather
from synchromesh.engine.groups import Group
from synchromesh.engine.optimizer import settings
from synchromesh.trace.capture.capture import VALUE, signature
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan


def refuse_first(faults: Sequence[str]) -> None:
    """ValueError with the first rank's fault, where one has any; empty texts are none."""
    rank, text = next(((r, t) for r, t in enumerate(faults) if t), (0, ""))
    if text:
        raise ValueError(text if len(faults) == 1 else f"rank {rank}: {text}")


def require_alike(everyone: Group, described: Mapping[str, Any]) -> None:
    """ValueError on every rank, with the first difference, where descriptions differ."""
    descriptions = everyone.all_gather_json(dict(described))
    for rank, other in enumerate(descriptions):
        for key, value in descriptions[0].items():
            if other[key] != value:
                raise ValueError(
                    f"ranks disagree about {key}: {_difference(value, other[key], rank)}; start "
                    "every rank with the same script and arguments"
                )


def _difference(first: Any, other: Any, rank: int) -> str:
    if isinstance(first, list) and isinstance(other, list):
        pairs = zip_longest(first, other)
        return next(_difference(a, b, rank) for a, b in pairs if a != b)
    return f"{first!r} on rank 0, {other!r} on rank {rank}"


@dataclass(frozen=True)
class Marks:
    """What ranks must have alike to run a step together; fingerprints of it."""

    batch: int = 0  # structure, types and shapes
    shared: int = 0  # the values of what all rows share
    place: int = 0  # updates done, the plan, and how the step was called
    model: int = 0  # frozen parameters, modes, and values that it reads
    optimizer: int = 0  # its settings
    data: str = ""  # where in the data the batch is from, in words
    alike: int = 0  # equal in steps that run equal programs, of batches of one size

    @classmethod
    def of(
        cls, model: Hashable, optimizer: Optimizer, batch: Any, steps: int, call: Hashable,
        data: str,
    ) -> "Marks":  # fmt: skip
        """Of a step as this rank would run it, after so many updates (`steps`)."""
        tree, kinds = shape = signature(batch)
        shared = [repr(x.tolist()) for x in batches.leaves(batch) if not x.dim()]  # by all rows
        shared += [value for sort, value, *_ in kinds if sort == VALUE]
        tensors = [VALUE if kind[0] == VALUE else kind for kind in kinds]
        return cls(
            batches.fingerprint((tree, tensors)), batches.fingerprint(repr(shared)),
            batches.fingerprint((steps, call)), batches.fingerprint(model),
            batches.fingerprint(repr(settings(optimizer))), data,
            hash((shape, model, call)),
        )  # fmt: skip


MODELS_DIFFER = (
    "have a model with other frozen parameters, other modes of modules, or other numbers that it "
    "or the loss reads, than rank {0}: change these on all ranks alike"
)
DIFFERENCES = {  # by the name of the mark
    "batch": (
        "have a batch of another structure or shape than rank {0}: shapes may depend on the "
        "number of rows only, so pad sequences to the same length on all ranks (trainer.loader's "
        "pad= does)"
    ),
    "shared": (
        "have other values than rank {0} of what all rows share (0-d tensors, numbers, texts): "
        "seed the generators that they are drawn from alike on all ranks, and leave out what rows "
        "have beside tensors (names, ids)"
    ),
    "place": (
        "are at another step than rank {0}: every rank does the same number of steps, under the "
        "same plan, with the same `last`, `micro_batches`, `share` and `loss`"
    ),
    "model": MODELS_DIFFER,
    "optimizer": (
        "have other settings of the optimizer than rank {0} (a learning rate, for example), and "
        "would train another model: change them on all ranks alike; where they follow a metric, "
        "by the one that trainer.evaluate returns"
    ),
}


class LossSum(IntEnum):
    """The sums that a loss is made of, over this rank's rows or all; each a float64."""

    VALUE = 0
    WEIGHT = 1
    PAIR = 2  # not 0: the loss is a pair (sum, weight)
    COUPLED = 3  # not 0: it cannot be added up, for its weight depends on parameters
    GRADIENT = 4  # not 0: a parameter that is trained reaches it


class LossState(IntEnum):
    """Whether the sums of a loss travel with what its rank reports."""

    APART = 0
    SENT = 1
    FAILED = -1  # its forward has: there is no loss


@dataclass(frozen=True)
class RankReport:
    """What a rank tells all others of a step; whole numbers on the way, as many from each."""

    rows: int  # of its batch; below 0: it has none that could run
    checksum: int  # of the batch, where ranks work on the same rows or may do so by mistake
    outdated: bool  # its model is another than was traced
    data: int  # fingerprint of where in the data the batch is from
    batch: int  # as are the next four, of its `Marks`
    shared: int
    place: int
    model: int
    optimizer: int
    loss: LossState = LossState.APART
    sums: tuple[int, ...] = (0,) * len(LossSum)  # of the loss: the bits of each float64
    numbers: tuple[int, ...] = ()  # the trainer's

    def packed(self) -> list[int]:
        *single, sums, numbers = vars(self).values()
        return [*map(int, single), *sums, *numbers]

    @classmethod
    def unpacked(cls, packed: Sequence[int]) -> "RankReport":
        rows, checksum, outdated, data, batch, shared, place, model, optimizer, loss, *rest = (
            packed
        )
        sums, numbers = tuple(rest[: len(LossSum)]), tuple(rest[len(LossSum) :])
        return cls(
            rows, checksum, bool(outdated), data, batch, shared, place, model, optimizer,
            LossState(loss), sums, numbers,
        )  # fmt: skip


class LoneRankFailed(RuntimeError):
    """The rank that works alone has failed in a step, which idle ones are told."""

    def __init__(self) -> None:
        super().__init__("rank 0, which works alone, has failed in this step: see its error")


class RowAgreement:
    """One small exchange a step: every rank's rows, so that disagreeing ranks are an error and
    never a hang.

    Where the first rank works alone it asks the idle ones for nothing that it could wait for, and
    tells them rows and loss at once, after its forward:

        rank 0     [ forward ] reads, checks, tells [ backward ] [ update ]
        rank 1     sends ..... waits ............... knows

    But for a step that may need all ranks before: of other rows, of a model that has changed, or
    with backwards before all forwards are done. What is refused at the check has no backward: an
    accumulation stays as it was, on all ranks; buffers have seen the batch on rank 0."""

    def __init__(
        self, group: Group, ranks: tuple[int, ...], layouts: Collection[Layout], plan: Plan,
        carries: bool = False, workers: int = 0,
    ) -> None:  # fmt: skip
        """layouts: of the batch, one on the positions of each stage. carries: whether a step
        reads what the one before has made. workers: how many there are, where the
        ranks are one that goes on without the others."""
        self.group, self.ranks, self.layouts = group, ranks, tuple(layouts)
        self._alone = ranks == (0,) and group.world.control is not None and not carries
        self._asked = self._usual = (0, 0)  # the last step that all met for, and that all ran
        self._send: Callable[[LossState, tuple[int, ...]], None] | None = None
        self._received: Tensor | None = None
        self.plan = plan
        self.numbers: list[tuple[int, ...]] = []  # that came with each rank's rows
        self.outdated = False  # whether the model of a rank has changed
        self.refused = False  # whether the check after the forward has refused the step
        self._workers = workers
        self._unknown = False  # whether data ranks are to have other rows than each other

    def __call__(
        self, batch: Any, marks: Marks, numbers: tuple[int, ...] = (), outdated: bool = False,
        method: str = STEP, at_once: bool = True, unknown: bool = False,
    ) -> GlobalRows:  # fmt: skip
        """The global rows of this step, or of a batch of `evaluate`. numbers: as many on every
        rank, gathered on all (`self.numbers`). outdated: whether this rank's model is another than
        was traced. at_once: whether all rows go forward before any go backward. unknown: whether
        the rows may be those of other data ranks too. Raises ValueError on every rank if marks
        differ, ranks of one data index hold other rows, or all data ranks hold the same."""
        self.refused = False
        own, fault = self._own(batch, marks, numbers, outdated, unknown)
        if self.group.size == 1:
            return self._checked([own], marks.data, fault)
        gather = start_checked_gather(self.group, method, own.packed())

        def met(report: RankReport) -> list[RankReport]:
            return [*map(RankReport.unpacked, gather(report.packed()))]

        if self._alone and not self.group.index and method == STEP and at_once:
            if (marks.alike, own.rows) == self._usual and not outdated:

                def send(state: LossState, sums: tuple[int, ...]) -> None:
                    reports = met(replace(own, loss=state, sums=sums))
                    if state is LossState.SENT:
                        self.refused = True
                        self._checked(reports, marks.data, fault)
                        self.refused = False

                self._send, self.outdated = send, False
                return self._rows((own,))
            self._asked = (marks.alike, own.rows)
        reports = met(own)
        first = reports[0]
        if first.loss is LossState.FAILED:
            raise LoneRankFailed
        sent = first.loss is LossState.SENT
        self._received = torch.tensor(first.sums).view(torch.float64) if sent else None
        return self._checked(reports, marks.data, fault)

    def _own(
        self, batch: Any, marks: Marks, numbers: tuple[int, ...], outdated: bool, unknown: bool
    ) -> tuple[RankReport, str]:
        fault = ""
        try:
            count = batches.row_count(batch)
        except ValueError as error:  # of this rank alone, maybe: the others must not wait for it
            count, fault = -1, str(error)
        self._unknown = unknown and self.layouts[0].data > 1 and batches.tells_ranks_apart(batch)
        compared = self._unknown or any(x.tensor > 1 for x in self.layouts)
        same = batches.checksum(batch, self._unknown) if compared else 0
        data = batches.fingerprint(marks.data)
        report = RankReport(
            count, same, outdated, data, marks.batch, marks.shared, marks.place, marks.model,
            marks.optimizer, numbers=numbers,
        )  # fmt: skip
        return report, fault

    def exchanged(self, sums: Tensor) -> Tensor | None:
        """The sums of a loss over all ranks, where they travel with the rows; None where they do
        not, and are to be exchanged. sums: over this rank, by `LossSum`."""
        if self._send is not None:
            send, self._send = self._send, None
            send(LossState.SENT, tuple(sums.view(torch.int64).tolist()))
            return sums
        received, self._received, self._usual = self._received, None, self._asked
        return received

    def give_up(self) -> None:
        """After a step that failed here: those that wait for its loss fail too."""
        if self._send is not None:
            send, self._send = self._send, None
            with suppress(RuntimeError):  # one is gone: what has failed here is to be said
                send(LossState.FAILED, (0,) * len(LossSum))

    def _checked(self, reports: Sequence[RankReport], data: str, fault: str) -> GlobalRows:
        """The rows of which all ranks report, checked as `__call__` says. fault: this rank's."""
        if any(report.rows < 0 for report in reports):
            refuse_first(self.group.all_gather_json(fault))
        if len({report.data for report in reports}) > 1:  # also of ranks that take no part
            self._refuse_data(data)
        self.numbers = [report.numbers for report in reports]
        self.outdated = any(report.outdated for report in reports)
        self._refuse_differences(reports)
        return self._rows([reports[rank] for rank in self.ranks])

    def _refuse_differences(self, reports: Sequence[RankReport]) -> None:
        """ValueError for other marks, or where idle ones alone have another model."""
        for mark, difference in DIFFERENCES.items():
            marks = [getattr(report, mark) for report in reports]
            self._refuse([r for r in self.ranks if marks[r] != marks[self.ranks[0]]], difference)
        outdated = [rank for rank, report in enumerate(reports) if report.outdated]
        if not {*outdated} & {*self.ranks}:
            self._refuse(outdated, MODELS_DIFFER)

    def _refuse(self, ranks: Sequence[int], difference: str) -> None:
        if ranks:
            raise ValueError(f"ranks {ranks} {difference.format(self.ranks[0])}")

    def _refuse_data(self, data: str) -> NoReturn:
        first, *others = self.group.all_gather_json(data)
        rank, other = next((r, d) for r, d in enumerate(others, 1) if d != first)
        raise ValueError(
            f"ranks read different data: rank 0 {first or 'nothing'}, rank {rank} "
            f"{other or 'nothing'}: give every rank the same data set, batch size and seed, and "
            "iterate over loaders on all ranks alike"
        )

    def _rows(self, working: Sequence[RankReport]) -> GlobalRows:
        counts = tuple(report.rows for report in working)
        for layout in self.layouts:
            self._require_equal(layout, working)
        if self._unknown:
            self._require_other(self.layouts[0], working)
        if self._workers:  # of one that goes on without the others
            return GlobalRows((counts[0],) * self._workers, self.plan, apart=True)
        of_stages = [counts[x.first : x.positions.stop : x.tensor] for x in self.layouts]
        if len(of_stages) == 1 and self.plan.micro_batches == 1:
            return GlobalRows(of_stages[0], self.plan)
        total = sum(of_stages[0])
        for layout, of_stage in zip(self.layouts, of_stages, strict=True):
            self._require_shares(layout, of_stage, total)
        finest = max(layout.data for layout in self.layouts)
        return GlobalRows(tuple(self._share(total, finest, i) for i in range(finest)), self.plan)

    def _require_equal(self, layout: Layout, working: Sequence[RankReport]) -> None:
        for first in layout.positions[:: layout.tensor]:
            block = slice(first, first + layout.tensor)
            if len({(report.rows, report.checksum) for report in working[block]}) > 1:
                raise ValueError(
                    f"ranks {list(self.ranks[block])} work on the same rows but were given "
                    f"different batches (rows {[report.rows for report in working[block]]}); use "
                    "trainer.loader or trainer.shard, which know the plan, and seed generators "
                    "that a data set keeps alike on all ranks"
                )

    def _require_other(self, layout: Layout, working: Sequence[RankReport]) -> None:
        firsts = working[layout.first : layout.positions.stop : layout.tensor]
        if len({(report.rows, report.checksum) for report in firsts}) == 1:
            raise ValueError(
                f"ranks {list(self.ranks)} were all given the same {firsts[0].rows} rows, though "
                f"the plan gives each of {layout.data} data ranks rows of its own, so that they "
                "would train on these alone: iterate over trainer.loader(your_loader, ...), of "
                "which each rank reads its own rows, or call trainer.step(trainer.shard(batch)) "
                "with a global batch"
            )

    def _share(self, total: int, data: int, index: int) -> int:
        return batches.count_of(self.plan.own_rows(total, data, index))

    def _require_shares(self, layout: Layout, counts: Sequence[int], total: int) -> None:
        for index, count in enumerate(counts):
            share = self._share(total, layout.data, index)
            if count != share:
                rank = self.ranks[layout.first + index * layout.tensor]
                raise ValueError(
                    f"rank {rank} was given {count} rows, but of a global batch of {total} rows "
                    f"the plan gives it {share}: stages and micro-batches need the plan's shares, "
                    "which trainer.loader and trainer.shard give"
                )
