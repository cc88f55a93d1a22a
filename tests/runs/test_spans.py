"""Sets of intervals against sets of seconds."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from synchromesh.runs.spans import common, covered_before, length, minus, union

pairs = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6)


def seconds(intervals: object) -> set[int]:
    return {s for start, end in intervals for s in range(start, end)}  # type: ignore[attr-defined]


@given(pairs, pairs)
def test_as_sets_of_seconds(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    x, y = union(a), union(b)
    assert seconds(x) == seconds(a) and length(x) == len(seconds(a))
    assert seconds(common(x, y)) == seconds(a) & seconds(b)
    assert seconds(minus(x, y)) == seconds(a) - seconds(b)
    assert covered_before(x)(12) == len(seconds(a) & set(range(12)))
    assert all(p[1] < q[0] for p, q in pairwise(x)), "sorted and apart"
