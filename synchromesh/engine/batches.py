"""Batches: nests of tensors whose first dimension is rows; this rank's part, micro-batches,
agreement of ranks."""

import zlib
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from synchromesh.engine.control_channel import STEP, start_checked_gather
from synchromesh.engine.groups import Group
from synchromesh.engine.optimizer import settings
from synchromesh.trace.capture.batch import row_count as row_count
from synchromesh.trace.capture.capture import signature
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan

Ranges = tuple[tuple[int, int], ...]


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`."""
    return pytree.tree_map(
        lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x, batch
    )


def leaves(batch: Any) -> list[Tensor]:
    """The tensors of a batch in flattening order."""
    return [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]


def split(rows: int, parts: int) -> Ranges:
    """`rows` in `parts` balanced ranges, the first ones one row longer."""
    sizes = (rows // parts + (i < rows % parts) for i in range(parts))
    ends = tuple(accumulate(sizes))
    return tuple(zip((0, *ends[:-1]), ends, strict=True))


def count_of(ranges: Ranges) -> int:
    """How many rows are in ranges."""
    return sum(stop - start for start, stop in ranges)


def one_row(batch: Any) -> Any:
    """The batch, with one row of zeros where it has none."""

    def one(x: Any) -> Any:
        empty = isinstance(x, Tensor) and x.dim() and not x.shape[0]
        return x.new_zeros((1, *x.shape[1:])) if empty else x

    return pytree.tree_map(one, batch)


@dataclass(frozen=True)
class GlobalRows:
    """The rows of one global batch: how many each data index of the finest layout has."""

    counts: tuple[int, ...]
    plan: Plan

    @property
    def total(self) -> int:
        """Rows over all ranks."""
        return sum(self.counts)

    def ranges(self, data: int) -> Ranges:
        """Global [start, stop) per data index of a layout of `data` degrees.

        Where `data` divides the finest degree its blocks are unions of the finest ones, else the
        plan's."""
        if data not in self._ranges:
            finest = len(self.counts)
            ends = (0, *accumulate(self.counts))
            self._ranges[data] = (
                self.plan.row_ranges(self.total, data)
                if finest % data
                else tuple(pairwise(ends[:: finest // data]))
            )
        return self._ranges[data]

    @cached_property
    def _ranges(self) -> dict[int, Ranges]:
        return {}

    @classmethod
    def of(cls, total: int, data: int, plan: Plan) -> "GlobalRows":
        """The rows of a (micro-)batch where each data index has the plan's share."""
        return cls(tuple(b - a for a, b in plan.row_ranges(total, data)), plan)

    def micro_batches(self) -> tuple["GlobalRows", ...]:
        """The micro-batches of the plan, each of which lies on the data ranks of every stage."""
        if self.plan.micro_batches == 1:
            return (self,)
        data = len(self.counts)
        cuts = self.plan.micro_rows(self.total)
        return tuple(GlobalRows.of(b - a, data, self.plan) for a, b in cuts)

    def micro(self, parts: int) -> tuple["GlobalRows", ...]:
        """The micro-batches when every data index cuts its own rows into `parts`."""
        cuts = [split(n, parts) for n in self.counts]
        sizes = [tuple(b - a for a, b in (cut[i] for cut in cuts)) for i in range(parts)]
        return tuple(GlobalRows(counts, self.plan) for counts in sizes)


def with_stand_in(
    batch: Any, rows: GlobalRows, layout: Layout, position: int, group: Group
) -> Any:
    """The batch; where position has no rows under `layout`, the first row of the first that has.

    group: of all positions. Those of `layout` call; nothing is sent where all have rows."""
    counts = [stop - start for start, stop in rows.ranges(layout.data)]
    if all(counts):
        return batch
    has = {p: counts[layout.data_index(p)] for p in layout.positions}
    source = next(p for p, count in has.items() if count)
    without = [p for p, count in has.items() if not count]
    found, structure = pytree.tree_flatten(batch)
    moving = [i for i, x in enumerate(found) if isinstance(x, Tensor) and x.dim()]
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, Tensor]] = []
    for i in moving:
        if position == source:
            sends += [(p, found[i][:1].contiguous()) for p in without]
        elif position in without:
            found[i] = found[i].new_zeros((1, *found[i].shape[1:]))
            receives.append((source, found[i]))
    with group.world.ledger.paused():  # no traffic of a step: no plan foresees it
        group.exchange(sends, receives)
    return pytree.tree_unflatten(found, structure)


def common(batch: Any) -> list[Any]:
    """The values of what all rows share, the tensors without dimensions."""
    return [repr(x.tolist()) for x in leaves(batch) if not x.dim()]


def fingerprint(key: Hashable) -> int:
    """A 63-bit number that equal keys share on every rank and in every run."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def checksum(batch: Any) -> int:
    """A checksum of at most 1,024 entries of each tensor, by which ranks that should have the same
    rows are compared."""
    total = 0
    for x in leaves(batch):
        flat = x.detach().resolve_conj().resolve_neg().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 1024)].contiguous().cpu()
        total = zlib.crc32(sample.view(torch.uint8).numpy().data if sample.numel() else b"", total)
    return total


@dataclass(frozen=True)
class Marks:
    """What ranks must have alike to run a step together; fingerprints of it."""

    batch: int = 0  # structure, types and shapes, and the values of what all rows share
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
        """Of a step as this rank would run it. model: what it must have alike. steps: updates
        done; call: how the step is run, and the plan."""
        shape = signature(batch)
        return cls(
            fingerprint((shape, common(batch))),
            fingerprint((steps, call)),
            fingerprint(model),
            fingerprint(repr(settings(optimizer))),
            data,
            hash((shape, model, call)),
        )

    def numbers(self) -> tuple[int, ...]:
        """The fingerprints, in the order of `DIFFERENCES`."""
        return self.batch, self.place, self.model, self.optimizer


MODELS_DIFFER = (
    "have a model with other frozen parameters, other modes of modules, or other numbers that it "
    "or the loss reads, than rank {0}: change these on all ranks alike"
)
DIFFERENCES = (
    "have a batch of another structure or shape than rank {0}: shapes may depend on the number "
    "of rows only, so pad sequences to the same length on all ranks; what all rows share (0-d "
    "tensors, numbers, texts) must be the same too, so leave out what rows have beside tensors "
    "(names, ids)",
    "are at another step than rank {0}: every rank does the same number of steps, under the same "
    "plan, with the same `last` and `micro_batches`",
    MODELS_DIFFER,
    "have other settings of the optimizer than rank {0} (a learning rate, for example), and would "
    "train another model: change them on all ranks alike; where they follow a metric, by the one "
    "that trainer.evaluate returns",
)


FIXED, SUMS = 8, 6  # numbers of a row; whether the loss comes with it (below), its five sums
SAID, FAILED = 1, -1


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
        self,
        group: Group,
        ranks: tuple[int, ...],
        layouts: Collection[Layout],
        plan: Plan,
        device: torch.device,
        carries: bool = False,
    ) -> None:
        """layouts: of the batch, one on the positions of each stage. carries: whether a step
        reads what the one before has made."""
        self.group, self.ranks, self.layouts = group, ranks, tuple(layouts)
        self._alone = ranks == (0,) and group.world.control is not None and not carries
        self._asked = self._usual = (0, 0)  # the last step that all met for, and that all ran
        self._tell: Callable[[int, list[int]], None] | None = None
        self._told: Tensor | None = None
        self.plan, self.device = plan, device
        self.numbers: list[tuple[int, ...]] = []  # that came with each rank's rows
        self.outdated = False  # whether the model of a rank has changed
        self.refused = False  # whether the check after the forward has refused the step

    def __call__(
        self,
        batch: Any,
        marks: Marks,
        numbers: tuple[int, ...] = (),
        outdated: bool = False,
        method: str = STEP,
        at_once: bool = True,
    ) -> GlobalRows:
        """The global rows of this step, or of a batch of `evaluate`.

        numbers: as many on every rank, gathered on all (`self.numbers`). outdated: whether this
        rank's model is another than was traced. at_once: whether all rows go forward before any
        go backward.

        Raises ValueError on every rank if marks differ or ranks of one data index hold other
        rows."""
        fault, self.refused = "", False
        try:
            count = row_count(batch)
        except ValueError as error:  # of this rank alone, maybe: the others must not wait for it
            count, fault = -1, str(error)
        same = checksum(batch) if any(x.tensor > 1 for x in self.layouts) else 0
        row = [count, same, int(outdated), fingerprint(marks.data), *marks.numbers()]
        row += [*[0] * SUMS, *numbers]
        if self.group.size == 1:
            return self._checked([row], marks.data, fault)
        finish = start_checked_gather(self.group, method, row, self.device)
        step = (marks.alike, count)
        if self._alone and not self.group.index and method == STEP and at_once:
            if step == self._usual and not outdated:

                def tell(said: int, sums: list[int]) -> None:
                    table = finish([*row[:FIXED], said, *sums, *numbers])
                    if said == SAID:
                        self.refused = True
                        self._checked(table, marks.data, fault)
                        self.refused = False

                self._tell, self.outdated = tell, False
                return self._rows((count,), (same,))
            self._asked = step
        table = finish(row)
        said, *sums = table[0][FIXED : FIXED + SUMS]
        if said == FAILED:
            raise LoneRankFailed
        self._told = torch.tensor(sums).view(torch.float64) if said else None
        return self._checked(table, marks.data, fault)

    def told(self, sums: Tensor) -> Tensor | None:
        """The sums of a loss over all ranks, where they travel with the rows; None where they do
        not, and are to be exchanged. sums: over this rank."""
        if self._tell is not None:
            tell, self._tell = self._tell, None
            tell(SAID, sums.view(torch.int64).tolist())
            return sums
        found, self._told, self._usual = self._told, None, self._asked
        return found

    def give_up(self) -> None:
        """After a step that failed here: those that wait for its loss fail too."""
        if self._tell is not None:
            tell, self._tell = self._tell, None
            with suppress(RuntimeError):  # one is gone: what has failed here is to be told
                tell(FAILED, [0] * (SUMS - 1))

    def _checked(self, table: Sequence[Sequence[int]], data: str, fault: str) -> GlobalRows:
        """The rows that a table of all ranks says; ValueError on all of them as `__call__` says.
        data, fault: this rank's."""
        if any(row[0] < 0 for row in table):
            faults = self.group.all_gather_json(fault)
            rank, text = next((r, t) for r, t in enumerate(faults) if t)
            raise ValueError(text if len(faults) == 1 else f"rank {rank}: {text}")
        if any(row[3] != table[0][3] for row in table):  # also of ranks that take no part
            self._refuse_data(data)
        self.numbers = [tuple(row[FIXED + SUMS :]) for row in table]
        self.outdated = any(row[2] for row in table)
        counts, sums, _, _, *columns = zip(*(table[r][:FIXED] for r in self.ranks), strict=True)
        for column, difference in zip(columns, DIFFERENCES, strict=True):
            odd = [r for r, mark in zip(self.ranks, column, strict=True) if mark != column[0]]
            if odd:
                raise ValueError(f"ranks {odd} {difference.format(self.ranks[0])}")
        if self.outdated and not any(table[rank][2] for rank in self.ranks):
            odd = [rank for rank, row in enumerate(table) if row[2]]
            raise ValueError(f"ranks {odd} {MODELS_DIFFER.format(self.ranks[0])}")
        return self._rows(counts, sums)

    def _refuse_data(self, data: str) -> NoReturn:
        first, *others = self.group.all_gather_json(data)
        rank, other = next((r, d) for r, d in enumerate(others, 1) if d != first)
        raise ValueError(
            f"ranks read different data: rank 0 {first or 'nothing'}, rank {rank} "
            f"{other or 'nothing'}: give every rank the same data set, batch size and seed, and "
            "iterate over loaders on all ranks alike"
        )

    def _rows(self, counts: tuple[int, ...], sums: tuple[int, ...]) -> GlobalRows:
        """Of what the ranks that take part have sent."""
        for layout in self.layouts:
            for first in layout.positions[:: layout.tensor]:
                block = slice(first, first + layout.tensor)
                if len(set(zip(counts[block], sums[block], strict=True))) > 1:
                    raise ValueError(
                        f"ranks {list(self.ranks[block])} work on the same rows but were given "
                        f"different batches (rows {list(counts[block])}); use trainer.loader or "
                        "trainer.shard, which know the plan, and seed generators that a data set "
                        "keeps alike on all ranks"
                    )
        of_stages = [counts[x.first : x.positions.stop : x.tensor] for x in self.layouts]
        if len(of_stages) == 1 and self.plan.micro_batches == 1:
            return GlobalRows(of_stages[0], self.plan)
        totals = [sum(found) for found in of_stages]
        for layout, found in zip(self.layouts, of_stages, strict=True):
            for index, count in enumerate(found):
                wanted = count_of(self.plan.own_rows(totals[0], layout.data, index))
                if count != wanted:
                    rank = self.ranks[layout.first + index * layout.tensor]
                    raise ValueError(
                        f"rank {rank} was given {count} rows, but of a global batch of "
                        f"{totals[0]} rows the plan gives it {wanted}: stages and micro-batches "
                        "need the plan's shares, which trainer.loader and trainer.shard give"
                    )
        finest = max(layout.data for layout in self.layouts)
        own = (self.plan.own_rows(totals[0], finest, i) for i in range(finest))
        return GlobalRows(tuple(map(count_of, own)), self.plan)
