"""Batch norm in training mode: synchronised over ranks against nn.BatchNorm of the whole batch."""

import pytest
import torch
from torch import Tensor, nn

from synchromesh.engine.world import World
from synchromesh.programs.batch_norm import BatchNormPolicy, NormArguments
from synchromesh.values.traffic import batch_norm_collectives, sent_bytes
from tests.ranks import run


def _whole(shape: tuple[int, ...], affine: bool) -> tuple[Tensor, Tensor, nn.Module]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 100
    dy = torch.randn(shape, generator=generator, dtype=torch.float64)
    norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](
        shape[1], momentum=0.3, affine=affine, dtype=torch.float64
    )
    if affine:
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2, shape[1]))
            norm.bias.copy_(torch.linspace(-1, 1, shape[1]))
    return x, dy, norm


def _synchronised(shape: tuple[int, ...], affine: bool, cuts: tuple[int, ...]) -> None:
    world = World.open("cpu")
    x, dy, norm = _whole(shape, affine)
    own = slice(cuts[world.rank], cuts[world.rank + 1])
    real = own.stop > own.start
    rows = x[own] if real else torch.full((1, *shape[1:]), 7.0, dtype=torch.float64)
    rows = rows.clone().requires_grad_()
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    weight = norm.weight.detach().clone().requires_grad_() if affine else None
    bias = norm.bias.detach().clone().requires_grad_() if affine else None
    policy = BatchNormPolicy(world.everyone)
    y = policy.apply(NormArguments(rows, weight, bias, mean, var, True, 0.3, norm.eps), real=real)
    y.backward(dy[own] if real else torch.zeros_like(y))
    predicted = batch_norm_collectives(shape[1], 8, world.size)
    assert world.ledger.sent == sum(
        sent_bytes(c.kind, c.payload(0), world.size) for c in predicted
    )

    x.requires_grad_()
    expected = norm(x)
    expected.backward(dy)
    close = {"atol": 1e-11, "rtol": 1e-11}
    torch.testing.assert_close(mean, norm.running_mean, **close)
    torch.testing.assert_close(var, norm.running_var, **close)
    if real:
        torch.testing.assert_close(y, expected[own], **close)
        torch.testing.assert_close(rows.grad, x.grad[own], **close)
    else:
        assert torch.equal(rows.grad, torch.zeros_like(rows)) and y.isfinite().all()
    if affine:
        for own_part, whole in ((weight.grad, norm.weight.grad), (bias.grad, norm.bias.grad)):
            world.everyone.all_reduce(own_part)  # as gradients are, later
            torch.testing.assert_close(own_part, whole, **close)
    world.close()


@pytest.mark.parametrize(
    ("shape", "affine", "cuts"),
    [
        ((6, 3, 2, 2), True, (0, 3, 6)),
        ((7, 3), True, (0, 1, 7)),
        ((5, 4, 3), False, (0, 2, 2, 5)),  # the middle rank has no rows, only a stand-in
    ],
)
def test_synchronised_is_the_norm_of_the_whole_batch(shape, affine, cuts) -> None:
    run(len(cuts) - 1, _synchronised, shape, affine, cuts)


def test_a_row_block_is_torchs_own() -> None:
    x, _, norm = _whole((6, 3, 2, 2), True)
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    policy = BatchNormPolicy()
    y = policy.apply(
        NormArguments(x, norm.weight, norm.bias, mean, var, True, 0.3, norm.eps), real=True
    )
    assert torch.equal(y, norm(x))
    assert torch.equal(mean, norm.running_mean) and torch.equal(var, norm.running_var)


def test_stand_ins_and_single_values_do_not_spoil_running_statistics() -> None:
    x, _, norm = _whole((1, 3), True)
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    policy = BatchNormPolicy()
    policy.apply(
        NormArguments(x, norm.weight, norm.bias, mean, var, True, 0.5, norm.eps), real=False
    )
    assert not mean.any() and torch.equal(var, torch.ones(3))
    y = policy.apply(
        NormArguments(x, norm.weight, norm.bias, mean, var, True, 0.5, norm.eps), real=True
    )
    torch.testing.assert_close(mean, x[0] / 2)
    assert torch.equal(var, torch.ones(3)) and y.isfinite().all()


def _too_few() -> str:
    world = World.open("cpu")
    try:
        BatchNormPolicy(world.everyone).apply(
            NormArguments(torch.ones(1, 2), None, None, None, None, True, 0.1, 1e-5),
            real=world.rank == 0,
        )
    except ValueError as error:
        return str(error)
    return ""


def test_one_value_per_channel_is_refused() -> None:
    assert all(
        "at least 2 values per channel (the global batch, or its micro-batch, has 1)" in e
        for e in run(2, _too_few)
    )


def test_half_precision_keeps_its_dtype() -> None:
    def half() -> tuple[str, str]:
        world = World.open("cpu")
        x = torch.randn(4, 2, 3, dtype=torch.bfloat16).requires_grad_()
        w = torch.ones(2, requires_grad=True)
        y = BatchNormPolicy(world.everyone).apply(
            NormArguments(x, w, None, None, None, True, 0.1, 1e-5), real=True
        )
        y.sum().backward()
        return str(y.dtype), str(x.grad.dtype), str(w.grad.dtype)

    assert run(2, half) == [("torch.bfloat16", "torch.bfloat16", "torch.float32")] * 2
