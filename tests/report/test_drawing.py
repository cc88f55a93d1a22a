"""Drawings: inks for colours, ids of their own, places that do not overlap."""

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from synchromesh.report.drawing import (
    SIZES,
    Drawing,
    SharedStyles,
    _shorter,
    boxes,
    drawn,
    fitted,
    labels,
    width_of,
)
from synchromesh.report.lines import spaced
from synchromesh.report.palette import PARTS
from synchromesh.report.strips import STRIP, _widths
from synchromesh.results.run import ComponentLayout, joined


def picture(width: int) -> Drawing:
    sheet = Drawing(width, 80)
    axes = sheet.axes(20, 10, width - 40, 40)
    boxes(axes, PARTS["transfer"], [(0, 1, 0, 1)])
    sheet.text(5, 70, "<b>$x$ & y")
    return sheet


def test_a_drawing_is_small_and_has_the_inks_of_the_page() -> None:
    wide, narrow = drawn("name", picture)
    assert (
        f'viewBox="0 0 {SIZES.wide} 80"' in wide and f'viewBox="0 0 {SIZES.narrow} 80"' in narrow
    )
    assert "var(--transfer)" in wide and "var(--text)" in wide
    assert not re.search(r"#[0-9a-f]{6}", wide), "each colour is an ink"
    assert "&lt;b&gt;$x$ &amp; y" in wide
    ids = set(re.findall(r'id="([^"]+)"', wide))
    used = set(re.findall(r'(?:url\(#|href="#)([\w-]+)', wide))
    assert ids == used and all(i.startswith("name-w") for i in ids)
    assert len(wide) < 12_000


def test_texts_fit_and_differ() -> None:
    assert fitted("short", 100) == "short" and fitted("anything", 1) == ""
    assert width_of(fitted("a long name of a plan " * 4, 90)) <= 90
    names = ["data; encoder.layer.1=tensor", "data; encoder.layer.2=tensor"]
    found = labels(names, 80)
    assert len(set(found.values())) == 2 and max(map(width_of, found.values())) <= 81


def test_labels_are_moved_apart_and_stay_inside() -> None:
    assert spaced([10, 50, 90], 0, 100) == [10, 50, 90]
    assert spaced([50, 50, 90], 0, 100) == [43, 57, 90], "a gap of 14, centred"
    assert spaced([2, 2, 2], 0, 100) == [0, 14, 28] and spaced([99, 99], 0, 100) == [86, 100]
    assert spaced([5, 5, 5], 0, 20) == [0, 14, 28], "without room from the first on"
    places = spaced([50, 50, 51, 99], 0, 100)
    assert all(b - a >= 14 for a, b in pairwise(places)) and places[-1] <= 100


@given(st.lists(st.floats(0, 300), min_size=1, max_size=9).map(sorted))
def test_no_label_can_stand_nearer(wanted: list[float]) -> None:
    """Against a descent of the sum of squares by single labels and by neighbours together."""
    places = spaced(wanted, 0, 300)
    assert all(b - a >= 14 - 1e-9 for a, b in pairwise(places))

    def far(of: list[float]) -> float:
        return sum((a - b) ** 2 for a, b in zip(of, wanted, strict=True))

    for first in range(len(wanted)):
        for last in range(first, len(wanted)):
            for step in (-0.5, 0.5):
                moved = [y + step * (first <= i <= last) for i, y in enumerate(places)]
                apart = all(b - a >= 14 for a, b in pairwise(moved))
                if apart and moved[0] >= 0 and moved[-1] <= 300:
                    assert far(moved) >= far(places) - 1e-6


def test_widths_are_shares_of_parameters_with_a_least() -> None:
    parts = tuple(ComponentLayout(n, "data", 0, b) for n, b in (("a", 0), ("b", 30), ("c", 10)))
    widths = _widths(parts, 100)
    assert abs(sum(widths) - 100) < 1e-9 and widths[0] == STRIP.least
    assert (widths[1] - STRIP.least) / (widths[2] - STRIP.least) == 3
    assert _widths(parts[:1], 50) == [50]
    assert min(_widths(parts * 100, 100)) > 0


def test_spans_that_are_seen_as_one_are_one() -> None:
    assert joined([(3, 4), (0, 1), (1.05, 2), (3.5, 3.6)], 0.1) == [(0, 2), (3, 4)]


def test_paths_get_shorter_and_stay_where_they_are() -> None:
    assert _shorter("M 0 0 L 5 0 L 5 3 L 0 3 L 0 0 z M 9 9 L 8 7") == "M0 0H5V3H0zM9 9L8 7"
    assert _shorter("M 0 0 L 0 4 z L 2 0") == "M0 0V4zH2"
    assert _shorter("M 1 1 z") == "M1 1z"
    assert _shorter("M 0 0 C 1 1 2 2 3 3 L 5 3") == "M 0 0 C 1 1 2 2 3 3 L 5 3"


def test_a_style_is_written_once_for_a_page() -> None:
    shared = SharedStyles()
    first = shared.classed('<path d="M0 0" style="fill:red" /><path style="fill:url(#a)" />')
    second = shared.classed('<text style="fill:blue">a</text><use style="fill:red" />')
    assert first == '<path d="M0 0" class="s0" /><path style="fill:url(#a)" />'
    assert second == '<text class="s1">a</text><use class="s0" />'
    assert shared.rules() == ".chart .s0{fill:red}\n.chart .s1{fill:blue}"
