"""The facts of a choice on two ranks: equal everywhere, measured once, faults told."""

from dataclasses import replace
from typing import Any

import torch

from synchromesh.engine.groups import World
from synchromesh.layout import Layout
from synchromesh.measure import facts as module
from synchromesh.measure import network
from synchromesh.measure.facts import Subject, facts
from synchromesh.profile import Pattern
from synchromesh.trace.partition import partition
from tests.models import family, traced
from tests.ranks import run

PATTERN = Pattern(2)


def subject() -> Subject:
    model, _, make = family("odd_mlp")
    tensors = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Subject(traced("odd_mlp"), tensors, make(8, dtype=torch.float64), optimizer, 8)


def measured() -> dict[str, Any]:
    world = World.open()
    about = subject()
    made = partition(about.step, (Layout(2, 1),) * len(about.step.chain.components), rows=8)
    first = facts(world, (0, 1), about, [made])
    timed = []
    original = module._measured

    def spy(*args: Any) -> Any:
        timed.append(args[2].component.name)
        return original(*args)

    module._measured = spy
    again = facts(world, (0, 1), about, [made], first)
    assert not timed and again.compute == first.compute and again.network == first.network

    class Broken(module.Bench):
        def timing(self, *args: Any) -> Any:
            if world.rank == 1:
                raise IndexError("no memory here")
            return super().timing(*args)

    module.Bench = Broken  # type: ignore[misc]
    lost = facts(world, (0, 1), about, [made], replace(first, compute={}))
    kept = world.ledger.sent
    world.close()
    return {"first": first.to_json(), "lost": lost, "sent": kept, "timed": timed}


def test_two_ranks() -> None:
    traced("odd_mlp")  # once, for both
    one, other = run(2, measured)
    first, second = (module_json(x["first"]) for x in (one, other))
    assert first == second
    assert one["sent"] == 0, "measuring is no traffic of a step"
    assert one["timed"] and not one["lost"].compute and not other["lost"].compute
    assert "no memory here" in one["lost"].missing[0]


def module_json(text: str) -> Any:
    import json

    found = json.loads(text)
    found.pop("seconds")  # of this rank's clock
    return found


def linked() -> Any:
    """On three ranks, one of them idle."""
    world = World.open()
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    found = network.collectives(world, (0, 1), [(k, PATTERN, 100) for k in kinds])
    rates = network.overlap(world, (0, 1), ("all_reduce",), 0.002)
    sent = world.ledger.sent
    world.close()
    return {k: c.points for (k, _), c in found.items()}, rates, sent


def test_an_idle_rank_takes_part() -> None:
    ranks = run(3, linked)
    for curves, rates, sent in ranks:
        assert sent == 0 and len(curves) == 4
        for points in curves.values():
            assert len(points) == 2 and all(y > 0 for _, y in points)
            assert points == tuple(sorted(points)) and points[0][1] <= points[1][1]
        assert 0 < rates["all_reduce"].compute <= 1 and 0 < rates["all_reduce"].network <= 1
    assert ranks[0][0] == ranks[1][0] == ranks[2][0] and ranks[0][1] == ranks[2][1]
