"""A switch: random boxes become other random boxes bit by bit, in little memory."""

import itertools
from pathlib import Path
from typing import Any

import torch

from synchromesh.checkpoint import switch
from synchromesh.checkpoint.local_tensor import LocalTensor, box_view
from synchromesh.checkpoint.switch import Move, in_order, move, redistribute
from synchromesh.engine.world import World
from synchromesh.values.boxes import Box, intersection, local_shape, volume
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED, Placement, shard
from tests.ranks import run

Side = tuple[Layout, Placement]


def boxes(shape: tuple[int, ...], side: Side, size: int) -> list[tuple[Box, ...]]:
    """The boxes of every rank of `size`, some of which may be idle."""
    layout, placement = side
    held = [
        placement.boxes(shape, layout.tensor, layout.tensor_index(p))
        for p in range(layout.devices)
    ]
    return held + [()] * (size - layout.devices)


def local(whole: torch.Tensor, mine: tuple[Box, ...]) -> torch.Tensor:
    out = torch.empty(local_shape(mine, whole.dim()), dtype=whole.dtype)
    for box in mine:
        box_view(out, mine, box).copy_(whole[tuple(slice(a, b) for a, b in box)])
    return out


SIDES: list[Side] = [
    (Layout(4, 1), REPLICATED),
    (Layout(1, 4), shard(0)),
    (Layout(1, 4), shard(1)),
    (Layout(2, 2), shard(0, 3)),
    (Layout(1, 3), shard(1)),
    (Layout(1, 2), shard(0, 2)),
    (Layout(1, 1), REPLICATED),
]


def all_to_all_sides(dtype: torch.dtype) -> list[bool]:
    world = World.open(device="cpu")
    shape = (24, 12)
    whole = (torch.arange(24 * 12) % 120).to(dtype).view(shape)
    answer = []
    for old, new in itertools.product(SIDES, SIDES):
        have, want = boxes(shape, old, world.size), boxes(shape, new, world.size)
        mine = local(whole, have[world.rank])
        moved = redistribute(mine, have, want, shape, world.everyone)
        answer.append(torch.equal(moved, local(whole, want[world.rank])))
    return answer


def test_every_layout_becomes_every_other() -> None:
    for dtype in (torch.float64, torch.int16):
        answers = run(4, all_to_all_sides, dtype)
        assert all(all(answer) and len(answer) == len(SIDES) ** 2 for answer in answers)


def many_tensors() -> tuple[bool, int, int, int]:
    """Tensors of several shapes in small rounds; the bytes reported are those of the ledger."""
    switch.SIZES = switch.RoundSizes(1000, 250)
    world = World.open(device="cpu")
    old, new = (Layout(2, 2), shard(0)), (Layout(1, 4), shard(1))
    wholes = {f"w{i}": torch.randn(8 * i, 12, dtype=torch.float64) for i in range(1, 6)}
    wholes["step"] = torch.tensor(3.0)
    state: dict[str, torch.Tensor] = {}
    moves = []
    for name, whole in wholes.items():
        shape = tuple(whole.shape)
        sides = [x if shape else (Layout(4, 1), REPLICATED) for x in (old, new)]
        have, want = (boxes(shape, x, 4) for x in sides)
        state[name] = local(whole, have[world.rank])
        wanted = local(whole, want[world.rank])
        wholes[name] = wanted
        moves.append(
            Move(
                name, shape, have, want,
                lambda n=name: state[n], lambda t, n=name: state.__setitem__(n, t),
            )
        )  # fmt: skip
    moved = move(moves, world.everyone)
    minimum = 0
    for m in moves:
        for rank in range(4):
            lacking = sum(map(volume, m.want[rank])) - sum(
                volume(x)
                for a in m.want[rank]
                for b in m.have[rank]
                if (x := intersection(a, b)) is not None
            )
            minimum += lacking * 8
    equal = all(torch.equal(state[n], wholes[n]) for n in wholes)
    return equal, moved.sent, world.ledger.sent, minimum


def test_many_tensors_in_small_rounds_with_the_least_traffic() -> None:
    answers = run(4, many_tensors)
    assert all(equal for equal, *_ in answers)
    assert [moved for _, moved, _, _ in answers] == [sent for _, _, sent, _ in answers]
    assert sum(moved for _, moved, _, _ in answers) == answers[0][3]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak_of_a_switch(old: Side, new: Side) -> tuple[int, int, bool]:
    """The most memory during a switch, tensors alone; bytes of the larger layout; correctness."""
    world = World.open(device="cpu")
    shapes = {"embed": (3000, 1000), **{f"w{i}": (500, 1000) for i in range(8)}}
    base = resident()
    state: dict[str, torch.Tensor] = {}
    moves, sizes = [], [0, 0]
    peak = 0
    for name, shape in shapes.items():
        have, want = boxes(shape, old, world.size), boxes(shape, new, world.size)
        state[name] = torch.full(local_shape(have[world.rank], 2), float(len(name)))
        sizes[0] += state[name].numel() * 4
        sizes[1] += sum(map(volume, want[world.rank])) * 4

        def replace(new_one: torch.Tensor, n: str = name) -> None:
            nonlocal peak
            peak = max(peak, resident() - base)
            state[n] = new_one

        moves.append(Move(name, shape, have, want, lambda n=name: state[n], replace))
    move(moves, world.everyone)
    correct = all(bool((t == len(n)).all()) for n, t in state.items())
    return peak, max(sizes), correct


def test_memory_stays_near_the_larger_layout() -> None:
    data, tensor = (Layout(2, 1), REPLICATED), (Layout(1, 2), shard(0))
    for old, new in ((data, tensor), (tensor, data), (tensor, (Layout(1, 2), shard(1)))):
        for peak, larger, correct in run(2, peak_of_a_switch, old, new):
            assert correct and peak <= 1.15 * larger + 64e6, (peak, larger)


def test_shrinking_tensors_go_first_and_growing_ones_last() -> None:
    def made(name: str, before: int, after: int) -> Move:
        def side(n: int) -> list[list[Box]]:
            return [[((0, n),)]]

        return Move(name, (9,), side(before), side(after), lambda: torch.empty(0), lambda _: None)

    moves = [made("a", 1, 9), made("b", 9, 1), made("c", 1, 5), made("d", 4, 2)]
    assert [m.name for m in in_order(moves)] == ["d", "b", "a", "c"]


def test_what_does_not_change_is_not_touched() -> None:
    def refuse(_: Any) -> None:
        raise AssertionError("replaced")

    side = [[((0, 4),)]]
    world = World.open(device="cpu")
    still = Move("x", (4,), side, side, lambda: torch.empty(4), refuse)
    assert move([still], world.everyone).sent == 0


def test_segments_in_a_local_tensor_as_a_picture() -> None:
    """Rank 1 of 2 holds rows 2-3 and 6-7 of 8 as a local tensor of 4 rows."""
    mine = shard(0, 2).boxes((8, 2), 2, 1)
    held = LocalTensor("w", (8, 2), mine, torch.arange(8 * 2).view(8, 2)[[2, 3, 6, 7]])
    assert mine == (((2, 4), (0, 2)), ((6, 8), (0, 2)))
    assert held.view(((6, 7), (1, 2))).tolist() == [[13]]
    assert held.view(mine[0]).tolist() == [[4, 5], [6, 7]]


def test_few_old_tensors_are_kept_beside_their_new_ones() -> None:
    """Without traffic too: forty tensors of 1 MB are cut in rounds of 16 MB of new ones."""

    def made(i: int) -> Move:
        old = boxes((1024, 512), (Layout(2, 1), REPLICATED), 2)
        new = boxes((1024, 512), (Layout(1, 2), shard(0)), 2)
        return Move(f"w{i}", (1024, 512), old, new, lambda: torch.empty(0), lambda _: None)

    rounds = list(switch._rounds([made(i) for i in range(40)]))
    assert [len(r.ends) for r in rounds] == [17, 17, 6]
    assert sorted(i for r in rounds for i in r.begins) == list(range(40))
