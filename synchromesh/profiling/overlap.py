"""How computation and traffic slow each other down, measured while both go on.

n collectives run back to back, alone and then beside small products, on all ranks at once:

    T0  seconds of the n alone           p0  products a second where nothing else goes on
    T   seconds of the n beside them     P   products done meanwhile

    b  =  T0 / T       the rate of traffic       a  =  P / (p0 T)       that of computation

They last long enough to hold several periods of a CPU quota: what one collective and one
computation do to each other depends on the moment at which they meet.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from statistics import fmean

import torch

from synchromesh.engine.groups import Group, World
from synchromesh.profiling.collectives import begun, choose_way, slowest
from synchromesh.values.profile import LEAST_RATE, Overlap


@dataclass(frozen=True)
class OverlapTuning:
    """How traffic and computation are made to meet. Chosen, not measured."""

    parts: int = 5  # collectives in the time that is asked for, at most
    least_bytes: int = 1 << 16  # of payload
    most_bytes: int = 1 << 24
    delay_calls: int = 16  # small collectives that show how late ranks are
    delay_compute_seconds: float = 0.03  # that are computed before each of them
    delay_bytes: int = 1 << 14  # payload of each of them


TUNING = OverlapTuning()


def overlap(
    world: World, ranks: Sequence[int], kinds: Iterable[str], seconds: float
) -> dict[str, Overlap]:
    """The overlap of each kind of collective on all of `ranks`, by traffic that takes `seconds`
    alone; the other ranks take no part. The delay of small ones after ranks have computed is a
    matter of the ranks: it is measured with one kind.
    """
    everyone = tuple(ranks)
    group = world.groups([everyone, *((r,) for r in range(world.size) if r not in everyone)])
    asked = sorted(set(kinds))
    if len(everyone) < 2 or not asked:
        return {}
    chosen = dict(world.choices)
    takes_part = group.size > 1
    world.everyone.barrier()
    usual = _products(world, seconds) / seconds
    rates = {kind: _rates(world, group, kind, seconds, usual) for kind in asked}
    found_here = [*(x for pair in rates.values() for x in pair), _delay(world, group, asked[0])]
    shared = torch.tensor(found_here, dtype=torch.float64).to(world.device) * takes_part
    world.everyone.all_reduce(shared, counted=False)
    *measured, delay = (shared / len(everyone)).tolist()
    world.choices.clear()
    world.choices.update(chosen)  # what was quickest for these payloads need not be for others
    return {
        kind: Overlap(_rate(a), _rate(b), max(0.0, delay))
        for kind, a, b in zip(asked, measured[::2], measured[1::2], strict=True)
    }


def _rate(found: float) -> float:
    return min(1.0, max(LEAST_RATE, found))


def _rates(
    world: World, group: Group, kind: str, seconds: float, usual: float
) -> tuple[float, float]:
    """a and b on this rank. usual: products a second where nothing else goes on."""
    payload, once = _payload(world, group, kind, seconds / TUNING.parts)
    count = max(2, ceil(seconds / max(once, seconds / 100)))
    world.everyone.barrier()
    alone = _lasts(lambda: _row(world, group, kind, payload, count))
    world.everyone.barrier()
    with ThreadPoolExecutor(1) as other:
        began = time.perf_counter()
        row = other.submit(_row, world, group, kind, payload, count)
        products = _products(world, until=row)
        beside = time.perf_counter() - began
        row.result()
    return products / usual / beside, alone / beside


def _lasts(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _row(world: World, group: Group, kind: str, payload: int, count: int) -> None:
    """So many collectives, one after the other, beside whatever another thread computes."""
    with _beside(world.device) as arrived:
        for _ in range(count):
            begun(world, group, kind, payload)()
            arrived()


@contextmanager
def _beside(device: torch.device) -> Iterator[Callable[[], None]]:
    """On CUDA a stream of its own, so that a wait for traffic is no wait of what is computed, and
    what waits for that stream. Elsewhere nothing."""
    if device.type != "cuda":
        yield lambda: None
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield stream.synchronize


def _products(world: World, seconds: float = 0.0, until: Future[None] | None = None) -> int:
    """Small products done in so many seconds, or until something is done."""
    x = torch.ones(128, 128, device=world.device)
    began, done = time.perf_counter(), 0
    while not until.done() if until else time.perf_counter() - began < seconds:
        torch.mm(x, x)
        done += 1
        if world.device.type == "cuda":
            torch.cuda.current_stream(world.device).synchronize()
    return done


def _delay(world: World, group: Group, kind: str) -> float:
    """Seconds that a small collective takes longer on this rank after it has computed."""
    alone: list[float] = []
    after: list[float] = []
    for _ in range(TUNING.delay_calls):
        for taken, seconds in ((alone, 0.0), (after, TUNING.delay_compute_seconds)):
            world.everyone.barrier()
            _products(world, seconds)
            taken.append(_lasts(lambda: begun(world, group, kind, TUNING.delay_bytes)()))
    return fmean(after) - fmean(alone)


def _payload(world: World, group: Group, kind: str, seconds: float) -> tuple[int, float]:
    """Bytes with which a collective takes about `seconds`, and what it takes."""
    size = TUNING.least_bytes
    if kind == "reduce_scatter" and group.size > 1:
        choose_way(group, TUNING.most_bytes >> 2)
    slowest(world, group, kind, group.size, size)  # what is done once is not counted
    while True:
        once = slowest(world, group, kind, group.size, size)
        if once >= seconds / 2 or size >= TUNING.most_bytes:
            return size, once
        size *= 2
