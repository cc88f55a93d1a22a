"""Dataclasses from plain values by the types of their fields: exact round trips, named faults."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from synchromesh.values.fields import of_plain, to_plain


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

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a name is needed")


FULL = Outer("x", "b", (Inner(1), Inner(2, -1.5)), Inner(3), 1e-9, {"k": 2.0}, [1, {"a": None}])


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
    ],
)
def test_a_fault_is_named_with_its_place(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        of_plain(Outer, {**to_plain(FULL), **change}, "it")
