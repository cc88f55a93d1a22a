"""The step time of a plan: its programs walked with measured durations, as the engine walks them.

Micro-batches take turns as their schedule says (values/schedule.py, cost/turns.py), with the
durations of forward, then of backward. Gradients fill buckets (values/buckets.py) that are
all-reduced while backward goes on. Then the optimizer steps.

    seconds = walk(forward) + walk(backward) until the last bucket has arrived
              + update + calls + host

Every duration is of a component or of a collective; no step of the plan has been run. Where ranks
differ in speed or rows, a component takes what it takes on the slowest: they meet at every
collective, and at the end of the step in any case.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from synchromesh.cost.timeline import Timeline
from synchromesh.cost.turns import Portion, Transmit, Turn, turns_of, walked
from synchromesh.trace.partition.local import LocalComponent, Partition
from synchromesh.values import buckets
from synchromesh.values.buckets import SIZES, BucketSizes
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Compute, Pattern, Profile
from synchromesh.values.schedule import Action, taking_turns
from synchromesh.values.traffic import Collective, Direction

_Traffic = tuple[str, float, Pattern]  # kind of a collective, seconds, the groups that it is on


class Unmeasured(ValueError):
    """The profile lacks a program or a collective that a plan would run."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step and what they consist of."""

    seconds: float
    forward: float
    backward: float  # until the last gradient has arrived
    update: float
    computed: float  # seconds of computation, undisturbed
    waited: float  # seconds in which a rank only waits for others
    interleaved: int  # micro-batches that take turns

    @property
    def communication_share(self) -> float:
        """The part of the step in which nothing is computed because something is under way."""
        return self.waited / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Setting:
    """A plan as it would run: its partition, where tensors lie, the rows of a step."""

    partition: Partition
    holdings: Mapping[str, Holding]
    plan: Plan
    devices: int
    rows: int
    overlaps: bool = False  # whether its rows may be cut into interleaved micro-batches

    @property
    def ranks(self) -> Sequence[int]:
        """The rank at each position."""
        return (self.plan.ranks or range(self.devices))[: self.devices]

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """What one micro-batch does in forward."""
        return turns_of(self.partition.components)

    def blocks(self, layout: Layout) -> tuple[int, ...]:
        """Rows of each data index; a rank without rows computes one that does not count."""
        return tuple(max(1, b - a) for a, b in self.plan.row_ranges(self.rows, layout.data))


def step_time(
    setting: Setting,
    profile: Profile,
    micro_batches: int = 1,
    sizes: BucketSizes = SIZES,
) -> StepTime:
    """The predicted time of one step of interleaved micro-batches. Unmeasured: by its name."""
    parts = setting.partition.components
    seconds = [_compute(setting, local, profile, micro_batches) for local in parts]
    moves = _Moves(setting, profile, micro_batches)
    turns = setting.turns
    runs = Counter(i.component for turn in turns for i in turn if isinstance(i, Portion))
    left = {component: count * micro_batches for component, count in runs.items()}
    gradients = _Gradients(setting, profile, sizes)
    line, forward = Timeline(profile.overlap, profile.device), 0.0
    for action, item in walked(turns, taking_turns(micro_batches, len(turns))):
        backward = action.kind == "B"
        if isinstance(item, Portion):
            line.compute(seconds[item.component][backward] * item.share)
            left[item.component] -= backward
            if not left[item.component]:
                gradients.ready(item.component, line)
        elif item.departs is not backward:
            moves.begin(line, item, action)
        else:
            moves.end(line, item, action)
        if not backward:
            forward = line.clock
    gradients.finish(line)
    update = _update(setting, profile, setting.ranks)
    total = line.clock + update + profile.calls.once + profile.host
    return StepTime(
        total, forward, line.clock - forward, update, line.computed, line.waited, micro_batches
    )


def best_interleaving(setting: Setting, profile: Profile, choices: Sequence[int]) -> StepTime:
    """The quickest step: of one micro-batch, or of one of the other `choices` where rows
    suffice."""
    found = [step_time(setting, profile)]
    least = min(min(setting.blocks(c.layout)) for c in setting.partition.components)
    if setting.overlaps:
        found += [step_time(setting, profile, n) for n in choices if 1 < n <= least]
    return min(found, key=lambda t: (t.seconds, t.interleaved))


def _compute(
    setting: Setting, local: LocalComponent, profile: Profile, micro_batches: int
) -> tuple[float, float]:
    """Seconds of a component's forward and backward for one micro-batch, on the slowest rank."""
    found = measured(setting, local, profile)
    blocks = setting.blocks(local.layout)
    last = len(found.forward) - 1
    different = {}  # devices and their rows; of those with the same curve one is enough
    for position, rank in enumerate(setting.ranks):
        rows = max(1.0, blocks[local.layout.data_index(position)] / micro_batches)
        different[id(found.forward[min(rank, last)]), rows] = rank
    forward, backward = max((found.on(r, n) for (_, n), r in different.items()), key=sum)
    calls = profile.calls
    return max(0.0, forward + calls.forward), max(0.0, backward + calls.backward)


def computing(setting: Setting, profile: Profile) -> Callable[[int, float], float]:
    """Seconds that a rank computes in a step with a part of the rows, 1.0 being an equal block:
    programs, of which those in fewer blocks are taken to keep their rows, and the optimizer's
    step."""
    parts = setting.partition.components
    programs = [(local.layout.data, measured(setting, local, profile)) for local in parts]
    most = max(data for data, _ in programs)
    speeds = profile.speeds
    update = _update(setting, profile, range(len(speeds))) * min(speeds)  # on the fastest

    def seconds(rank: int, share: float) -> float:
        total = update / speeds[rank]
        for data, found in programs:
            rows = setting.rows / data * (share if data == most else 1.0)
            total += sum(found.on(rank, rows))
        return total

    return seconds


def measured(setting: Setting, local: LocalComponent, profile: Profile) -> Compute:
    """What was measured of a component. Unmeasured: where nothing was."""
    key = setting.partition.program(local)
    if key not in profile.compute:
        raise Unmeasured(f"{local.component.name} ({local.layout}) was not measured")
    return profile.compute[key]


def pattern(collective: Collective) -> Pattern:
    """The groups of ranks on which a collective runs."""
    return Pattern(collective.ranks, collective.stride)


def collective_seconds(kind: str, ranks: Pattern, payload: float, profile: Profile) -> float:
    """Seconds of one collective, all groups of its pattern at once."""
    if ranks.size == 1 or payload <= 0:
        return 0.0
    curve = profile.network.get((kind, ranks))
    if curve is None:
        raise Unmeasured(f"{kind} on {ranks.size} ranks (stride {ranks.stride}) was not measured")
    return curve(payload)


class _Moves:
    """The communications of a step's moves, each micro-batch with its share of the rows."""

    def __init__(self, setting: Setting, profile: Profile, micro_batches: int) -> None:
        self.setting, self.profile, self.micro_batches = setting, profile, micro_batches
        self._known: dict[tuple[int, int, str], list[_Traffic]] = {}

    def begin(self, line: Timeline, item: Transmit, action: Action) -> None:
        """What `item` sends in the direction of `action` departs."""
        known = (item.component, item.number, action.kind)
        if known not in self._known:
            direction: Direction = "forward" if action.kind == "F" else "backward"
            self._known[known] = self._traffic(item, direction)
        for number, (kind, seconds, ranks) in enumerate(self._known[known]):
            line.depart(self._key(item, action, number), kind, seconds, ranks)

    def end(self, line: Timeline, item: Transmit, action: Action) -> None:
        """What `item` has sent in the direction of `action` is waited for."""
        for number in range(len(item.communication.collectives)):
            line.arrive(self._key(item, action, number))

    def _key(self, item: Transmit, action: Action, number: int) -> tuple[int, ...]:
        return action.micro_batch, item.component, item.number, number

    def _traffic(self, item: Transmit, direction: Direction) -> list[_Traffic]:
        found: list[_Traffic] = []
        layout = self.setting.partition.components[item.component].layout
        for c in item.communication.collectives:
            if c.direction == direction:
                data = c.data or layout.data
                rows = max(self.setting.blocks(Layout(data, self.setting.devices // data)))
                payload = c.bytes_per_row * rows**c.power / self.micro_batches + c.fixed_bytes
                seconds = collective_seconds(c.kind, pattern(c), payload, self.profile)
                found.append((c.kind, seconds, pattern(c)))
        return found


def gradient_pattern(holding: Holding) -> Pattern:
    """The groups of ranks over which a parameter's gradient is summed."""
    layout = holding.gradient_layout
    return Pattern(layout.data, layout.tensor)


class _Gradients:
    """Gradient buckets in their order, each sent when its last gradient is there."""

    def __init__(self, setting: Setting, profile: Profile, sizes: BucketSizes) -> None:
        self.profile, self.holdings = profile, setting.holdings
        self._copy_byte = profile.copy_byte * profile.lateness(setting.ranks)
        self._first_user: dict[str, int] = {}  # whose backward ends last
        for i, local in enumerate(setting.partition.components):
            for p in local.component.parameters:
                if p.trainable and p.name in setting.holdings:
                    self._first_user.setdefault(p.name, i)
        trained = [setting.holdings[name] for name in self._first_user]
        self.buckets = buckets.fill(
            [h for h in trained if h.summed],
            lambda h: (gradient_pattern(h), h.tensor.dtype),
            lambda h: h.local_bytes,
            sizes,
        )
        self._missing = [{h.tensor.name for h in bucket} for bucket in self.buckets]
        self._next = 0

    def ready(self, component: int, line: Timeline) -> None:
        """The backward of `component` is done: its gradients go into their buckets."""
        names = {n for n, i in self._first_user.items() if i == component}
        for missing in self._missing:
            copied = sum(self.holdings[n].local_bytes for n in missing & names)
            line.compute(self._copy_byte * copied)
            missing -= names
        while self._next < len(self.buckets) and not self._missing[self._next]:
            self._launch(line)

    def _launch(self, line: Timeline) -> None:
        bucket = self.buckets[self._next]
        ranks, payload = gradient_pattern(bucket[0]), sum(h.local_bytes for h in bucket)
        seconds = collective_seconds("all_reduce", ranks, payload, self.profile)
        line.depart(("gradients", self._next), "all_reduce", seconds, ranks)
        self._next += 1

    def finish(self, line: Timeline) -> None:
        """Backward is over: what is left is sent, and everything under way is waited for."""
        while self._next < len(self.buckets):
            self._launch(line)
        line.finish()


def _update(setting: Setting, profile: Profile, ranks: Sequence[int]) -> float:
    """Seconds of the optimizer's step on the slowest of `ranks`; it was measured on all's."""
    trained = [h for h in setting.holdings.values() if h.tensor.trainable]
    byte, tensor = profile.update_byte, profile.update_tensor
    slowest = byte * sum(h.local_bytes for h in trained) + tensor * len(trained)
    return slowest * profile.lateness(ranks)
