"""A walk computes what the graph does, pauses at every move and frees what nobody reads."""

import operator
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from synchromesh.engine.walk import pauses, walking


class Twice:
    """An axis whose moves double what they move."""

    def moving(self, x: Tensor, source: str, target: str) -> Generator[None, None, Tensor]:
        yield
        return 2 * x if (source, target) == ("P", "R") else x

    def move(self, x: Tensor, source: str, target: str) -> Tensor:
        return 2 * x if (source, target) == ("P", "R") else x


def graph(write: Callable[[torch.fx.Graph, Any, Any], Any]) -> torch.fx.GraphModule:
    made = torch.fx.Graph()
    axis, x = made.placeholder("axis"), made.placeholder("x")
    made.output((write(made, axis, x),))
    return torch.fx.GraphModule({}, made)


def finished(walk: Any) -> tuple[int, Any]:
    """How often a walk pauses, and what it returns."""
    count = 0
    while True:
        try:
            next(walk)
        except StopIteration as end:
            return count, end.value
        count += 1


def call(target: Any, *args: Any, **kwargs: Any) -> Any:
    return lambda g, axis, x: g.call_function(
        target, tuple(x if a is None else a for a in args), kwargs
    )


@pytest.mark.parametrize(
    "write",
    [
        call(torch.add, None, 0.1),
        call(torch.add, None, None, alpha=-2),
        call(torch.clamp, None, float("-inf"), 1e30),
        call(operator.getitem, None, (slice(None, 1), ..., 0)),
        call(operator.truediv, 1.0, None),
        call(torch.sum, None, [0, 1], True),
        call(torch.ops.aten.mul.Tensor, None, None),
        call(getattr, None, "mT"),
        lambda g, axis, x: g.call_method("to", (x,), {"dtype": torch.float64}),
        lambda g, axis, x: g.call_function(torch.cat, ([x, x], 1)),
        lambda g, axis, x: g.call_method("view", (x, g.call_function(getattr, (x, "shape")))),
        lambda g, axis, x: g.call_method("move", (axis, x, "P", "R")),
    ],
)
def test_a_walk_computes_what_the_graph_does(write: Any) -> None:
    made, x = graph(write), torch.randn(2, 3)
    count, (found,) = finished(walking(made)(Twice(), x))
    (expected,) = made(Twice(), x)
    assert torch.equal(found, expected) and found.dtype is expected.dtype
    assert count == pauses(made.graph)


def test_a_walk_pauses_while_a_tensor_is_under_way() -> None:
    def write(g: torch.fx.Graph, axis: Any, x: Any) -> Any:
        for _ in range(3):
            x = g.call_function(torch.add, (g.call_method("move", (axis, x, "P", "R")), 1))
        return x

    made = graph(write)
    count, (found,) = finished(walking(made)(Twice(), torch.ones(1)))
    assert count == pauses(made.graph) == 3 and found.item() == 15


def test_names_of_nodes_are_no_names_of_operators() -> None:
    made = torch.fx.Graph()
    made.placeholder("axis")
    x = made.placeholder("op0")
    made.output((made.call_function(torch.neg, (x,)),))
    assert finished(walking(torch.fx.GraphModule({}, made))(None, torch.ones(1)))[1] == (-1,)


def test_what_nobody_reads_any_more_is_freed() -> None:
    alive: list[Any] = []

    def noted(x: Tensor) -> Tensor:
        y = x + 1
        alive.append(weakref.ref(y))
        return y

    def write(g: torch.fx.Graph, axis: Any, x: Any) -> Any:
        first = g.call_function(noted, (x,))
        g.call_function(noted, (first,))  # nobody reads it
        second = g.call_function(noted, (first,))
        return g.call_method("move", (axis, second, "P", "R"))

    walk = walking(graph(write))(Twice(), torch.ones(1))
    next(walk)
    assert [ref() is not None for ref in alive] == [False, False, True]
