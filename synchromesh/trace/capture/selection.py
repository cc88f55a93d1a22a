"""Selections: entries that a mask keeps, written as all entries and the mask.

    logits[keep], each.masked_select(keep)     as many as are kept, which no graph knows
    cross_entropy(logits[keep], y[keep])  ->   cross_entropy(logits, y where kept, else ignored)
    each[keep].mean()                     ->   where(keep, each, 0).sum() / keep.sum()

An operator that computes each entry from those at its place (`proofs/order.py`) gives of the kept
ones what it gives of all, of these ones; what reduces them is written with the mask. In place of
others are ordinary numbers, so that no index is out of bounds and no gradient infinite."""

import operator
from contextlib import nullcontext, suppress
from math import prod
from typing import Any, ClassVar

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from synchromesh.trace import meta
from synchromesh.trace.nodes import (
    all_arguments,
    dims_of,
    has_gradients,
    is_number,
    is_random,
    line_of,
    same_shape,
    short_name,
)
from synchromesh.trace.rules.loss import AtenReduction

from .export import Untraceable
from .flat_graph import FlatGraph, Sizes, aten, expression
from .loss_reduction import WEIGHTED
from .normal_form import RESIZES, SHAPED_AS, settled
from .proofs import prove
from .proofs.order import apart
from .row_layout import Case, RowOperand, sizes_of

COMBINED = {"Mul": aten.mul.Tensor, "Max": aten.clamp_min.default}


class Selections:
    """Which nodes of a flat graph stand for entries that a mask keeps, along dimension 0."""

    # where functions that have poles have none, as logarithms of x and 1 - x
    ORDINARY: ClassVar[float] = 0.5

    def __init__(self, flat: FlatGraph, sizes: Sizes) -> None:
        self.flat, self.sizes = flat, sizes
        self.masks: dict[Node, Node] = {}
        self.counts: dict[Any, Node] = {}  # by the symbol that stands for how many are kept
        self.alike: dict[Any, Node] = {}  # by a node, and by what it computes of what

    def written(self, node: Node, name: str, args: Any, kwargs: Any) -> Node | None:
        """An exported operator in the flat graph; None if nothing is selected; or Untraceable."""
        masks = [mask for mask in map(self.mask_of, nodes_of((args, kwargs))) if mask]
        if not masks:
            mask = selecting(node, name, args)
            return None if mask is None else self.selected(node, args[0], mask)
        in_graph, (_, made) = None, next(meta.tensors(node))
        if len(set(map(self.first_alike, masks))) == 1:
            same = made.dim() and expression(made.shape[0]) in self.counts
            write = self.of_each if same else self.reduced
            with suppress(RuntimeError, TypeError, ValueError, IndexError):  # it takes no others
                in_graph = write(node, name, args, kwargs, masks[0])
        if in_graph is None:
            raise Untraceable(
                f"{line_of(node)} uses entries that a mask selects so that their number matters "
                f"({node.target}): write it with the mask itself (torch.where, ignore_index), or "
                "train the model as it is, under 'data' with a loss that returns (sum, weight)"
            )
        return in_graph

    def mask_of(self, node: Node) -> Node | None:
        """The mask of the entries that a node stands for, None for other nodes."""
        while node not in self.masks and node.target in (operator.getitem, aten.detach.default):
            node = node.all_input_nodes[0]
        return self.masks.get(node)

    def first_alike(self, node: Node) -> Node:
        """The first node that computed the same of the same."""
        if node.op != "call_function" or is_random(node) or meta.effect(node):
            return node
        if node not in self.alike:
            key = node.target, str(map_arg((node.args, node.kwargs), self.first_alike))
            self.alike[node] = self.alike.setdefault(key, node)
        return self.alike[node]

    def make(self, node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A node for part of what an exported one does, of which the value is found out."""
        given: Any = map_arg((args, kwargs), meta.val)
        mode = next(x for x in map(meta.val, nodes_of((args, kwargs))) if x is not None).fake_mode
        region = self.flat.autocast
        cast = torch.autocast(region.device, region.dtype, cache_enabled=False) if region else None
        with mode, cast or nullcontext():
            val = target(*given[0], **given[1])
        return self.flat.emit(node, target, args, kwargs, val)

    def selected(self, node: Node, x: Node, mask: Node) -> Node:
        """x[mask], with its entries in one dimension."""
        last = meta.val(mask).dim() - 1
        keep = self.make(node, aten.flatten.using_ints, mask)
        entries = self.make(node, aten.flatten.using_ints, x, 0, last)
        if not has_gradients(meta.val(x).dtype):
            entries = self.filled(node, entries, keep, 0)
        elif not all(short_name(user) in (*WEIGHTED, "sym_size") for user in node.users):
            entries = self.filled(node, entries, keep, self.ORDINARY)
        self.masks[entries] = keep
        self.counts[expression(meta.val(node).shape[0])] = self.make(node, aten.sum.default, keep)
        return entries

    def number(self, node: Node, item: Node | None) -> Node | None:
        """What stands for a number computed of how many are kept, if it is. item: its tensor."""
        expr = expression(meta.val(node))
        if item is not None:
            self.counts[expr] = item
        symbols = expr.free_symbols & self.counts.keys()
        others = [a for a in expr.args if a not in symbols]
        target = COMBINED.get(type(expr).__name__)
        if target and len(symbols) == len(others) == 1 and others[0].is_Integer:
            return self.make(node, target, self.counts[symbols.pop()], int(others[0]))
        return self.counts.get(expr)

    def filled(self, node: Node, x: Node, keep: Node, fill: float) -> Node:
        """Entries with a number in place of those that are not kept."""
        left_out = self.make(node, aten.logical_not.default, keep)
        for _ in range(meta.val(x).dim() - 1):
            left_out = self.make(node, aten.unsqueeze.default, left_out, -1)
        return self.make(node, aten.masked_fill.Scalar, x, left_out, fill)

    def of_each(self, node: Node, name: str, args: Any, kwargs: Any, keep: Node) -> Node | None:
        """An operator that computes each entry from those at its place; batch norm does not."""
        if name in (*RESIZES, *SHAPED_AS):
            same = same_shape(meta.val(node), meta.val(node.all_input_nodes[0]))
            return args[0] if same else None
        assert isinstance(node.target, torch._ops.OpOverload)
        target, args, kwargs = settled(node.target, args, kwargs, meta.val(node), self.sizes)
        made = self.make(node, target, *args, **kwargs)
        self.masks[made] = keep
        return made if name != "batch_norm" and self.is_apart(made) else None

    def is_apart(self, node: Node) -> bool:
        """Whether each entry of what a node makes depends on those at its place alone."""

        def operand(x: Node, argument: str) -> RowOperand | None:
            sizes = () if is_number(x) else sizes_of(meta.val(x), self.sizes.symbols)
            return None if is_number(x) else RowOperand(x, argument, sizes, None)

        entries = [*filter(self.mask_of, node.all_input_nodes)]
        return all(
            apart(Case(node, at, sizes_of(x, self.sizes.symbols), None, operand), entries, prove)
            for at, x in meta.tensors(node)
        )

    def reduced(self, node: Node, name: str, args: Any, kwargs: Any, keep: Node) -> Node | None:
        """An operator that reduces the kept entries."""
        given = all_arguments(node)
        if name in WEIGHTED and meta.val(args[1]).dtype is torch.int64:
            if [a for a in nodes_of(args) if self.mask_of(a)] != [*args[:2]]:
                return None
            ignored = self.filled(node, args[1], keep, given["ignore_index"])
            return self.flat.emit(node, node.target, (args[0], ignored, *args[2:]), kwargs)
        if "reduction" in given:
            each = self.unreduced(node, args, kwargs)
            mean = given["reduction"] == AtenReduction.MEAN
            return self.total(node, each, keep, mean) if self.is_apart(each) else None
        if name in ("sum", "mean"):
            return self.total(node, args[0], keep, name == "mean")
        return None

    def unreduced(self, node: Node, args: Any, kwargs: Any) -> Node:
        place = list(all_arguments(node)).index("reduction")
        if len(args) <= place:
            kwargs = kwargs | {"reduction": AtenReduction.NONE}
        args = [AtenReduction.NONE if at == place else a for at, a in enumerate(args)]
        return self.make(node, node.target, *args, **kwargs)

    def total(self, node: Node, each: Node, keep: Node, mean: bool) -> Node:
        """The sum, or the mean, of the kept ones of `each`, along the dimensions of `node`."""
        given, shape = all_arguments(node), meta.val(each).shape
        dims = dims_of(given.get("dim"), len(shape)) or list(range(len(shape)))
        kept, keepdim = self.filled(node, each, keep, 0), bool(given.get("keepdim"))
        dtype = given.get("dtype")
        total = self.make(node, aten.sum.dim_IntList, kept, dims, keepdim, dtype=dtype)
        if not mean:
            return total
        count = self.make(node, aten.sum.default, keep)
        count = self.make(node, aten.mul.Tensor, count, prod(shape[d] for d in dims if d))
        return self.make(node, aten.div.Tensor, total, count)


def selecting(node: Node, name: str, args: Any) -> Node | None:
    if name == "index" and len(args[1]) == 1:
        mask = args[1][0]
    elif name == "masked_select" and same_shape(meta.val(args[0]), meta.val(args[1])):
        mask = args[1]
    else:
        return None
    unknown = isinstance(meta.val(node).shape[0], torch.SymInt)
    return mask if unknown and meta.val(mask).dtype is torch.bool else None


def nodes_of(arguments: Any) -> list[Node]:
    """The nodes among arguments, a repeated one each time."""
    nodes: list[Node] = []
    map_arg(arguments, nodes.append)
    return nodes
