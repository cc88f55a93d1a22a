"""Axes in one unit, and notes on nothing that is not drawn."""

import re
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synchromesh.report import strips, times
from synchromesh.report.figure import PageFigure, Subject
from synchromesh.report.numbers import Unit, size_unit, time_unit
from synchromesh.report.page import SECTIONS
from synchromesh.report.palette import marks
from synchromesh.report.panels import log_ticks, round_ticks
from synchromesh.results.groups import comparisons
from synchromesh.results.study import StudyResults
from tests.report import sample
from tests.report.picture import read

WRITTEN = re.compile(r"[\d.,]+ (µs|ms|s|min|h|B|KiB|MiB|GiB)")
SECONDS, MINUTES = Unit("s", 1.0), Unit("min", 60.0)
UNITS = {"seconds and minutes": "s", "minutes": "min", "one count": "ms"}


def subject(study: StudyResults) -> Subject:
    return Subject(comparisons(study)[0], marks(run.strategy for run in study.runs), "name")


@cache
def figures(case: str) -> dict[str, tuple[PageFigure, ...]]:
    of = subject(sample.difficult(case))
    return {name: tuple(make(of)) for name, _, make, _ in SECTIONS}


@pytest.mark.parametrize("case", UNITS)
def test_all_numbers_of_a_drawing_are_in_one_unit(case: str) -> None:
    found = figures(case)
    for name, of_section in found.items():
        for drawing in (drawing for figure in of_section for drawing in figure.drawings):
            texts = [text for text, _ in read(drawing).texts]
            units = {match[1] for text in texts if (match := WRITTEN.fullmatch(text))}
            assert len(units) == (0 if name in ("speedup", "layouts") else 1), (name, units)
        if name == "time":
            assert units == {UNITS[case]}
    alone = {"speedup", "scaling"} if case == "one count" else set()
    assert {name for name, of in found.items() if not of} == {"layouts", "workers"} | alone


def test_the_unit_suits_all_numbers() -> None:
    assert [time_unit(*of).name for of in ((0.25, 1200.0), (22.8, 308), (48.4, 738), (400, 65))] \
        == ["s", "s", "min", "min"]  # fmt: skip
    assert time_unit(0.0, 0.02).name == "ms" and time_unit(0.0).name == "s"
    assert [size_unit(bytes).name for bytes in (12, 2**20, 2**40)] == ["B", "MiB", "GiB"]


def test_ticks_are_round_in_their_unit() -> None:
    assert round_ticks(309, 5, SECONDS) == ([0, 100, 200, 300], ["0 s", "100 s", "200 s", "300 s"])
    places, texts = round_ticks(738, 5, MINUTES)
    assert places == [0, 150, 300, 450, 600]
    assert texts == ["0 min", "2.5 min", "5 min", "7.5 min", "10 min"]
    assert round_ticks(1.6, 4, Unit("ms", 1e-3))[1][-1] == "1,500 ms"
    assert log_ticks(0.2, 1600, 6, SECONDS)[1] == [
        "1 s", "10 s", "100 s", "1,000 s"
    ]  # fmt: skip
    assert log_ticks(0.05, 8, 6, SECONDS)[1] == ["0.05 s", "0.2 s", "1 s", "5 s"]
    assert log_ticks(370, 790, 6, SECONDS)[0] == [400, 500, 600]
    assert log_ticks(150, 300, 6, MINUTES)[1] == ["2.5 min", "3 min", "4 min", "5 min"]


@given(st.floats(1e-5, 1e5), st.integers(3, 8))
def test_ticks_are_within_their_axis(most: float, count: int) -> None:
    unit = time_unit(most)
    places, texts = round_ticks(most, count, unit)
    assert places[0] == 0 and 2 <= len(places) <= count + 1 and len(set(texts)) == len(places)
    assert places[-1] <= most * (1 + 1e-6) and places == sorted(places)
    written = [float(text.removesuffix(" " + unit.name).replace(",", "")) for text in texts]
    assert places == pytest.approx([number * unit.one for number in written])
    for low in (most / 2, most / 100):
        within, _ = log_ticks(low, most, count, unit)
        assert 1 <= len(within) <= count and all(
            low * 0.999 <= at <= most * 1.001 for at in within
        )


@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_whiskers_are_noted_where_there_are_some(spread: float) -> None:
    (figure,) = times.training_time(subject(sample.difficult("minutes", spread=spread)))
    drawn = [read(drawing).of("text", 1.2) for drawing in figure.drawings]
    assert all(map(bool, drawn)) == ("hiskers" in figure.note) == (spread > 0)


def test_what_is_not_drawn_has_neither_note_nor_legend() -> None:
    (none,) = figures("minutes")["communication"]
    (some,) = times.communication(subject(sample.full()))
    labels = {text for text, _ in read(none.drawings[0]).texts}
    assert not labels & {"other", "computation, communication hidden"}
    assert (
        "computation, communication hidden" in some.drawings[0] and ">other<" in some.drawings[0]
    )
    assert "Hidden" in some.note and "Hidden" not in none.note
    (staged,) = strips.figures(subject(sample.full()))
    assert "Gaps divide" in staged.note
