"""The step time of a plan: its programs walked with measured durations, as the engine walks them.

Each device group walks its actions, sends and receives (values/messages.py) on a timeline of its
own, all groups together (cost/timeline.py); on one stage micro-batches take turns
(cost/planned_step.py). Gradients fill buckets (values/buckets.py) that are all-reduced while
backward goes on. Then the optimizer steps.

    seconds = walk(forward and backward) until the last bucket has arrived + update, on the
              slowest group, + step of calls + host

Every duration is of a component, a collective or a message; no step of the plan has been run.
A pipeline without a flush (values/weight_versions.py) makes updates within its walk, and a step of
it is the time between two of many (cost/filled.py).

Where ranks of a stage differ in speed or rows, a component takes what it takes on the slowest:
they meet at every collective, and at the end of the step in any case."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from synchromesh.cost.filled import last_step, runs, seconds_within
from synchromesh.cost.gradients import GradientSeconds, GroupGradients, late_seconds
from synchromesh.cost.planned_step import (
    ComputeShare,
    PlannedStep,
    Transmit,
    collective_seconds,
    exchange_seconds,
    gradient_pattern,
    link_seconds,
    measured,
    pattern,
    shard_seconds,
    update_seconds,
    walked,
)
from synchromesh.cost.timeline import Links, RecordedSpan, Spans, Timeline, Timelines
from synchromesh.trace.partition.local import LocalComponent
from synchromesh.trace.partition.moves import edge_collectives
from synchromesh.values.layout import Layout
from synchromesh.values.messages import Instruction, Message, Receive, Run
from synchromesh.values.profile import Pattern, Profile
from synchromesh.values.schedule import Action, ActionKind
from synchromesh.values.sharding import UnitEvent, UseWalk
from synchromesh.values.traffic import Collective, Direction


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step and what they consist of, on the device group that is ready last."""

    seconds: float
    forward: float  # in which its forwards run or wait
    backward: float  # the rest until the last gradient has arrived
    update: float
    computed: float  # seconds of computation, undisturbed
    waited: float  # seconds in which a rank only waits for others
    pieces: int  # of a micro-batch, that take turns
    exchanged: float = 0.0  # of what is waited: behind the end, for what workers that step alone
    # send each other, and for late sums that take longer than a step

    @property
    def communication_share(self) -> float:
        """The part of the step in which nothing is computed because something is under way, or
        because another stage is at work."""
        return self.waited / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Recorded:
    """What each device group does in a step, in order, and the seconds of its optimizer. run: of
    many steps, of which this is one that goes on while others do."""

    groups: tuple[tuple[RecordedSpan, ...], ...]
    updates: tuple[float, ...]
    time: StepTime
    run: "Recorded | None" = None


def step_time(planned: PlannedStep, profile: Profile, pieces: int = 1) -> StepTime:
    """The predicted time of one step. pieces: how many pieces take turns on the only stage.
    Unmeasured: by its name."""
    return _recorded(planned, profile, pieces, False).time


def recorded(
    planned: PlannedStep, profile: Profile, pieces: int = 1, links: Links | None = None
) -> Recorded:
    """The same step, with what goes on in it. links: that traffic of all device groups shares."""
    return _recorded(planned, profile, pieces, True, links)


def _recorded(
    planned: PlannedStep, profile: Profile, pieces: int, record: bool, links: Links | None = None
) -> Recorded:
    if not planned.plan.kept:
        return _walk(planned, profile, pieces, record, links)
    within = seconds_within(planned, profile)
    before, run = (_walk(r, profile, pieces, record, links, within) for r in runs(planned))
    a, b, calls = before.time, run.time, profile.calls.step + profile.host
    time = StepTime(
        b.seconds - a.seconds + calls, b.forward - a.forward, b.backward - a.backward, 0.0,
        b.computed - a.computed, b.waited - a.waited, pieces,
    )  # fmt: skip
    return Recorded(last_step(run.groups, time.seconds - calls), run.updates, time, run)


def _walk(
    planned: PlannedStep, profile: Profile, pieces: int, record: bool, links: Links | None = None,
    within: Sequence[float] = (),
) -> Recorded:  # fmt: skip
    """within: seconds of an update on each group behind each micro-batch's backward; none: there
    is one at the end."""
    traffic = Traffic(planned, profile, pieces)
    lists = planned.instructions(pieces)
    lines = [Timeline(profile.overlap, profile.device) for _ in lists]
    for line in lines if record else ():
        line.record = []
    timelines = Timelines(lines, links)
    gradients = (GroupGradients(planned, group, pieces) for group in range(len(lists)))
    sums = (GradientSeconds(of_group, profile, timelines) for of_group in gradients)
    walks = [_GroupWalk(traffic, timelines, of_group, within) for of_group in sums]
    timelines.walk([walk.spans(own) for walk, own in zip(walks, lists, strict=True)])
    updates = [
        0.0 if within else update_seconds(planned, profile, its) for its in planned.positions
    ]
    ends = [line.clock + update for line, update in zip(lines, updates, strict=True)]
    last = ends.index(max(ends))
    line, forward = lines[last], walks[last].forward
    least = max(late_seconds(planned, profile), link_seconds(planned, profile))
    means = max(exchange_seconds(planned, profile), least - ends[last])
    seconds = ends[last] + means + profile.calls.step + profile.host
    time = StepTime(
        seconds, forward, line.clock - forward, updates[last], line.computed, line.waited + means,
        pieces, means,
    )  # fmt: skip
    return Recorded(tuple(tuple(line.record or ()) for line in lines), tuple(updates), time)


Walk = Callable[[PlannedStep, Profile, int], StepTime]  # the last one: pieces


def best_pieces(
    planned: PlannedStep, profile: Profile, choices: Sequence[int], walk: Walk = step_time
) -> StepTime:
    """The quickest step: of one micro-batch, or of one of the other `choices` where rows
    suffice."""
    times = [walk(planned, profile, 1)]
    least = min(min(planned.blocks(c.layout)) for c in planned.partition.components)
    if planned.overlaps and len(planned.stages) == 1:
        times += [walk(planned, profile, n) for n in choices if 1 < n <= least]
    return min(times, key=lambda t: (t.seconds, t.pieces))


_Traffic = tuple[str, float, Pattern]  # kind of a collective, seconds, the groups that it is on
# of what actions send; the gradients of weights alone send nothing
_DIRECTIONS: dict[ActionKind, Direction] = {"F": "forward", "B": "backward"}


class Traffic:
    """Seconds of moves inside a stage, and of messages between stages, of a micro-batch, which has
    its share of the rows. pieces: how many pieces take turns on a stage."""

    def __init__(self, planned: PlannedStep, profile: Profile, pieces: int) -> None:
        self.planned, self.profile, self.pieces = planned, profile, pieces
        self._moves: dict[tuple[int, int, str], list[_Traffic]] = {}
        self._messages: dict[tuple[str, int, int], float] = {}

    def begin(self, line: Timeline, item: Transmit, action: Action) -> None:
        """What `item` sends in the direction of `action` departs."""
        known = (item.component, item.number, action.kind)
        if known not in self._moves:
            self._moves[known] = self._move(item, _DIRECTIONS[action.kind])
        for number, (kind, seconds, ranks) in enumerate(self._moves[known]):
            line.depart(self._key(item, action, number), kind, seconds, ranks)

    def end(self, line: Timeline, item: Transmit, action: Action) -> Spans:
        """What `item` has sent in the direction of `action` is waited for."""
        for number in range(len(item.communication.collectives)):
            yield from line.arrive(self._key(item, action, number))

    def repeats(self, component: int) -> list[_Traffic]:
        """What a component that is recomputed sends once more in backward."""
        local = self.planned.partition.components[component]
        return [self._seconds(c, local.layout) for c in local.repeats]

    def message(self, message: Message) -> float:
        """Seconds of all values of a message, one after another."""
        known = (message.kind, message.source, message.target)
        if known not in self._messages:
            self._messages[known] = sum(
                collective_seconds("send", pattern(c), self._payload(c, e.source), self.profile)
                for e in self.planned.crossings[message.source, message.target]
                for c in edge_collectives(
                    e.value, e.have, e.want, e.source, e.target, e.flows
                ) or ()
                if c.direction == _DIRECTIONS[message.kind]
            )  # fmt: skip
        return self._messages[known]

    def _key(self, item: Transmit, action: Action, number: int) -> tuple[int, ...]:
        return action.micro_batch, item.component, item.number, number

    def _move(self, item: Transmit, direction: Direction) -> list[_Traffic]:
        layout = self.planned.partition.components[item.component].layout
        sent = (c for c in item.communication.collectives if c.direction == direction)
        return [self._seconds(c, layout) for c in sent]

    def _seconds(self, collective: Collective, layout: Layout) -> _Traffic:
        ranks, payload = pattern(collective), self._payload(collective, layout)
        seconds = collective_seconds(collective.kind, ranks, payload, self.profile)
        return collective.kind, seconds, ranks

    def _payload(self, collective: Collective, layout: Layout) -> float:
        """Bytes for a micro-batch's rows, of the largest block."""
        rows = max(self.planned.blocks(Layout(collective.data) if collective.data else layout))
        of_rows = collective.bytes_per_row * rows**collective.power / self.pieces
        return float(of_rows + collective.fixed_bytes)


class _GroupWalk:
    """What one device group does in a step, in seconds."""

    def __init__(
        self, traffic: Traffic, timelines: Timelines, gradients: GradientSeconds,
        within: Sequence[float],
    ) -> None:  # fmt: skip
        self.within = within[gradients.group] if within else 0.0  # seconds of updates
        self.traffic, self.timelines, self.gradients = traffic, timelines, gradients
        self.planned, self.group, self.line = traffic.planned, gradients.group, gradients.line
        group = self.group
        count = self.planned.plan.micro_batches * traffic.pieces
        self.last: ActionKind = "W" if self.planned.divides else "B"  # makes weights' gradients
        self.seconds, self.left = {}, Counter[int]()  # of each component: until its last backward
        for stage in self.planned.stages_on(group):
            for turn in self.planned.turns[stage]:
                self.left.update(i.component for i in turn if isinstance(i, ComputeShare))
        self.shares = dict(self.left)  # of a micro-batch
        for i in self.left:
            local = self.planned.partition.components[i]
            seconds = _compute(self.planned, local, traffic.profile, traffic.pieces)
            divides = self.planned.divides
            self.seconds[i] = _by_kind(*seconds, local, divides)
            self.left[i] *= count
        self.forward = 0.0
        self.needs: dict[Action, list[Message]] = {}
        actions = self.planned.actions(group, traffic.pieces)
        self.uses = UseWalk(self.planned.gathering.uses(actions, self.planned.stages))
        self.entered = set[int]()  # uses of sharded parameters
        self.again: set[tuple[int, Action]] = set()  # components that were computed again

    def spans(self, instructions: Sequence[Instruction]) -> Spans:
        """The walk (`Timelines`)."""
        sent: list[Message] = []
        yield from self._carry_out(self.uses.start())
        for instruction in instructions:
            if isinstance(instruction, Run):
                begun = self.line.clock
                yield from self._run(instruction.action)
                if instruction.action.kind == "F":
                    self.forward += self.line.clock - begun
                continue
            message, of = instruction.message, self.planned.of
            if isinstance(instruction, Receive):
                self.needs.setdefault(message.needed_by, []).append(message)
            else:
                sent.append(message)
            self.timelines.come(
                self.group, message, 2, "send", self.traffic.message(message),
                (message.kind, message.source, message.target),
                "in" if isinstance(instruction, Receive) else "out",
                frozenset((of[message.source], of[message.target])),
            )  # fmt: skip
        yield from self.timelines.await_all(self.group, sent)
        yield from self.gradients.finish()

    def _run(self, action: Action) -> Spans:
        for message in self.needs.pop(action, ()):
            yield from self.timelines.await_all(self.group, (message,))
        backward = action.kind != "F"
        calls, shared = self.traffic.profile.calls, action.micro_batch % self.traffic.pieces
        if not action.turn and not backward:
            yield from self.line.compute(calls.begin_forward)
        elif not action.turn and not shared:  # those that take turns have one backward
            yield from self.line.compute(calls.begin_backward)
        for item in walked(self.planned.turns[action.stage], action):
            if isinstance(item, ComputeShare):
                yield from self._share(item, action)
            elif item.departs is not backward:
                self.traffic.begin(self.line, item, action)
            else:
                yield from self.traffic.end(self.line, item, action)
        if action.kind == self.last and not action.turn and not shared:
            yield from self.gradients.end_backward(action.stage)
            yield from self.line.compute(self.within)

    def _share(self, item: ComputeShare, action: Action) -> Spans:
        i = item.component
        use = self.uses.uses.number.get((action.of_all(self.traffic.pieces), i))
        if use is not None and use not in self.entered:
            self.entered.add(use)
            yield from self._carry_out(self.uses.enter(use))
        if action.kind == "B" and (i, action) not in self.again:
            self.again.add((i, action))
            for number, repeated in enumerate(self.traffic.repeats(i)):
                key = "again", i, action, number
                self.line.depart(key, *repeated)
                yield from self.line.arrive(key)
        seconds = self.seconds[i][action.kind]
        yield from self.line.compute(seconds * item.share, (i, action))
        if action.kind == self.last:
            self.left[i] -= 1
            if self.left[i] % (self.shares[i] * self.traffic.pieces) == 0:
                yield from self.gradients.ready(action, i)

    def _carry_out(self, events: Iterable[UnitEvent]) -> Spans:
        """What is gathered departs; what is awaited comes, and is copied to where it is read."""
        for event in events:
            held = self.planned.gathering.units[event.unit].holdings
            if event.verb == "gather" and held[0].servers:
                continue  # it has come at the end of the step before
            if event.verb == "gather":
                seconds = shard_seconds("all_gather", held, self.traffic.profile)
                ranks = gradient_pattern(held[0])
                self.line.depart(("gather", event.unit), "all_gather", seconds, ranks)
            elif event.verb == "await":
                yield from self.line.arrive(("gather", event.unit))
                copied = self.gradients.copy_byte * sum(h.local_bytes for h in held)
                yield from self.line.compute(copied)


def _compute(
    planned: PlannedStep, local: LocalComponent, profile: Profile, pieces: int
) -> tuple[float, float]:
    """Seconds of a component's forward and backward for one micro-batch, on the slowest rank."""
    curves = measured(local, profile)
    blocks = planned.blocks(local.layout)
    last = len(curves.forward) - 1
    different = {}  # devices and their rows; of those with the same curve one is enough
    if len(set(map(id, curves.forward))) == 1:
        different = {(0, max(1.0, block / pieces)): 0 for block in set(blocks)}
    else:
        for position in local.layout.positions:
            rank = planned.ranks[position]
            rows = max(1.0, blocks[local.layout.data_index(position)] / pieces)
            different[id(curves.forward[min(rank, last)]), rows] = rank
    forward, backward = max((curves.on(r, n) for (_, n), r in different.items()), key=sum)
    calls = profile.calls
    forward, backward = max(0.0, forward + calls.forward), max(0.0, backward + calls.backward)
    return forward, backward + forward * local.layout.recompute


@dataclass(frozen=True)
class DividedTuning:
    """What a divided backward takes, both parts of it, for a second of a whole one: the mean of
    five models on one core (`benchmarks.divided`), of which the least is 1.03, the most 1.13."""

    seconds: float = 1.08


DIVIDED = DividedTuning()


def _by_kind(
    forward: float, backward: float, local: LocalComponent, divides: bool
) -> Mapping[ActionKind, float]:
    """Seconds by kind of action."""
    if not divides:
        return {"F": forward, "B": backward}
    again = forward * local.layout.recompute
    own, weights = (backward - again) * DIVIDED.seconds, local.division.weights
    return {"F": forward, "B": own * (1 - weights) + again, "W": own * weights}


def computing(planned: PlannedStep, profile: Profile) -> Callable[[int, float], float]:
    """Seconds that a rank computes in a step with a part of the rows, 1.0 being an equal block:
    programs, of which those in fewer blocks are taken to keep their rows, and the optimizer's
    step."""
    parts = planned.partition.components
    programs = [(local.layout.data, measured(local, profile)) for local in parts]
    most = max(data for data, _ in programs)
    slowdowns = profile.relative_slowdowns
    everyone = range(len(slowdowns))
    slowest = update_seconds(planned, profile, range(planned.devices), everyone)
    update = slowest / max(slowdowns)  # of the quickest

    def seconds(rank: int, share: float) -> float:
        total = update * slowdowns[rank]
        for data, curves in programs:
            rows = planned.rows / data * (share if data == most else 1.0)
            total += sum(curves.on(rank, rows))
        return total

    return seconds
