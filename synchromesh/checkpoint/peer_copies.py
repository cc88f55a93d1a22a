"""Copies in memory of a model's state behind a step, for when ranks are lost that alone had parts.

Every rank keeps what it has itself, and what ranks of one host alone have a rank of another host
keeps too (`values.boxes.lent`), as checkpoints in memory do (Wang et al. 2023, "GEMINI: Fast
Failure Recovery in Distributed Training with In-Memory Checkpoints", SOSP). Two are kept while one
is made, for not all ranks may have the newer one when another is lost."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from synchromesh.checkpoint.local_tensor import box_view
from synchromesh.checkpoint.model_state import ModelState
from synchromesh.checkpoint.switch import Lent, Move
from synchromesh.values.boxes import Box, full_box, lent, local_shape, volume, without
from synchromesh.values.holding import Holding

Sides = tuple[tuple[Box, ...], ...]  # boxes of each rank of the world


@dataclass
class PeerCopy:
    """One rank's part. told: what is no tensor. own: as its boxes; lent: what it keeps for others.
    Names are of moves (`ModelState.moves_to`)."""

    step: int
    told: Any
    plan: tuple[str, int]  # and of how many devices
    ranks: tuple[int, ...]  # of the plan's positions
    holdings: Mapping[str, Holding]
    optimizer: Mapping[str, Any] = field(default_factory=dict)  # but for its tensors
    own: dict[str, Tensor] = field(default_factory=dict)
    lent: dict[str, Lent] = field(default_factory=dict)

    @classmethod
    def none(cls) -> "PeerCopy":
        return cls(-1, None, ("", 0), (), {})

    @property
    def bytes(self) -> int:
        of_others = (x for parts in self.lent.values() for _, x in parts)
        return sum(x.nbytes for x in (*self.own.values(), *of_others))


class PeerCopies:
    """Of a state: the newest that all ranks have, and one under way. hosts: of each rank."""

    def __init__(self, state: ModelState, hosts: Callable[[], Sequence[Hashable]]) -> None:
        self._state, self._hosts = state, hosts
        self._kept: list[PeerCopy] = []
        self._spare: PeerCopy | None = None  # whose memory the next one takes

    @property
    def steps(self) -> list[int]:
        """Behind which this rank has copies."""
        return [copy.step for copy in self._kept]

    @property
    def bytes(self) -> int:
        """Of all of them on this rank."""
        return sum(x.bytes for x in (*self._kept, self._spare) if x is not None)

    def needed(self) -> bool:
        """Whether ranks of one host alone have parts of parameters or buffers."""
        state, hosts = self._state, self._hosts()
        sides = {state.sides(holding, state.ranks) for holding in state.holdings.values()}
        return any(any(lent(side, hosts)) for side in sides)

    def sizes(self) -> tuple[int, int]:
        """Bytes that one will take on this rank, and of those what others send."""
        state, index = self._state, self._state.world.rank
        held = kept = 0
        for m in state.moves_to(state.holdings, state.ranks):
            item = m.current().element_size()
            held += item * sum(map(volume, m.have[index]))
            kept += item * sum(map(volume, lent(m.have, self._hosts())[index]))
        return held + kept, kept

    def take(self, step: int, told: Any, alone: bool = False) -> None:
        """The state as it is, behind `step`. alone: nothing is lent. All ranks call alike; where
        it fails, they have the one before."""
        state, before, self._spare = self._state, self._spare or PeerCopy.none(), None
        copy = PeerCopy(step, told, state.placed_by, state.ranks, dict(state.holdings))
        copy.optimizer = state.spread_optimizer_state()
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for m in state.moves_to(state.holdings, state.ranks):
            own = m.current().detach()
            if not m.have[state.world.rank]:
                own = own.new_empty(local_shape((), own.dim()))
            copy.own[m.name] = _filled(before.own.get(m.name), own)
            if not alone:
                sends += self._given(m, copy)
                kept = [*self._taken(m, copy, dict(before.lent.get(m.name, ())))]
                receives += [(source, room) for source, _, room in kept]
                copy.lent[m.name] = [(box, room) for _, box, room in kept]
        everyone = state.world.everyone
        everyone.exchange(sends, receives, payload=0)
        self._kept.append(copy)
        everyone.all_gather_json(step)  # all have it
        self._spare = self._kept[-2] if len(self._kept) > 1 else None
        self._kept = [copy]

    def _lent(self, m: Move) -> Iterator[tuple[int, int, Box]]:
        """What a rank keeps for others: whose it is, that rank, the box."""
        for target, boxes in enumerate(lent(m.have, self._hosts())):
            for box in boxes:
                owner = next(r for r, side in enumerate(m.have) if not without([box], side))
                yield owner, target, box

    def _given(self, m: Move, copy: PeerCopy) -> Iterator[tuple[int, Tensor]]:
        own, index = copy.own[m.name], self._state.world.rank
        for source, target, box in self._lent(m):
            if source == index:
                yield target, box_view(own, m.have[index], box).contiguous()

    def _taken(
        self, m: Move, copy: PeerCopy, before: Mapping[Box, Tensor]
    ) -> Iterator[tuple[int, Box, Tensor]]:
        """Whose it is, what, and where it comes to. before: memory that is free."""
        for source, target, box in self._lent(m):
            if target == self._state.world.rank:
                new = copy.own[m.name].new_empty([stop - start for start, stop in box])
                yield source, box, _room(before.get(box), new)

    def drop(self) -> None:
        self._kept.clear()
        self._spare = None

    def renumber(self, before: Sequence[int]) -> None:
        """The world has other ranks; before: which each was."""
        for copy in self._kept:
            copy.ranks = self._state.renumbered(copy.ranks, before)

    def restore(self, holdings_of: Callable[[str, int], Mapping[str, Holding]]) -> tuple[int, Any]:
        """Makes the newest copy that ranks have whole together what they hold, until the state
        moves; its step and what is no tensor. -1: there is none. holdings_of: a plan of so many
        devices. Collective."""
        state = self._state
        table: list[list[int]] = state.world.everyone.all_gather_json(self.steps)
        for step in sorted({step for steps in table for step in steps}, reverse=True):
            having = [rank for rank, steps in enumerate(table) if step in steps]
            copy = self._shared(step, having, holdings_of)
            sides = self._lent_sides(copy)
            if self._whole(copy, sides):
                state.take_back(copy.holdings, copy.ranks, copy.optimizer, copy.own)
                state.borrow(sides, copy.lent)
                self._kept = [one for one in self._kept if one.step <= step]
                return step, copy.told
        return -1, None

    def _shared(
        self, step: int, having: Sequence[int],
        holdings_of: Callable[[str, int], Mapping[str, Holding]],
    ) -> PeerCopy:  # fmt: skip
        """This rank's copy, also where it has nothing of it, as the first of those tells that do;
        only their parts count."""
        everyone, own = self._state.world.everyone, PeerCopy.none()
        own = next((copy for copy in self._kept if copy.step == step), own)
        known = [*own.plan, own.ranks, own.optimizer, own.told]
        known = everyone.broadcast_json(known if everyone.index == having[0] else None, having[0])
        plan, devices, ranks, optimizer, told = known
        if not own.holdings:
            own = PeerCopy(step, told, (plan, devices), (), holdings_of(plan, devices))
        own.ranks = tuple(r if r in having else self._state.LOST for r in ranks)
        own.optimizer, own.told = optimizer, told
        return own

    def _lent_sides(self, copy: PeerCopy) -> dict[str, Sides]:
        """What each rank keeps for others of each tensor."""
        own = {name: [box for box, _ in parts] for name, parts in copy.lent.items()}
        table = self._state.world.everyone.all_gather_json(own)
        return {
            name: tuple(_boxes(of.get(name, ())) for of in table)
            for name in sorted({name for of in table for name in of})
        }

    def _whole(self, copy: PeerCopy, sides: Mapping[str, Sides]) -> bool:
        state, none = self._state, ((),) * self._state.world.size
        return not any(
            without([full_box(state.model.described[name].shape)], [
                box for side in (*state.sides(holding, copy.ranks), *sides.get(name, none))
                for box in side
            ])
            for name, holding in copy.holdings.items()
        )  # fmt: skip


def _filled(room: Tensor | None, value: Tensor) -> Tensor:
    return _room(room, torch.empty_like(value, memory_format=torch.contiguous_format)).copy_(value)


def _room(free: Tensor | None, new: Tensor) -> Tensor:
    """What is free, where it fits; memory of a new one is taken when it is written to."""
    fits = free is not None and (free.shape, free.dtype) == (new.shape, new.dtype)
    return free if free is not None and fits else new


def _boxes(plain: Sequence[Sequence[Sequence[int]]]) -> tuple[Box, ...]:
    return tuple(tuple((start, stop) for start, stop in box) for box in plain)
