"""A walk computes what the graph does, pauses at every move and frees what nobody reads."""

import operator
import weakref
from collections.abc import Callable, Generator
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from synchromesh.programs.walk import BINDINGS, pauses, run_forwards, walking
from synchromesh.values.schedule import taking_turns


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


class Dispatched(TorchDispatchMode):
    """Notes the operators that are dispatched, with what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, repr((args, kwargs))))
        return func(*args, **(kwargs or {}))


IDS, ROW = torch.tensor([[1, 0], [2, 2]]), torch.arange(4.0)
SQUARE = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
STACK, PICTURE = SQUARE.expand(2, 3, 4, 4).clone(), SQUARE.expand(2, 2, 4, 4).clone()
SAMPLES: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "linear.default": [((STACK, SQUARE), {}), ((SQUARE, SQUARE, ROW), {})],
    "gelu.default": [((SQUARE,), {}), ((SQUARE,), {"approximate": "tanh"})],
    "scaled_dot_product_attention.default": [
        ((STACK, STACK, STACK), {}),
        ((STACK, STACK, STACK, None, 0.0, True), {"scale": 0.5}),
    ],
    "add.Tensor": [((SQUARE, ROW), {"alpha": 2}), ((SQUARE, 2), {}), ((IDS, 0.5), {})],
    "sub.Tensor": [((SQUARE, ROW), {"alpha": 2}), ((SQUARE, 2), {})],
    "mul.Tensor": [((SQUARE, ROW), {}), ((IDS, 0.5), {})],
    "div.Tensor": [((SQUARE, ROW + 1), {}), ((IDS, 2), {})],
    "matmul.default": [((STACK, SQUARE), {}), ((SQUARE, ROW), {})],
    "bmm.default": [((STACK[0], STACK[1]), {})],
    "cat.default": [(([SQUARE, SQUARE],), {}), (([SQUARE, SQUARE], -1), {})],
    "conv1d.default": [((SQUARE[None], SQUARE[None].mT, ROW[:1], [2], [1], [1], 1), {})],
    "conv2d.default": [((PICTURE, PICTURE), {}), ((PICTURE, PICTURE, None, [2, 1], [1, 1]), {})],
    "embedding.default": [((SQUARE, IDS), {}), ((SQUARE, IDS, 0, True), {})],
    "layer_norm.default": [((SQUARE, [4]), {}), ((SQUARE, [4], ROW, ROW, 0.1), {})],
    "relu.default": [((SQUARE,), {})],
    "tanh.default": [((SQUARE,), {})],
    "softmax.int": [((SQUARE, -1), {}), ((SQUARE, 0, torch.float64), {})],
    "expand.default": [((ROW, [3, -1]), {})],
    "permute.default": [((STACK, [2, 0, 3, 1]), {})],
    "reshape.default": [((STACK.mT, [-1, 2]), {})],
    "transpose.int": [((STACK, 1, -1), {})],
    "unbind.int": [((STACK,), {}), ((STACK, 1), {})],
    "unsqueeze.default": [((STACK, -1), {})],
    "view.default": [((STACK, [2, -1]), {})],
}


def test_each_binding_has_samples() -> None:
    assert {str(op).removeprefix("aten.") for op in BINDINGS} == set(SAMPLES)


@pytest.mark.parametrize("op", BINDINGS, ids=str)
def test_a_binding_dispatches_what_its_operator_does(op: Any) -> None:
    for args, kwargs in SAMPLES[str(op).removeprefix("aten.")]:
        with Dispatched() as plain:
            expected = op(*args, **kwargs)
        with Dispatched() as bound:
            found = BINDINGS[op](*args, **kwargs)
        assert plain.seen == bound.seen and plain.seen
        assert all(
            torch.equal(a, b) and a.dtype is b.dtype and a.stride() == b.stride()
            for a, b in zip(torch.utils._pytree.tree_leaves(found),
                            torch.utils._pytree.tree_leaves(expected), strict=True)
        )  # fmt: skip


def test_bindings_are_torchs_own() -> None:
    assert not [op for op, f in BINDINGS.items() if isinstance(f, FunctionType)]


class Doubles(TorchFunctionMode):
    """Doubles what torch.mul gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) * (2 if func is torch.mul else 1)


def test_what_intercepts_functions_was_traced_and_is_not_asked_again() -> None:
    x = torch.randn(2, 3)
    walk = walking(graph(call(torch.ops.aten.mul.Tensor, None, None)))
    with Doubles():
        ((found,),) = run_forwards([walk(Twice(), x)], taking_turns(1))
    assert torch.equal(found, x * x)
