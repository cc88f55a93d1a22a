"""A step under layouts: where rows depend on each other none of them divides rows."""

import pytest
import torch

from synchromesh.trace.step import Step
from synchromesh.values.component import Chain, Component
from synchromesh.values.layout import Layout


@pytest.mark.parametrize(
    ("coupling", "stated", "undivided"),
    [
        ("", "4x1 2x2 1x4", "4x1 2x2 1x4"),
        ("c", "4x1 2x2 4x1", "4x1 2x2 1x4"),
        ("b", "2x2 2x2 2x2", "2x2 1x4 2x2"),
        ("a b c", "4x1 1x4 2x2", "1x4 1x4 1x4"),
        ("a", "1x1 1x1 1x1", "1x1 1x1 1x1"),
    ],
)
def test_components_that_couple_rows_have_them_all(
    coupling: str, stated: str, undivided: str
) -> None:
    chain = Chain(tuple(map(Component, "abc")))
    step = Step(chain, torch.fx.Graph(), {}, ("loss",), (), {}, coupling=tuple(coupling.split()))
    layouts = [Layout(*map(int, text.split("x"))) for text in stated.split()]
    assert " ".join(map(str, step.undivided(layouts))) == undivided
