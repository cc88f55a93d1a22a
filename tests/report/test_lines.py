"""The lines of speedups: the ideal one whole, names at the ends of theirs."""

from functools import cache
from itertools import combinations, pairwise
from math import log

import pytest

from synchromesh.report import scaling
from synchromesh.report.drawing import SIZES, width_of
from synchromesh.report.figure import Subject
from synchromesh.report.palette import marks
from synchromesh.results.groups import comparisons
from tests.report import sample
from tests.report.picture import Picture, Point, read

CASES = ("crowded", "ending early", "slower", "seconds and minutes")
SIZED = [(case, narrow) for case in CASES for narrow in (0, 1)]


@cache
def drawings(case: str) -> tuple[str, ...]:
    study = sample.difficult(case)
    subject = Subject(comparisons(study)[0], marks(run.strategy for run in study.runs), "name")
    (figure,) = scaling.speedup(subject)
    return figure.drawings


def picture(case: str, narrow: int) -> Picture:
    return read(drawings(case)[narrow])


def names(case: str, picture: Picture) -> dict[str, tuple[str, Point]]:
    """By strategy the words of its name, shortened perhaps, and where they begin."""
    strategies = [*sample.DIFFICULT[case][1], "ideal"]
    found = {}
    for name in strategies:
        (text,) = [
            (words, place)
            for words, place in picture.texts
            if name == words or (words.endswith("…") and name.startswith(words[:-1]))
        ]
        found[name] = text
    return found


def end(case: str, name: str, picture: Picture) -> Point:
    """Of a strategy's line: there is one of its ink."""
    ink = "muted" if name == "ideal" else marks(sample.DIFFICULT[case][1])[name].ink.name
    (line,) = picture.of(ink)
    assert not line.clipped
    return line.points[-1]


@pytest.mark.parametrize(("case", "narrow"), SIZED)
def test_the_ideal_line_is_whole_and_like_no_other(case: str, narrow: int) -> None:
    drawn = picture(case, narrow)
    (ideal,) = drawn.of("muted")
    numbers = sorted({n for of in sample.DIFFICULT[case][1].values() for n in of})
    (x1, y1), (x2, y2) = ideal.points
    assert not ideal.clipped
    axis = drawn.at("devices")[1]  # below the numbers
    below = {text: x for text, (x, y) in drawn.texts if abs(y - (axis - 15)) < 1}
    assert abs(x1 - below["1"]) < 0.2 and abs(x2 - below[str(numbers[-1])]) < 0.2
    assert 0 < y2 < y1 < SIZES.wide
    # along both axes 1 to N is as far, in logarithms: by the numbers at the left
    left = sorted(
        (float(text.replace(",", "")), y)
        for text, (x, y) in drawn.texts
        if x == 36.5 and text not in ("", "ideal")
    )
    (low, at_low), (high, at_high) = left[0], left[-1]
    octave = (at_low - at_high) / log(high / low)
    assert abs((y1 - y2) / octave - log(numbers[-1])) < 0.02
    assert all(line.dash != ideal.dash for line in drawn.lines if line is not ideal)
    assert ideal.dash, "dotted"


@pytest.mark.parametrize(("case", "narrow"), SIZED)
def test_names_stand_at_the_ends_of_their_lines(case: str, narrow: int) -> None:
    drawn = picture(case, narrow)
    for name, (_, (x, y)) in names(case, drawn).items():
        at_x, at_y = end(case, name, drawn)
        away = (x - at_x, y - 4 - at_y)  # of the middle of its letters
        if away[0] < SIZES.leader - 1:
            assert 5 < away[0] < 10 and abs(away[1]) < 2, (name, away)
            continue
        ink = "muted" if name == "ideal" else marks(sample.DIFFICULT[case][1])[name].ink.name
        (leader,) = drawn.of(ink, 0.8)[-1:]
        assert leader.points[0] == pytest.approx((at_x, at_y), abs=0.2), name
        assert leader.points[1] == pytest.approx((x - 10, y - 4), abs=0.3), name
        most = len(sample.DIFFICULT[case][1]) * SIZES.line / 2
        assert abs(away[1]) < most, (name, away)


def test_a_line_that_ends_early_has_its_name_there() -> None:
    wide, narrow = (picture("ending early", size) for size in (0, 1))
    for name in ("pipeline", "tensor", "fsdp2"):
        assert wide.at(name)[0] - end("ending early", name, wide)[0] < 10
        assert narrow.at(name)[0] - end("ending early", name, narrow)[0] > SIZES.leader
    # no room in front of 8 devices
    name = "hybrid:tensor=2"
    assert wide.at(name)[0] - end("ending early", name, wide)[0] > SIZES.leader


@pytest.mark.parametrize(("case", "narrow"), SIZED)
def test_names_do_not_overlap_and_stay_in_the_sheet(case: str, narrow: int) -> None:
    drawn = picture(case, narrow)
    boxes = [(x, x + width_of(words), y) for words, (x, y) in names(case, drawn).values()]
    for (a, b, y), (c, d, z) in combinations(boxes, 2):
        assert min(b, d) <= max(a, c) or abs(y - z) > 13, (a, c)
    assert max(b for _, b, _ in boxes) <= (SIZES.narrow if narrow else SIZES.wide) + 1


def test_what_has_room_is_not_moved() -> None:
    drawn = picture("seconds and minutes", 0)
    found = sorted(y for _, (_, y) in names("seconds and minutes", drawn).values())
    near = [b - a < 15 for a, b in pairwise(found)]
    leaders = [line for line in drawn.lines if line.points[0][0] > 700 and not line.clipped]
    assert sum(near) == 1 and len(leaders) == 2, "data is as quick as the ideal is"


def test_one_device_goes_on_level_without_a_marker() -> None:
    drawn = picture("slower", 0)
    (single,) = drawn.of("single")
    assert single.points[0][1] == single.points[1][1] and single.points[1][0] > 800
    ends = [place for style, place in drawn.marks if "--single" in style]
    assert single.points[0] in ends and single.points[1] not in ends
