"""The network measured: seconds of the collectives that layouts ask for, all groups at once.

Every rank calls `collectives` alike. A small size is timed by a few calls in a row, after one that
is not counted, and what counts is the slowest rank: nobody goes on before it has what it needs.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import torch

from synchromesh.engine.groups import Group, World
from synchromesh.profile import Curve, Overlap, Pattern

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23)  # bytes of payload
CALLS = 3
LONG_SECONDS = 0.05  # a call longer than this is not repeated
DELAYS, TIRING, SMALL = 8, 0.03, 1 << 14  # calls; seconds computed before; bytes
LONGER = 2.0  # times a collective, that computation goes on beside it
DOUBTFUL = 1.1  # times the seconds a byte of the size before
MOST_SECONDS = 0.3  # one call longer than this ends a curve: the line goes on from there


def collectives(
    world: World, ranks: Sequence[int], wanted: Iterable[tuple[str, Pattern, int]]
) -> dict[tuple[str, Pattern], Curve]:
    """Curves by kind and pattern; `wanted` says up to which payload each must reach.

    ranks: the rank at each position of the stage; ranks that are not named take no part.
    """
    most: dict[tuple[str, Pattern], int] = {}
    for kind, pattern, size in wanted:
        most[kind, pattern] = max(size, most.get((kind, pattern), 0))
    idle = [(r,) for r in range(world.size) if r not in set(ranks)]
    found = {}
    for (kind, pattern), size in sorted(most.items()):
        groups = [tuple(ranks[p] for p in group) for group in pattern.groups(len(ranks))]
        group = world.groups([*groups, *idle])
        if kind == "reduce_scatter" and group.size == pattern.size:
            _choose_way(group, size)
        found[kind, pattern] = Curve.of(_curve(world, group, kind, pattern, size))
    return found


def reaches(curve: Curve, payload: int) -> bool:
    """Whether a curve goes as far as one that is measured for `payload` would."""
    size, seconds = curve.points[-1]
    long = seconds > MOST_SECONDS / 2  # it ended there; it may have been scaled since
    return size >= min(payload, SIZES[-1]) or long


def at_sizes(
    world: World,
    ranks: Sequence[int],
    kind: str,
    pattern: Pattern,
    sizes: Sequence[int],
    most: float,
) -> list[tuple[float, float]]:
    """(payload, seconds) of one kind and pattern, until a call takes more than `most` seconds."""
    idle = [(r,) for r in range(world.size) if r not in set(ranks)]
    groups = [tuple(ranks[p] for p in group) for group in pattern.groups(len(ranks))]
    group = world.groups([*groups, *idle])
    points: list[tuple[float, float]] = []
    for size in sizes:
        points.append((float(size), _seconds(world, group, kind, pattern.size, size, sure=False)))
        if points[-1][1] > most:
            break
    return points


def _choose_way(group: Group, payload: int) -> None:
    """A group keeps the first way it finds quickest: not for the small payload that comes first
    here, but for the largest that is asked for."""
    if group.size > 1 and group.ranks not in group.world.choices:
        group.world.choices[group.ranks] = group.measure_reduce_scatter(payload)


def _curve(
    world: World, group: Group, kind: str, pattern: Pattern, most: int
) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    upper = next((s for s in SIZES[1:] if s >= most), SIZES[-1])  # two points, to tell latency
    for size in (s for s in SIZES if s <= upper):
        seconds = _seconds(world, group, kind, pattern.size, size)
        if points and seconds > DOUBTFUL * points[-1][1] * size / points[-1][0]:
            # more a byte than for fewer bytes: something came between
            seconds = min(seconds, _seconds(world, group, kind, pattern.size, size))
        points.append((float(size), seconds))
        if seconds > MOST_SECONDS and len(points) > 1:
            break
    return points


def _seconds(
    world: World, group: Group, kind: str, ranks: int, payload: int, sure: bool = True
) -> float:
    """The median of a few calls after a first one, of the rank that is slowest. What a long call
    does for the first time is nothing beside it: it counts, and is repeated for all-reduces alone,
    for gradients take the most; sure: and only where that is worth the time."""
    first = _slowest(world, group, kind, ranks, payload)
    if first > LONG_SECONDS and not (sure and kind == "all_reduce"):
        return first
    if first > LONG_SECONDS:
        return median([first, *(_slowest(world, group, kind, ranks, payload) for _ in range(2))])
    return median(_slowest(world, group, kind, ranks, payload) for _ in range(CALLS))


def _slowest(world: World, group: Group, kind: str, ranks: int, payload: int) -> float:
    """Seconds of one call on the rank that is slowest."""
    world.everyone.barrier()
    began = time.perf_counter()
    if group.size == ranks:
        with world.ledger.paused():
            _start(group, kind, payload, world.device)()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    taken = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=world.device)
    world.everyone.all_reduce(taken, "max", counted=False)
    return float(taken)


def _start(group: Group, kind: str, payload: int, device: torch.device) -> Callable[[], Any]:
    """Begins a collective of `payload` bytes as `traffic.sent_bytes` counts them."""
    numbers = max(1, payload // 4)
    part = torch.zeros(max(1, numbers // group.size), device=device)
    match kind:
        case "all_reduce":
            return group.start_all_reduce(torch.zeros(numbers, device=device))
        case "all_gather":
            return group.start_all_gather(part)
        case "reduce_scatter":
            return group.start_reduce_scatter(part.repeat(group.size, 1))
        case "all_to_all":
            return group.start_all_to_all([part] * group.size)
    raise AssertionError(f"no collective {kind!r}")


def overlap(
    world: World, ranks: Sequence[int], kinds: Iterable[str], seconds: float
) -> dict[str, Overlap]:
    """How computation and a large collective of each kind slow each other down on a stage's ranks.

    With Tn the seconds of the collective alone, two trials tell the rates a of computation and b
    of traffic while both go on:

        computes for Tn / 2, then waits until Tn'     (1 - b) Tn / 2 = Tn' - Tn
        computes long past the arrival, Tc' not Tc    (1 - a) Tn / b = Tc' - Tc

    and a third one, with small collectives, their delay after ranks have computed; it is a matter
    of the ranks, so all kinds have the mean.
    """
    everyone = tuple(ranks)
    group = world.groups([everyone, *((r,) for r in range(world.size) if r not in everyone)])
    if len(everyone) < 2:
        return {}
    found = {}
    chosen = dict(world.choices)
    for kind in sorted(set(kinds)):
        payload, alone = _payload(world, group, kind, seconds)
        trials = [_trial(world, group, kind, payload, alone) for _ in range(CALLS)]
        mine = torch.tensor(
            [*(median(t) for t in zip(*trials, strict=True)), _delay(world, group, kind)],
            dtype=torch.float64,
        )
        shared = mine.to(world.device) * (group.size > 1)  # an idle rank has nothing to tell
        world.everyone.all_reduce(shared, counted=False)
        late, lost, delay = (shared / len(everyone)).tolist()
        b = min(1.0, max(0.05, 1 - 2 * late / alone))
        a = min(1.0, max(0.05, 1 - lost * b / alone))
        found[kind] = Overlap(a, b, delay)
    late = fmean(o.delay for o in found.values()) if found else 0.0
    found = {kind: replace(o, delay=late) for kind, o in found.items()}
    world.choices.clear()
    world.choices.update(chosen)  # what was quickest for these payloads need not be for others
    return found


def _trial(
    world: World, group: Group, kind: str, payload: int, alone: float
) -> tuple[float, float]:
    """Seconds that the collective was late, and that computation lost."""
    world.everyone.barrier()
    began = time.perf_counter()
    finish = _begun(world, group, kind, payload)
    _compute(world, alone / 2)
    finish()
    late = time.perf_counter() - began - alone
    products = int(_compute(world, LONGER * alone))  # undisturbed
    world.everyone.barrier()
    finish = _begun(world, group, kind, payload)
    lost = _compute(world, 0.0, products) - LONGER * alone
    finish()
    return max(0.0, late), max(0.0, lost)


def _delay(world: World, group: Group, kind: str) -> float:
    """Seconds that a small collective takes longer on this rank after it has computed."""
    alone: list[float] = []
    after: list[float] = []
    for _ in range(DELAYS):
        for taken, seconds in ((alone, 0.0), (after, TIRING)):
            world.everyone.barrier()
            _compute(world, seconds)
            began = time.perf_counter()
            _begun(world, group, kind, SMALL)()
            taken.append(time.perf_counter() - began)
    return max(0.0, fmean(after) - fmean(alone))


def _begun(world: World, group: Group, kind: str, payload: int) -> Callable[[], Any]:
    if group.size == 1:  # an idle rank
        return lambda: None
    with world.ledger.paused():
        return _start(group, kind, payload, world.device)


def _compute(world: World, seconds: float, products: int = 0) -> float:
    """Runs products for `seconds` and returns how many; or so many, and returns their seconds."""
    x = torch.ones(128, 128, device=world.device)
    began, done = time.perf_counter(), 0
    if seconds <= 0.0 and not products:
        return 0.0
    while done < products or (not products and time.perf_counter() - began < seconds):
        torch.mm(x, x)
        done += 1
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
    return time.perf_counter() - began if products else float(done)


def _payload(world: World, group: Group, kind: str, seconds: float) -> tuple[int, float]:
    """Bytes (64 KB to 16 MB) with which a collective takes about `seconds`, and what it takes."""
    size, once = 1 << 16, 0.0
    while True:
        once = _seconds(world, group, kind, group.size, size)
        if once >= seconds / 2 or size >= 1 << 24:
            return size, once
        size *= 2
