"""Colours: contrast on both grounds, and a mark of its own for each strategy."""

import pytest

from synchromesh.report.palette import INKS, LAYOUTS, MEMORY, PARTS, layout_fill, marks

TEXTS = ("text", "muted")
FAINT = ("ground", "grid")  # lines of a grid carry no meaning


def luminance(colour: str) -> float:
    """WCAG 2.2: L = 0.2126 R + 0.7152 G + 0.0722 B of linear components."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    """WCAG 2.2: (L1 + 0.05) / (L2 + 0.05)."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", [name for name in INKS if name not in FAINT])
def test_inks_are_seen_on_both_grounds(name: str) -> None:
    ink, ground = INKS[name], INKS["ground"]
    least = 4.5 if name in TEXTS else 3.0
    assert contrast(ink.light, ground.light) >= least
    assert contrast(ink.dark, ground.dark) >= least


def test_each_strategy_has_a_mark_of_its_own() -> None:
    names = ("single", "data", "tensor", "pipeline", "hybrid", "auto", "ddp", "fsdp2",
             "torch-pipeline", "data; a=tensor", "hybrid:tensor=2", "b", "c")  # fmt: skip
    found = marks(names * 3)  # of several runs
    assert list(found) == list(names)
    assert all(found[name].ink.name == name for name in names[:9])
    looks = {(mark.ink.name, mark.marker, mark.rival) for mark in found.values()}
    assert len(looks) == len(names)


def test_nothing_rests_on_colour_alone() -> None:
    for fills in (PARTS, MEMORY, LAYOUTS):
        assert len({(fill.ink.name, fill.hatch) for fill in fills.values()}) == len(fills)
        coloured = [f.hatch for f in fills.values() if f.ink.name not in ("rest",)]
        assert len(set(coloured)) == len(coloured)
    assert layout_fill("hybrid:tensor=2") is LAYOUTS["hybrid"]
    assert layout_fill("something").label == "other layouts"
