"""An operator as placement rules see it, its specs, and the axis that local operators run on.

A rule is a function from an operator to its specs. Each spec must be right for value and
gradient: with the inputs in the states it names, the local operator gives outputs in the states
it names, and gradients of the outputs in their states become gradients of the inputs in theirs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from operator import floordiv
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.fx import Node

from synchromesh.trace.nodes import OperatorCall
from synchromesh.values.component import ITEM_BYTES, Value
from synchromesh.values.placement import Placement, shard, shard_units
from synchromesh.values.traffic import Collective

# batch rows in concrete shapes: a prime, so that no other size is confused with it
ROWS = 1_000_003
# types that ranks can add up: the others are counts and masks, or too coarse for a sum (float8)
SUMMABLE = (
    "float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32",
)  # fmt: skip

R, r, P = Placement("R"), Placement("r"), Placement("P")


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
    sized: bool = True  # its bytes are known for any number of rows: else it is never moved
    rows_proved: bool = True  # and in an order that is proved
    border: bool = False  # it comes from another component

    # of a sharded dimension: chosen, not measured; bounds the number of specs
    MOST_SEGMENTS: ClassVar[int] = 16

    def allows(self, state: Placement, m: int) -> bool:
        """Whether the tensor can be in `state` over m ranks (batch rows are never sharded)."""
        if state.kind == "R" or not self.sized:
            return state.kind == "R"
        if state.kind == "r":
            return self.differentiable
        if state.kind == "P":
            return self.floating
        return self.regular and state.dim < len(self.shape) and self._divides(state, m)

    def _divides(self, state: Placement, m: int) -> bool:
        inner = inside_rows(state)
        if inner and (self.border or not self.rows_proved):
            return False
        return (
            (state.dim == self.rows_dim) == inner
            and (state.segments // ROWS if inner else state.segments) <= self.MOST_SEGMENTS
            and self.shape[state.dim] > 0
            and state.fits(self.shape, m)
        )

    def even(self, state: Placement, m: int) -> bool:
        return state.even(self.shape[state.dim], m)

    def populated(self, state: Placement, m: int) -> bool:
        return state.units(self.shape[state.dim]) >= m

    def cuts(self, dim: int) -> set[Placement]:
        """The states that shard `dim`, as states of dimension 0."""
        return {s.at(0) for s in self.states if s.dim == dim}

    def share(self, state: Placement, m: int) -> float:
        return state.local_shape(self.shape, m)[state.dim] / self.shape[state.dim]


def inside_rows(state: Placement) -> bool:
    """Whether the state shards what stands behind the rows in their dimension. (rows * heads,
    length, width) can be sharded by heads, as in `nn.MultiheadAttention`: one segment for every
    row. As the number of rows is not fixed, such a state has no text form; a value in it stays
    inside its component and is never moved."""
    return state.sharded and state.segments % ROWS == 0


def operand(value: Value, states: tuple[Placement, ...] = ()) -> Operand:
    shape, rows_dim = value.shape, None
    if value.rows is not None:
        rows_dim = d = value.rows.dim
        shape = (*shape[:d], shape[d] * ROWS, *shape[d + 1 :])
    floating, item = value.dtype in SUMMABLE, ITEM_BYTES[value.dtype]
    return Operand(shape, rows_dim, value.differentiable, floating, item, states)


# -- groups ------------------------------------------------------------------------------
#
# Dimensions that are made of equal groups of neighbours, which stay together on a rank: channels
# of grouped operators, query heads that share a key head. A state is found for the groups; each
# tensor's own has as many units, a group's entries in each:
#
#     2 groups of 3 channels on 2 ranks    groups 0 1    S(0)       channels 0 1 2 | 3 4 5    S(1)
#     3 groups of 2 channels on 2 ranks    groups 0 1 | 2    S(0)    0 1 2 3 | 4 5    S(1, 1, 2)


def group_states(
    groups: int, m: int, known: Iterable[tuple[int, Iterable[Placement]]]
) -> list[Placement]:
    """States of a dimension of groups, over m ranks. known: lengths of groups, states."""
    of_groups = {shard(0)}
    for length, states in known:
        inner = length // groups
        for s in states:
            if s.even(length, m):
                of_groups.add(shard(0, s.segments))
            elif s.unit % inner == 0:
                of_groups.add(shard(0, s.segments, s.unit // inner))
    return sorted(s for s in of_groups if s.fits((groups,), m))


def spread(state: Placement, groups: int, length: int, dim: int, m: int) -> Placement:
    """The state of `dim`, of so many entries, with the groups on each rank as in `state`."""
    return shard_units(length, m, dim, state.segments, state.unit * (length // groups))


# -- what a local operator runs on, and how it is written ---------------------------------


class TensorAxis(Protocol):
    """What a local graph may ask of the ranks that share its rows; the engine implements it."""

    size: int  # ranks on the axis
    index: int  # this rank's place among them

    def move(self, x: Tensor, source: str, target: str, length: int = 0) -> Tensor:
        """`x` from one placement to another, value and gradient (table in docs/design.md). length:
        entries of the dimension that the source shards; 0: size times those of `x`."""

    def maximum(self, x: Tensor) -> Tensor:
        """The elementwise largest of the ranks' `x`, without gradient."""

    def stream(self, key: int, sharded: bool, rows: bool) -> None:
        """Seeds random operator `key`; sharded: bits differ along the axis; rows: with rows."""

    def batch_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
        running_var: Tensor | None, training: bool, momentum: float, eps: float,
    ) -> Tensor:  # fmt: skip
        """In training mode the engine decides over which rows its statistics are taken."""


def all_reduces(m: int, like: Operand, entries: Iterable[int]) -> tuple[Collective, ...]:
    """Forward only; entries: the bytes that each of them has for an entry of `like`."""
    count = prod(like.shape)
    per_row, fixed = (0, count) if like.rows_dim is None else (count // ROWS, 0)
    sums = ((n * per_row, n * fixed) for n in entries)
    return tuple(Collective("all_reduce", "forward", m, *payload) for payload in sums)


def local_entries(axis: TensorAxis, entries: int, segment: int, unit: int) -> int:
    """How many of `entries` in segments of so many a rank has, units staying together."""
    start, stop = shard(0, 1, unit).share(segment, axis.size, axis.index)
    return entries // segment * (stop - start)


Replace = Callable[["Emit", dict[str, Any]], Node]


class Emit:
    """Where a replaced operator writes itself: the local graph, its axis node."""

    def __init__(self, graph: torch.fx.Graph, axis: Node) -> None:
        self.graph, self.axis = graph, axis

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return self.graph.call_function(function, args, kwargs)

    def original(self, node: Node, given: dict[str, Any]) -> Node:
        values = list(given.values())
        n = len(node.args)
        kwargs = dict(list(given.items())[n:])
        return self.graph.call_function(node.target, tuple(values[:n]), kwargs)  # type: ignore[arg-type]

    def method(self, name: str, *args: Any) -> Node:
        return self.graph.call_method(name, (self.axis, *args))


@dataclass(frozen=True)
class OpSpec:
    """One valid combination of placements of the tensor inputs, in order, and of the outputs; and
    how to run the operator with it (DTensor's notion of the same name)."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    share: float = 1.0  # part of the operator's work that one rank does
    replace: Replace | None = None  # gets the mapped arguments, returns the node of the result
    collectives: tuple[Collective, ...] = ()  # that the replacement runs itself
    draws_alike: bool = False  # every rank draws for the unsharded output

    @property
    def draws_apart(self) -> bool:
        """Whether ranks draw other random numbers: each those of its own shard."""
        return any(s.sharded for s in self.outputs) and not self.draws_alike


SECOND_FACTOR = {
    "linear": "weight", "addmm": "mat2", "matmul": "other", "bmm": "mat2", "mm": "mat2",
}  # fmt: skip


class Operator(OperatorCall):
    """One node of the graph on m ranks: arguments by name, tensor operands in call order."""

    def __init__(
        self, node: Node, m: int, operand_of: Callable[[Node], Operand | None],
        outputs: tuple[Operand, ...],
    ) -> None:  # fmt: skip
        super().__init__(node)
        self.m, self.outputs = m, outputs
        self._slots: dict[str, list[int | None]] = {}
        inputs: list[Operand] = []
        for name, value in self.arguments.items():
            self._slots[name] = []
            for item in value if isinstance(value, list | tuple) else (value,):
                tensor = operand_of(item) if isinstance(item, Node) else None
                self._slots[name].append(None if tensor is None else len(inputs))
                if tensor is not None:
                    inputs.append(tensor)
        self.inputs: tuple[Operand, ...] = tuple(inputs)

    @property
    def output(self) -> Operand:
        return self.outputs[0]

    def slot(self, name: str) -> int | None:
        """Index among the tensor inputs of the argument `name`; None when it is not given."""
        slots = self._slots.get(name, [])
        return slots[0] if slots else None

    def slots(self, name: str) -> list[int | None]:
        return self._slots.get(name, [])

    def given_slots(self, name: str) -> list[int]:
        return [slot for slot in self.slots(name) if slot is not None]

    def tensor(self, name: str) -> Operand:
        slot = self.slot(name)
        assert slot is not None, f"{self.name} has no tensor {name}"
        return self.inputs[slot]

    def spec(
        self, states: Mapping[Any, Placement | None], output: Placement | tuple[Placement, ...],
        *, share: float | None = None, **rest: Any,
    ) -> OpSpec:  # fmt: skip
        """From states by argument name or slot; inputs not named are `r` (partial gradient)."""
        inputs = [r] * len(self.inputs)
        for key, state in states.items():
            slot = self.slot(key) if isinstance(key, str) else key
            if slot is not None and state is not None:
                inputs[slot] = state
        outputs = output if isinstance(output, tuple) else (output,) * len(self.outputs)
        if share is None:
            tensors, all_states = (*self.inputs, *self.outputs), (*inputs, *outputs)
            shares = (
                x.share(s, self.m)
                for x, s in zip(tensors, all_states, strict=True)
                if s.sharded and x.allows(s, self.m)
            )
            share = max(shares, default=1.0)
        return OpSpec(tuple(inputs), outputs, share, **rest)

    def mapped(self, dims: list[int | None], linear: bool = True, **rest: Any) -> Iterator[OpSpec]:
        """Input dim d becomes output dim `dims[d]` in order; None: it works along d."""
        for state in self.mapped_states(dims):
            to = dims[state.dim]
            if to is not None:
                yield self.spec({0: state}, state.at(to), **rest)
        if linear and all(o.floating for o in self.outputs):
            yield self.spec({0: P}, P, share=1.0)

    def mapped_states(self, dims: list[int | None]) -> list[Placement]:
        """States in question for the first input, where its dim d is `dims[d]` of the output."""
        states = set(self.inputs[0].states)
        back = {to: d for d, to in enumerate(dims) if to is not None}
        for made in self.outputs:
            states |= {s.at(back[s.dim]) for s in made.states if s.dim in back}
        return sorted(states)

    def along(self, *dims: int, linear: bool = False) -> Iterator[OpSpec]:
        """Specs of an operator that works along these dims, and leaves the others apart."""
        n = len(self.inputs[0].shape)
        yield from self.mapped([None if d in dims else d for d in range(n)], linear)

    def on_entries(self, specs: Iterable[OpSpec]) -> Iterator[OpSpec]:
        """Those with parts of the output on every rank, where torch refuses to run on nothing."""
        for spec in specs:
            state = spec.outputs[0]
            if not state.sharded or self.output.populated(state, self.m):
                yield spec

    def local(self, to: Emit, length: int, state: Placement, entries: Any) -> Any:
        """How many of `entries` (the length, or a node that computes it from the rows) this rank
        has of a dimension of `length`: a number where all ranks have as many, else a node."""
        if not state.even(length, self.m):
            segment = length // state.segments
            return to.call(local_entries, to.axis, entries, segment, state.unit)
        if isinstance(entries, Node):  # rows x something that is sharded
            return to.call(floordiv, entries, self.m)
        return entries // self.m

    def with_local(self, name: str, length: int, state: Placement) -> Replace:
        """The operator with `name`, a length that `state` shards, as this rank has it."""

        def emit(to: Emit, given: dict[str, Any]) -> Node:
            return to.original(self.node, {**given, name: self.local(to, length, state, length)})

        return emit

    @property
    def work(self) -> float:
        """Rough count of floating point operations, enough to break ties."""
        made = sum(prod(o.shape) for o in self.outputs) / ROWS
        name = SECOND_FACTOR.get(self.name)
        if name and self.slot(name) is not None:
            shape = self.tensor(name).shape
            contracted = -1 if self.name == "linear" or len(shape) == 1 else -2
            return 2 * made * shape[contracted]
        if self.name.startswith("conv") and self.slot("weight") is not None:
            return 2 * made * prod(self.tensor("weight").shape[1:])
        return made


Rule = Callable[[Operator], Iterator[OpSpec]]
