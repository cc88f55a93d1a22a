"""Links between components: edges cost what the engine does on them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations, product
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from synchromesh.engine.exchange import Exchange, depart
from synchromesh.engine.groups import Group
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.engine.world import World
from synchromesh.planner.chain import links as module
from synchromesh.planner.chain.problem import BATCH
from synchromesh.planner.uniform import UniformPartitions
from synchromesh.trace.partition.moves import edge_collectives
from synchromesh.values.component import Rows, Value
from synchromesh.values.layout import Layout
from synchromesh.values.placement import parse
from synchromesh.values.profile import Curve, Pattern, Profile
from synchromesh.values.traffic import Collective, sent_bytes
from tests.ranks import run

ROWS, DEVICES = 16, 4
X = Value("x", (1, 8, 8), "float32", Rows(), True)  # 256 bytes a row
TABLE = Value("table", (8, 8), "float32", None, True)
Sent = tuple[str, tuple[int, ...], int]  # kind, ranks, payload (of messages: bytes sent)


# Edges, as the engine crosses them


def crossable() -> list[tuple[Value, str, str, int, int]]:
    """Every value, placements and degrees that an edge of four devices may have."""
    found = []
    for a, b in permutations((1, 2, 4), 2):
        source, target = Layout(DEVICES // a, a), Layout(DEVICES // b, b)
        for value, have, want in product((X, TABLE), ("R", "r", "P", "S(1)"), ("R", "r", "S(1)")):
            if edge_collectives(value, parse(have), parse(want), source, target) is not None:
                found.append((value, have, want, a, b))
    return found


def blocks(value: Value, layout: Layout) -> tuple[tuple[int, int], ...]:
    if value.rows is None:
        return ()
    size = ROWS // layout.data
    return tuple((d * size, (d + 1) * size) for d in range(layout.data))


def spied(log: list[Sent], patch: pytest.MonkeyPatch) -> None:
    """Groups of more than one rank tell what they are asked for."""

    def collective(name: str, kind: str, factor: Callable[[Group], int]) -> None:
        original = getattr(Group, name)

        def call(group: Group, x: Tensor, *rest: Any, **settings: Any) -> Any:
            if group.size > 1 and settings.get("counted", True):
                log.append((kind, group.ranks, x.numel() * x.element_size() * factor(group)))
            return original(group, x, *rest, **settings)

        patch.setattr(Group, name, call)

    collective("all_reduce", "all_reduce", lambda group: 1)
    collective("start_all_gather", "all_gather", lambda group: group.size)
    collective("start_reduce_scatter", "reduce_scatter", lambda group: 1)
    exchange = Group.start_exchange

    def messages(group: Group, sends: Any, receives: Any) -> Any:
        out = [
            (group.ranks[i], x.numel() * x.element_size()) for i, x in sends if i != group.index
        ]
        log.append(("messages", tuple(r for r, _ in out), sum(n for _, n in out)))
        return exchange(group, sends, receives)

    patch.setattr(Group, "start_exchange", messages)


def crossed() -> list[tuple[list[Sent], list[Sent]]]:
    """What this rank was asked for, forward and backward, on every edge."""
    world = World.open("cpu")
    layouts = {m: Layout(DEVICES // m, m) for m in (1, 2, 4)}
    stage = PlanGroups(world, tuple(range(DEVICES)), layouts.values())
    for layout in layouts.values():  # none is measured in between
        world.choices[stage.tensor_group(layout).ranks] = "native"
    log: list[Sent] = []
    found = []
    with pytest.MonkeyPatch.context() as patch:
        spied(log, patch)
        for value, have, want, a, b in crossable():
            source, target = layouts[a], layouts[b]
            shape = parse(have).local_shape(value.shape, a)
            rows = ROWS // source.data if value.rows else 1
            x = torch.ones(shape[0] * rows, *shape[1:]).requires_grad_()
            log.clear()
            ranges = {layout.data: blocks(value, layout) for layout in (source, target)}
            item = Exchange(value, parse(have), parse(want), source, target)
            y = depart(x, item, stage, ranges.__getitem__)()
            forward = list(log)
            log.clear()
            y.backward(torch.ones_like(y))
            found.append((forward, list(log)))
    world.close()
    return found


def said(found: tuple[Collective, ...], direction: str, rows: int, rank: int) -> list[Sent]:
    """What a rank would be asked for, by the edge's collectives and the survey's patterns."""
    out: list[Sent] = []
    for c in found:
        if c.direction != direction:
            continue
        groups = Pattern(c.ranks, c.stride).groups(DEVICES)
        (group,) = (g for g in groups if rank in g)
        payload = c.payload(rows)
        if c.kind == "all_to_all":  # by messages between intersecting boxes
            others = tuple(r for r in group if r != rank)
            out.append(("messages", others, sent_bytes(c.kind, payload, c.ranks)))
        else:
            out.append((c.kind, group, payload))
    return out


def test_an_edge_is_priced_as_the_collectives_that_the_engine_runs() -> None:
    cases = crossable()
    assert len(cases) > 20 and {v.name for v, *_ in cases} == {"x", "table"}
    for rank, answers in enumerate(run(DEVICES, crossed)):
        for (value, have, want, a, b), (forward, backward) in zip(cases, answers, strict=True):
            source, target = Layout(DEVICES // a, a), Layout(DEVICES // b, b)
            found = edge_collectives(value, parse(have), parse(want), source, target)
            assert found is not None
            for direction, really in (("forward", forward), ("backward", backward)):
                expected = said(found, direction, ROWS // source.data, rank)
                assert really == expected, (value.name, have, want, a, b, direction)


# Edges, as the search pays for them

ALL, PAIRS, ACROSS = Pattern(4), Pattern(2, 1), Pattern(2, 2)
BYTE = {"all_gather": 1.0, "reduce_scatter": 10.0, "all_to_all": 100.0, "all_reduce": 1000.0}
WHOLE, HALF = 16 * 256, 8 * 256  # bytes of all rows, of half of them


def network(**byte: float) -> dict[tuple[str, Pattern], Curve]:
    """Seconds a byte by kind, the same for every pattern."""
    kinds = {**BYTE, **byte}
    return {(k, p): Curve(((1.0, s),)) for k, s in kinds.items() for p in (ALL, PAIRS, ACROSS)}


@pytest.mark.parametrize(
    ("have", "a", "want", "b", "byte", "forward", "backward"),
    [
        # tensor shrinks: slices of rows, gathered again in backward
        ("R", 4, "R", 1, {}, 0, WHOLE),
        ("R", 4, "R", 2, {}, 0, WHOLE),
        ("R", 2, "R", 1, {}, 0, HALF),
        # tensor grows
        ("R", 1, "R", 4, {}, WHOLE, 0),
        ("R", 1, "R", 2, {}, HALF, 0),
        ("R", 2, "R", 4, {}, WHOLE, 0),
        # a partial sum: scattered on the way, or summed first where that is cheaper
        ("P", 4, "R", 1, {}, 10 * WHOLE, WHOLE),
        ("P", 4, "R", 1, {"reduce_scatter": 5000.0}, 1000 * WHOLE, WHOLE),
        ("P", 4, "R", 2, {}, 1000 * WHOLE, WHOLE),  # there is no other way
        # a gradient that is partial at the reader: scattered on the way back, or summed there
        ("R", 1, "r", 4, {}, WHOLE, 10 * WHOLE),
        ("R", 1, "r", 4, {"reduce_scatter": 5000.0}, WHOLE, 1000 * WHOLE),
        ("R", 2, "r", 4, {}, WHOLE, 1000 * WHOLE),
        # a quarter of the rows of all numbers for all rows of a quarter of them, or gathered
        ("R", 1, "S(1)", 4, {"all_to_all": 1.0}, WHOLE / 4, WHOLE / 4),
        ("R", 1, "S(1)", 4, {}, WHOLE, WHOLE),
        ("S(1)", 4, "R", 1, {"all_to_all": 1.0}, WHOLE / 4, WHOLE / 4),
        ("S(1)", 4, "R", 1, {}, WHOLE, WHOLE),
        # one degree: the move that the partition makes
        ("P", 4, "R", 4, {}, 1000 * WHOLE, 0),
        ("R", 2, "r", 2, {}, 0, 1000 * HALF),
    ],
)  # fmt: skip
def test_the_cheapest_way_between_two_degrees(
    have: str, a: int, want: str, b: int, byte: dict[str, float], forward: float, backward: float
) -> None:
    asked = UniformPartitions(
        cast(Any, None), DEVICES, ROWS, cast(Any, {1: None, 2: None, 4: None})
    )
    made = {m: parse(have if m == a else "R") for m in (1, 2, 4)}
    wanted = {(m, 1): parse(want if m == b else "R") for m in (1, 2, 4)}
    link = module.CrossingValue(X, 0, (1,), made, wanted)
    told = Profile(DEVICES, {}, network(**byte))
    assert module.cheapest(asked, link, a, b, told) == (forward, backward)
    leaf = module._prices(asked, replace(link, source=BATCH), told)
    assert not leaf.forward.any() and not leaf.backward.any(), "leaves of the batch"


def test_a_way_that_nobody_measured_is_none() -> None:
    asked = UniformPartitions(cast(Any, None), DEVICES, ROWS, cast(Any, {2: None, 4: None}))
    link = module.CrossingValue(
        X, 0, (1,), dict.fromkeys((2, 4), parse("R")), dict.fromkeys(((2, 1), (4, 1)), parse("R"))
    )
    told = Profile(DEVICES, {}, {k: c for k, c in network().items() if k[1] != ACROSS})
    assert module.cheapest(asked, link, 2, 4, told) == (float("inf"),) * 2
    prices = module._prices(asked, link, told)
    assert prices.forward.tolist() == [[0.0, float("inf")], [float("inf"), 0.0]]
