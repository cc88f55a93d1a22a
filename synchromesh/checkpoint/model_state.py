"""The state of a model in training as shards on ranks, and how it moves."""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from synchromesh.checkpoint.initial import initial_values
from synchromesh.checkpoint.local_tensor import LocalTensor, box_view
from synchromesh.checkpoint.optimizer_state import OptimizerState, first_state
from synchromesh.checkpoint.switch import Lent, Move, TransferStats, move, redistribute
from synchromesh.engine.batches import fingerprint
from synchromesh.engine.movable import bytes_of
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.engine.world import World
from synchromesh.programs.model import Model
from synchromesh.values.boxes import Box, full_box, local_shape, without
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED_PARTIAL_GRADIENT

Sides = tuple[tuple[Box, ...], ...]  # boxes of each rank of the world


class ModelState:
    """Where every tensor lies now; at first complete on every rank."""

    LOST: ClassVar = -1  # in place of a rank that is gone, or whose state no longer counts

    def __init__(self, model: Model, optimizer: Optimizer, world: World) -> None:
        self.model, self.optimizer, self.world = model, optimizer, world
        self.optimizer_state = OptimizerState(model, optimizer)
        self.ranks = tuple(range(world.size))
        self._all: tuple[int, ...] | None = None  # where not all of them count
        self.moves = 0  # that are over
        self.torn = False  # whether one that changes this rank's parts was left in the middle
        self._forgotten: frozenset[str] = frozenset()  # tensors that come with a checkpoint
        # what ranks keep for others, in the move to come
        self._lent: tuple[Mapping[str, Sides], Mapping[str, Lent]] = {}, {}
        self.placed_by = "", world.size  # the plan of `holdings`, and of how many devices
        everywhere = Layout(world.size, 1)
        self.holdings = {
            n: Holding(d, everywhere, REPLICATED_PARTIAL_GRADIENT)
            for n, d in model.described.items()
        }
        self.settle: Callable[[], None] = lambda: None  # before it is one optimizer's
        self.outer: list[Tensor] = []  # of an outer optimizer (training/workers.py)
        self.residuals: list[Tensor] = []  # of compressed gradients (training/gradient_sums.py)
        self.firsts: frozenset[str] = frozenset()  # tensors of which rank 0's alone count
        self._start_optimizer(counters=True)

    def sides(self, holding: Holding, ranks: tuple[int, ...]) -> Sides:
        """The boxes of `holding` at each rank of the world; none at idle ranks."""
        return holding.sides(ranks, self.world.size)

    def move(
        self, holdings: Mapping[str, Holding], groups: PlanGroups, plan: str
    ) -> TransferStats:
        """Brings every tensor to where `holdings` of `plan` says on the ranks of `groups`. Tensors
        on the meta device stay there: `start` places them."""
        if not self.torn:  # else taken back
            if self.world.rank not in self.ranks:
                self._drop()
            self.spread_optimizer_state()
        moves = [self._with_lent(m) for m in self.moves_to(holdings, groups.ranks)]
        own = self.world.rank
        self.torn |= any([*m.have[own]] != [*m.want[own]] for m in moves)
        moved = move(moves, self.world.everyone)
        self.torn, self._all, self.moves = False, None, self.moves + 1
        self._lent = {}, {}
        self.holdings, self.ranks, self.firsts = dict(holdings), groups.ranks, frozenset()
        self.placed_by = plan, self.world.size
        for name in self._forgotten:
            boxes, local = self._boxes(name), self.model.local(name)
            self.model.place(name, local.new_empty(local_shape(boxes, local.dim())))
        self.torn, self._forgotten = bool(self._forgotten), frozenset()
        return moved

    def moves_to(self, holdings: Mapping[str, Holding], ranks: tuple[int, ...]) -> Iterator[Move]:
        """Of each tensor that is not on the meta device, to where `holdings` says on `ranks`."""
        for name, new in holdings.items():
            if not (self.model.local(name).is_meta or name in self._forgotten):
                want = self.sides(new, ranks)
                yield self._move(name, self._have(name, name), want)
                for key in self.optimizer_state.moving(name):
                    yield self._move_state(name, key, want)

    def _with_lent(self, m: Move) -> Move:
        sides, tensors = self._lent
        if m.name not in sides:
            return m
        have = tuple((*own, *more) for own, more in zip(m.have, sides[m.name], strict=True))
        return replace(m, have=have, lent=tensors.get(m.name, []))

    def take_back(
        self, holdings: Mapping[str, Holding], ranks: tuple[int, ...],
        optimizer: Mapping[str, Any], own: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        """This rank holds what it did once, `own` by names of moves; nothing where it has none.
        Until it has moved no other step counts."""
        self.torn, self._all, self.firsts = True, None, frozenset()
        self.holdings, self.ranks = dict(holdings), ranks
        self._drop()
        for name in self.model.described.keys() & own.keys():
            self.model.place(name, own[name].clone())
        self.optimizer_state.adopt(optimizer)
        for name, parameter in self.model.parameters.items():
            for key in self.optimizer_state.moving(name):
                if f"{name}/{key}" in own:
                    self.optimizer.state[parameter][key] = own[f"{name}/{key}"].clone()

    def forget(self, holders: Collection[int]) -> str:
        """What checkpoints have counts no more: the move to come makes room for it, and this rank
        is torn until it is read. The rest is as of `count`, whose answer it gives."""
        self.torn, self._forgotten = True, frozenset(self.model.persistent)
        self.optimizer.state.clear()
        return self.count(holders)

    def mend(self) -> None:
        """Others hold all of it: what is left of a move here, in the middle, counts no more."""
        self.torn, self._forgotten = False, frozenset()

    def borrow(self, sides: Mapping[str, Sides], tensors: Mapping[str, Lent]) -> None:
        """What ranks keep for others counts in the move to come. sides: of each rank."""
        self._lent = sides, tensors

    def _drop(self) -> None:
        """This rank holds nothing that counts."""
        for name in self.model.described:
            if not (local := self.model.local(name)).is_meta:
                self.model.place(name, local.new_empty(local_shape((), local.dim())))
        self.optimizer.state.clear()

    def come(self, holdings: Mapping[str, Holding], ranks: Sequence[int], moves: int) -> None:
        """This rank comes to others that hold all of it; what it has does not count."""
        self.holdings, self.ranks, self.moves = dict(holdings), tuple(ranks), moves
        self.firsts, self._all = frozenset(), None

    def renumber(self, before: Sequence[int]) -> None:
        """The world has other ranks; before: which each was. All that are there count again."""
        self.ranks, self._all = self.renumbered(self._all or self.ranks, before), None
        self._lent = {}, {}

    @classmethod
    def renumbered(cls, ranks: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
        return tuple(before.index(r) if r in before else cls.LOST for r in ranks)

    def count(self, holders: Collection[int]) -> str:
        """Only what these ranks hold counts in the move to come. The name of a tensor that they do
        not hold whole, if any: nothing has changed then."""
        left = tuple(rank if rank in holders else self.LOST for rank in self.ranks)
        for name, holding in self.holdings.items():
            if name in self._forgotten:
                continue
            have = [box for side in self.sides(holding, left) for box in side]
            if without([full_box(self.model.described[name].shape)], have):
                return name
        self._all, self.ranks = self.ranks, left
        return ""

    def _have(self, name: str, key: str) -> Sides:
        """Who has what counts of a tensor: at first rank 0 alone, if ranks had other values."""
        everywhere = self.sides(self.holdings[name], self.ranks)
        alone = (everywhere[0], *(() for _ in everywhere[1:]))
        return alone if key in self.firsts else everywhere

    def _move(self, name: str, have: Sides, want: Sides) -> Move:
        shape = self.model.described[name].shape
        current = lambda: self.model.local(name).detach()  # noqa: E731
        return Move(name, shape, have, want, current, lambda new: self.model.place(name, new))

    def _move_state(self, name: str, key: str, want: Sides) -> Move:
        """want: where the parameter goes; what is whole comes to the same ranks entirely."""
        state = self.optimizer.state[self.model.parameters[name]]
        have = self._have(name, f"{name}/{key}")
        shape = self.model.described[name].shape
        if key in self.optimizer_state.whole(name):
            shape = tuple(state[key].shape)
            whole = (full_box(shape),)
            have, want = (tuple(whole if x else () for x in side) for side in (have, want))
        update = lambda new: state.__setitem__(key, new)  # noqa: E731
        return Move(f"{name}/{key}", shape, have, want, lambda: state[key], update)

    def start(self, seed: int, without: Collection[str] = ()) -> None:
        """Tensors on the meta device come into being, shards alone; not those of `without`."""
        model, device = self.model, self.world.device
        with model.unreferenced():
            for name in [n for n in without if model.local(n).is_meta]:
                shape = local_shape(self._boxes(name), len(model.described[name].shape))
                model.place(name, model.local(name).new_empty(shape, device=device))
            for name, entire in initial_values(model, seed, device, without):
                boxes, full = self._boxes(name), (full_box(entire.shape),)
                local = entire.new_empty(local_shape(boxes, entire.dim()))
                for box in boxes:
                    box_view(local, boxes, box).copy_(box_view(entire, full, box))
                model.place(name, local)
                del entire
        self._start_optimizer(counters=False)

    def _start_optimizer(self, counters: bool) -> None:
        """State that the optimizer's constructor made on the meta device comes into being on this
        rank's: its counters at once, the rest with parameters."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                on_meta = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.is_meta}
                keys = [k for k, v in on_meta.items() if (v.dim() == 0) == counters]
                first = first_state(self.optimizer, group, parameter) if keys else {}
                for key in keys:
                    shape = () if counters else parameter.shape
                    one = first[key].reshape(()).to(self.world.device)
                    state[key] = one.expand(shape).clone()

    def _boxes(self, name: str) -> tuple[Box, ...]:
        return self.sides(self.holdings[name], self.ranks)[self.world.rank]

    def compare_first(self) -> None:
        """Finds the tensors in which ranks differ before anything has moved: rank 0's count."""
        if self.world.size == 1:
            return
        everyone = self.world.everyone
        mine = {n: checksum(self.model.local(n)) for n in self.model.described}
        described = self.optimizer_state.describe() if self.optimizer.state else None
        for name in self.model.parameters:
            for key, tensor in self.optimizer_state.moving(name).items():
                mine[f"{name}/{key}"] = checksum(tensor)
        marks = everyone.all_gather_json(fingerprint((sorted(mine.items()), repr(described))))
        if len(set(marks)) == 1:
            return
        theirs = everyone.all_gather_json(mine)
        differ = (k for k, v in theirs[0].items() if any(t.get(k) != v for t in theirs))
        self.firsts = frozenset(differ)
        described = everyone.broadcast_json(described)
        if self.world.rank:
            self.optimizer.state.clear()
            if described is not None:
                self.optimizer_state.adopt(described)

    def _held_everywhere(self) -> bool:
        its = self.holdings.values()
        everywhere = all(len(h.positions) == self.world.size and not h.replica for h in its)
        return everywhere and self.LOST not in self.ranks

    @property
    def alike(self) -> bool:
        """Whether each rank that holds something holds all."""
        its = self.holdings.values()
        return all(h.copies == len(self.ranks) and not h.replica for h in its)

    def _stepped(self, position: int | None, name: str) -> bool:
        """Whether the optimizer at `position` steps a parameter, or a part of it."""
        h = self.holdings[name]
        if position is None or position not in h.positions:
            return False
        return not h.replica or bool(h.boxes(position))

    def spread_optimizer_state(self) -> dict[str, Any]:
        """Ranks learn which optimizer state exists of parameters that they have no part of; all
        of it but the tensors that move."""
        described = self.described_optimizer(self.optimizer_state.describe())
        if self._held_everywhere():
            return described
        if self.world.rank not in self.ranks:
            self.optimizer_state.adopt(described)
            return described
        position = self.ranks.index(self.world.rank)
        others = [n for n in self.model.parameters if not self._stepped(position, n)]
        self.optimizer_state.adopt_of(others, described["state"])
        return described

    def described_optimizer(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer as all ranks together know it. own: this rank's description. Each tells
        of the parameters that it has a part of. Collective where not all have all."""
        if self._held_everywhere():
            return dict(own)
        position = self.ranks.index(self.world.rank) if self.world.rank in self.ranks else None
        held = {n: x for n, x in own["state"].items() if self._stepped(position, n)}
        everyone = self.world.everyone
        first = next(rank for rank in self.ranks if rank != self.LOST)
        groups = everyone.broadcast_json(own["groups"], first)
        state = {n: e for known in everyone.all_gather_json(held) for n, e in known.items()}
        return {"kind": own["kind"], "groups": groups, "state": state}

    def gathered(
        self, local: Mapping[str, Tensor], root: int | None = None,
        of: Collection[int] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
        """Shards that lie as the parameters of those names, complete at `root` (None: all). of:
        the ranks whose shards count, where others have others; None: all."""
        for name, shard in local.items():
            have = self.sides(self.holdings[name], self.ranks)
            have = tuple(x if of is None or r in of else () for r, x in enumerate(have))
            shape = self.model.described[name].shape
            all_of_it = (full_box(shape),)
            want = tuple(all_of_it if root in (None, r) else () for r in range(self.world.size))
            yield name, redistribute(shard, have, want, shape, self.world.everyone)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's own with entire tensors, in every rank's host memory; all call alike."""
        self.settle()
        self.spread_optimizer_state()
        names = {p: n for n, p in self.model.parameters.items()}
        order = [names[p] for group in self.optimizer.param_groups for p in group["params"]]
        made: dict[str, Any] = self.optimizer_state.state_dict()
        made["state"] = {number: dict(entries) for number, entries in made["state"].items()}
        for number, name in enumerate(order):
            everywhere = (full_box(self.model.described[name].shape),)
            want = (everywhere,) * self.world.size
            for key in self.optimizer_state.moving(name):
                moved = self._move_state(name, key, want)
                sides = moved.have, moved.want
                entire = redistribute(moved.current(), *sides, moved.shape, self.world.everyone)
                made["state"][number][key] = entire.cpu()
        return made

    @contextmanager
    def whole(self, rank: int | None) -> Iterator[nn.Module | None]:
        """The module with entire tensors, on all ranks or on one alone."""
        if rank is not None and not 0 <= rank < self.world.size:
            raise ValueError(f"whole: there are ranks 0 to {self.world.size - 1}, not {rank}")
        here = rank in (None, self.world.rank)
        local = {n: self.model.local(n).detach() for n in self.model.described}
        entire = {n: t for n, t in self.gathered(local, rank) if here}
        with self.model.whole(entire) if here else nullcontext() as module:
            yield module

    def state_dict(self) -> dict[str, Tensor]:
        """The model's names, aliases included, with complete tensors on the host."""
        names = (n for n in self.model.described if n in self.model.persistent)
        local = {n: self.model.local(n).detach() for n in names}
        entire = {n: t.cpu().clone() for n, t in self.gathered(local)}
        return {alias: entire[name] for alias, name in self.model.aliases.items()}

    def local_tensors(self) -> dict[str, LocalTensor]:
        """All that a checkpoint carries, as boxes: `model/NAME`, `optimizer/NAME/KEY`."""
        held = {f"model/{name}": local for name, local in self.model_tensors("model/").items()}
        for name in self.model.parameters:
            for key, tensor in self.optimizer_state.moving(name).items():
                full = f"optimizer/{name}/{key}"
                if key in self.optimizer_state.whole(name):
                    boxes = tuple(full_box(tensor.shape) for _ in self._boxes(name))
                    held[full] = LocalTensor(full, tuple(tensor.shape), boxes, tensor)
                else:
                    held[full] = self.local(full, name, tensor)
        return held

    def model_tensors(self, prefix: str = "") -> dict[str, LocalTensor]:
        """What `state_dict` has, as this rank's boxes; names in them begin with `prefix`."""
        names = (n for n in self.holdings if n in self.model.persistent)
        return {n: self.local(f"{prefix}{n}", n, self.model.local(n).detach()) for n in names}

    def local(self, full: str, name: str, tensor: Tensor) -> LocalTensor:
        """A tensor that lies as the parameter `name` does, called `full`."""
        shape, boxes = self.model.described[name].shape, self._boxes(name)
        return LocalTensor(full, shape, boxes, tensor.reshape(local_shape(boxes, len(shape))))

    def copies(self) -> list[tuple[nn.Parameter, float]]:
        """This rank's parameters, each with the number of ranks that have an equal shard."""
        return [(p, float(self.holdings[n].copies)) for n, p in self.model.parameters.items()]

    def settle_buffers(self, groups: PlanGroups, names: Collection[str], rows: int) -> None:
        """Makes buffers that data ranks compute from own rows equal: means, weighted by the `rows`
        of each rank since they last were; whole numbers are the first rank's that had any."""
        if groups.position is None:
            return
        for name in names:
            holding = self.holdings[name]
            if groups.position not in holding.positions:
                continue
            group = groups.sum_group(holding)
            if group.size == 1:
                continue
            buffer = self.model.buffers[name]
            share = torch.tensor(float(rows), dtype=torch.float64, device=buffer.device)
            group.all_reduce(share, counted=False)
            if not share:
                continue
            total = buffer.clone()  # of a sum that is never done nothing is to stay
            exact = buffer.is_floating_point() or buffer.is_complex()
            if not exact:
                first = torch.tensor(-group.index if rows else -group.size, device=buffer.device)
                group.all_reduce(first, "max", counted=False)
                if group.index != -int(first):
                    total.zero_()
            elif rows:
                total.mul_(rows / float(share))
            else:
                total.zero_()
            group.all_reduce(total, counted=False)
            buffer.copy_(total)


def checksum(tensor: Tensor) -> int:
    """Of all bytes of a tensor; 0 on the meta device."""
    return 0 if tensor.is_meta else zlib.crc32(bytes_of(tensor))
