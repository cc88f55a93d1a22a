"""Border edges between different layouts: the table of what is allowed, and the bytes each
sends."""

import pytest

from synchromesh.trace.partition.moves import edge_collectives
from synchromesh.values.component import Rows, Value
from synchromesh.values.layout import Layout
from synchromesh.values.placement import parse
from synchromesh.values.traffic import sent_bytes

ONE, TWO, FOUR = Layout(4, 1), Layout(2, 2), Layout(1, 4)
ACTIVATION = Value("x", (1, 8, 6), "float32", Rows(), True)  # 192 bytes a row
BIAS = Value("b", (1, 8, 6), "float32", None, True)
ROWS = 16


def text(value: Value, have: str, want: str, source: Layout, target: Layout) -> str | None:
    """`all_gather f 768 / ...`: each collective, its direction, and the bytes a rank sends."""
    found = edge_collectives(value, parse(have), parse(want), source, target)
    if found is None:
        return None
    rows = ROWS // source.data
    sent = ((c, sent_bytes(c.kind, c.payload(rows), c.ranks)) for c in found)
    return " / ".join(f"{c.kind} {c.direction[0]}{c.ranks} {n}" for c, n in sent) or "nothing"


@pytest.mark.parametrize(
    ("have", "want", "source", "target", "expected"),
    [
        # rows of a producer's block: 16 under 1x4, 8 under 2x2, 4 under 4x1
        ("R", "R", FOUR, ONE, "all_gather b4 2304"),
        ("R", "R", FOUR, TWO, "all_gather b2 1536"),
        ("R", "R", TWO, ONE, "all_gather b2 768"),
        ("P", "R", FOUR, ONE, "reduce_scatter f4 2304 / all_gather b4 2304"),
        ("P", "R", FOUR, TWO, None),
        ("S(1)", "R", FOUR, ONE, "all_to_all f4 576 / all_to_all b4 576"),
        ("S(0)", "R", FOUR, ONE, None),  # rows
        ("S(2)", "R", FOUR, ONE, "all_to_all f4 768 / all_to_all b4 768"),  # 2 of 6, the largest
        ("r", "R", FOUR, ONE, None),
        ("R", "R", ONE, FOUR, "all_gather f4 2304"),
        ("R", "r", ONE, FOUR, "all_gather f4 2304 / reduce_scatter b4 2304"),
        ("R", "r", TWO, FOUR, None),
        ("R", "S(1)", ONE, FOUR, "all_to_all f4 576 / all_to_all b4 576"),
        ("R", "S(1)", TWO, FOUR, None),
        ("R", "P", ONE, FOUR, None),
        ("R", "R", TWO, FOUR, "all_gather f2 1536"),
        ("R", "R", Layout(3, 2), Layout(2, 3), "all_to_all f6 800 / all_to_all b6 800"),
        ("R", "r", Layout(3, 2), Layout(2, 3), None),
    ],
)  # fmt: skip
def test_values_with_rows(
    have: str, want: str, source: Layout, target: Layout, expected: str | None
) -> None:
    assert text(ACTIVATION, have, want, source, target) == expected


@pytest.mark.parametrize(
    ("have", "want", "source", "target", "expected"),
    [
        ("R", "R", FOUR, ONE, "all_reduce b4 288"),
        ("R", "r", TWO, FOUR, "all_reduce b2 192"),
        ("r", "R", FOUR, TWO, "nothing"),
        ("r", "r", TWO, FOUR, "nothing"),
        ("R", "R", ONE, FOUR, "nothing"),
        ("P", "R", FOUR, ONE, None),
        ("S(1)", "R", FOUR, ONE, None),
    ],
)
def test_values_without_rows(
    have: str, want: str, source: Layout, target: Layout, expected: str | None
) -> None:
    assert text(BIAS, have, want, source, target) == expected


def test_no_gradient_no_backward() -> None:
    found = edge_collectives(ACTIVATION, parse("P"), parse("R"), FOUR, ONE, backward=False)
    assert found is not None and [c.direction for c in found] == ["forward"]
