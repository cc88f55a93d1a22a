"""An operator as placement rules see it, and a choice: one valid combination of placements.

A rule is a function from an operator to its choices. Each choice must be right for value and
gradient: with the inputs in the states it names, the local operator gives outputs in the states
it names, and gradients of the outputs in their states become gradients of the inputs in theirs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.fx import Node

from synchromesh.values.component import ITEM_BYTES, Value
from synchromesh.values.placement import REPLICATED, REPLICATED_PARTIAL_GRADIENT, Placement
from synchromesh.values.traffic import Collective

ROWS = (
    1_000_003  # batch rows in concrete shapes: a prime, so that no other size is confused with it
)
MOST_SEGMENTS = 16
# types that ranks can add up: the others are counts and masks, or too coarse for a sum (float8)
SUMMABLE = (
    "float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32",
)  # fmt: skip

R, r, P = REPLICATED, REPLICATED_PARTIAL_GRADIENT, Placement("P")


@dataclass(frozen=True)
class Operand:
    """A tensor that an operator reads or makes, with the sharded states in question for it."""

    shape: tuple[int, ...]  # with `ROWS` batch rows
    rows_dim: int | None
    differentiable: bool
    floating: bool
    item: int = 8  # bytes of an entry
    states: tuple[Placement, ...] = ()
    regular: bool = True  # its rows, if any, lie along one dimension
    laid: bool = True  # and in an order that is proved
    border: bool = False  # it comes from another component

    def allows(self, state: Placement, m: int) -> bool:
        """Whether the tensor can be in `state` over m ranks (batch rows are never sharded)."""
        if state.kind == "R":
            return True
        if state.kind == "r":
            return self.differentiable
        if state.kind == "P":
            return self.floating
        inner = inside_rows(state)
        if inner and (self.border or not self.laid):
            return False
        return (
            self.regular
            and state.dim < len(self.shape)
            and (state.dim == self.rows_dim) == inner
            and (state.segments // ROWS if inner else state.segments) <= MOST_SEGMENTS
            and self.shape[state.dim] > 0
            and self.shape[state.dim] % (state.segments * m) == 0
        )


def inside_rows(state: Placement) -> bool:
    """Whether the state shards what stands behind the rows in their dimension.

    (rows * heads, length, width) can be sharded by heads, as in `nn.MultiheadAttention`: one
    segment for every row. As the number of rows is not fixed, such a state has no text form; a
    value in it stays inside its component and is never moved.
    """
    return state.sharded and state.segments % ROWS == 0


def concrete(value: Value) -> tuple[int, ...]:
    """The value's shape for a batch of `ROWS` rows."""
    if value.rows is None:
        return value.shape
    d = value.rows.dim
    return (*value.shape[:d], value.shape[d] * ROWS, *value.shape[d + 1 :])


def operand(value: Value, states: tuple[Placement, ...] = ()) -> Operand:
    rows_dim = None if value.rows is None else value.rows.dim
    floating, item = value.dtype in SUMMABLE, ITEM_BYTES[value.dtype]
    return Operand(concrete(value), rows_dim, value.differentiable, floating, item, states)


Replace = Callable[["Emit", dict[str, Any]], Node]


class Emit:
    """Where a replaced operator writes itself: the local graph, its axis node."""

    def __init__(self, graph: torch.fx.Graph, axis: Node) -> None:
        self.graph, self.axis = graph, axis

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return self.graph.call_function(function, args, kwargs)

    def original(self, node: Node, given: dict[str, Any]) -> Node:
        """The operator of `node` with the arguments `given`."""
        values = list(given.values())
        n = len(node.args)
        kwargs = dict(list(given.items())[n:])
        return self.graph.call_function(node.target, tuple(values[:n]), kwargs)  # type: ignore[arg-type]

    def method(self, name: str, *args: Any) -> Node:
        return self.graph.call_method(name, (self.axis, *args))


@dataclass(frozen=True)
class Choice:
    """One valid combination: states of the tensor inputs in order, of the outputs, and how to
    run it."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    share: float = 1.0  # part of the operator's work that one rank does
    constants: Mapping[str, Any] = field(default_factory=dict)  # arguments that change
    replace: Replace | None = None  # gets the mapped arguments, returns the node of the result
    collectives: tuple[Collective, ...] = ()  # that the replacement runs itself
    draws_alike: bool = False  # what is drawn is whole on every rank, though outputs are sharded

    @property
    def draws_apart(self) -> bool:
        """Whether ranks draw other random numbers: each those of its own shard."""
        return any(s.sharded for s in self.outputs) and not self.draws_alike


class Operator:
    """One node of the graph: name, arguments by name, tensor operands in call order."""

    def __init__(
        self,
        node: Node,
        m: int,
        operand_of: Callable[[Node], Operand | None],
        outputs: tuple[Operand, ...],
    ) -> None:
        self.node, self.m, self.outputs = node, m, outputs
        target = node.target
        self.schema = getattr(target, "_schema", None)
        self.name: str = self.schema.name.split("::")[1] if self.schema else str(target)
        self.overload: str = self.schema.overload_name if self.schema else ""
        self.arguments = arguments(node)
        self.inputs: tuple[Operand, ...] = ()
        self._slots: dict[str, list[int | None]] = {}
        inputs: list[Operand] = []
        for name, value in self.arguments.items():
            self._slots[name] = []
            for item in value if isinstance(value, list | tuple) else (value,):
                found = operand_of(item) if isinstance(item, Node) else None
                self._slots[name].append(None if found is None else len(inputs))
                if found is not None:
                    inputs.append(found)
        self.inputs = tuple(inputs)
        self.output = outputs[0] if outputs else None

    def constant(self, name: str, default: Any = None) -> Any:
        """The argument `name`, else the schema's default."""
        return constant(self.schema, self.arguments, name, default)

    def slot(self, name: str) -> int | None:
        """Index among the tensor inputs of the tensor argument `name`; None when it is not
        given."""
        found = self._slots.get(name, [])
        return found[0] if found else None

    def slots(self, name: str) -> list[int | None]:
        """The same for an argument that is a list of tensors."""
        return self._slots.get(name, [])

    def tensor(self, name: str) -> Operand:
        slot = self.slot(name)
        assert slot is not None, f"{self.name} has no tensor {name}"
        return self.inputs[slot]

    def choice(
        self,
        states: Mapping[Any, Placement | None],
        output: Placement | tuple[Placement, ...],
        *,
        share: float | None = None,
        **rest: Any,
    ) -> Choice:
        """A choice from states by argument name or slot; inputs not named are `r` (their
        gradient partial)."""
        inputs = [r] * len(self.inputs)
        for key, state in states.items():
            slot = self.slot(key) if isinstance(key, str) else key
            if slot is not None and state is not None:
                inputs[slot] = state
        outputs = output if isinstance(output, tuple) else (output,) * len(self.outputs)
        if share is None:
            share = 1 / self.m if any(s.sharded for s in (*inputs, *outputs)) else 1.0
        return Choice(tuple(inputs), outputs, share, **rest)

    @property
    def work(self) -> float:
        """Rough count of floating point operations, enough to break ties."""
        made = sum(prod(o.shape) for o in self.outputs) / ROWS
        contracted = {
            "linear": "weight",
            "addmm": "mat2",
            "matmul": "other",
            "bmm": "mat2",
            "mm": "mat2",
        }
        name = contracted.get(self.name)
        if name and self.slot(name) is not None:
            shape = self.tensor(name).shape
            return (
                2
                * made
                * (shape[-1] if self.name == "linear" else shape[-2 if len(shape) > 1 else 0])
            )
        if self.name.startswith("conv") and self.slot("weight") is not None:
            return 2 * made * prod(self.tensor("weight").shape[1:])
        return made


def arguments(node: Node) -> dict[str, Any]:
    """Arguments by name, positional ones first; functions without a schema number theirs."""
    schema = getattr(node.target, "_schema", None)
    names = (
        [a.name for a in schema.arguments] if schema else [str(i) for i in range(len(node.args))]
    )
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def constant(schema: Any, given: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """The argument `name` of those given, else the schema's default, else `default`."""
    if name in given:
        return given[name]
    for a in schema.arguments if schema else ():
        if a.name == name and a.has_default_value():
            return a.default_value
    return default


def dim_of(dim: int, shape: tuple[int, ...]) -> int:
    """A dimension counted from the front."""
    return dim + len(shape) if dim < 0 else dim


Rule = Callable[[Operator], Iterator[Choice]]
