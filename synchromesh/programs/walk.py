"""A walk: a local graph as a generator, which pauses while a tensor that it moves is under way.

Each node becomes one line of Python, as in fx's own code, and a move a `yield from`:

    a = op0(x, weight)                                  forgets each value after its last use, so
    b = yield from axis.moving(a, 'P', 'R'); a = None   that no walk keeps more than it needs
    return (b,)

Frequent operators are called by torch's Python bindings, which take about 1 us less a call than
the overloads that a trace consists of: a hundredth of the time of small micro-batches."""

import operator
from collections.abc import Callable, Generator, Sequence
from math import isfinite
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.graph import magic_methods
from torch.fx.node import map_aggregate

from synchromesh.values.schedule import Schedule

T = TypeVar("T")
Walk = Generator[None, None, tuple[Tensor, ...]]
_LITERALS = (bool, int, str, type(None))
_INFIX = {getattr(operator, n): form for n, form in magic_methods.items() if n != "div"}
_ATEN = torch.ops.aten
_NN: Any = torch._C._nn
_FUNCTIONS: Any = torch._C._VariableFunctions
_METHODS: Any = torch._C.TensorBase
# Operators, and the binding that takes the same arguments and does the same: torch's own, also
# where somebody has put another function in the place of `torch.nn.functional.linear`.
_BOUND = (  # where the binding is, the operators' overload, the names of both
    (_NN, "default", "linear gelu scaled_dot_product_attention"),
    (_FUNCTIONS, "Tensor", "add sub mul div"),
    (_FUNCTIONS, "default", "matmul bmm cat conv1d conv2d embedding layer_norm relu tanh"),
    (_FUNCTIONS, "int", "softmax"),
    (_METHODS, "int", "transpose unbind"),
    (_METHODS, "default", "expand permute reshape unsqueeze view"),
)
BINDINGS: dict[Any, Callable[..., Any]] = {
    getattr(getattr(_ATEN, name), overload): getattr(place, name)
    for place, overload, names in _BOUND
    for name in names.split()
}


def pauses(graph: torch.fx.Graph) -> int:
    return len(graph.find_nodes(op="call_method", target="move"))


def run_forwards(walks: Sequence[Generator[None, None, T]], schedule: Schedule) -> list[T]:
    """Runs generators, one a micro-batch, from pause to pause in the order of the schedule's
    forwards. What intercepts torch's functions has been traced, and is not asked again."""
    results: dict[int, T] = {}
    with torch._C.DisableTorchFunction():
        for action in schedule.groups[0]:
            if action.kind == "F":
                try:
                    next(walks[action.micro_batch])
                except StopIteration as end:
                    results[action.micro_batch] = end.value
    return [results[i] for i in range(len(walks))]


def walking(graph: torch.fx.GraphModule) -> Callable[..., Walk]:
    return _Source(graph.graph).compiled()


class _Name(str):
    """A name that prints as it stands in source."""

    __repr__ = str.__str__


class _Source:
    """The Python source of a graph; objects that have no literal are its globals."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.globals: dict[str, Any] = {}
        self._names = {node.name for node in self.nodes}
        self._known: dict[int, str] = {}  # name by identity of a global

    def compiled(self) -> Callable[..., Walk]:
        given = [node.name for node in self.nodes if node.op == "placeholder"]
        lines = [f"def walk({', '.join(given)}):", "    yield from ()"]  # even where nothing moves
        last = {node: node for node in self.nodes if node.op != "placeholder"}
        for node in self.nodes:
            last |= dict.fromkeys(node.all_input_nodes, node)
        dead: dict[Node, list[str]] = {}  # with the last node that reads each one, or itself
        for node, at in last.items():
            if at.op != "output":  # outputs live on
                dead.setdefault(at, []).append(f"; {node.name} = None")
        lines += [
            f"    {self._line(node)}{''.join(dead.get(node, ()))}"
            for node in self.nodes
            if node.op != "placeholder"
        ]
        exec("\n".join(lines), self.globals)
        made: Callable[..., Walk] = self.globals["walk"]
        return made

    def _line(self, node: Node) -> str:
        args = [self._text(a) for a in node.args]
        named = [f"{k}={self._text(v)}" for k, v in node.kwargs.items()]
        match node.op:
            case "output":
                return f"return {args[0]}"
            case "call_method" if node.target == "move":
                call = f"yield from {args[0]}.moving({', '.join(args[1:])})"
            case "call_method":
                call = f"{args[0]}.{node.target}({', '.join(args[1:] + named)})"
            case "call_function" if node.target in _INFIX:
                call = _INFIX[node.target].format(*args)
            case "call_function":
                function = BINDINGS.get(node.target, node.target)
                call = f"{self._global(function)}({', '.join(args + named)})"
            case _:
                raise AssertionError(f"local graphs have neither attributes nor modules: {node}")
        return f"{node.name} = {call}"

    def _text(self, value: Any) -> str:
        return repr(map_aggregate(value, self._leaf))

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, Node):
            return _Name(value.name)
        literal = isfinite(value) if type(value) is float else type(value) in _LITERALS
        return value if literal else _Name(self._global(value))

    def _global(self, value: Any) -> str:
        if id(value) not in self._known:
            name = f"op{len(self._known)}"
            while name in self._names:
                name += "_"
            self._known[id(value)], self.globals[name] = name, value
        return self._known[id(value)]
