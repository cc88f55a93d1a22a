"""Deviations: what is compared, and from when on a difference is an error."""

import sys

import pytest
import torch

from synchromesh.verify.deviation import MARGIN, Deviation, merged, number

LIMIT = 1e-10


def deviation(value: list[float], reference: list[float], noise: float = 0.0) -> Deviation:
    d = Deviation(LIMIT)
    d.add(*(torch.tensor(x, dtype=torch.float64) for x in (value, reference)), noise, "w", 2)
    return d


def test_a_deviation_is_the_largest_difference_by_the_largest_value() -> None:
    d = Deviation(LIMIT)
    d.add(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), noise=0.4)
    d.add(torch.tensor(0.5), torch.tensor(0.0))
    d.add(torch.empty(0), torch.empty(0))
    assert d.relative == 0.5 and d.noise_floor == 0.1
    d.add(torch.tensor(float("nan")), torch.tensor(1.0))
    d.add(torch.tensor(1.0), torch.tensor(1.0))
    assert d.relative != d.relative and d.wrong, "a NaN is never forgotten"


@pytest.mark.parametrize("noise", [0.0, 1e-16, 1e-9])
def test_an_error_exceeds_the_tolerance_and_the_margin_of_noise_together(noise: float) -> None:
    for y in (1e-3, 1.0):
        allowed = LIMIT * y + MARGIN.times * noise
        assert not deviation([1.0, y + 0.99 * allowed], [1.0, y], noise).wrong
        assert deviation([1.0, y + 1.02 * allowed], [1.0, y], noise).wrong


def test_a_small_entry_is_judged_by_its_own_size() -> None:
    worst = deviation([1.0, 1e-6 * (1 + 1e-7)], [1.0, 1e-6], noise=1e-16).worst
    assert worst.excess > 1 and (worst.name, worst.step) == ("w", 2)
    assert worst.deviation == pytest.approx(1e-7, rel=1e-3)
    assert worst.noise_floor == pytest.approx(1e-10)


def test_equal_infinities_agree_and_others_do_not() -> None:
    inf = float("inf")
    d = deviation([inf, -inf, 1.0], [inf, -inf, 1.0])
    assert not d.wrong and d.relative == 0.0 and d.reference == 1.0
    assert deviation([inf], [-inf]).wrong and deviation([inf], [1.0]).wrong
    assert deviation([1.0], [-inf]).wrong and deviation([float("nan")], [float("nan")]).wrong


def test_imaginary_parts_count() -> None:
    d = Deviation(LIMIT)
    d.add(torch.tensor([1 + 2j]), torch.tensor([1 + 1j]))
    assert d.difference == 1.0


def test_over_ranks_the_worst_counts_with_its_rank() -> None:
    right, wrong = deviation([1.0], [1.0]), deviation([1.5], [1.0])
    over = merged([d.to_dict() for d in (right, wrong, right)])
    assert over.wrong and over.worst.rank == 1 and over.relative == 0.5
    assert not merged([right.to_dict(), right.to_dict()]).wrong


def test_numbers_fit_into_json() -> None:
    assert number(0.5) == 0.5
    assert number(float("inf")) == number(float("nan")) == sys.float_info.max
