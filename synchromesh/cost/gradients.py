"""The gradients of a device group: buckets in their order, each sent when its last one is there.

    seconds    copies into buckets, collectives, what is waited for        `GradientSeconds`
    bytes      of those of which each rank gets a part                     `ScatteredBytes`

Both carry out the events of `values/buckets.py`. A parameter that several stages use is summed
over the ranks of all of them: its bucket begins when the last of their groups comes to it."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property

from synchromesh.cost.alive_bytes import AliveBytes
from synchromesh.cost.compression import collectives, passed_bytes, working_bytes
from synchromesh.cost.planned_step import (
    PlannedStep,
    collective_seconds,
    gradient_pattern,
    shard_seconds,
    sharded_bytes,
)
from synchromesh.cost.timeline import Spans, Timelines, Way
from synchromesh.values import buckets
from synchromesh.values.buckets import BucketEvent, BucketKind, Sending, SendingRules, completing
from synchromesh.values.holding import Holding
from synchromesh.values.profile import Pattern, Profile, ServerMessages
from synchromesh.values.schedule import Action
from synchromesh.values.traffic import CollectiveKind, Servers


class GroupGradients:
    """The gradients of a device group, when each is complete, and the buckets of those that are
    summed over ranks, in the order in which they are sent."""

    def __init__(self, planned: PlannedStep, group: int, pieces: int = 1) -> None:
        self.planned, self.group, self.pieces = planned, group, pieces
        self._stages: dict[str, tuple[int, ...]] = {}  # that use each parameter
        first: dict[str, tuple[int, int]] = {}  # of these, with the component in it
        for stage in planned.stages_on(group):
            for i in planned.stages[stage]:
                for h in planned.trained(i):
                    name = h.tensor.name
                    first.setdefault(name, (stage, i))
                    known = self._stages.get(name, ())
                    self._stages[name] = (*(s for s in known if s != stage), stage)
        held = [planned.holdings[name] for name in first]
        summed = [h for h in held if h.summed]
        self.buckets = buckets.fill(summed, self.kind, lambda h: h.local_bytes)
        self.bucket_of = {h.tensor.name: n for n, b in enumerate(self.buckets) for h in b}
        each = {h.tensor.name for h in held if h.each_backward}
        self._completing = completing(planned.actions(group, pieces), first, each)

    def kind(self, h: Holding) -> BucketKind:
        """What it has in common with those that share its bucket."""
        ranks, users = (gradient_pattern(h), h.positions), self._stages[h.tensor.name]
        part, dtype, served = h.part_placement, h.tensor.dtype, h.scattered and h.servers > 0
        return BucketKind.of(ranks, dtype, part, users, h.each_backward, h.compressor, served)

    @cached_property
    def messages(self) -> list[int]:
        """In how many messages each server gets its part of a bucket, and sends it."""
        sizes, total = [sum(h.local_bytes for h in its) for its in self.buckets], Counter[object]()
        for its, size in zip(self.buckets, sizes, strict=True):
            total[self.kind(its[0])] += size
        return [
            buckets.SIZES.messages(size, total[kind]) if (kind := self.kind(its[0])).served else 1
            for its, size in zip(self.buckets, sizes, strict=True)
        ]

    def complete(self, action: Action, component: int) -> tuple[str, ...]:
        """The parameters whose gradients are complete after a component's backward."""
        return self._completing.get(action.of_all(self.pieces), {}).get(component, ())

    def sending(self, rules: SendingRules) -> Sending:
        """Nothing has been sent."""
        its = [(self.kind(b[0]), [h.tensor.name for h in b]) for b in self.buckets]
        return Sending(its, rules)


def compressed_demands(planned: PlannedStep) -> Iterator[tuple[CollectiveKind, Pattern, int]]:
    """The collectives of compressed buckets, which nothing else of a plan asks for."""
    for group in range(len(planned.positions)):
        for bucket in GroupGradients(planned, group).buckets:
            if bucket[0].compressor:
                for kind, payload in collectives(bucket):
                    yield kind, gradient_pattern(bucket[0]), payload


def late_seconds(planned: PlannedStep, profile: Profile) -> float:
    """Seconds that the sums of a step take by themselves, where whole steps go by meanwhile; no
    step is shorter."""
    if not planned.plan.sync.late:
        return 0.0
    return max(sum_seconds(planned, profile, group) for group in range(len(planned.positions)))


def sum_seconds(planned: PlannedStep, profile: Profile, group: int) -> float:
    """Seconds of the all-reduces of a group's buckets, by themselves."""
    buckets = GroupGradients(planned, group).buckets
    return sum(
        collective_seconds(
            "all_reduce", gradient_pattern(its[0]), sum(h.local_bytes for h in its), profile
        )
        for its in buckets
    )


class GradientSeconds:
    """Call `ready` after each backward of one of the group's components, `end_backward` after each
    one of a stage, then `finish`."""

    def __init__(self, gradients: GroupGradients, profile: Profile, timelines: Timelines) -> None:
        self.gradients, self.profile, self.timelines = gradients, profile, timelines
        self.planned, self.group = gradients.planned, gradients.group
        self.line = timelines.lines[self.group]
        ranks = [self.planned.ranks[p] for p in self.planned.positions[self.group]]
        self.copy_byte = profile.copy_byte * profile.relative_slowdown(ranks)
        self._sending = gradients.sending(SendingRules(reuse=False, of_stages=False))
        self._sent: list[object] = []
        self._of: dict[int, list[object]] = {}  # of a bucket, those not yet awaited

    def ready(self, action: Action, component: int) -> Spans:
        """A backward of `component` is done: gradients that are complete go into their buckets,
        first those that are summed in each backward."""
        names: dict[int, list[str]] = {}
        for name in self.gradients.complete(action, component):
            if name in self.gradients.bucket_of:
                names.setdefault(self.gradients.bucket_of[name], []).append(name)
        once = {n for n in names if not self.gradients.buckets[n][0].each_backward}
        for numbers in (names.keys() - once, once):
            events: list[BucketEvent] = []
            for number in sorted(numbers):
                sizes = (self.planned.holdings[n].local_bytes for n in names[number])
                yield from self.line.compute(self.copy_byte * sum(sizes))
                for name in names[number]:
                    events += self._sending.fill(number, name)
            yield from self._carry_out(events)

    def end_backward(self, stage: int) -> Spans:
        """A backward of a stage is over: what is summed in each one is on its way."""
        yield from self._carry_out(self._sending.end_backward(stage))

    def finish(self) -> Spans:
        """Backward is over: what is left is sent, and all of it is waited for, unless whole steps
        go by meanwhile."""
        yield from self._carry_out(self._sending.finish())
        if self.planned.plan.sync.late:
            return
        for number, keys in self._of.items() if self.planned.plan.sync.servers else ():
            for key in keys:
                yield from self.timelines.await_all(self.group, (key,))
                if key in keys[-self.gradients.messages[number] :]:  # of the last backward
                    self._fetch(number, key)
        yield from self.timelines.await_all(self.group, self._sent)
        rest = sum(passed_bytes(bucket)[1] for bucket in self.gradients.buckets)
        yield from self.line.compute(self.copy_byte * rest)
        yield from self.line.finish()

    def _fetch(self, number: int, pushed: object) -> None:
        """What servers have stepped by what has come goes to all, while other sums come."""
        bucket = self.gradients.buckets[number]
        if (serving := bucket[0].serving) is not None and bucket[0].scattered:
            ranks, seconds = gradient_pattern(bucket[0]), shard_seconds("", bucket, self.profile)
            _, way = _ways(serving, ranks)
            lane = ServerMessages("fetch", ranks, serving.count)
            seconds /= self.gradients.messages[number]
            self.line.depart(("fetch", pushed), "send", seconds, lane, way)

    def _carry_out(self, events: Iterable[BucketEvent]) -> Spans:
        for event in events:
            if event.verb == "send":
                before, _ = passed_bytes(self.gradients.buckets[event.bucket])
                yield from self.line.compute(self.copy_byte * before)
                self._send(event.bucket)
            else:
                first = self._of[event.bucket].pop(0)
                yield from self.timelines.await_all(self.group, (first,))

    def _send(self, number: int) -> None:
        bucket = self.gradients.buckets[number]
        ranks, scattered = gradient_pattern(bucket[0]), bucket[0].scattered
        lane: object = ranks
        way: Way = "both"
        if scattered:
            kind: CollectiveKind = "reduce_scatter"
            seconds = shard_seconds(kind, bucket, self.profile)
            if (serving := bucket[0].serving) is not None:
                kind, lane = "send", ServerMessages("push", ranks, serving.count)
                way, _ = _ways(serving, ranks)
        else:  # where a second one follows, as if it were a part of the first
            kind, seconds = collectives(bucket)[0][0], 0.0
            for each, payload in collectives(bucket):
                seconds += collective_seconds(each, ranks, payload, self.profile)
        groups, messages = self._groups(bucket[0]), self.gradients.messages[number]
        for message in range(messages):
            shared = (message,) if groups > 1 else (self.group, len(self._sent))
            key = ("gradients", *shared, bucket[0].tensor.name)
            self.timelines.come(self.group, key, groups, kind, seconds / messages, lane, way)
            self._sent.append(key)
            self._of.setdefault(number, []).append(key)

    def _groups(self, holding: Holding) -> int:
        """How many device groups hold a tensor."""
        return sum(its[0] in holding.positions for its in self.planned.positions)


def _ways(servers: Servers, ranks: Pattern) -> tuple[Way, Way]:
    """Which direction of a server's link pushes and fetches take; both, where all ranks serve."""
    return ("both", "both") if servers.count == ranks.size else ("in", "out")


SCATTERED, PART, COMPRESSED = "scattered", "part", "compressed"


class ScatteredBytes:
    """Buckets of a device group of which each rank gets a part: each gradient is added once it is
    there, and its bucket awaited before the next backward fills it again."""

    def __init__(self, gradients: GroupGradients, alive: AliveBytes, position: int) -> None:
        self.gradients, self.alive, self.position = gradients, alive, position
        self._sending = gradients.sending(SendingRules(in_order=False))

    def open(self, holding: Holding) -> None:
        """The bucket of a gradient is there."""
        number = self.gradients.bucket_of[holding.tensor.name]
        self._carry_out(self._sending.open(number))
        if (SCATTERED, number) not in self.alive.bytes:
            self.alive.set((SCATTERED, number), sharded_bytes(self.gradients.buckets[number]))

    def add(self, holding: Holding) -> None:
        """A gradient goes into its bucket."""
        if holding.scattered:
            self.open(holding)
        name = holding.tensor.name
        self._carry_out(self._sending.fill(self.gradients.bucket_of[name], name))

    def end_backward(self, stage: int) -> None:
        """What is summed in each backward is sent."""
        self._carry_out(self._sending.end_backward(stage))

    def _carry_out(self, events: Iterable[BucketEvent]) -> None:
        for event in events:
            bucket = self.gradients.buckets[event.bucket]
            if not bucket[0].scattered:  # summed in place, in memory that is always there
                working, under_way = working_bytes(bucket)
                self.alive.meanwhile(working)
                self.alive.set((COMPRESSED, event.bucket), under_way)
                continue
            size, serving = sum(h.kept_bytes for h in bucket), bucket[0].serving
            if not bucket[0].kept_at(self.position):
                size = 0
            if event.verb == "send":  # what is sent, and parts of all ranks
                came = len(bucket[0].sharing(self.position)) - (serving.first if serving else 0)
                self.alive.set((SCATTERED, event.bucket), sharded_bytes(bucket) + came * size)
                self.alive.meanwhile(0.0)
            else:
                self.alive.free((SCATTERED, event.bucket))
                self.alive.set((PART, event.bucket), float(size))
