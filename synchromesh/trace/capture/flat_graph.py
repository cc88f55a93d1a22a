"""The flat graph as it is written: its nodes, their casts, and the memory that tensors share."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from synchromesh.trace import meta
from synchromesh.trace.nodes import exported_owner, has_gradients

from .casts import CASTABLE, Autocast, casts

aten = torch.ops.aten


class Storage:
    """The cells that may share memory.

    fresh: memory of a tensor that the code makes anew in every call (`torch.tensor(2.0)`)."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.fresh = False


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
        """Joins the storage of another cell."""
        self.storage.cells.remove(self)
        self.storage = other.storage
        self.storage.cells.append(self)


Environment = dict[Node, Any]  # exported node -> its cell, a tuple of cells, or a sub-graph


def cell_of(node: Any, env: Environment) -> Cell | None:
    """The cell of an exported node, None where it has none or is no node."""
    found = env.get(node) if isinstance(node, Node) else None
    return found if isinstance(found, Cell) else None


class FlatGraph:
    """Writes nodes with their entries in `meta`, and the casts that autocast makes.

    autocast: the region that nodes are written in now."""

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
        """A node that stands for the exported node `old`, its inputs cast as autocast wants.

        val: what it makes, where that is not what `old` makes."""
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
        """The node without gradient."""
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
