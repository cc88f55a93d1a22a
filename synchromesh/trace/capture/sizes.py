"""Sizes: integer nodes that compute every size which depends on the batch from its rows."""

import operator
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from .export import Untraceable

Node = torch.fx.Node
Int = int | Node

BINARY: dict[str, Callable[..., Any]] = {
    "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv, "IntTrueDiv": operator.truediv,
    "Mod": operator.mod, "PythonMod": operator.mod, "Max": max, "Min": min,
}  # fmt: skip


def expression(size: Any) -> sympy.Expr:
    """The sympy expression of a size: an int, or a SymInt whose only symbol is the rows."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


class Sizes:
    """Makes each size once, as nodes at the end of `graph`."""

    def __init__(self, graph: torch.fx.Graph, rows: Node, symbols: set[sympy.Symbol]) -> None:
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
        if expr.is_Symbol:
            raise Untraceable(
                f"a size depends on values of the batch ({expr}): shapes may depend on the number "
                "of rows alone; pad to a fixed size, or train the model as it is under the plan "
                "'data'"
            )
        if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
            return self.node(operator.pow, self.of(expr.base), int(expr.exp))
        target = (
            operator.add
            if expr.is_Add
            else operator.mul
            if expr.is_Mul
            else BINARY.get(type(expr).__name__)
        )
        if target is None or any(a.is_Rational and not a.is_Integer for a in expr.args):
            raise Untraceable(
                f"the size {expr} is no simple function of the rows: use integer arithmetic"
            )
        commutes = target in (operator.add, operator.mul)
        result, *rest = [
            self.of(a) for a in (sorted(expr.args, key=str) if commutes else expr.args)
        ]
        for value in rest:
            result = self.node(target, result, value)
        assert isinstance(result, Node)
        return result

    def node(self, target: Callable[..., Any], *args: Int) -> Node:
        made = self.graph.call_function(target, args)
        made.meta.update(val=None, value=None, owner=(), differentiable=False)
        return made
