"""Gradient buckets: a picture of how they fill, and laws of every assignment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synchromesh.values.buckets import BucketSizes, fill
from tests.bucket_sizes import bucket_sizes

Parameter = tuple[str, str, int]  # name, kind, bytes


def filled(parameters: list[Parameter], full: int, first: int) -> list[list[Parameter]]:
    with bucket_sizes(full, first):
        return fill(parameters, lambda p: p[1], lambda p: p[2])


def picture(text: str, full: int, first: int) -> str:
    """Parameters as `name:bytes`, of the kind that their first letter is."""
    split = [item.split(":") for item in text.split()]
    made = filled([(n, n[0], int(size)) for n, size in split], full, first)
    return " | ".join(" ".join(name for name, _, _ in bucket) for bucket in made)


def test_buckets_fill_from_the_last_parameter_and_the_first_one_is_small() -> None:
    assert picture("p0:2 p1:2 p2:2 p3:2 p4:2 p5:2", full=4, first=2) == "p5 | p4 p3 | p2 p1 | p0"


def test_each_kind_has_its_buckets_and_its_small_first_one() -> None:
    assert picture("a0:2 b0:2 a1:2 b1:2 a2:2", full=4, first=2) == "a2 | b1 | a1 a0 | b0"


def test_sizes_are_those_of_ddp() -> None:
    assert BucketSizes() == BucketSizes(25 << 20, 1 << 20)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 20)), max_size=30),
    st.integers(1, 30),
    st.integers(1, 30),
)
def test_every_parameter_is_in_one_bucket_of_its_kind(
    drawn: list[tuple[str, int]], full: int, first: int
) -> None:
    parameters = [(str(i), kind, size) for i, (kind, size) in enumerate(drawn)]
    made = filled(parameters, full, first)
    assert sorted(p for bucket in made for p in bucket) == sorted(parameters)
    for kind in "ab":
        own = [bucket for bucket in made if bucket[0][1] == kind]
        assert [p for b in own for p in b] == [p for p in parameters[::-1] if p[1] == kind]
        for i, bucket in enumerate(own[:-1]):  # full, and not before its last parameter
            limit = full if i else first
            sizes = [p[2] for p in bucket]
            assert sum(sizes) >= limit > sum(sizes[:-1])


@pytest.mark.parametrize("size", [25 << 20, 1])
def test_nothing_falls_into_no_bucket(size: int) -> None:
    assert filled([], size, size) == []
