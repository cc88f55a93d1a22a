"""A crossing: values that go from the ranks of one stage to those of another, or their gradients
on the way back. Autograd knows nothing of it: graphs end where a stage does.

    stage 0   forward --> x ~~~ x' requires grad --> forward   stage 1
    stage 0   backward <-- dx ~~~ gradient of x' <-- backward  stage 1"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from synchromesh.engine import exchange
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.exchange import Message
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.values.exchange import Border, Exchange, Ranges, shape_of_rows, shape_rows_first

Rows = Callable[[int], Ranges]  # global rows of each data index, by data degree


def send(
    items: Sequence[Exchange], tensors: Mapping[Border, Tensor], gradient: bool, rows: Rows,
    groups: PlanGroups,
) -> Any:  # fmt: skip
    """Begins to send what this rank has of `items`, or their gradients; what to wait for."""
    messages: list[Message] = []
    for item in items:
        if item.flows or not gradient:
            x = tensors[item.read if gradient else item.made]
            messages += outward(item, x, gradient, rows, groups)
    return groups.everyone.post(messages, [])


def outward(
    item: Exchange, x: Tensor, gradient: bool, rows: Rows, groups: PlanGroups
) -> list[Message]:
    """What this rank sends of `x`, its part of a value or of a gradient, by receiver."""
    position = _position(groups)
    x = x.detach()
    if item.value.rows is None:
        return [(to, x) for sender, to in item.copies(gradient) if sender == position]
    change = item.change(rows, gradient)
    if whole := [(r.receiver, x) for r in change.whole if r.sender == position]:
        return whole
    local = exchange.rows_first(x, item.value.rows, max(1, change.source.rows_at(position)))
    return exchange.sends(change, local, position)


@dataclass
class Arrival:
    """One value, or gradient, that this rank receives; `tensor` is it when all has come."""

    item: Exchange
    gradient: bool
    rows: Rows
    groups: PlanGroups
    inward: list[Message] = field(init=False)
    whole: list[int] = field(init=False)  # who sends all of it as it lies here

    def __post_init__(self) -> None:
        value, position = self.item.value, _position(self.groups)
        like = torch.empty(0, dtype=getattr(torch, value.dtype), device=self.groups.world.device)
        if value.rows is None:
            senders = [s for s, to in self.item.copies(self.gradient) if to == position]
            self.out = like.new_zeros(value.shape)
            self.inward = [(s, like.new_empty(value.shape)) for s in senders]
            return
        self.change = self.item.change(self.rows, self.gradient)
        shape = self.change.shape(shape_rows_first(value), position)
        self.whole = [r.sender for r in self.change.whole if r.receiver == position]
        if self.whole:
            self.out = like.new_empty(shape_of_rows(value, shape))
            self.inward = [(self.whole[0], self.out)]
            return
        self.out = exchange.empty(self.change, like, shape)
        self.inward = exchange.receives(self.change, self.out, position)

    @property
    def border(self) -> Border:
        return self.item.made if self.gradient else self.item.read

    def tensor(self) -> Tensor:
        """The value at this rank."""
        of = self.item.value.rows
        if of is None:
            for _, part in self.inward:
                self.out += part
            return self.out
        if self.whole:
            return self.out
        position = _position(self.groups)
        arrived = exchange.assembled(self.change, None, self.inward, self.out, position)
        if not len(arrived):  # what comes back of this rank's stand-in row: nothing
            arrived = arrived.new_zeros((1, *arrived.shape[1:]))
        return exchange.rows_back(arrived, of).contiguous()


class Receipt:
    """What one message brings; values that are read in several forms have one border."""

    def __init__(
        self, items: Sequence[Exchange], gradient: bool, rows: Rows, groups: PlanGroups
    ) -> None:
        self._arrivals = [
            Arrival(item, gradient, rows, groups) for item in items if item.flows or not gradient
        ]
        inward = [m for arrival in self._arrivals for m in arrival.inward]
        self._wait = groups.everyone.post([], inward)

    def wait(self) -> list[tuple[Border, Tensor]]:
        self._wait.wait()
        return [(arrival.border, arrival.tensor()) for arrival in self._arrivals]


Ways = Sequence[tuple[str, Sequence[Exchange]]]  # of each leaf, to the ranks of each stage


def deliver(
    made: Mapping[str, Tensor], ways: Ways, rows: GlobalRows, groups: PlanGroups
) -> dict[str, Tensor]:
    """The leaves of a (micro-)batch's carry that this rank reads next, of its own rows. made: of
    this rank's components, of one row where it has none. Every rank calls, in equal order."""
    position = groups.position
    leaves: dict[str, Tensor] = {}
    arrivals: list[tuple[str, Arrival]] = []
    messages: list[Message] = []
    for leaf, exchanges in ways:
        for way in exchanges:
            if position in way.source.positions:
                if way.crosses:
                    messages += outward(way, made[leaf], False, rows.ranges, groups)
                elif way.source.mesh == way.target.mesh:
                    leaves[leaf] = made[leaf]
                else:
                    leaves[leaf] = exchange.depart(made[leaf], way, groups, rows.ranges)()
            elif position in way.target.positions:
                arrivals.append((leaf, Arrival(way, False, rows.ranges, groups)))
    groups.everyone.exchange(messages, [m for _, a in arrivals for m in a.inward])
    return leaves | {leaf: arrival.tensor() for leaf, arrival in arrivals}


def _position(groups: PlanGroups) -> int:
    assert groups.position is not None, "an idle rank exchanges nothing"
    return groups.position
