"""The carry of a run: the state of a recurrent model between one batch and the next, on this rank.

It begins anew with each epoch, and a rank has that of the rows on which it computes. Where a plan
or a batch gives ranks other rows it moves with them, when the next batch is joined with it:

                  data on two ranks           one stage on each, which read h and g
    rank 0    h g of rows 0-3       -->       h of rows 0-7 (and g, once)
    rank 1    h g of rows 4-7                 g of rows 0-7 (and h, once)"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from synchromesh.checkpoint.local_tensor import LocalTensor
from synchromesh.checkpoint.switch import redistribute
from synchromesh.engine.batches import GlobalRows, Ranges, count_of, to_device
from synchromesh.engine.world import World
from synchromesh.trace.capture.batch import take_parts
from synchromesh.trace.capture.carry import Start, carry_leaves, join, started, with_leaves
from synchromesh.training.active_plan import ActivePlan
from synchromesh.values.boxes import Box


class Carry:
    """What this rank has of the carry. All ranks call its methods alike.

    start: rows -> the carry at the beginning of streams; None: batches have nothing to carry.
    rows: of the global batches that the carry is of; 0: the next one begins new streams."""

    def __init__(self, start: Start | None, world: World) -> None:
        self.rows = 0
        self._start, self._world = start, world
        self._held: dict[str, Ranges] = {}  # global rows of each leaf that this rank has
        self._leaves: dict[str, Tensor] = {}
        self._of: tuple[ActivePlan, GlobalRows] | None = None  # whose rows they are
        self._like: dict[str, Tensor] = {}  # an empty leaf of each name
        if start is not None:
            self._one = to_device(started(start, 1), world.device)
            self._like = {n: x[:0] for n, x in carry_leaves(self._one).items()}

    def forget(self) -> None:
        """The next batch begins new streams."""
        self.rows, self._of = 0, None
        self._held, self._leaves = {}, {}

    def joined(self, batch: Any, rows: GlobalRows, active: ActivePlan) -> Any:
        """This rank's batch, which has its part of the agreed `rows`, with the carry of these.

        ValueError for a batch of other rows than the last one had."""
        if self._start is None:
            return batch
        if self.rows not in (0, rows.total):
            raise ValueError(
                f"the batch has {rows.total} rows, but the carry is of {self.rows}, of which each "
                "goes on in the same row of the next batch: give every batch of a stream as many "
                "rows (continuing=True of trainer.loader does), or call trainer.forget_carry() "
                "where new streams begin"
            )
        parts = [active.global_rows(rows, rank) for rank in range(self._world.size)]
        own = parts[self._world.rank]
        if not self.rows:
            full = carry_leaves(to_device(started(self._start, rows.total), self._world.device))
            self._leaves = {n: take_parts(x, own or ((0, 0),)) for n, x in full.items()}
            self._held = dict.fromkeys(full, own)
        elif self._of is None or self._of[0] is not active or self._of[1] != rows:
            self._move(parts)
        self._of = active, rows
        count = count_of(own)
        leaves = {name: self._leaf(name, count) for name in self._like}
        return join(batch, with_leaves(self._one, leaves))

    def _leaf(self, name: str, count: int) -> Tensor:
        """A leaf of this rank's rows; zeros where only other stages read it."""
        if name in self._leaves:
            return self._leaves[name]
        like = self._like[name]
        return like.new_zeros(()).expand(count, *like.shape[1:])

    def _move(self, want: Sequence[Ranges]) -> None:
        """Every rank gets its rows of all leaves, from those that have them."""
        everyone = self._world.everyone
        held = everyone.all_gather_json(self._held)
        with self._world.ledger.paused():  # no traffic of a step: no plan foresees it
            for name, like in self._like.items():
                shape = (self.rows, *like.shape[1:])
                have = [boxes(of_rank.get(name, ()), like) for of_rank in held]
                sides = have, [boxes(ranges, like) for ranges in want]
                own = redistribute(self._leaves.get(name, like), *sides, shape, everyone)
                self._leaves[name] = own.reshape(-1, *like.shape[1:]) if own.numel() else like
        self._held = dict.fromkeys(self._like, want[self._world.rank])

    def advance(self, made: Mapping[str, Tensor]) -> None:
        """What the batch joined last has made of it, of this rank's rows: what it reads next."""
        if self._start is None:
            return
        assert self._of is not None, "a batch is joined before its carry is made"
        active, rows = self._of
        own = active.global_rows(rows, self._world.rank)
        self.rows = rows.total
        self._leaves, self._held = dict(made), dict.fromkeys(made, own)

    # In checkpoints

    def local_tensors(self) -> dict[str, LocalTensor]:
        """What a checkpoint carries, as this rank's boxes: `carry/NAME`."""
        if not self.rows:
            return {}
        return {
            f"carry/{name}": LocalTensor(
                f"carry/{name}", (self.rows, *like.shape[1:]),
                boxes(self._held.get(name, ()), like), self._leaves.get(name, like),
            )
            for name, like in self._like.items()
        }  # fmt: skip

    def stored(self, rows: int) -> dict[str, LocalTensor]:
        """Where a checkpoint's carry of `rows` rows is read to, all of it on every rank."""
        return {
            f"carry/{name}": LocalTensor(
                f"carry/{name}", (rows, *like.shape[1:]), boxes(((0, rows),), like),
                like.new_empty((rows, *like.shape[1:])),
            )
            for name, like in (self._like.items() if rows else ())
        }  # fmt: skip

    def adopt(self, stored: Mapping[str, LocalTensor], rows: int) -> None:
        """Goes on with what was read of a checkpoint."""
        self.forget()
        if stored:
            self.rows = rows
            self._leaves = {name: stored[f"carry/{name}"].tensor for name in self._like}
            self._held = dict.fromkeys(self._like, ((0, rows),))


def boxes(ranges: Sequence[Sequence[int]], like: Tensor) -> tuple[Box, ...]:
    """Those of these rows of a leaf, all of each."""
    rest = tuple((0, n) for n in like.shape[1:])
    return tuple(((start, stop), *rest) for start, stop in ranges if start < stop)
