"""The wording of plans: what is read back is what was meant; transformers read short."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synchromesh.planner.wording import worded
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan
from tests.models import FAMILIES, traced

CHOICES = (Layout(4, 1), Layout(2, 2), Layout(1, 4))
CHAINS = {name: traced(name).chain.names for name in ("bert", "cnn", "odd_mlp", "lstm")}
AWKWARD = {
    "indices": ("a[0]", "a[1]", "a", "a.b", "a.b.c", "b?c"),
    "signs": ("a=b", "e;f", "@g", " h", "i\x1b[31mj", "@g.k"),
    "numbers": ("0", "1", "1.0", "0.1", "x.0", "x.00", "x.0.y"),
}


def read(plan: Plan, names: tuple[str, ...]) -> tuple[Layout, ...]:
    return Plan.parse(str(plan)).layouts(names, 4)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CHAINS)), st.data())
def test_it_reads_back(name: str, data: Any) -> None:
    names = CHAINS[name]
    layouts = tuple(data.draw(st.sampled_from(CHOICES)) for _ in names)
    plan = worded(names, layouts)
    assert read(plan, names) == layouts
    assert worded(names, layouts) == plan


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(AWKWARD)), st.data())
def test_awkward_names_read_back(name: str, data: Any) -> None:
    names = AWKWARD[name]
    layouts = tuple(data.draw(st.sampled_from(CHOICES)) for _ in names)
    assert read(worded(names, layouts), names) == layouts


@pytest.mark.parametrize("layout", CHOICES)
def test_equal_layouts_are_one_word(layout: Layout) -> None:
    plan = worded(CHAINS["bert"], (layout,) * len(CHAINS["bert"]))
    assert not plan.overrides
    assert str(plan) in ("data", "tensor", "hybrid:tensor=2")


def test_transformers_read_short() -> None:
    names = tuple(f"encoder.layer.{i}.{part}" for i in range(24) for part in ("attention", "mlp"))
    names = ("embeddings", *names, "classifier")
    layouts = tuple(Layout(1, 4) if n.endswith("mlp") else Layout(4, 1) for n in names)
    assert str(worded(names, layouts)) == "data; encoder.layer.*.mlp=tensor"


def test_known_families() -> None:
    assert set(CHAINS) <= set(FAMILIES)


@pytest.mark.parametrize(
    ("layouts", "free", "text"),
    [
        ("4x1 4x1 1x4", "c", "data"),
        ("2x2 4x1 1x4", "c", "data; a=hybrid:tensor=2"),
        ("2x2 2x2 1x4", "c", "hybrid:tensor=2"),
        ("1x4 1x4 1x4", "a b c", "data"),
    ],
)
def test_what_follows_from_the_model_is_not_said(layouts: str, free: str, text: str) -> None:
    given = [Layout(*map(int, layout.split("x"))) for layout in layouts.split()]
    assert str(worded("abc", given, free=free.split())) == text
