"""Moves between placements: value and gradient of every row of the table by its definition."""

from itertools import product

import pytest
import torch
from torch import Tensor

from synchromesh.engine.world import World
from synchromesh.programs.batch_norm import BatchNormPolicy
from synchromesh.programs.collectives import TABLE, GroupAxis, join, move, part
from synchromesh.programs.random import RandomStreams
from synchromesh.values.placement import Placement, parse
from tests.ranks import run

SHAPE = (12, 24, 2)
ODD = (7, 18, 3)  # 7 entries, 6 units of 3, 2 x 3 of 3


def _globals(size: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A value, a gradient, and terms for partial ones that add up to zero; equal on every rank."""
    generator = torch.Generator().manual_seed(size)
    value, gradient = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    noise = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(size - 1)]
    return value, gradient, [*noise, -sum(noise, torch.zeros(shape, dtype=torch.float64))]


def _hold(whole: Tensor, noise: list[Tensor], how: str, rank: int) -> Tensor:
    """What `rank` holds of `whole`, which is R, P or S."""
    size, placement = len(noise), parse(how)
    if placement.sharded:
        return part(whole, placement, size, rank)
    return whole / size + noise[rank] if how == "P" else whole


def _check(held: Tensor, whole: Tensor, how: str, world: World, what: str) -> None:
    """What this rank holds is its share of `whole`; partial values add up to it."""
    placement = parse(how)
    if placement.sharded:
        whole = part(whole, placement, world.size, world.rank)
    elif how == "P":
        held = world.everyone.all_gather(held).sum(0)
    torch.testing.assert_close(held, whole, atol=1e-13, rtol=0, msg=lambda m: f"{what}: {m}")


VALUE = {"R": "R", "r": "R", "P": "P"}
GRADIENT = {"R": "R", "r": "P", "P": "R"}


def _every_move(sharded: tuple[str, ...], shape: tuple[int, ...] = SHAPE) -> int:
    world = World.open("cpu")
    group, rank = world.everyone, world.rank
    value, gradient, noise = _globals(world.size, shape)
    moves = 0
    for source, target in product(("R", "r", "P", *sharded), repeat=2):
        if (source[0], target[0]) not in TABLE and source != target:
            continue
        if not all(parse(p).fits(shape, world.size) for p in (source, target)):
            continue
        length = shape[parse(source).dim] if parse(source).sharded else 0
        x = _hold(value, noise, VALUE.get(source, source), rank)
        # a transposed memory layout: nothing here is contiguous
        x = x.transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
        y = move(x, group, parse(source), parse(target), length)
        what = f"{source} -> {target}"
        _check(y.detach(), value, VALUE.get(target, target), world, what)
        dy = _hold(gradient, noise, GRADIENT.get(target, target), rank)
        (dx,) = torch.autograd.grad(y, x, dy.transpose(0, 2).contiguous().transpose(0, 2))
        _check(dx, gradient, GRADIENT.get(source, source), world, f"{what}, gradient")
        moves += 1
    world.close()
    return moves


@pytest.mark.parametrize(
    ("size", "sharded", "moves"),
    [
        (2, ("S(0)", "S(1)", "S(1, 2)", "S(0, 3)"), 49),
        (3, ("S(1)", "S(0, 2)"), 25),
        (4, ("S(0)", "S(0, 3)"), 25),
    ],
)
def test_every_move_of_the_table(size: int, sharded: tuple[str, ...], moves: int) -> None:
    assert run(size, _every_move, sharded) == [moves] * size


@pytest.mark.parametrize(("size", "shape"), [(2, ODD), (4, ODD), (4, (3, 9, 2))])
def test_every_move_of_unequal_parts(size: int, shape: tuple[int, ...]) -> None:
    """With (3, 9, 2) on four ranks the last one has nothing."""
    sharded = ("S(0)", "S(1)", "S(1, 1, 3)", "S(1, 2, 3)", "S(2)")
    fitting = [p for p in sharded if parse(p).fits(shape, size)]
    assert len(fitting) > 2
    pairs = len(fitting) ** 2 + 3 * len(fitting) * 2 + 9
    refused = sum(
        (a[0], b[0]) not in TABLE and a != b
        for a, b in product(("R", "r", "P", *fitting), repeat=2)
    )
    assert run(size, _every_move, sharded, shape) == [pairs - refused] * size


def _traffic() -> dict:
    world = World.open("cpu")
    world.choices[world.everyone.ranks] = "native"
    sent = {}
    x = torch.ones(2, 4, dtype=torch.float64)  # 64 bytes
    for source, target in (("R", "r"), ("P", "r"), ("S(0)", "r"), ("S(0)", "S(1)")):
        held = _hold(x, [torch.zeros(2, 4)] * 2, VALUE.get(source, source), world.rank)
        for wants in (False, True):
            held = held.detach().requires_grad_(wants)
            world.ledger.reset()
            y = move(held, world.everyone, parse(source), parse(target))
            forward = world.ledger.sent
            if wants:
                y.backward(torch.ones_like(y))
            sent[f"{source} -> {target}", wants] = (forward, world.ledger.sent - forward)
            assert y.requires_grad == wants
    world.close()
    return sent


def test_no_gradient_no_backward_traffic() -> None:
    for sent in run(2, _traffic):
        assert sent == {
            ("R -> r", False): (0, 0),
            ("R -> r", True): (0, 64),
            ("P -> r", False): (64, 0),
            ("P -> r", True): (64, 64),
            ("S(0) -> r", False): (32, 0),
            ("S(0) -> r", True): (32, 32),
            ("S(0) -> S(1)", False): (16, 0),
            ("S(0) -> S(1)", True): (16, 16),
        }


def _integers_and_scalars() -> None:
    world = World.open("cpu")
    axis = GroupAxis(world.everyone, RandomStreams(0), BatchNormPolicy())
    ids = torch.arange(8).view(2, 4)
    mine = axis.move(ids, "R", "S(1)")
    assert mine.tolist() == ids[:, 2 * world.rank :][:, :2].tolist()
    assert torch.equal(axis.move(mine, "S(1)", "S(0)"), ids[world.rank : world.rank + 1])
    assert torch.equal(axis.move(mine, "S(1)", "R"), ids)
    assert torch.equal(axis.move(axis.move(ids, "R", "P"), "P", "R"), ids)
    assert torch.equal(axis.move(ids > 3, "R", "S(0)"), (ids > 3)[world.rank : world.rank + 1])
    loss = torch.tensor(1.0 + world.rank, requires_grad=True)
    total = axis.move(loss, "P", "R")
    total.backward()
    assert total == 3 and loss.grad == 1
    assert axis.maximum(loss) == 2
    with torch.no_grad():
        assert not axis.move(loss, "P", "R").requires_grad
    # a move must not write into what others read
    shared = torch.ones(4, requires_grad=True)
    axis.move(shared, "P", "R")
    assert torch.equal(shared, torch.ones(4))
    world.close()


def test_integers_scalars_and_no_grad() -> None:
    run(2, _integers_and_scalars)


def test_part_and_join_are_inverse() -> None:
    x = torch.arange(24).view(12, 2)
    for placement in (Placement("S", 0), Placement("S", 0, 2), Placement("S", 0, 3)):
        parts = [part(x, placement, 2, i) for i in range(2)]
        assert torch.equal(join(torch.stack(parts), placement), x)
        for i, held in enumerate(parts):
            boxes = placement.boxes((12, 2), 2, i)
            assert torch.equal(held, torch.cat([x[a:b] for (a, b), _ in boxes]))


def test_one_rank_moves_nothing() -> None:
    world = World(0, 1, torch.device("cpu"), None, owner=False)  # type: ignore[arg-type]
    x = torch.ones(3)
    assert move(x, world.everyone, parse("P"), parse("R")) is x


def _two_terms_of_one_sum() -> list[float]:
    world = World.open("cpu")
    terms = [torch.zeros(3, requires_grad=True) for _ in range(2)]
    for _ in range(2):  # an accumulation
        moved = [move(t, world.everyone, parse("R"), parse("P")) for t in terms]
        ((moved[0] + moved[1]) * torch.ones(3)).sum().backward()
    world.close()
    return [t.grad[0].item() for t in terms if t.grad is not None]


def test_gradients_that_accumulate_do_not_share_memory() -> None:
    assert run(2, _two_terms_of_one_sum) == [[2.0, 2.0]] * 2
