"""The step time of a plan: its programs walked with measured durations, as the engine walks them.

Forward, the pieces of the batch take turns: each computes until a move departs, then the next one
goes on (`engine/program.py`). Backward is the reverse of that order, an arrival becoming a
departure, with the backward durations; gradients fill buckets that are all-reduced meanwhile
(`engine/gradients.py`). Then the optimizer steps.

    seconds = walk(forward) + walk(backward) until the last bucket has arrived + update + host

Every duration is of a component or of a collective; no step of the plan has been run. Where ranks
differ in speed or rows, a component takes what it takes on the slowest: they meet at every
collective, and at the end of the step in any case.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from synchromesh.cost.timeline import Timeline
from synchromesh.trace.partition.local import Communication, Computation, LocalComponent, Partition
from synchromesh.values.component import Parameter
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Compute, Pattern, Profile
from synchromesh.values.traffic import Collective

MIB = 1 << 20
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * MIB, MIB  # as the engine's


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
    pieces: int

    @property
    def communication_share(self) -> float:
        """The part of the step in which nothing is computed because something is under way."""
        return self.waited / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Setting:
    """A plan as it would run: its partition, how tensors are held, the rows of a step."""

    partition: Partition
    held: Mapping[str, Holding]
    plan: Plan
    devices: int
    rows: int
    overlaps: bool = False  # whether the rows may walk in pieces

    @property
    def ranks(self) -> Sequence[int]:
        """The rank at each position."""
        return (self.plan.ranks or range(self.devices))[: self.devices]

    def blocks(self, layout: Layout) -> tuple[int, ...]:
        """Rows of each data index; a rank without rows computes one that does not count."""
        return tuple(max(1, b - a) for a, b in self.plan.row_ranges(self.rows, layout.data))


# Tokens of a walk: (piece, component, part of its work), or a hop that departs or arrives.


@dataclass(frozen=True)
class Run:
    piece: int
    component: int
    share: float


@dataclass(frozen=True)
class Depart:
    key: tuple[int, int, int]  # piece, component, number of the event
    component: int
    hop: Communication


@dataclass(frozen=True)
class Arrive:
    key: tuple[int, int, int]
    component: int
    hop: Communication


Token = Run | Depart | Arrive
_Sent = tuple[str, float, Pattern]  # kind of a collective, seconds, the groups that it is on


def step_time(setting: Setting, profile: Profile, pieces: int = 1) -> StepTime:
    """The predicted time of one step, its rows walking in `pieces`. Unmeasured: by its name."""
    parts = setting.partition.components
    rates = [_compute(setting, local, profile, pieces) for local in parts]
    order = walked(parts, pieces)
    line = Timeline(profile.overlap, profile.device)
    for token in order:
        match token:
            case Run(_, i, share):
                line.compute(rates[i][0] * share)
            case Depart(key, i, hop):
                _begin(line, key, _hop(setting, parts[i], hop, profile, pieces, "forward"))
            case Arrive(key):
                _end(line, key)
    forward = line.clock
    buckets = _Buckets(setting, profile)
    first = {t.component: n for n, t in reversed(list(enumerate(order))) if isinstance(t, Run)}
    for number in range(len(order) - 1, -1, -1):
        token = order[number]
        match token:
            case Run(_, i, share):
                line.compute(rates[i][1] * share)
                if first[i] == number:
                    buckets.ready(i, line)
            case Arrive(key, i, hop):
                _begin(line, key, _hop(setting, parts[i], hop, profile, pieces, "backward"))
            case Depart(key):
                _end(line, key)
    buckets.finish(line)
    backward = line.clock - forward
    update = _update(setting, profile, setting.ranks)
    seconds = line.clock + update + profile.host
    return StepTime(seconds, forward, backward, update, line.computed, line.waited, pieces)


def best_pieces(setting: Setting, profile: Profile, choices: Sequence[int]) -> StepTime:
    """The quickest way to walk: whole, or in one of the other `choices` where rows suffice."""
    found = [step_time(setting, profile, 1)]
    least = min(min(setting.blocks(c.layout)) for c in setting.partition.components)
    if setting.overlaps:
        found += [step_time(setting, profile, n) for n in choices if 1 < n <= least]
    return min(found, key=lambda t: (t.seconds, t.pieces))


def walked(parts: Sequence[LocalComponent], pieces: int) -> list[Token]:
    """What a rank does in forward, in its order; backward is the reverse."""
    return list(_in_turns([list(_tokens(parts, piece)) for piece in range(pieces)]))


def _tokens(parts: Sequence[LocalComponent], piece: int) -> Iterator[Token]:
    """What one piece does, component after component."""
    for i, local in enumerate(parts):
        total = sum(e.work for e in local.events if isinstance(e, Computation))
        if not total:
            yield Run(piece, i, 1.0)
        for number, event in enumerate(local.events):
            if isinstance(event, Computation):
                yield Run(piece, i, event.work / total)
            else:
                key = (piece, i, number)
                yield Depart(key, i, event)
                yield Arrive(key, i, event)


def _in_turns(lanes: Sequence[Sequence[Token]]) -> Iterator[Token]:
    """The order of `engine.program.in_turns`: each lane goes on until its next pause."""
    at = [0] * len(lanes)
    while any(place < len(lane) for place, lane in zip(at, lanes, strict=True)):
        for i, lane in enumerate(lanes):
            while at[i] < len(lane):
                token = lane[at[i]]
                at[i] += 1
                yield token
                if isinstance(token, Depart) and token.hop.pauses:
                    break


def _compute(
    setting: Setting, local: LocalComponent, profile: Profile, pieces: int
) -> tuple[float, float]:
    """Seconds of a component's forward and backward for one piece, on the slowest rank."""
    found = _known(setting, local, profile)
    blocks = setting.blocks(local.layout)
    last = len(found.forward) - 1
    different = {}  # devices and their rows; of those with the same curve one is enough
    for position, rank in enumerate(setting.ranks):
        rows = max(1.0, blocks[local.layout.data_index(position)] / pieces)
        different[id(found.forward[min(rank, last)]), rows] = rank
    return max((found.on(rank, rows) for (_, rows), rank in different.items()), key=sum)


def computing(setting: Setting, profile: Profile) -> Callable[[int, float], float]:
    """Seconds that a rank computes in a step with a part of the rows, 1.0 being an equal block:
    programs, of which those in fewer blocks are taken to keep their rows, and the optimizer's
    step."""
    parts = setting.partition.components
    programs = [(local.layout.data, _known(setting, local, profile)) for local in parts]
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


def _known(setting: Setting, local: LocalComponent, profile: Profile) -> Compute:
    key = setting.partition.program(local)
    if key not in profile.compute:
        raise Unmeasured(f"{local.component.name} ({local.layout}) was not measured")
    return profile.compute[key]


def pattern(collective: Collective) -> Pattern:
    return Pattern(collective.ranks, collective.stride)


def collective_seconds(kind: str, ranks: Pattern, payload: float, profile: Profile) -> float:
    """Seconds of one collective, all groups of its pattern at once."""
    if ranks.size == 1 or payload <= 0:
        return 0.0
    curve = profile.network.get((kind, ranks))
    if curve is None:
        raise Unmeasured(f"{kind} on {ranks.size} ranks (stride {ranks.stride}) was not measured")
    return curve(payload)


def _hop(
    setting: Setting,
    local: LocalComponent,
    hop: Communication,
    profile: Profile,
    pieces: int,
    direction: str,
) -> list[_Sent]:
    """What a hop sends in one direction, for one piece."""
    found: list[_Sent] = []
    for c in hop.collectives:
        if c.direction == direction:
            data = c.data or local.layout.data
            rows = max(setting.blocks(Layout(data, setting.devices // data)))
            payload = c.bytes_per_row * rows / pieces + c.fixed_bytes
            seconds = collective_seconds(c.kind, pattern(c), payload, profile)
            found.append((c.kind, seconds, pattern(c)))
    return found


def _begin(line: Timeline, key: tuple[int, int, int], sends: list[_Sent]) -> None:
    for number, (kind, seconds, ranks) in enumerate(sends):
        line.depart((*key, number), kind, seconds, ranks)


def _end(line: Timeline, key: tuple[int, int, int]) -> None:
    for other in [k for k in line.under_way if isinstance(k, tuple) and k[:3] == key]:
        line.arrive(other)


def gradient_pattern(held: Holding) -> Pattern:
    """The ranks over which a parameter's gradient is summed."""
    if held.placement.kind == "r":
        return Pattern(held.layout.devices)
    return Pattern(held.layout.data, held.layout.tensor)


def held_bytes(held: Holding) -> int:
    """Bytes of a tensor on one rank."""
    return Parameter("", held.local_shape, held.tensor.dtype).bytes


@dataclass
class _Bucket:
    ranks: Pattern
    bytes: int
    waits_for: set[str]


class _Buckets:
    """Gradient buckets in the engine's order, each sent when its last gradient is there."""

    def __init__(self, setting: Setting, profile: Profile) -> None:
        self.profile, self.held = profile, setting.held
        self._copy_byte = profile.copy_byte * profile.lateness(setting.ranks)
        users: dict[str, list[int]] = {}
        for i, local in enumerate(setting.partition.components):
            for p in local.component.parameters:
                if p.trainable and p.name in setting.held:
                    users.setdefault(p.name, []).append(i)
        self._last = {name: min(where) for name, where in users.items()}
        self._buckets = _filled([setting.held[name] for name in users][::-1])
        self._next = 0

    def ready(self, component: int, line: Timeline) -> None:
        """The backward of `component` is done: its gradients go into their buckets."""
        names = {n for n, i in self._last.items() if i == component}
        for bucket in self._buckets:
            mine = bucket.waits_for & names
            line.compute(self._copy_byte * sum(held_bytes(self.held[n]) for n in mine))
            bucket.waits_for -= mine
        while self._next < len(self._buckets) and not self._buckets[self._next].waits_for:
            self._launch(line)

    def _launch(self, line: Timeline) -> None:
        bucket = self._buckets[self._next]
        seconds = collective_seconds("all_reduce", bucket.ranks, bucket.bytes, self.profile)
        line.depart(("gradients", self._next), "all_reduce", seconds, bucket.ranks)
        self._next += 1

    def finish(self, line: Timeline) -> None:
        while self._next < len(self._buckets):
            self._launch(line)
        line.finish()


def _filled(parameters: Sequence[Holding]) -> list[_Bucket]:
    """Parameters in the reverse order of the chain fall into buckets (engine/gradients.py)."""
    filling: dict[tuple[Pattern, str], _Bucket] = {}
    begun: set[tuple[Pattern, str]] = set()
    done: list[_Bucket] = []
    for held in parameters:
        ranks = gradient_pattern(held)
        if ranks.size == 1:
            continue
        key = (ranks, held.tensor.dtype)
        bucket = filling.setdefault(key, _Bucket(ranks, 0, set()))
        bucket.bytes += held_bytes(held)
        bucket.waits_for.add(held.tensor.name)
        if bucket.bytes >= (BUCKET_BYTES if key in begun else FIRST_BUCKET_BYTES):
            done.append(filling.pop(key))
            begun.add(key)
    return done + list(filling.values())


def _update(setting: Setting, profile: Profile, ranks: Sequence[int]) -> float:
    """Seconds of the optimizer's step on the slowest of `ranks`; it was measured on all's."""
    trained = [h for h in setting.held.values() if h.tensor.trainable]
    byte, tensor = profile.update_byte, profile.update_tensor
    slowest = byte * sum(map(held_bytes, trained)) + tensor * len(trained)
    return slowest * profile.lateness(ranks)
