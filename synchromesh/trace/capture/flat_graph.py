"""The flat graph as it is written: its nodes, the integers that compute sizes, the casts of
autocast, and the memory that tensors share."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from synchromesh.trace import meta
from synchromesh.trace.nodes import exported_owner, has_gradients

from .export import Untraceable

aten = torch.ops.aten


class Storage:
    """The cells that may share memory. fresh: made anew in every call (`torch.tensor(2.0)`)."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.fresh = False

    def placeholders(self) -> list[Node]:
        return [c.node for c in self.cells if c.node.op == "placeholder"]


class Cell:
    """What an exported node stands for now: an in-place operator puts a new node in its place.

    part_of: (cell, "select" or "slice", arguments) where it is part of another cell.
    readers: positions of the exported nodes that read it."""

    def __init__(self, node: Any, storage: Storage | None = None) -> None:
        self.node = node
        self.part_of: tuple[Cell, str, tuple[Any, ...]] | None = None
        self.readers: list[int] = []
        self.storage = storage or Storage()
        self.storage.cells.append(self)

    def share(self, other: "Cell") -> None:
        self.storage.cells.remove(self)
        self.storage = other.storage
        self.storage.cells.append(self)


Environment = dict[Node, Any]  # exported node -> its cell, a tuple of cells, or a sub-graph


def cell_of(node: Any, env: Environment) -> Cell | None:
    cell = env.get(node) if isinstance(node, Node) else None
    return cell if isinstance(cell, Cell) else None


class FlatGraph:
    """Writes nodes with their `meta`, and autocast's casts. autocast: the region now."""

    def __init__(self, trainable: Mapping[str, bool]) -> None:
        self.graph = Graph()
        self.trainable = trainable  # of the model's parameters
        self.autocast: Autocast | None = None
        self._policies: dict[Any, torch.dtype | None] = {}
        self._casts: dict[tuple[Node, torch.dtype, meta.Owners], Node] = {}

    def placeholder(self, target: str, role: str, name: str, val: Any) -> Node:
        """A placeholder of a role, by its name in the model or the batch."""
        node = self.graph.placeholder(target)
        trainable = role == "parameter" and self.trainable[name] and has_gradients(val.dtype)
        meta.describe(node, val, (), trainable)
        meta.role.set(node, role)
        meta.name.set(node, name)
        return node

    def emit(
        self, old: Node, target: Any, args: Any, kwargs: Mapping[str, Any], val: Any = None
    ) -> Node:
        """A node for the exported node `old`, cast as autocast wants. val: if another."""
        owner = exported_owner(old)
        if self.autocast is not None and isinstance(target, torch._ops.OpOverload):
            key = (self.autocast, target, len(args), *kwargs)
            if key not in self._policies:  # autocast decides by operator and arguments given
                self._policies[key] = casts(self.autocast, target, args, kwargs)
            if (wanted := self._policies[key]) is not None:
                args, kwargs = map_arg((args, dict(kwargs)), lambda n: self.cast(n, wanted, owner))
        node = self.graph.call_function(target, args, dict(kwargs))
        val = meta.val(old) if val is None else val
        meta.val.set(node, tuple(val) if isinstance(val, list) else val)
        continuous = any(has_gradients(x.dtype) for _, x in meta.tensors(node))
        stops = target in (aten.detach.default, aten.detach_.default)
        flows = any(map(meta.differentiable, node.all_input_nodes))
        differentiable = continuous and not stops and flows
        meta.describe(node, meta.val(node), owner, differentiable, meta.stack_trace(old))
        return node

    def cast(self, node: Node, dtype: torch.dtype, owner: meta.Owners) -> Node:
        """`node` as `dtype`, made once in each module that asks."""
        val = meta.val(node)
        if not isinstance(val, Tensor) or val.dtype not in CASTABLE or val.dtype == dtype:
            return node
        key = (node, dtype, owner)
        if key in self._casts:
            return self._casts[key]
        made = self.graph.call_function(aten.to.dtype, (node, dtype))
        meta.describe(made, val.to(dtype), owner, meta.differentiable(node))
        if meta.role(node) != "buffer":  # its content may change
            self._casts[key] = made
        return made

    def detach(self, node: Any) -> Any:
        if not isinstance(node, Node) or not meta.differentiable(node):
            return node
        detached = self.graph.call_function(aten.detach.default, (node,))
        meta.describe(detached, meta.val(node), meta.owner(node), False, meta.stack_trace(node))
        return detached

    def scatter(self, old: Node, whole: Cell, part: Node, kind: str, place: Any) -> Node:
        """`whole` with `part` in place of its selection (`kind`: "select" or "slice")."""
        target = aten.select_scatter.default if kind == "select" else aten.slice_scatter.default
        node = self.graph.call_function(target, (whole.node, part, *place))
        meta.copy(whole.node, node)
        meta.owner.set(node, exported_owner(old))
        meta.stack_trace.set(node, meta.stack_trace(old))
        if meta.differentiable(part):
            meta.differentiable.set(node, True)
        return node


# -- sizes -------------------------------------------------------------------------------

Int = int | Node

BINARY: dict[str, Callable[..., Any]] = {
    "Add": operator.add, "Mul": operator.mul,
    "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv, "IntTrueDiv": operator.truediv,
    "Mod": operator.mod, "PythonMod": operator.mod, "Max": max, "Min": min,
}  # fmt: skip


def expression(size: Any) -> sympy.Expr:
    """The sympy expression of a size: an int, or a SymInt whose only symbol is the rows."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


class Sizes:
    """Makes each size once, as nodes at the end of `graph`."""

    def __init__(self, graph: Graph, rows: Node, symbols: set[sympy.Symbol]) -> None:
        self.graph = graph
        self.symbols = symbols
        self.made: dict[Any, Int] = dict.fromkeys(symbols, rows)

    def __call__(self, size: Any) -> Int:
        return self.of(expression(size))

    def of(self, expr: Any) -> Int:
        if expr.is_Integer:
            return int(expr)
        if expr not in self.made:
            self.made[expr] = self.make(expr)
        return self.made[expr]

    def make(self, expr: Any) -> Node:
        """New nodes for an expression of the rows. Untraceable where it is too involved."""
        if expr.is_Symbol:
            raise Untraceable(
                f"a size depends on values of the batch ({expr}): shapes may depend on the number "
                "of rows alone; pad to a fixed size, or train the model as it is, under 'data' "
                "with a loss that returns (sum, weight)"
            )
        if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
            return self.node(operator.pow, self.of(expr.base), int(expr.exp))
        target = BINARY.get(type(expr).__name__)
        if target is None or any(a.is_Rational and not a.is_Integer for a in expr.args):
            raise Untraceable(
                f"the size {expr} is no simple function of the rows: use integer arithmetic"
            )
        args = sorted(expr.args, key=str) if expr.is_Add or expr.is_Mul else expr.args
        result, *rest = map(self.of, args)
        for value in rest:
            result = self.node(target, result, value)
        assert isinstance(result, Node)
        return result

    def node(self, target: Callable[..., Any], *args: Int) -> Node:
        made = self.graph.call_function(target, args)
        meta.describe(made, None, (), False)
        return made


# -- casts -------------------------------------------------------------------------------

CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Autocast:
    """An autocast region: device type and its lower precision."""

    device: str
    dtype: torch.dtype


def casts(
    region: Autocast, target: torch._ops.OpOverload, args: Any, kwargs: Mapping[str, Any]
) -> torch.dtype | None:
    """The type to which the floating inputs of `target` are to be cast, None for no cast.
    Autocast's lists of operators differ between devices and versions, so the operator is run on
    fake tensors: all inputs in float32 give the lower precision (as linear does), or all in the
    lower precision give float32 (as cross-entropy does)."""
    with FakeTensorMode():
        vals = map_arg((args, dict(kwargs)), stand_in)
    given = [v for v in pytree.tree_leaves(vals) if isinstance(v, Tensor) and v.dtype in CASTABLE]
    if not given or target._schema.name in ("aten::to", "aten::_to_copy"):
        return None
    if result_type(region, target, vals, torch.float32) == region.dtype:
        return region.dtype
    raised = result_type(region, target, vals, region.dtype) == torch.float32
    lower_without = result_type(None, target, vals, region.dtype) == region.dtype
    return torch.float32 if raised and lower_without else None


def stand_in(node: torch.fx.Node) -> Any:
    """A fake tensor or integer for the node, of the example's sizes (symbols get bound)."""
    val = meta.val(node)
    if isinstance(val, Tensor):
        shape = [s if isinstance(s, int) else int(s.node.hint) for s in val.shape]
        return torch.empty(shape, dtype=val.dtype, device=val.device)
    if meta.role(node) == "rows":
        return meta.example_rows(node)
    arguments = map_arg(node.args, stand_in)
    return node.target(*arguments) if callable(node.target) else val


def result_type(
    region: Autocast | None, target: torch._ops.OpOverload, vals: Any, dtype: torch.dtype
) -> torch.dtype | None:
    """Type of the operator's (first) result when all its castable inputs have `dtype`."""

    def convert(v: Any) -> Any:
        castable = isinstance(v, Tensor) and v.dtype in CASTABLE
        return torch.empty_like(v, dtype=dtype) if castable else v

    mode = next(v.fake_mode for v in pytree.tree_leaves(vals) if isinstance(v, FakeTensor))
    device = region.device if region else "cpu"
    with (
        mode,
        torch.no_grad(),
        torch.autocast(device, region.dtype if region else None, enabled=region is not None),
    ):
        args, kwargs = pytree.tree_map(convert, vals)
        try:
            made = target(*args, **kwargs)
        except Exception:
            return None  # the operator refuses this type: autocast would not give it to it
    first = next((v for v in pytree.tree_leaves(made) if isinstance(v, Tensor)), None)
    return None if first is None else first.dtype
