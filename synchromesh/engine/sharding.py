"""Sharded parameters on a rank: gathered ahead of use, freed after it.

    forward     wait for c0, begin c1 | c0 | free | wait for c1, begin c2 | c1 | free | ...
    backward    wait for c2, begin c1 | c2 | free | wait for c1, begin c0 | c1 | free | ...

A program computes with parameters of its own (`whole`), whose storage is filled by an all-gather
of the parts and emptied again: autograd keeps the tensors, not their bytes, from a component's
forward to its backward. Two autograd nodes around the component say when its backward begins and
ends. The latter comes last: of the nodes that are ready autograd runs the one that was made last.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from synchromesh.engine.gradient_buckets import SummedSlice
from synchromesh.engine.groups import Group
from synchromesh.engine.servers import FetchUnderWay
from synchromesh.programs.communicator import Finish
from synchromesh.values import buckets
from synchromesh.values.holding import Holding
from synchromesh.values.placement import Placement
from synchromesh.values.schedule import Action
from synchromesh.values.sharding import Run, Unit, UnitEvent, UseWalk, uses_of


def parts_of(whole: Tensor, placement: Placement, parts: int) -> Iterator[tuple[slice, Tensor]]:
    """Views of `whole` with its parts in front: (which parts, (how many, *shape of each)).

    Parts differ by one entry along its dimension, so that there are two views at most.
    """
    d, length = placement.dim, whole.shape[placement.dim]
    each, more = divmod(length, parts)
    for ranks, size in ((slice(0, more), each + 1), (slice(more, parts), each)):
        count = ranks.stop - ranks.start
        if count and size:
            start = more * (each + 1) if ranks.start else 0
            view = whole.narrow(d, start, count * size).unflatten(d, (count, size))
            yield ranks, view.movedim(d, 0)


class _Gathered:
    """A unit on this rank."""

    def __init__(
        self, unit: Unit, position: int, parameters: Sequence[nn.Parameter], group: Group,
        number: int, messages: int,
    ) -> None:  # fmt: skip
        """number: of all units. messages: in which each server sends its part."""
        self._number, self._messages = number, messages
        self.unit, self.parameters, self.group = unit, parameters, group
        self.there = False
        first = unit.holdings[0]
        self._serving, self._parts = first.serving, first.parts
        self.whole: list[nn.Parameter] = []
        self._offsets = [0]
        for h, p in zip(unit.holdings, parameters, strict=True):
            shape = h.local_shape_at(position)
            self.whole.append(nn.Parameter(p.new_empty(shape), requires_grad=p.requires_grad))
            entries = h.part_bytes_at(position) // p.element_size()
            self._offsets.append(self._offsets[-1] + entries)
        self._index = {p: index for index, p in enumerate(parameters)}
        self._given: dict[int, int] = {}  # entries of parameters that are not all there to be sent
        self._finish: Finish | None = None
        self.free()

    def begin(self) -> None:
        """Begins to gather the parts, where that has not begun."""
        if self.there or (self._finish is not None and not self._given):
            return
        flat = self._open()
        for index in self._given:
            p, start = self.parameters[index], self._offsets[index]
            flat[start : start + p.numel()].view(p.shape).copy_(p.detach())
        self._given.clear()
        if self._serving is None:
            self._finish = self.group.start_all_gather(flat)
        else:
            self._send()

    def give(self, came: Iterable[SummedSlice]) -> None:
        """What servers have stepped goes to all at once."""
        for each in came:
            if self.there or self._serving is None or each.parameter not in self._index:
                continue
            index, flat = self._index[each.parameter], self._open()
            entries = flat[self._offsets[index] :][each.start : each.stop]
            entries.copy_(each.parameter.detach().reshape(-1)[each.start : each.stop])
            self._given[index] = each.stop
            if each.last:
                del self._given[index]
            self._send()

    def _open(self) -> Tensor:
        """For the parts that this rank keeps, one after the other. Receives are posted."""
        if isinstance(self._finish, FetchUnderWay):
            return self._finish.part
        first = self.parameters[0]
        self._given = dict.fromkeys(self._index.values(), 0)
        flat = torch.empty(self._offsets[-1], dtype=first.dtype, device=first.device)
        if self._serving is not None:
            self._finish = FetchUnderWay(
                self.group, self._serving, flat, self._messages, self._number
            )
        return flat

    def _send(self) -> None:
        """What is there to be sent, up to what is not."""
        assert isinstance(self._finish, FetchUnderWay)
        until = (self._offsets[index] + there for index, there in self._given.items())
        self._finish.send(min(until, default=self._offsets[-1]))

    def wait(self) -> None:
        """The parameters are there."""
        self.begin()
        if self._finish is None:
            return
        parts, self._finish = self._finish(), None
        for h, whole, start in zip(self.unit.holdings, self.whole, self._offsets, strict=False):
            data = whole.data  # autograd need not know: values are those that it has seen
            data.untyped_storage().resize_(data.nbytes)
            for ranks, view in parts_of(data, h.part_placement, self._parts):
                shape = view.shape[1:]
                view.copy_(parts[ranks, start : start + shape.numel()].unflatten(1, shape))
        self.there = True

    def free(self) -> None:
        """The parameters are no longer there."""
        if self._finish is not None:  # begun, but nobody came
            self._finish()
            self._finish = None
            self._given.clear()
        for whole in self.whole:
            whole.untyped_storage().resize_(0)
        self.there = False

    def owns(self, x: Tensor) -> bool:
        """Whether `x` lies in the storage of one of the parameters."""
        own = x.untyped_storage()._cdata
        return any(whole.untyped_storage()._cdata == own for whole in self.whole)


def _kind(unit: Unit) -> object:
    """What units have in common that are divided alike into messages."""
    first = unit.holdings[0]
    return first.gradient_layout, first.tensor.dtype


class Sharding:
    """The parameters of which this rank keeps parts. A walk begins with `expect`; in each of its
    actions every component that needs a unit is used between `enter` and `leave`."""

    def __init__(
        self,
        units: Sequence[Unit] = (),
        position: int | None = None,
        parameters: Mapping[str, nn.Parameter] = MappingProxyType({}),
        group_of: Callable[[Holding], Group] | None = None,
    ) -> None:
        self.units = tuple(units)
        self._here: dict[int, _Gathered] = {}  # by their number among all
        total = Counter[object]()
        for unit in units:
            total[_kind(unit)] += unit.bytes
        for number, unit in enumerate(units):
            if position is not None and position in unit.holdings[0].positions:
                assert group_of is not None
                own, group = [parameters[n] for n in unit.names], group_of(unit.holdings[0])
                messages = buckets.SIZES.messages(unit.bytes, total[_kind(unit)])
                self._here[number] = _Gathered(unit, position, own, group, number, messages)
        self.whole = {
            name: whole
            for gathered in self._here.values()
            for name, whole in zip(gathered.unit.names, gathered.whole, strict=True)
        }
        self._goes_on = False
        self._walk: UseWalk | None = None
        self._action: Action | None = None

    @property
    def served(self) -> bool:
        """Whether no rank's backward waits for what another does after its own: what servers keep
        they send before."""
        return all(unit.holdings[0].serving is not None for unit in self.units)

    def fetch(self, came: Sequence[SummedSlice]) -> None:
        """What servers have stepped goes to all for the next walk: nothing changes it before."""
        for gathered in self._here.values():
            gathered.give(came)

    def drop(self) -> None:
        """What was gathered for the next walk is of no use: parameters change."""
        for gathered in self._here.values():
            gathered.free()

    def expect(self, runs: Sequence[tuple[Action, Run]], goes_on: bool) -> None:
        """What comes next. goes_on: whether more follows before the parameters change."""
        if self._walk is not None:  # a walk that failed half-way
            self.over()
        self._goes_on = goes_on
        self._walk = UseWalk(uses_of(runs, self.units, goes_on))
        self._carry_out(self._walk.start())

    def begin(self, action: Action) -> None:
        """The action begins; the one before is over."""
        assert self._walk is not None, "expect comes before begin"
        self._carry_out(self._walk.end_action())
        self._action = action

    def enter(self, component: int, together: int = 1, leaves: bool = True) -> None:
        """The component is about to compute (`UseWalk.enter`)."""
        walk, use = self._use(component)
        self._carry_out(walk.enter(use, together, leaves))
        for unit in walk.uses.uses[use].units:  # those too that a backward which autograd left
            self._here[unit].wait()  # out was to gather, or that another micro-batch has freed

    def leave(self, component: int, together: int = 1) -> None:
        """The component has computed one of the micro-batches."""
        walk, use = self._use(component)
        self._carry_out(walk.leave(use, together))

    def over(self) -> None:
        """The walk is over, or was abandoned."""
        self._walk = None
        for gathered in self._here.values():
            if not (self._goes_on and gathered.unit.lasting):
                gathered.free()

    def _use(self, component: int) -> tuple[UseWalk, int]:
        assert self._walk is not None and self._action is not None
        return self._walk, self._walk.uses.number[self._action, component]

    def _carry_out(self, events: Iterable[UnitEvent]) -> None:
        for event in events:
            unit = self._here[event.unit]
            match event.verb:
                case "gather":
                    unit.begin()
                case "await":
                    unit.wait()
                case "free":
                    unit.free()

    def owned(self, units: Sequence[int], x: Tensor) -> bool:
        """Whether `x` lies in a parameter that will be freed."""
        return any(self._here[unit].owns(x) for unit in units)


class _BackwardHook(torch.autograd.Function):
    """Identity whose backward calls a function first."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.call()
        return None, *gradients


def on_backward(tensors: Sequence[Tensor], call: Callable[[], None]) -> list[Tensor]:
    """`tensors`; backward calls `call` when the gradients of all of them are there."""
    flowing = [i for i, x in enumerate(tensors) if x.requires_grad]
    outputs = list(tensors)
    if flowing and torch.is_grad_enabled():
        passed = _BackwardHook.apply(call, *(tensors[i] for i in flowing))
        for i, x in zip(flowing, passed, strict=True):
            outputs[i] = x
    return outputs
