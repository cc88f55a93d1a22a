"""The gradients of a device group: buckets in their order, each sent when its last one is there.

A parameter that several stages use is summed over the ranks of all of them: its bucket begins when
the last of their groups comes to it."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from synchromesh.cost.planned_step import (
    PlannedStep,
    collective_seconds,
    gradient_pattern,
    shard_seconds,
)
from synchromesh.cost.timeline import Spans
from synchromesh.cost.timelines import Timelines
from synchromesh.values import buckets
from synchromesh.values.buckets import UNDER_WAY, SendingOrder
from synchromesh.values.holding import Holding
from synchromesh.values.profile import Profile
from synchromesh.values.traffic import CollectiveKind


def first_users(planned: PlannedStep, group: int) -> dict[str, int]:
    """The first component of a device group that uses each trained parameter."""
    found: dict[str, int] = {}
    for i in planned.components(group):
        for h in planned.trained(i):
            found.setdefault(h.tensor.name, i)
    return found


def gradient_buckets(planned: PlannedStep, group: int) -> list[list[Holding]]:
    """The buckets of a device group's gradients, in the order in which they are sent."""
    stages: dict[str, list[int]] = {}  # of the group that use each parameter, in their order
    for s in planned.stages_on(group):
        for name in dict.fromkeys(
            h.tensor.name for i in planned.stages[s] for h in planned.trained(i)
        ):
            stages.setdefault(name, []).append(s)

    def kind(h: Holding) -> Hashable:
        when = tuple(stages[h.tensor.name]) if h.each_backward else None
        return gradient_pattern(h), tuple(h.positions), h.tensor.dtype, h.parts > 1, when

    summed = [h for n in stages if (h := planned.holdings[n]).summed]
    return buckets.fill(summed, kind, lambda h: h.local_bytes)


@dataclass
class _Filling:
    """A bucket, and the gradients that it waits for."""

    held: list[Holding]
    missing: set[str] = field(default_factory=set)

    def empty(self) -> None:
        """None is there."""
        self.missing = {h.tensor.name for h in self.held}


def _order(found: Iterable[list[Holding]]) -> SendingOrder[_Filling]:
    order: SendingOrder[_Filling] = SendingOrder(lambda bucket: not bucket.missing)
    order.buckets += map(_Filling, found)
    for bucket in order.buckets:
        bucket.empty()
    return order


class Gradients:
    """Call `ready` after each backward of one of the group's components, `end_backward` after each
    one of a stage, then `finish`."""

    def __init__(
        self, planned: PlannedStep, profile: Profile, timelines: Timelines, group: int = 0
    ) -> None:
        self.planned, self.profile = planned, profile
        self.timelines, self.group, self.line = timelines, group, timelines.lines[group]
        ranks = [planned.ranks[p] for p in planned.positions[group]]
        self.copy_byte = profile.copy_byte * profile.relative_slowdown(ranks)
        self._first_user = first = first_users(planned, group)  # whose backward ends last
        stage_of = {i: s for s in planned.stages_on(group) for i in planned.stages[s]}
        found = gradient_buckets(planned, group)
        self._last = _order(b for b in found if not b[0].each_backward)
        self._every = {
            s: _order(
                b for b in found if b[0].each_backward and stage_of[first[b[0].tensor.name]] == s
            )
            for s in planned.stages_on(group)
        }
        orders = (self._last, *self._every.values())
        self._fills = {order: self._filled_by(order) for order in orders}
        self._sent: list[object] = []
        self._under_way: list[object] = []  # of buckets that are scattered

    def _filled_by(
        self, order: SendingOrder[_Filling]
    ) -> dict[int, list[tuple[_Filling, set[str]]]]:
        """By component: the buckets that its gradients go into, and which of these do."""
        found: dict[int, list[tuple[_Filling, set[str]]]] = {}
        for bucket in order.buckets:
            by_user: dict[int, set[str]] = {}
            for h in bucket.held:
                by_user.setdefault(self._first_user[h.tensor.name], set()).add(h.tensor.name)
            for component, names in by_user.items():
                found.setdefault(component, []).append((bucket, names))
        return found

    def ready(self, component: int, last: bool = True) -> Spans:
        """A backward of `component` is done: gradients that are summed then go into their
        buckets. last: there is no other one in this step."""
        for order in [*self._every.values(), *([self._last] if last else [])]:
            for bucket, names in self._fills[order].get(component, ()):
                sizes = (self.planned.holdings[n].local_bytes for n in bucket.missing & names)
                yield from self.line.compute(self.copy_byte * sum(sizes))
                bucket.missing -= names
            yield from self._launch(order.ready())

    def end_backward(self, stage: int) -> Spans:
        """A backward of a stage is over: what is summed in each one is on its way."""
        order = self._every[stage]
        yield from self._launch(order.rest())
        order.restart()
        for bucket in order.buckets:
            bucket.empty()

    def _launch(self, ready: Sequence[_Filling]) -> Spans:
        for bucket in (filling.held for filling in ready):
            ranks, scattered = gradient_pattern(bucket[0]), bucket[0].parts > 1
            kind: CollectiveKind = "reduce_scatter" if scattered else "all_reduce"
            if scattered:
                seconds = shard_seconds(kind, bucket, self.profile)
            else:
                payload = sum(h.local_bytes for h in bucket)
                seconds = collective_seconds(kind, ranks, payload, self.profile)
            groups = self._groups(bucket[0])
            shared = () if groups > 1 else (self.group, len(self._sent))
            key = ("gradients", *shared, bucket[0].tensor.name)
            self.timelines.come(self.group, key, groups, kind, seconds, ranks)
            self._sent.append(key)
            if scattered:
                self._under_way.append(key)
            if len(self._under_way) > UNDER_WAY:
                first = self._under_way.pop(0)
                yield from self.line.wait(partial(self.timelines.arrived, first))

    def _groups(self, holding: Holding) -> int:
        """How many device groups hold a tensor."""
        return sum(its[0] in holding.positions for its in self.planned.positions)

    def finish(self) -> Spans:
        """Backward is over: what is left is sent, and all of it is waited for."""
        yield from self._launch(self._last.rest())
        yield from self.line.wait(lambda: all(map(self.timelines.arrived, self._sent)))
        yield from self.line.finish()
