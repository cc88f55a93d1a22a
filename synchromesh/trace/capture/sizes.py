"""Sizes: integer nodes that compute every size which depends on the batch from its rows."""

import operator
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.fx import Graph, Node

from synchromesh.trace import meta

from .export import Untraceable

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
        """The integer, or the node that computes it."""
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
        """A node at the end of the graph that computes an integer."""
        made = self.graph.call_function(target, args)
        meta.describe(made, None, (), False)
        return made
