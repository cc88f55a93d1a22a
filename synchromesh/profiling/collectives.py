"""The network measured: seconds of collectives, all groups at once, and of messages of pairs.

Every rank calls `collectives` alike. A small size is timed by a few calls in a row, after one that
is not counted, and what counts is the slowest rank: nobody goes on before it has what it needs.
Messages go as the engine sends them, through the group of all ranks; of the rounds in which a
pattern's pairs talk (`Pattern.pairs`) the slower one counts."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from synchromesh.engine.groups import Group, Ranks
from synchromesh.engine.reduce_scatter import quickest
from synchromesh.engine.world import World
from synchromesh.values.profile import Curve, Pattern
from synchromesh.values.traffic import MESSAGES


@dataclass(frozen=True)
class CollectiveTuning:
    """With which payloads, and how long, a collective is timed. Chosen, not measured."""

    sizes: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23)  # bytes
    calls: int = 5  # of a short collective; their median counts
    long_seconds: float = 0.05  # a call longer than this is not repeated
    doubtful: float = 1.1  # times the seconds a byte of the size before: timed once more
    most_seconds: float = 0.3  # one call longer than this ends a curve: its line goes on


TUNING = CollectiveTuning()


def collectives(
    world: World, ranks: Sequence[int], wanted: Iterable[tuple[str, Pattern, int]]
) -> dict[tuple[str, Pattern], Curve]:
    """Curves by kind and pattern, up to the payloads `wanted`. ranks: at the stage's positions."""
    most: dict[tuple[str, Pattern], int] = {}
    for kind, pattern, size in wanted:
        most[kind, pattern] = max(size, most.get((kind, pattern), 0))
    curves = {}
    for (kind, pattern), size in sorted(most.items()):
        groups = _groups(world, ranks, kind, pattern)
        _choose_ways(groups, kind, pattern, size)
        curves[kind, pattern] = Curve.of(_curve(world, groups, kind, pattern, size))
    return curves


def reaches(curve: Curve, payload: int) -> bool:
    """Whether a curve goes as far as one that is measured for `payload` would."""
    size, seconds = curve.points[-1]
    long = seconds > TUNING.most_seconds / 2  # it ended there; it may have been scaled since
    return size >= min(payload, TUNING.sizes[-1]) or long


def sampled(
    world: World, ranks: Sequence[int], kind: str, pattern: Pattern, sizes: Sequence[int],
    most: float,
) -> list[tuple[float, float]]:  # fmt: skip
    """(payload, seconds) of one kind and pattern at the first of `sizes` and at the last, or the
    first one above `most` seconds; the median or, of long ones, the least of a few."""
    groups = _groups(world, ranks, kind, pattern)
    _choose_ways(groups, kind, pattern, sizes[-1])

    def call(size: int) -> float:
        return max(slowest(world, group, kind, pattern.size, size) for group in groups)

    first = median(call(sizes[0]) for _ in range(TUNING.calls))
    size, once = sizes[0], first
    for size in sizes[1:]:
        once = call(size)
        if once > most and (once := min(once, call(size))) > most:
            break  # not by a pause alone
    last = once if once > most or size == sizes[0] else median([once, call(size), call(size)])
    return [(float(sizes[0]), first), (float(size), last)]


@dataclass(frozen=True)
class Pair:
    """Two ranks that send messages to each other through a group of more, or this rank alone."""

    group: Group
    members: tuple[int, ...]  # indices in the group, first of the one that sends where one does

    @classmethod
    def among(cls, group: Group, pairs: Iterable[tuple[int, int]]) -> "Pair":
        """This rank's pair of several that are disjoint; of a group of its own it is alone."""
        own = [p for p in pairs if group.index in p and group.size > 1]
        return cls(group, own[0] if own else (group.index,))

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def world(self) -> Ranks:
        return self.group.world

    def start(self, both: bool, sent: Tensor, received: Tensor) -> Callable[[], None]:
        """Begins to send `sent`, which fills the other's `received`; both: each to the other."""
        first = self.group.index == self.members[0]
        other = self.members[1 if first else 0]
        sends = [(other, sent)] if both or first else []
        receives = [(other, received)] if both or not first else []
        return self.group.start_exchange(sends, receives)


def _groups(
    world: World, ranks: Sequence[int], kind: str, pattern: Pattern
) -> list[Group] | list[Pair]:
    """This rank's group of a pattern over `ranks`, or its pair in each round; alone where none."""
    idle = [(r,) for r in range(world.size) if r not in set(ranks)]
    if kind in MESSAGES:
        everyone = world.groups([tuple(ranks), *idle])
        return [Pair.among(everyone, pairs) for pairs in pattern.pairs(len(ranks))]
    groups = [tuple(ranks[p] for p in group) for group in pattern.groups(len(ranks))]
    return [world.groups([*groups, *idle])]


def _choose_ways(groups: Iterable[Group | Pair], kind: str, pattern: Pattern, most: int) -> None:
    for group in groups:
        if kind == "reduce_scatter" and isinstance(group, Group) and group.size == pattern.size:
            choose_way(group, most)


def choose_way(group: Group, payload: int) -> None:
    """A group keeps the way that is quickest for the largest payload, not for the first one."""
    if group.size > 1 and group.ranks not in group.world.choices:
        group.world.choices[group.ranks] = quickest(group, payload)


def _curve(
    world: World, groups: Sequence[Group | Pair], kind: str, pattern: Pattern, most: int
) -> list[tuple[float, float]]:
    def taken(size: int) -> float:
        return max(_seconds(world, group, kind, pattern.size, size) for group in groups)

    points: list[tuple[float, float]] = []
    # two points at least, to tell latency
    upper = next((s for s in TUNING.sizes[1:] if s >= most), TUNING.sizes[-1])
    for size in (s for s in TUNING.sizes if s <= upper):
        seconds = taken(size)
        if points and seconds > TUNING.doubtful * points[-1][1] * size / points[-1][0]:
            # more a byte than for fewer bytes: something came between
            seconds = min(seconds, taken(size))
        # fewer bytes take no longer: what did was a pause, and would make more take as long
        points = [(x, min(y, seconds)) for x, y in points]
        points.append((float(size), seconds))
        if seconds > TUNING.most_seconds and len(points) > 1:
            break
    return points


def _seconds(world: World, group: Group | Pair, kind: str, ranks: int, payload: int) -> float:
    """The median of a few calls after a first one, of the slowest rank. A long first call counts;
    it is repeated for all-reduces alone, for gradients take the most."""
    call = partial(slowest, world, group, kind, ranks, payload)
    first = call()
    if first > TUNING.long_seconds:
        return first if kind != "all_reduce" else median([first, call(), call()])
    return median(call() for _ in range(TUNING.calls))


def slowest(world: World, group: Group | Pair, kind: str, ranks: int, payload: int) -> float:
    """Seconds of one call on the rank that is slowest; ranks whose group is another are idle."""
    takes_part = group.size == ranks
    return timed(world, lambda: takes_part and begun(group, kind, payload)())


def timed(world: World, run: Callable[[], Any]) -> float:
    """Seconds that `run` takes on the rank that is slowest; all begin together."""
    world.everyone.barrier()
    began = time.perf_counter()
    run()
    wait(world)
    return largest(world, time.perf_counter() - began)


def wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def largest(world: World, seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64, device=world.device)
    world.everyone.all_reduce(value, "max", counted=False)
    return float(value)


def prepared(group: Group | Pair, kind: str, payload: int) -> Callable[[], Callable[[], Any]]:
    """An uncounted collective or message of `payload` bytes with its tensors: what begins it."""
    world = group.world
    numbers = max(1, payload // 4)
    part = torch.zeros(max(1, numbers // group.size), device=world.device)
    start: Callable[[], Callable[[], Any]]
    if isinstance(group, Pair):
        full = torch.zeros(numbers, device=world.device)
        start = partial(group.start, kind == "exchange", full, torch.empty_like(full))
        return lambda: _uncounted(world, start)
    match kind:
        case "all_reduce":
            start = partial(group.start_all_reduce, torch.zeros(numbers, device=world.device))
        case "all_gather":
            start = partial(group.start_all_gather, part)
        case "reduce_scatter":
            start = partial(group.start_reduce_scatter, part.repeat(group.size, 1))
        case "all_to_all":
            start = partial(group.start_all_to_all, [part] * group.size)
        case _:
            raise AssertionError(f"no collective {kind!r}")

    return lambda: _uncounted(world, start)


def _uncounted(world: Ranks, start: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    with world.ledger.paused():
        return start()


def begun(group: Group | Pair, kind: str, payload: int) -> Callable[[], Any]:
    """Begins a collective that is not counted; an idle rank, in a group alone, begins nothing."""
    return (lambda: None) if group.size == 1 else prepared(group, kind, payload)()
