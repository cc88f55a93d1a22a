"""Gradient sums: against one process, with accumulation, missing gradients, groups and dtypes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from synchromesh.engine.gradients import GradientSync, Summed
from synchromesh.engine.world import World
from synchromesh.values.placement import shard
from tests.bucket_sizes import bucket_sizes
from tests.ranks import run


def _model() -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)
    ).double()
    layers[0].to(memory_format=torch.channels_last)
    return layers


def _batch(row: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(row)
    return torch.randn(1, 2, 4, 4, generator=generator, dtype=torch.float64), torch.tensor(
        [row % 3]
    )


def _loss(model: nn.Module, row: int) -> Tensor:
    x, y = _batch(row)
    return F.cross_entropy(model(x), y)


def _expected(rows: int) -> list[Tensor]:
    model = _model()
    sum(_loss(model, r) for r in range(rows)).backward()
    return [p.grad for p in model.parameters()]


def _accumulated(bucket: int) -> None:
    """Three micro-batches a rank, two steps; sums are of all rows whichever bucket size."""
    world = World.open("cpu")
    model = _model()
    with bucket_sizes(bucket, bucket // 2):
        sync = GradientSync([Summed(p, world.everyone) for p in model.parameters()])
    for _ in range(2):
        for p in model.parameters():
            p.grad = None
        for micro in range(3):
            if micro == 2:
                sync.begin()
                sync.complete(model.parameters())
            _loss(model, micro * world.size + world.rank).backward()
        sync.finish(0.5)
        for p, want in zip(model.parameters(), _expected(3 * world.size), strict=True):
            torch.testing.assert_close(p.grad, want / 2, atol=1e-14, rtol=0)
            assert p.grad.stride() == p.stride()
    numbers = sum(p.numel() for p in model.parameters())
    assert world.ledger.sent == 2 * (2 * (world.size - 1) * numbers * 8 // world.size)
    before = [p.grad.clone() for p in model.parameters()]
    sync.close()
    _loss(model, 0).backward()  # nothing is left behind: this adds as torch does
    assert all(not torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))
    world.close()


@pytest.mark.parametrize(("size", "bucket"), [(2, 25 << 20), (3, 600), (2, 8)])
def test_accumulated_gradients_are_the_sum_over_all_rows(size: int, bucket: int) -> None:
    run(size, _accumulated, bucket)


def _missing() -> list[list[float] | None]:
    """a: everywhere; b: on rank 1; c: in an earlier micro-batch of rank 0; d: nowhere."""
    world = World.open("cpu")
    a, b, c, d = (nn.Parameter(torch.ones(2)) for _ in range(4))
    sync = GradientSync([Summed(p, world.everyone) for p in (a, b, c, d)])
    if world.rank == 0:
        (c.sum() * 5).backward()
    for step in range(2):
        sync.begin()
        sync.complete([a, b, c, d])
        loss = a.sum() * (world.rank + 1)
        if world.rank == 1:
            loss = loss + b.sum() * 7
        loss.backward()
        sync.finish(None)
        if step == 0:
            first = [None if p.grad is None else p.grad.tolist() for p in (a, b, c, d)]
            for p in (a, b, c, d):
                p.grad = None
    assert c.grad is None and d.grad is None and b.grad.tolist() == [7, 7]
    world.close()
    return first


def test_missing_gradients_are_zeros_unless_missing_everywhere() -> None:
    assert run(2, _missing) == [[[3, 3], [7, 7], [5, 5], None]] * 2


def _mixed_groups() -> None:
    """Parameters of other groups, dtypes and none, as components of other layouts have them."""
    world = World.open("cpu")
    pairs = world.groups([(0, 2), (1, 3)])
    alone = world.groups([(0,), (1,), (2,), (3,)])
    groups = [world.everyone, pairs, alone, pairs, world.everyone]
    dtypes = [torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float32]
    parameters = [nn.Parameter(torch.ones(3, dtype=t)) for t in dtypes]
    with bucket_sizes(1, 1):
        sync = GradientSync(list(map(Summed, parameters, groups)))
    sync.begin()
    sync.complete(parameters)
    sum((p * (world.rank + 1)).sum().double() for p in parameters).backward()
    sync.finish(2.0)
    pair = 4.0 if world.rank in (0, 2) else 6.0
    for p, t, want in zip(parameters, dtypes, (10, pair, world.rank + 1, pair, 10), strict=True):
        assert p.grad.dtype is t and p.grad.tolist() == [2 * want] * 3
    idle = GradientSync([])
    idle.begin()
    idle.finish(0.5)
    world.close()


def test_groups_and_dtypes_differ_by_parameter() -> None:
    run(4, _mixed_groups)


def test_sparse_gradients_of_one_rank_become_dense() -> None:
    """As they do where they are summed: what follows (scaling, norms) takes dense ones."""
    world = World.open("cpu")
    table = nn.Embedding(5, 2, sparse=True)
    sync = GradientSync([Summed(table.weight, world.everyone)])
    sync.begin()
    sync.complete([table.weight])
    table(torch.tensor([1, 1, 3])).sum().backward()
    sync.finish(0.5)
    assert table.weight.grad.tolist() == [[0, 0], [1, 1], [0, 0], [0.5, 0.5], [0, 0]]
    world.close()


def _replaced() -> None:
    """After a switch a parameter has other data; a new sync takes over."""
    world = World.open("cpu")
    p = nn.Parameter(torch.ones(4))
    for length in (4, 6):
        p.data = torch.ones(length)
        p.grad = None
        sync = GradientSync([Summed(p, world.everyone)])
        sync.begin()
        sync.complete([p])
        (p.sum() * (world.rank + 1)).backward()
        sync.finish()
        assert p.grad.tolist() == [3.0] * length
        sync.close()
    world.close()


def test_another_shape_after_a_switch() -> None:
    run(2, _replaced)


def _scattered(every: bool, bucket: int, unused: int) -> None:
    """Each rank keeps a part: of odd sizes, of fewer rows than ranks, of a missing gradient, of
    two data types."""
    world = World.open("cpu")
    shapes = [(5, 3), (2,), (4, 2), (1, 7), (6,), (3, 2)]
    dtypes = [torch.float32] * 4 + [torch.float64] * 2
    wholes = [nn.Parameter(torch.ones(s, dtype=t)) for s, t in zip(shapes, dtypes, strict=True)]
    cuts = [shard(0), shard(0), shard(0), shard(1), shard(0), shard(0)]
    parts = [
        nn.Parameter(x.detach().narrow(cut.dim, start, stop - start).clone())
        for x, cut in zip(wholes, cuts, strict=True)
        for start, stop in (cut.share(x.shape[cut.dim], world.size, world.rank),)
    ]
    summed = [
        Summed(part, world.everyone, whole, cut, every)
        for part, whole, cut in zip(parts, wholes, cuts, strict=True)
    ]
    with bucket_sizes(bucket, bucket):
        sync = GradientSync(summed)
    used = [i for i in range(len(wholes)) if i != unused]
    for _ in range(2):
        for part in parts:
            part.grad = None
        for micro in range(3):
            if micro == 2:
                sync.begin()
                sync.complete(parts)
            values = [torch.arange(x.numel()).view(x.shape) + micro for x in wholes]
            sum(((world.rank + 1) * wholes[i] * values[i]).sum() for i in used).backward()
            sync.end_backward(0)
            assert all(x.grad is None for x in wholes) or not every
        sync.finish(0.5)
        ranks = sum(range(1, world.size + 1))
        for i in used:
            whole, cut = wholes[i], cuts[i]
            start, stop = cut.share(whole.shape[cut.dim], world.size, world.rank)
            want = ranks * (3 * torch.arange(whole.numel()).view(whole.shape) + 3) / 2
            assert parts[i].grad.tolist() == want.narrow(cut.dim, start, stop - start).tolist()
        assert parts[unused].grad is None
    sent = sum(world.size * cut.local_shape(s, world.size)[cut.dim] * torch.Size(s).numel()
               // s[cut.dim] * t.itemsize
               for s, t, cut in zip(shapes, dtypes, cuts, strict=True))  # fmt: skip
    times = 6 if every else 2
    assert world.ledger.sent == times * sent * (world.size - 1) // world.size
    world.close()


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize(
    ("size", "bucket", "unused"), [(2, 40, 3), (3, 40, 0), (2, 1, 0), (3, 1, 2), (2, 60, 1)]
)
def test_each_rank_gets_the_sum_of_its_part(
    size: int, every: bool, bucket: int, unused: int
) -> None:
    run(size, _scattered, every, bucket, unused)


def _zeroed_in_place() -> None:
    world = World.open("cpu")
    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p], lr=0.0)
    sync = GradientSync([Summed(p, world.everyone)])
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        sync.begin()
        sync.complete([p])
        p.sum().backward()
        sync.finish()
        assert p.grad.tolist() == [2.0] * 4
    world.close()


def test_gradients_that_are_zeroed_in_place() -> None:
    run(2, _zeroed_in_place)
