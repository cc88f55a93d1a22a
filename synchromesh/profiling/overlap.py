"""How computation and traffic slow each other down, measured while both go on.

Collectives run back to back, alone and then beside small products, on all ranks at once:

    t0  seconds of one alone            p0  products a second where nothing else goes on
    t   seconds of one beside them      P   products done in the T seconds of all beside them

    b  =  t0 / t       the rate of traffic       a  =  P / (p0 T)       that of computation

Messages also run both ways between two ranks at once; with t2 seconds of such a pair of them

    both  =  t0 / t2   the rate of each

Both rows last long enough to hold several periods of a CPU quota: what one collective and one
computation do to each other depends on the moment at which they meet."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from statistics import fmean

import torch

from synchromesh.engine.groups import Group
from synchromesh.engine.world import World
from synchromesh.profiling.collectives import Pair, begun, choose_way, largest, slowest
from synchromesh.programs.clock import settled
from synchromesh.values.profile import Overlap, Pattern
from synchromesh.values.traffic import MESSAGES


@dataclass(frozen=True)
class OverlapTuning:
    """How traffic and computation are made to meet. Chosen, not measured."""

    parts: int = 5  # collectives in the time that is asked for, at most
    least_bytes: int = 1 << 16  # of payload
    most_bytes: int = 1 << 24
    delay_calls: int = 16  # small collectives that show how late ranks are, at most
    delay_calls_at_once: int = 4  # of them, before their mean may count as known
    delay_compute_seconds: float = 0.03  # that are computed before each of them
    delay_bytes: int = 1 << 14  # payload of each of them


TUNING = OverlapTuning()


def overlap(
    world: World, ranks: Sequence[int], kinds: Iterable[str], seconds: float,
    known: Mapping[str, Overlap],
) -> dict[str, Overlap]:  # fmt: skip
    """The overlap of each kind of collective on all of `ranks`, by traffic that takes `seconds`
    alone; the other ranks take no part. Messages go from the first half of the ranks to the second
    (and back). The delay of small ones after ranks have computed is a matter of the ranks: it is
    measured with one kind, where `known` has no other."""
    everyone = tuple(ranks)
    group = world.groups([everyone, *((r,) for r in range(world.size) if r not in everyone)])
    asked = sorted(set(kinds))
    if len(everyone) < 2 or not asked:
        return {}
    pair = Pair.among(group, Pattern(2, len(everyone) // 2).pairs(len(everyone))[0])
    chosen = dict(world.choices)
    world.everyone.barrier()
    usual = _computed(world.device, seconds) / seconds
    of = {kind: pair if kind in MESSAGES else group for kind in asked}
    rates = {k: _mean(world, at, _rates(world, at, k, seconds, usual)) for k, at in of.items()}
    first, at = next(iter(of.items()))
    delays = [o.delay for o in known.values()] or _mean(world, at, [_delay(world, at, first)])
    world.choices.clear()
    world.choices.update(chosen)  # what was quickest for these payloads need not be for others
    return {
        kind: Overlap(_rate(a), _rate(b), max(0.0, delays[0]), _rate(both))
        for kind, (a, b, both) in rates.items()
    }


def _mean(world: World, group: Group | Pair, numbers: Sequence[float]) -> list[float]:
    """The means over the ranks that are not alone."""
    shared = torch.tensor([*numbers, 1.0], dtype=torch.float64).to(world.device)
    shared *= group.size > 1
    world.everyone.all_reduce(shared, counted=False)
    *total, count = shared.tolist()
    return [x / count for x in total]


def _rate(rate: float) -> float:
    return min(1.0, max(Overlap.LEAST_RATE, rate))


def _rates(
    world: World, group: Group | Pair, kind: str, seconds: float, usual: float
) -> tuple[float, float, float]:
    """a, b and, of messages, `both` on this rank. usual: products a second without traffic."""
    payload, once = _payload(world, group, kind, seconds / TUNING.parts)
    count = max(2, ceil(seconds / max(once, seconds / 100)))
    alone, both = _in_a_row(world, group, kind, payload, count), 1.0
    if kind in MESSAGES:
        both = alone / _in_a_row(world, group, "exchange", payload, count)
    beside, lasted, products = _beside_products(world, group, kind, payload, seconds)
    return products / usual / lasted, alone * beside / lasted, both


def _in_a_row(world: World, group: Group | Pair, kind: str, payload: int, count: int) -> float:
    world.everyone.barrier()
    with _own_stream(world.device) as arrived:
        began = time.perf_counter()
        for _ in range(count):
            begun(group, kind, payload)()
            arrived()
        return (time.perf_counter() - began) / count


def _beside_products(
    world: World, group: Group | Pair, kind: str, payload: int, seconds: float
) -> tuple[int, float, int]:
    """Collectives for `seconds` beside products: how many, their seconds, the products done."""
    done = [0]

    def meet() -> tuple[int, float, int]:
        count, lasted, products = 0, 0.0, 0
        with _own_stream(world.device) as arrived:
            while count < 2 or largest(world, lasted) < seconds:
                began, before = time.perf_counter(), done[0]
                begun(group, kind, payload)()
                arrived()
                lasted += time.perf_counter() - began
                products += done[0] - before
                count += 1
        return count, lasted, products

    world.everyone.barrier()
    with ThreadPoolExecutor(1) as other:
        row = other.submit(meet)
        for done[0] in _products(world.device):
            if row.done():
                break
        return row.result()


def _lasts(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@contextmanager
def _own_stream(device: torch.device) -> Iterator[Callable[[], None]]:
    """On CUDA a stream of its own, so that a wait for traffic is none for what is computed."""
    if device.type != "cuda":
        yield lambda: None
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield stream.synchronize


def _products(device: torch.device) -> Iterator[int]:
    x = torch.ones(128, 128, device=device)
    for done in itertools.count(1):
        torch.mm(x, x)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        yield done


def _computed(device: torch.device, seconds: float) -> int:
    began = time.perf_counter()
    return next(n for n in _products(device) if time.perf_counter() - began >= seconds)


def _delay(world: World, group: Group | Pair, kind: str) -> float:
    later: list[float] = []
    while len(later) < TUNING.delay_calls:
        for _ in range(TUNING.delay_calls_at_once):
            world.everyone.barrier()
            alone = _lasts(lambda: begun(group, kind, TUNING.delay_bytes)())
            world.everyone.barrier()
            _computed(world.device, TUNING.delay_compute_seconds)
            after = _lasts(lambda: begun(group, kind, TUNING.delay_bytes)())
            later.append(after - alone)
        if settled(world.everyone.all_gather_json(later)):
            break
    return fmean(later)


def _payload(world: World, group: Group | Pair, kind: str, seconds: float) -> tuple[int, float]:
    size = TUNING.least_bytes
    if kind == "reduce_scatter" and isinstance(group, Group):
        choose_way(group, TUNING.most_bytes >> 2)
    slowest(world, group, kind, group.size, size)  # what is done once is not counted
    while True:
        once = slowest(world, group, kind, group.size, size)
        if once >= seconds / 2 or size >= TUNING.most_bytes:
            return size, once
        size *= 2
