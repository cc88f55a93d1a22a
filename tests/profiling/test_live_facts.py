"""The facts of a choice on two ranks: equal everywhere, measured once, faults told."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from synchromesh.engine.world import World
from synchromesh.planner.problem import PartitionCache, PlanningProblem
from synchromesh.profiling import collectives as network
from synchromesh.profiling import programs
from synchromesh.profiling.live_facts import LiveFacts
from synchromesh.profiling.overlap import overlap
from synchromesh.profiling.programs import Numbers, ProgramTimer, Wanted, memory_of
from synchromesh.programs.borders import StandIns, record
from synchromesh.programs.model import Model
from synchromesh.trace.partition.partition import Partition
from synchromesh.values.layout import Layout
from synchromesh.values.profile import Pattern
from synchromesh.values.traffic import MESSAGES, CollectiveKind
from tests.models import family, traced
from tests.ranks import run

PATTERN, CPU = Pattern(2), torch.device("cpu")


def facts_on(world: World) -> LiveFacts:
    model, _, make = family("odd_mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    partitions = PartitionCache(PlanningProblem(traced("odd_mlp"), 8, world.size))
    return LiveFacts(world, partitions, Model(model), make(8, dtype=torch.float64), optimizer)


def cut(facts: LiveFacts, layout: Layout) -> Partition:
    return facts.partitions.of_layouts((layout,) * len(facts.problem.names))


def measured() -> dict[str, Any]:
    world = World.open()
    facts = facts_on(world)
    made = cut(facts, Layout(2, 1))
    first = facts.profile([made], None, (0, 1))
    timed = []
    original = programs.ProgramTimer.__call__

    def spy(timer: Any, wanted: Any) -> Any:
        timed.append(wanted.local.component.name)
        return original(timer, wanted)

    programs.ProgramTimer.__call__ = spy  # type: ignore[method-assign]
    again = facts.profile([made], first, (0, 1))
    assert not timed and again.compute == first.compute and again.network == first.network

    class Broken(programs.Bench):
        def timing(self, *args: Any) -> Any:
            if world.rank == 1:
                raise IndexError("no memory here")
            return super().timing(*args)

    programs.Bench = Broken  # type: ignore[misc]
    lost = facts.profile([made], replace(first, compute={}), (0, 1))
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
    kinds = get_args(CollectiveKind)
    found = network.collectives(world, (0, 1), [(k, PATTERN, 100) for k in kinds])
    rates = overlap(world, (0, 1), kinds, 0.002, {})
    sent = world.ledger.sent
    world.close()
    return {k: c.points for (k, _), c in found.items()}, rates, sent


def test_an_idle_rank_takes_part() -> None:
    ranks = run(3, linked)
    for curves, rates, sent in ranks:
        assert sent == 0 and len(curves) == len(get_args(CollectiveKind))
        for points in curves.values():
            assert len(points) == 2 and all(y > 0 for _, y in points)
            assert points == tuple(sorted(points)) and points[0][1] <= points[1][1]
        for kind in ("all_reduce", *MESSAGES):
            assert 0 < rates[kind].compute <= 1 and 0 < rates[kind].network <= 1
    assert ranks[0][0] == ranks[1][0] == ranks[2][0] and ranks[0][1] == ranks[2][1]


def timed_for_micro_batches() -> list[list[float]]:
    """Rows that a program was timed with: for one micro-batch, then for eight, and for both."""
    world = World.open()
    facts = facts_on(world)
    made = cut(facts, Layout(1, 1))
    key = made.components[0].program
    known = facts.profile([made], None, (0,))
    fewer = facts.profile([made], known, (0,), micro_batches=(8,))
    both = facts.profile([made], fewer, (0,), micro_batches=(1, 4, 8))
    fresh = facts.profile([made], replace(known, compute={}), (0,), micro_batches=(2, 8))
    world.close()
    found = (known, fewer, both, fresh)
    return [[x for x, _ in profile.compute[key].forward[0].points] for profile in found]


def test_programs_are_timed_down_to_the_rows_of_micro_batches() -> None:
    assert timed_for_micro_batches() == [[2, 8], [1, 2, 8], [1, 2, 8], [1, 4]]


def messages() -> Any:
    """On four ranks: what is begun for a message, by stride; the pairs as ranks see them."""
    world = World.open()
    ranks, seen = (2, 0, 3, 1), []
    for stride in (1, 2, 3):
        for kind in MESSAGES:
            groups = network._groups(world, ranks, kind, Pattern(2, stride))
            for pair in groups:
                assert isinstance(pair, network.Pair)
                sent, received = torch.full((2,), float(world.rank)), torch.full((2,), -1.0)
                if pair.size > 1:
                    pair.start(kind == "exchange", sent, received)()
                seen.append((kind, stride, int(received[0])))
    world.close()
    return seen


def test_messages_go_from_the_first_to_the_second_of_a_pair_or_both_ways() -> None:
    """What each rank receives (. nothing) in every round; positions 0 1 2 3 are ranks 2 0 3 1."""
    drawn: dict[tuple[str, int], list[str]] = {}
    for at in zip(*run(4, messages), strict=True):
        kind, stride, _ = at[0]
        here = "".join("." if x < 0 else str(x) for _, _, x in at)
        drawn.setdefault((kind, stride), []).append(here)
    assert drawn == {
        ("send", 1): ["23..", "...0"],
        ("exchange", 1): ["2301", "3..0"],
        ("send", 2): [".0.2"],
        ("exchange", 2): ["1032"],
        ("send", 3): [".2.."],
        ("exchange", 3): [".21."],
    }


def timed_for_more_rows() -> Any:
    """Programs that are known for fewer rows are timed, and not watched, for more."""
    world = World.open()
    facts = facts_on(world)
    made = cut(facts, Layout(1, 1))
    known = facts.profile([made], None, (0,), rows=4)
    watched, original = [], programs.Bench.bytes

    def bytes_(bench: Any, *limit: Any) -> Any:
        watched.append(bench)
        return original(bench, *limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs.Bench, "bytes", bytes_)
        more = facts.profile([made], known, (0,), quick=True)
    world.close()
    key = made.components[0].program
    sizes = [[x for x, _ in c.forward[0].points] for c in (known.compute[key], more.compute[key])]
    kept = [c.memory.kept(8) for c in (known.compute[key], more.compute[key])]
    return sizes, kept, len(watched)


def test_memory_that_is_known_is_not_watched_again() -> None:
    sizes, kept, watched = timed_for_more_rows()
    assert sizes == [[1, 4], [1, 4, 8]]
    assert kept[0] == kept[1] and watched == 0


def test_measuring_stops_below_the_limit() -> None:
    """With growing memory nothing can be timed, then few rows, then all."""
    facts = facts_on(World.open(CPU))
    made, step = cut(facts, Layout(1, 1)), facts.problem.step
    wanted = Wanted(made, made.components[0], (2, 8))
    tensors = StandIns(step.chain, facts.tensors, CPU)
    borders = record(step, facts.example, tensors, CPU)

    def numbers(program: Wanted, left: float) -> Numbers:
        return ProgramTimer(step, tensors, borders, left, CPU, 0.0)(program)

    found = []
    for left in (0, *(2**n for n in range(8, 24))):
        told = numbers(wanted, left)
        sizes = [rows for rows, *_ in told.get("points", ())]
        found.append(sizes)
        lack = told.get("lack", "")
        missing = {(): "2 rows take more", (2,): "8 rows take more", (2, 8): ""}[tuple(sizes)]
        assert missing in lack and bool(missing) == bool(lack)
    assert found == sorted(found) and [2] in found and found[0] == [] and found[-1] == [2, 8]
    memory = memory_of(told)
    known, need = replace(wanted, memory=memory, rows=(16,)), memory.backward(16)
    for left, watched in ((2 * need, 1), (10 * need, 0)):
        told = numbers(known, left)
        assert len(told["points"]) == 1 and len(told["memory"]) == watched


def scattered() -> tuple[bool, bool]:
    """Whether there is a ring before and after what scatters gradients was measured."""
    world = World.open()
    facts, everyone = facts_on(world), world.everyone
    known = facts.profile([cut(facts, Layout(3, 1))], None)
    before = everyone.ring is not None
    sharded = cut(facts, Layout(3, 1, shard_states="gradients"))
    found = facts.profile([sharded], replace(known, compute={}))
    assert ("reduce_scatter", Pattern(3)) in found.network
    after = everyone.ring is not None
    world.close()
    return before, after


def test_a_reduce_scatter_of_gradients_is_measured_with_the_ring_that_it_may_take() -> None:
    assert run(3, scattered) == [(False, True)] * 3
