"""A crossing: the other stage's ranks have a value as they read it, its makers the gradient, and
whoever reads a leaf of the carry has it of its own rows, whoever made it."""

from itertools import pairwise

import torch

from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.crossing import Receipt, deliver, send
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.engine.world import World
from synchromesh.values.component import Rows, Value
from synchromesh.values.exchange import Exchange
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED
from synchromesh.values.plan import Plan
from tests.ranks import run

H = Value("h", (1, 2), "float64", Rows(), False)
ROWS = 3
# maker, and the layouts in which stages have the rows of a batch
WAYS = (
    (Layout(1, 4), (Layout(4, 1),)),
    (Layout(2, 2), (Layout(4, 1),)),
    (Layout(1, 2, first=2), (Layout(2, 1), Layout(2, 1, first=2))),
    (Layout(2, 1), (Layout(1, 2, first=2),)),
    (Layout(1, 1, first=3), (Layout(3, 1),)),
)


def delivered() -> list[dict[str, list[float]]]:
    """Of each way, what this rank has; -1 and its stand-in where it has no row."""
    world = World.open("cpu")
    values = torch.arange(1.0, ROWS + 1).double().view(-1, 1).expand(-1, 2)
    found = []
    for maker, readers in WAYS:
        groups = PlanGroups(world, (0, 1, 2, 3), {maker, *readers})
        rows = GlobalRows.of(ROWS, max(x.data for x in (maker, *readers)), Plan.parse("data"))
        made = {}
        if world.rank in maker.positions:
            start, stop = rows.ranges(maker.data)[maker.data_index(world.rank)]
            own = values[start:stop].contiguous()
            made["h"] = own if len(own) else torch.full((1, 2), -1.0).double()
        ways = [Exchange(H, REPLICATED, REPLICATED, maker, x, flows=False) for x in readers]
        got = deliver(made, [("h", ways)], rows, groups)
        found.append({name: x[:, 0].tolist() for name, x in got.items()})
    world.close()
    return found


def test_readers_have_their_rows_whoever_made_them() -> None:
    by_rank = run(4, delivered)
    for number, (_, readers) in enumerate(WAYS):
        for rank, found in enumerate(by_rank):
            reader = next((x for x in readers if rank in x.positions), None)
            if reader is None:
                assert not found[number]
                continue
            each, more = divmod(ROWS, reader.data)
            ends = [0]
            for i in range(reader.data):
                ends.append(ends[-1] + each + (i < more))
            start, stop = list(pairwise(ends))[reader.data_index(rank)]
            if start < stop:
                assert found[number]["h"] == list(map(float, range(start + 1, stop + 1)))


X = Value("x", (1, 4), "float64", Rows(), True)
# of the stage that makes a value and of the one that reads it
STAGES = (
    (Layout(2, 1), Layout(2, 1, first=2)),  # as it lies
    (Layout(2, 1), Layout(1, 2, first=2)),
    (Layout(1, 2), Layout(2, 1, first=2)),
)


def crossed() -> list[tuple[list[list[float]], list[list[float]]]]:
    """Of each pair of stages, the value and the gradient that this rank has in the end."""
    world = World.open("cpu")
    values = torch.arange(ROWS * 4.0).double().view(ROWS, 4)
    answers = []
    for source, target in STAGES:
        groups = PlanGroups(world, (0, 1, 2, 3), {source, target})
        rows = GlobalRows.of(ROWS, 2, Plan.parse("data")).ranges
        item = Exchange(X, REPLICATED, REPLICATED, source, target)
        makes = world.rank in source.positions
        mesh = source if makes else target
        start, stop = rows(mesh.data)[mesh.data_index(world.rank)]
        own = values[start:stop].contiguous()
        if makes:
            value = own
            send([item], {item.made: own}, False, rows, groups).wait()
            ((border, gradient),) = Receipt([item], True, rows, groups).wait()
            assert border == item.made
        else:
            ((border, value),) = Receipt([item], False, rows, groups).wait()
            assert border == item.read
            gradient = -own
            send([item], {item.read: gradient}, True, rows, groups).wait()
        assert torch.equal(value, own)
        answers.append((value.tolist(), gradient.tolist()))
    world.close()
    return answers


def test_values_cross_and_their_gradients_come_back() -> None:
    for answers in run(4, crossed):
        for value, gradient in answers:
            assert gradient == (-torch.tensor(value)).tolist()
