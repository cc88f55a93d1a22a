"""Reprofiling on real ranks whose links are stand-ins; probes of idle ranks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from synchromesh.engine.world import World
from synchromesh.profiling import collectives as network
from synchromesh.profiling import reprofile as module
from synchromesh.profiling.reprofile import _sampled_rows, _scaled, _settled
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.profile import (
    BurstSpeed,
    Compute,
    Curve,
    DeviceModel,
    Memory,
    Overlap,
    Pattern,
    Profile,
)
from synchromesh.values.traffic import CollectiveKind, sent_bytes
from tests.ranks import run

BY = "all_reduce"
KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "all_to_all")
PATTERNS = (Pattern(2), Pattern(4), Pattern(8))  # there are four ranks
SIZES = (10, 14, 17, 19, 21, 23)
HOST = 4e-9  # seconds a byte that a host needs for it, whatever the links are


def links(seconds: float, kind: CollectiveKind, size: int, payload: int) -> float:
    """What a collective takes over links of so many seconds a byte; an all-to-all twice."""
    times = 2 if kind == "all_to_all" else 1
    return 1e-3 + HOST * payload + seconds * times * sent_bytes(kind, payload, size)


def reprofiled(before: float, now: float, pause: float) -> Any:
    """The profile after another sample: links took `before` seconds a byte and take `now`. pause:
    of the first call at some size, as a quota has it."""
    world = World.open()
    known = Profile(
        4,
        network={
            (k, p): Curve(tuple((float(1 << n), links(before, k, p.size, 1 << n)) for n in SIZES))
            for k in KINDS
            for p in PATTERNS
        },
        overlap=dict.fromkeys(KINDS, Overlap(0.5, 0.5)),
    )
    asked: list[tuple[str, int]] = []
    calls: set[tuple[str, int, int]] = set()

    def slowest(world: World, group: Any, kind: Any, ranks: int, payload: int) -> float:
        late = pause if payload == 1 << 17 and (kind, ranks, payload) not in calls else 0.0
        calls.add((kind, ranks, payload))
        if (kind, ranks) not in asked:
            asked.append((kind, ranks))
        return links(now, kind, ranks, payload) + late

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "slowest", slowest)
        facts: Any = SimpleNamespace(world=world)
        nothing: Any = None  # of programs: links alone are sampled
        found = module.reprofile(facts, range(4), nothing, known, devices=False, links=True)
    world.close()
    return {(k, p.size): c.points for (k, p), c in found.network.items()}, found.overlap, asked


@pytest.mark.parametrize("pause", [0.0, 0.2])
def test_slower_links(pause: float) -> None:
    """Every curve is what it would be measured to be, though a pattern is sampled by one kind."""
    for curves, rates, asked in run(4, reprofiled, 1e-9, 100e-9, pause):
        assert asked == [(k, n) for k in sorted(KINDS) for n in (2, 4) if n == 4 or k == BY]
        for (kind, size), points in curves.items():
            if size < 8:  # more ranks than there are: as on fewer
                for x, y in points:
                    assert y == pytest.approx(links(100e-9, kind, size, int(x)), rel=0.01)
        stretched = Overlap(0.5, 0.5).stretched(1.0)
        assert all(o.compute > 0.8 > stretched.compute for o in rates.values())


@pytest.mark.parametrize("pause", [0.0, 0.2])
def test_quicker_links(pause: float) -> None:
    for curves, _, _ in run(4, reprofiled, 100e-9, 1e-9, pause):
        for (kind, size), points in curves.items():
            if size < 8:
                for x, y in points:
                    assert y == pytest.approx(links(1e-9, kind, size, int(x)), rel=0.05)


def test_links_that_are_what_they_were() -> None:
    for curves, rates, _ in run(4, reprofiled, 1e-9, 1e-9, 0.0):
        for (kind, size), points in curves.items():
            for x, y in points:
                assert y == pytest.approx(links(1e-9, kind, size, int(x)), rel=1e-6)
        assert rates["all_reduce"].compute == pytest.approx(0.5)


@pytest.mark.parametrize(
    "samples, found",
    [
        ([[1.3, 0.2]], [1.3, 0.2]),
        ([[9.0, 1.1], [1.1, 1.2]], [1.1, 1.1]),
        ([[9.0, 0.9], [5.0, 9.0], [1.2, 1.3]], [1.2, 0.9]),
        ([[1.6, 9.0], [1.5, 1.0], [1.7, 1.0]], [1.5, 1.0]),  # each says that it is slower
    ],
)
def test_samples_that_are_doubted(samples: list[list[float]], found: list[float]) -> None:
    taken = iter(samples)
    points = module.confirmed(lambda: list(enumerate(next(taken))), lambda _: 1.0)
    assert points == list(enumerate(found)) and not list(taken)


def test_microseconds_are_not_doubted() -> None:
    assert module.confirmed(lambda: [(0.0, 3e-5)], lambda _: 1e-5) == [(0.0, 3e-5)]


def sampled_slowdowns(sampled: list[float]) -> Any:
    """Seconds that a program of 1 s takes on each rank, its slowdown, and how often it was timed,
    where sampling finds `sampled` as slowdowns of the second rank, one after the other."""
    world = World.open()
    curves = (Curve(((1.0, 1.0),)),) * 2
    program = Compute(curves, (Curve(((1.0, 0.0),)),) * 2, Memory())
    known = Profile(2, {"a": program}, device=DeviceModel(slowdowns=(2.5, 2.5)))
    later = iter(sampled)
    timed: list[float] = []

    def again(ranks: Any, wanted: Any, profile: Profile, block: float) -> Any:
        slower = [profile.device.slowdown_of(r) / 2.5 for r in (0, 1)]
        timed.append(slower[1])
        return {"a": replace(program, forward=tuple(curves[0].scaled(x) for x in slower))}, []

    part = SimpleNamespace(program="a", layout=LayoutSpec("data").layout(2))
    facts: Any = SimpleNamespace(world=world, timed=again, problem=SimpleNamespace(rows=2))
    partition: Any = SimpleNamespace(components=[part])
    with pytest.MonkeyPatch.context() as patch:
        now = lambda *_: DeviceModel(slowdowns=(2.5, 2.5 * next(later)))  # noqa: E731
        patch.setattr(module, "measure_device_model", now)
        found = module.reprofile(facts, (0, 1), partition, known, devices=True, links=False)
    world.close()
    return [c(1.0) for c in found.compute["a"].forward], found.device.slowdowns, len(timed)


@pytest.mark.parametrize(
    "sampled, now", [([1.46, 1.0], 1.0), ([1.46, 1.5, 1.45], 1.45), ([1.2], 1.2), ([0.5], 0.5)]
)
def test_a_host_that_seems_slow_once(sampled: list[float], now: float) -> None:
    for programs, slowdowns, timed in run(2, sampled_slowdowns, sampled):
        assert programs == pytest.approx([1.0, now])
        assert slowdowns == pytest.approx([2.5, 2.5 * now]) and timed == 1


KNOWN = Profile(
    2, network={("all_reduce", Pattern(2)): Curve(((1e3, 0.001), (1e6, 0.040), (8e6, 0.320)))}
)


def probed(
    calls: list[float], slowdown: tuple[float, float], before: tuple[float, float], usual: Any
) -> Any:
    """What rank 0 alone, at work, finds where all-reduces take `calls` and ranks have
    `slowdown`."""
    world = World.open()
    asked: list[int] = []

    def slowest(world: World, group: Any, kind: str, ranks: int, payload: int) -> float:
        asked.append(payload)
        return calls[len(asked) - 1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "slowest", slowest)
        now = DeviceModel(BurstSpeed(), slowdown)
        patch.setattr(module, "measure_device_model", lambda world, runs: now)
        known = Profile(2, network=KNOWN.network, device=DeviceModel(slowdowns=before))
        found = module.probe_idle(world, (0,), known, usual)
    world.everyone.barrier()  # nobody leaves while another still connects
    world.close()
    return bool(found), str(found), asked


@pytest.mark.parametrize(
    "calls, slowdown, before, usual, better, told",
    [
        ([0.010, 0.020], (1, 1), (1, 1), {}, True, "links carry 2.0 times as fast"),
        ([0.010, 0.020], (1, 1), (1, 1), {1_000_000: 0.02}, False, ""),  # it was seen before
        ([0.010, 0.039], (1, 1), (1, 1), {}, False, ""),  # one call alone is chance
        ([0.400, 0.400], (1, 1), (1, 1), {}, False, ""),  # slower links change nothing here
        ([], (1, 2), (1, 6), {}, True, "idle ranks compute 3.0 times as fast"),
        ([0.040, 0.040], (1, 5), (1, 6), {}, False, ""),
        ([0.010, 0.020], (1, 5), (1, 6), {}, True, "links carry 2.0 times as fast"),
    ],
)
def test_a_probe_finds_what_is_better(
    calls: list[float], slowdown: Any, before: Any, usual: Any, better: bool, told: str
) -> None:
    for found, text, asked in run(2, probed, calls, slowdown, before, usual):
        assert found == better and (told in text)
        assert asked == [1_000_000] * len(calls), "the largest that is short"


def test_latency_alone() -> None:
    """Links that are as quick as before and farther away: no byte takes longer."""
    before = Curve(((16384.0, 0.001), (1e6, 0.010)))
    found = module._Sample.of("all_gather", 4, before, [(16384.0, 0.051), (1e6, 0.0601)])
    assert found.late == pytest.approx(0.050, rel=0.01) and not found.changed


def test_processors_that_became_slower_and_a_rank_that_stands_out() -> None:
    # slowdowns tell of a quota, programs of what became of all processors; the rest is noise
    slower = _settled([1.3, 1.2, 1.1, 3.6], [1.0, 1.0, 1.0, 3.0])
    assert slower == pytest.approx([1.2, 1.2, 1.2, 3.6])
    assert _settled([1.0, 1.0, 2.0, 1.0], [1.0] * 4) == [1.0, 1.0, 2.0, 1.0], "one is slower"
    assert _settled([1.0, 1.6], [1.0, 1.0]) == [1.0, 1.6]


def test_sampling_takes_the_rows_that_are_not_too_long() -> None:
    found = Compute(
        (Curve(((10.0, 0.01), (40.0, 0.04))),) * 2, (Curve(((40.0, 0.0),)),) * 2, Memory()
    )
    assert _sampled_rows(found, (10, 40), [1.0, 1.0]) == 40
    assert _sampled_rows(found, (10, 40), [1.0, 3.0]) == 10, "on the slowest rank"
    assert _sampled_rows(found, (10, 40), [1.0, 90.0]) == 10, "there is nothing shorter"


def test_costs_of_the_slowest_rank_come_back_with_it() -> None:
    curve = Curve(((1.0, 1.0),))
    known = Profile(2, {"a": Compute((curve,) * 2, (curve,) * 2, Memory())}, update_byte=1e-9)
    slow = _scaled(known, [1.0, 3.0])
    assert slow.update_byte == pytest.approx(3e-9)
    assert _scaled(slow, [1.0, 1 / 3]).update_byte == pytest.approx(1e-9)
    assert _scaled(slow, [2.0, 1.0]).update_byte == pytest.approx(3e-9), (
        "the other is slower still"
    )
