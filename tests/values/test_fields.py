"""Dataclasses from plain values by the types of their fields: exact round trips, named faults."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from synchromesh.values.compute import Curve
from synchromesh.values.fields import Keys, Within, of_plain, to_plain


@dataclass(frozen=True)
class Inner:
    size: int
    share: float = 0.5


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["a", "b"]
    parts: tuple[Inner, ...] = ()
    best: Inner | None = None
    seconds: float | None = None
    table: Mapping[str, float] = field(default_factory=dict)
    free: Any = None
    right: bool = True
    rank: Annotated[int, Within(0, 7)] = 0
    rate: Annotated[float, Within(0.5)] = 1.0
    known: Annotated[Mapping[str, int], Keys(("a", "b"))] = field(default_factory=dict)
    curves: tuple[Curve, ...] = ()  # whose plain form is its own

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a name is needed")


FULL = Outer(
    "x", "b", (Inner(1), Inner(2, -1.5)), Inner(3), 1e-9, {"k": 2.0}, [1, {"a": None}], False,
    7, 0.5, {"b": 3}, (Curve(((1.0, 0.5), (2.0, 0.75))),),
)  # fmt: skip


@pytest.mark.parametrize("value", [FULL, Outer("y", "a")])
def test_round_trip_through_json(value: Outer) -> None:
    assert of_plain(Outer, json.loads(json.dumps(to_plain(value))), "it") == value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": 1}, "it.name: should be text, not 1"),
        ({"name": ""}, "it: a name is needed"),
        ({"kind": "c"}, "it.kind: should be one of a, b, not text 'c'"),
        ({"parts": {}}, "it.parts: should be a list, not a mapping"),
        ({"parts": [{"size": 1}, {}]}, r"it.parts\[1\]: size is missing"),
        ({"parts": [{"size": 1.5}]}, r"it.parts\[0\].size: should be a whole number"),
        ({"parts": [{"size": True}]}, r"it.parts\[0\].size: should be a whole number"),
        ({"best": 3}, "it.best: should be a mapping, not 3"),
        ({"seconds": "1"}, "it.seconds: should be a number, not text '1'"),
        ({"table": {"k": None}}, "it.table.k: should be a number, not nothing"),
        ({"right": 1}, "it.right: should be true or false, not 1"),
        ({"wrong": 1}, "it: unknown key 'wrong'; known are name"),
        ({"rank": 8}, "it.rank: should be from 0 to 7, not 8"),
        ({"rate": 0.4}, "it.rate: should be at least 0.5, not 0.4"),
        ({"known": {"c": 1}}, "it.known: unknown key 'c'; known are a, b"),
        ({"known": {"a": "1"}}, "it.known.a: should be a whole number"),
        ({"curves": [[[1, 2]], [[2]]]}, r"it.curves\[1\]\[0\]: should be \[size, value\]"),
    ],
)
def test_a_fault_is_named_with_its_place(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        of_plain(Outer, {**to_plain(FULL), **change}, "it")


def test_nothing_is_left_out_of_a_complete_one() -> None:
    plain = to_plain(FULL)
    assert of_plain(Outer, plain, "it", complete=True) == FULL
    with pytest.raises(ValueError, match="it: right is missing"):
        of_plain(Outer, {k: v for k, v in plain.items() if k != "right"}, "it", complete=True)
    with pytest.raises(ValueError, match=r"it\.best: share is missing"):
        of_plain(Outer, {**plain, "best": {"size": 1}}, "it", complete=True)
