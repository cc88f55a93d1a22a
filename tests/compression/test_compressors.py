"""Compressors against the formulas of their papers in plain torch; the law of error feedback."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from synchromesh.compression import compressors
from synchromesh.compression.compressor import Compressor, played
from synchromesh.compression.low_rank import orthogonal
from synchromesh.compression.quantised import CODES
from synchromesh.values.compression import CompressedSizes

WORDS = ("fp16", "int8", "onebit", "topk:0.05", "powersgd:2")
SHAPES = ((20, 30), (7,), (5, 4, 3, 3), ())
GIVEN = [True] * len(SHAPES)


def sides(
    word: str,
    ranks: int,
    dtype: torch.dtype = torch.float64,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[Compressor]:
    sizes = CompressedSizes.of(word, shapes, str(dtype).removeprefix("torch."), ranks)
    return [compressors.of(sizes, i, torch.zeros(1, dtype=dtype)) for i in range(ranks)]


def gradients(ranks: int, step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(step)
    numbers = sum(map(math.prod, SHAPES))
    return [torch.randn(numbers, generator=g, dtype=torch.float64).to(dtype) for _ in range(ranks)]


def summed(of: Sequence[Compressor], numbers: Sequence[Tensor]) -> Tensor:
    made = played([side.sum(g, GIVEN) for side, g in zip(of, numbers, strict=True)])
    first = made[0][0].nan_to_num(7.0)
    assert all(torch.equal(total.nan_to_num(7.0), first) for total, _ in made)
    assert made[0][1].tolist() == [len(of)] * len(SHAPES)
    return made[0][0]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(WORDS), st.integers(1, 5), st.sampled_from([torch.float32, torch.float64]))
def test_what_is_lost_is_owed(word: str, ranks: int, dtype: torch.dtype) -> None:
    """All that was sent and all that is owed are all gradients that there were."""
    of, sent, had = sides(word, ranks, dtype), [], []
    for step in range(6):
        own = gradients(ranks, step, dtype)
        had += own
        sent.append(summed(of, own))
    owed = torch.stack([side.owed() for side in of]).sum(0)
    total = torch.stack(had).sum(0)
    close = (
        {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-11}
    )
    torch.testing.assert_close(torch.stack(sent).sum(0) + owed, total, **close)
    if word != "fp16":
        assert (owed.norm() / total.norm()) > 1e-3  # there was something to owe


@pytest.mark.parametrize("word", WORDS)
def test_what_is_owed_stays_bounded(word: str) -> None:
    of = sides(word, 3)
    own, sizes = gradients(3, 0), []
    for _ in range(120):
        summed(of, own)
        sizes.append(float(sum(side.owed() for side in of).norm()))  # type: ignore[arg-type]
    assert max(sizes[60:]) < 1.5 * max(sizes[:60])


@pytest.mark.parametrize("word", WORDS)
def test_bytes_are_those_of_the_sizes(word: str) -> None:
    (side, *_) = sides(word, 4)
    rounds, payloads = side.sum(gradients(4, 0)[0], GIVEN), []
    request = next(rounds)
    try:
        while True:
            payloads.append((request.kind, request.payload))
            flags = request.sent.nbytes
            got = request.sent
            if request.kind == "all_gather":
                got = torch.stack([got] * 4)
            assert flags >= request.payload // (4 if request.kind == "all_gather" else 1)
            request = rounds.send(got)
    except StopIteration:
        assert tuple(payloads) == side.sizes.payloads
    assert sum(x.nbytes for x in side.kept) == side.sizes.state_bytes


def coded(word: str, x: Tensor) -> Tensor:
    encode, decode = CODES[word]
    code = encode(x[None])
    assert (
        code.dtype == torch.uint8
        and code.shape[1] == CompressedSizes(word, ((256 * 2,),), 4, 1).part_bytes
    )
    return decode(code, x.dtype)[0]


def test_codes_are_the_formulas() -> None:
    x = torch.randn(512, dtype=torch.float64) * torch.tensor([1.0, 100.0]).repeat_interleave(256)
    for start in (0, 256):
        block = x[start : start + 256]
        m = float((block.abs().max() / 127).float())
        expected = torch.tensor([m * max(-127, min(127, round(float(v) / m))) for v in block])
        torch.testing.assert_close(coded("int8", x)[start : start + 256], expected.double())
        mean = float(block.abs().mean().float())
        signs = torch.tensor([mean if v >= 0 else -mean for v in block], dtype=torch.float64)
        torch.testing.assert_close(coded("onebit", x)[start : start + 256], signs)
    assert torch.equal(coded("fp16", x), x.half().double())


@pytest.mark.parametrize("word", ["fp16", "int8", "onebit"])
def test_codes_of_extremes(word: str) -> None:
    zero = torch.zeros(512, dtype=torch.float32)
    assert torch.equal(coded(word, zero), zero)
    large = zero.clone()
    large[3] = 1e6
    assert coded(word, large).isfinite().all()
    for broken in (math.inf, math.nan):
        large[3] = broken
        assert not coded(word, large)[3].isfinite()


@pytest.mark.parametrize("word", WORDS)
def test_what_is_not_finite_is_seen_and_not_owed(word: str) -> None:
    of, own = sides(word, 2), gradients(2, 0)
    own[1][5] = math.inf
    assert not summed(of, own).isfinite().all()
    assert all(x.isfinite().all() for side in of for x in [side.owed()])
    assert summed(of, gradients(2, 1)).isfinite().all()


def test_half_owes_what_is_too_large_for_it() -> None:
    of, own = sides("fp16", 2), gradients(2, 0)
    own[0][0], own[1][0] = 1e5, 1.0
    first = summed(of, own)[0]
    own[0][0] = own[1][0] = 0.0
    assert first == 65504.0
    assert sum(float(summed(of, own)[0]) for _ in range(3)) == pytest.approx(1e5 + 1 - 65504)


def test_the_largest_are_sent() -> None:
    of, own = sides("topk:0.05", 3), gradients(3, 0)
    k = math.ceil(0.05 * len(own[0]))
    expected = torch.zeros_like(own[0])
    for g in own:
        places = sorted(range(len(g)), key=lambda i: -abs(float(g[i])))[:k]
        expected[places] += g[places]
    torch.testing.assert_close(summed(of, own), expected)


def test_low_rank_is_the_algorithm_of_the_paper() -> None:
    """Gram-Schmidt, as Vogels et al. write it, on the sum, as all of it is linear in that."""
    ranks, of = 3, sides("powersgd:2", 3)
    starts = [q.clone() for q in of[0].factors]  # type: ignore[attr-defined]
    memory = torch.zeros_like(gradients(1, 0)[0])
    for step in range(5):
        own = gradients(ranks, step)
        x = memory + torch.stack(own).sum(0)
        expected, start, number = x.clone(), 0, 0
        for shape in SHAPES:
            count = math.prod(shape)
            if len(shape) > 1:
                m, q = x[start : start + count].view(shape[0], -1), starts[number]
                p = m @ q
                for i in range(p.shape[1]):
                    for j in range(i):
                        p[:, i] -= (p[:, j] @ p[:, i]) * p[:, j]
                    p[:, i] /= p[:, i].norm()
                starts[number] = m.T @ p
                expected[start : start + count] = (p @ starts[number].T).view(-1)
                number += 1
            start += count
        torch.testing.assert_close(summed(of, own), expected, rtol=1e-10, atol=1e-10)
        memory = x - expected


def test_a_matrix_of_low_rank_is_sent_without_a_loss() -> None:
    """Its missing directions are not filled with rounding, and come back when it has them."""
    of = sides("powersgd:3", 2, shapes=[(40, 30)])
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(40, 3, generator=g).double(), torch.randn(30, 3, generator=g).double()
    for kept in (1, 3, 0, 3, 3):
        m = (a[:, :kept] @ b[:, :kept].T).view(-1)
        made = played([side.sum(m / 2, [True]) for side in of])[0][0]
        torch.testing.assert_close(made, m, rtol=1e-9, atol=1e-9)


def test_columns_that_depend_on_others_are_left_out() -> None:
    p = torch.randn(9, 2, dtype=torch.float64)
    q = orthogonal(torch.cat([p, p[:, :1] + p[:, 1:]], 1))
    torch.testing.assert_close(q.T @ q, torch.diag(torch.tensor([1.0, 1.0, 0.0]).double()))
    assert not orthogonal(torch.zeros(5, 2)).any()


@pytest.mark.parametrize("word", WORDS)
def test_a_tensor_without_gradient_is_owed_what_it_was(word: str) -> None:
    """On one rank it takes part, on all it does not."""
    of = sides(word, 2)
    summed(of, gradients(2, 0))
    second = slice(600, 607)
    for other in ([True, False, True, True], [True] * 4):
        own = gradients(2, 1)
        own[0][second] = 0.0
        if not all(other):
            own[1][second] = 0.0
        before = sum(side.owed() for side in of)  # type: ignore[misc]
        flags = [[True, False, True, True], other]
        made = played([s.sum(g, f) for s, g, f in zip(of, own, flags, strict=True)])
        total, counts = made[0]
        after = sum(side.owed() for side in of)  # type: ignore[misc]
        assert counts.tolist() == [2, other[1], 2, 2]
        if not other[1]:
            torch.testing.assert_close(after[second], before[second])
        else:
            owed = before + own[0] + own[1] - total
            torch.testing.assert_close(after, owed, rtol=1e-10, atol=1e-10)
