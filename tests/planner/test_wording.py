"""The wording of plans: what is read back is what was meant; transformers read short."""

import time
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
    "ranges": ("x.0-2", "x.0", "x.1", "x.1.y", "x.2", "3-4", "3", "x.2.0.1.2.z"),
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


LAYERS = tuple(f"model.layers.{i}.{part}" for i in range(32) for part in ("attn", "mlp"))
DATA, HYBRID, TENSOR = CHOICES


@pytest.mark.parametrize(
    ("layout_of", "text"),
    [
        (lambda i, part: TENSOR if i < 14 else DATA, "data; model.layers.0-13=tensor"),
        (
            lambda i, part: TENSOR if part == "attn" and 4 <= i <= 17 else DATA,
            "data; model.layers.4-17.attn=tensor",
        ),
        (lambda i, part: HYBRID if i == 7 else DATA, "data; model.layers.7=hybrid:tensor=2"),
        (
            lambda i, part: TENSOR if part == "attn" else HYBRID if i > 9 else DATA,
            "hybrid:tensor=2; model.layers.*.attn=tensor; model.layers.0-9.mlp=data",
        ),
        (
            lambda i, part: DATA if not 4 <= i <= 17 else HYBRID if i == 9 else TENSOR,
            "data; model.layers.4-8=tensor; model.layers.9=hybrid:tensor=2; "
            "model.layers.10-17=tensor",
        ),
        (
            lambda i, part: TENSOR if i < (26 if part == "attn" else 12) else DATA,
            "data; model.layers.0-25.attn=tensor; model.layers.0-11.mlp=tensor",
        ),
        (
            lambda i, part: TENSOR if i < (27 if part == "attn" else 26) else DATA,
            "data; model.layers.0-25=tensor; model.layers.26.attn=tensor",
        ),
    ],
)
def test_runs_of_layers_are_ranges(layout_of: Any, text: str) -> None:
    names = ("model.embed", *LAYERS, "head")
    layouts = [layout_of(int(n.split(".")[2]), n.split(".")[3]) for n in LAYERS]
    plan = worded(names, (layout_of(99, ""), *layouts, layout_of(99, "")))
    assert str(plan) == text


def test_runs_stand_in_the_order_of_the_model() -> None:
    layouts = [TENSOR if (i // 4) % 2 or i == 0 else DATA for i in range(20)]
    plan = worded([f"x.{i}.a" for i in range(20)], layouts)
    assert str(plan) == "data; x.0.a=tensor; x.4-7.a=tensor; x.12-15.a=tensor"


def test_of_two_defaults_that_of_fewer_words_is_taken() -> None:
    """`tensor` is the commonest, in five runs; `data` leaves four of them to be said."""
    layouts = [DATA if i % 5 in (1, 2) else TENSOR for i in range(20)]
    plan = worded([f"x.{i}.a" for i in range(20)], layouts)
    assert str(plan) == "tensor; x.1-2.a=data; x.6-7.a=data; x.11-12.a=data; x.16-17.a=data"
    assert plan.words == 9


def test_patterns_that_hit_more_than_they_seem_to_are_left_out() -> None:
    """`blocks.*.b` crosses dots, and names what lies inside another component."""
    names = ("blocks.0.b", "blocks.1.b", "blocks.1.c.b", "blocks.2.b")
    modules = {"blocks.2.b": ("blocks.2.b.b",)}
    layouts = (TENSOR, TENSOR, DATA, DATA)
    plan = worded(names, layouts, modules)
    assert plan.layouts(names, 4, modules) == layouts
    assert str(plan) == "data; blocks.0-1.b=tensor"


def test_long_chains_are_worded_quickly() -> None:
    names = [f"m.{i}.{part}" for i in range(200) for part in ("a", "b")]
    layouts = [CHOICES[(i // 37 + i % 2) % 3] for i in range(400)]
    began = time.process_time()
    plan = worded(names, layouts)
    assert time.process_time() - began < 3.0 and len(plan.overrides) <= 24


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
