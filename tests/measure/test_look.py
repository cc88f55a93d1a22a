"""Looks at what has changed, on real ranks whose links are stand-ins; glances at idle ranks."""

from typing import Any

import pytest

from synchromesh.engine.groups import World
from synchromesh.measure import look, network
from synchromesh.measure.sprint import Ease
from synchromesh.profile import Curve, Overlap, Pattern, Profile, Sprint
from tests.ranks import run


def looked_at() -> Any:
    """Links that take three times as long between two ranks, five times in groups of four."""
    world = World.open()
    kinds = ("all_reduce", "all_gather")
    patterns = (Pattern(2), Pattern(4), Pattern(8))  # there are four ranks
    curve = Curve(tuple((float(1 << n), 1e-9 * (1 << n)) for n in (10, 14, 20, 23)))
    known = Profile(
        4,
        network={(k, p): curve for k in kinds for p in patterns},
        overlap=dict.fromkeys(kinds, Overlap(0.5, 0.5)),
    )

    def slowest(world: World, group: Any, kind: str, ranks: int, payload: int) -> float:
        times = {2: 3.0, 4: 5.0}.get(ranks, 7.0) if kind == "all_reduce" else 1.0
        return times * curve(payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "slowest", slowest)
        found = look.again(
            world,
            range(4),
            None,
            None,
            known,
            devices=False,
            links=True,  # type: ignore[arg-type]
        )
    world.close()
    ratios = {
        f"{kind} {p.size}": [now(x) / y for x, y in curve.points]
        for (kind, p), now in found.network.items()
    }
    return ratios, found.overlap


def test_links_are_looked_at_on_every_pattern() -> None:
    for ratios, rates in run(4, looked_at):
        assert ratios["all_reduce 2"] == pytest.approx([3.0] * 4)
        assert ratios["all_reduce 4"] == pytest.approx([5.0] * 4)
        assert ratios["all_reduce 8"] == pytest.approx([5.0] * 4), "as that of the most ranks"
        assert ratios["all_gather 2"] == pytest.approx([1.0] * 4)
        assert rates["all_gather"] == Overlap(0.5, 0.5)
        assert rates["all_reduce"] == Overlap(0.5, 0.5).stretched(5.0)


def test_beyond_what_was_sampled() -> None:
    before = Curve(((1e4, 0.001), (1e6, 0.100), (8e6, 0.800)))
    slower = look._Change.of(before, [(1e4, 0.002), (1e6, 0.150)])
    assert slower(1e4, 0.001) == pytest.approx(0.002) and slower.largest == pytest.approx(1.5)
    assert slower(8e6, 0.900) == pytest.approx(0.900 + 8 * 0.050), "so much more a byte"
    quicker = look._Change.of(before, [(1e4, 0.001), (1e6, 0.020)])
    assert quicker(8e6, 0.900) == pytest.approx(0.900 * 0.2)


KNOWN = Profile(
    2, network={("all_reduce", Pattern(2)): Curve(((1e3, 0.001), (1e6, 0.040), (8e6, 0.320)))}
)


def glanced(calls: list[float], pace: tuple[float, float], before: tuple[float, float]) -> Any:
    """What rank 0 alone, at work, finds where all-reduces take `calls` and ranks have `pace`."""
    world = World.open()
    asked: list[int] = []

    def slowest(world: World, group: Any, kind: str, ranks: int, payload: int) -> float:
        asked.append(payload)
        return calls[len(asked) - 1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "slowest", slowest)
        patch.setattr(look, "ease", lambda world, runs: Ease(Sprint(), pace))
        found = look.glance(world, (0,), Profile(2, network=KNOWN.network, pace=before))
    world.close()
    return bool(found), str(found), asked


@pytest.mark.parametrize(
    "calls, pace, before, better, told",
    [
        ([0.010, 0.020], (1, 1), (1, 1), True, "links carry 2.0 times as fast"),
        ([0.010, 0.039], (1, 1), (1, 1), False, ""),  # one call alone is chance
        ([0.400, 0.400], (1, 1), (1, 1), False, ""),  # slower links change nothing here
        ([], (1, 2), (1, 6), True, "idle ranks compute 3.0 times as fast"),
        ([], (1, 5), (1, 6), False, ""),
    ],
)
def test_a_glance_finds_what_is_better(
    calls: list[float], pace: Any, before: Any, better: bool, told: str
) -> None:
    for found, text, asked in run(2, glanced, calls, pace, before):
        assert found == better and (told in text)
        assert asked == [1_000_000] * len(calls), "the largest that is short"
