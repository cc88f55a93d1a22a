"""Where the batch rows of every tensor of the graph lie, and its `Value`."""

from math import prod
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

from synchromesh.component import Rows, Value

from .nodes import has_gradients
from .sizes import expression

Node = torch.fx.Node


def annotate(graph: torch.fx.Graph, symbols: set[sympy.Symbol]) -> None:
    """Give nodes `meta["value"]`, and `meta["irregular"]` where rows lie along no one dim."""
    one = dict.fromkeys(symbols, 1)
    for node in graph.nodes:
        val = node.meta.get("val")
        if node.op == "output":
            continue
        if isinstance(val, tuple):
            node.meta["value"] = tuple(
                value_of(node, v, symbols, one) if isinstance(v, Tensor) else None for v in val
            )
        elif isinstance(val, Tensor):
            node.meta["value"] = value_of(node, val, symbols, one)
        else:
            node.meta["value"] = None


def value_of(node: Node, val: Tensor, symbols: set[sympy.Symbol], one: Any) -> Value:
    sizes = [expression(s) for s in val.shape]
    dims = [d for d, e in enumerate(sizes) if e.free_symbols & symbols]
    shape = [int(e.subs(one)) for e in sizes]
    rows = None
    if dims:
        dim = dims[0]
        count = linear(sizes[dim], symbols)
        if len(dims) > 1:
            node.meta["irregular"] = f"has rows along two dimensions ({dims[0]} and {dims[1]})"
        elif count is None:
            node.meta["irregular"] = (
                f"has {sizes[dim]} entries along dimension {dim}, which is no multiple of the rows"
            )
        segments, inner = lay(node, dim, count or 1, sizes)
        rows = Rows(dim, segments, inner)
    floating = has_gradients(val.dtype)
    name = node.meta["name"] if "role" in node.meta else node.name
    dtype = str(val.dtype).removeprefix("torch.")
    return Value(name, tuple(shape), dtype, rows, floating and bool(node.meta["differentiable"]))


def linear(size: Any, symbols: set[sympy.Symbol]) -> int | None:
    """k where the size is k * rows."""
    (symbol,) = size.free_symbols & symbols if len(size.free_symbols & symbols) == 1 else (None,)
    if symbol is None:
        return None
    k = sympy.expand(size / symbol)
    return int(k) if k.is_Integer else None


def lay(node: Node, dim: int, count: int, sizes: list[Any]) -> tuple[int, int]:
    """(segments, inner) of the rows of `node`: segments x rows x inner entries along `dim`.

    A view keeps the row-major order, so the number of entries before the rows stays the same:
    prod(shape[:dim]) * segments. (T, rows, C) -> (T * rows, C) has T segments.
    """
    if count == 1:
        return 1, 1
    name = (
        node.target._schema.name.split("::")[1]
        if isinstance(node.target, torch._ops.OpOverload)
        else ""
    )
    inputs = [
        v for a in node.all_input_nodes if isinstance(v := a.meta.get("value"), Value) and v.rows
    ]
    same = [v for v in inputs if v.rows and v.rows.segments * v.rows.inner == count]
    if name in ("view", "reshape", "_unsafe_view", "flatten", "unflatten") and inputs:
        source = inputs[0]
        assert source.rows is not None
        before = prod(source.shape[: source.rows.dim]) * source.rows.segments
        ahead = prod(int(s) for s in sizes[:dim])
        segments = max(1, before // ahead) if ahead and before % ahead == 0 else 1
        return (segments, count // segments) if count % segments == 0 else (1, count)
    if name == "cat" and inputs and all(v.rows and v.rows.inner == 1 for v in inputs):
        return count, 1
    if name == "repeat" and inputs:
        rows = inputs[0].rows
        assert rows is not None
        return count // rows.inner, rows.inner
    if same and same[0].rows:
        return same[0].rows.segments, same[0].rows.inner
    return 1, count
