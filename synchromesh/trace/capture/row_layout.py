"""The layout of a value's batch rows, and an operator's result as the proofs of it see it.

A value has regular rows where, for any rows [a, b) of the batch, what the graph computes of these
alone are the entries [a, b) of what it computes of all: the dimension `dim` holds segments x rows
x inner entries, and no row depends on another one or on its place. Only such values may be taken
apart by rows. Values that are the same for all rows lie in several ways at once."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from synchromesh.trace.nodes import OperatorCall, described, is_number, line_of, number
from synchromesh.trace.step import ROWS

from .flat_graph import expression


@dataclass(frozen=True)
class RowLayout:
    """`dim` has `count` entries for a row; each number in `segments` of segments is proved."""

    dim: int
    count: int
    segments: frozenset[int] = frozenset()

    @property
    def in_any_order(self) -> "RowLayout":
        """The layout of a value that is the same for all rows."""
        return self.with_segments(s for s in range(1, self.count + 1) if self.count % s == 0)

    def with_segments(self, segments: Iterable[int]) -> "RowLayout":
        return RowLayout(self.dim, self.count, frozenset(segments))


@dataclass(frozen=True)
class Order:
    """An order that a step brings rows into: the permutation that the node `by` computes. kind:
    what a value has along dimension 0. "values": those of one that lies in `layout`, in this
    order. "places": where each of them was, divided by `per`. "inverse": of that permutation."""

    by: Node
    kind: str
    layout: RowLayout
    per: int = 1


class IrregularRows(Exception):
    """Rows that are not proved to be regular.

    coupling: a clause where it is the operator itself that works along the rows.
    grid: every row with every row, both in order; what sums over one of them has the other's rows.
    order: the one that they are in, where the step may undo it."""

    def __init__(
        self, why: str, coupling: str = "", grid: bool = False, order: Order | None = None
    ) -> None:
        super().__init__(why)
        self.why, self.coupling, self.grid, self.order = why, coupling, grid, order


RowStatus = RowLayout | IrregularRows | None  # None: a value without rows


def sizes_of(val: Tensor, symbols: set[sympy.Symbol]) -> tuple[Any, ...]:
    """Sizes with the one symbol `ROWS` in place of all that stand for the rows."""
    one = dict.fromkeys(symbols, ROWS)
    return tuple(expression(s).subs(one) for s in val.shape)


def row_dims(sizes: tuple[Any, ...]) -> list[int]:
    return [d for d, e in enumerate(sizes) if ROWS in e.free_symbols]


def unproved_layout(sizes: tuple[Any, ...]) -> RowStatus:
    """Where the rows of a value of these sizes are, with no number of segments proved."""
    dims = row_dims(sizes)
    if not dims:
        return None
    if len(dims) > 1:
        return IrregularRows(f"has rows along two dimensions ({dims[0]} and {dims[1]})")
    count = sympy.expand(sizes[dims[0]] / ROWS)
    if not count.is_Integer:
        return IrregularRows(
            f"has {sizes[dims[0]]} entries along dimension {dims[0]}, which is no multiple of "
            "the rows"
        )
    return RowLayout(dims[0], int(count))


@dataclass(frozen=True)
class RowOperand:
    """A tensor that an operator reads: its maker, which argument it is, where its rows lie."""

    node: Node
    argument: str
    sizes: tuple[Any, ...]
    rows: RowStatus

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def layout(self) -> RowLayout:
        if isinstance(self.rows, IrregularRows):
            raise IrregularRows(self.rows.why)
        assert self.rows is not None
        return self.rows

    @property
    def grid(self) -> bool:
        return isinstance(self.rows, IrregularRows) and self.rows.grid

    @property
    def order(self) -> Order | None:
        return self.rows.order if isinstance(self.rows, IrregularRows) else None

    @property
    def one_per_row(self) -> bool:
        """Whether rows are alone in their dimension, and in order."""
        return isinstance(self.rows, RowLayout) and self.rows.count == 1

    def shape(self, rows: int) -> tuple[int, ...]:
        return tuple(int(e.subs({ROWS: rows})) for e in self.sizes)


class Case(OperatorCall):
    """One result with rows of a node, to be proved: the arguments by name, and what is read.
    result: where its rows are, with no number of segments proved. first: the first tensor read."""

    def __init__(
        self, node: Node, index: int, sizes: tuple[Any, ...], result: RowStatus,
        operand: Callable[[Node, str], RowOperand | None],
    ) -> None:  # fmt: skip
        super().__init__(node)
        self.index, self.sizes = index, sizes
        self.result = result if isinstance(result, RowLayout) else RowLayout(0, 1)
        self.operands: list[RowOperand] = []
        self.numbers: list[str] = []  # arguments that are computed from the number of rows
        for argument, value in self.arguments.items():
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, Node):
                    tensor = operand(item, argument)
                    if tensor is not None:
                        self.operands.append(tensor)
                    else:
                        self.numbers.append(argument)

    @cached_property
    def with_rows(self) -> list[RowOperand]:
        return [e for e in self.operands if e.rows is not None]

    @property
    def first(self) -> RowOperand:
        return self.operands[0]

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def where(self) -> str:
        return described(self.node)

    def apply(
        self, tensor: Callable[[RowOperand], Any], rows: int,
        constant: Callable[[Any], Any] = lambda x: x,
    ) -> Any:  # fmt: skip
        """What the operator makes of other tensors and constants, for so many rows."""
        operands = iter(self.operands)

        def put(x: Any) -> Any:
            if not isinstance(x, Node):
                return constant(x)
            return number(x, rows) if is_number(x) else tensor(next(operands))

        given: Any = map_aggregate((self.node.args, dict(self.node.kwargs)), put)
        return self.node.target(*given[0], **given[1])  # type: ignore[operator]

    def shared_layout(self, operands: list[RowOperand] | None = None) -> RowLayout:
        """The layout that all `operands` with rows have in common."""
        segments = self.result.in_any_order.segments
        for operand in self.with_rows if operands is None else operands:
            layout = operand.layout
            if layout.count != self.result.count:
                raise self.unproved()
            if not segments & layout.segments:
                raise self.different_orders()
            segments &= layout.segments
        return self.result.with_segments(segments)

    def unproved(self) -> IrregularRows:
        return IrregularRows(f"has rows in an order that is not known ({self.where})")

    def different_orders(self) -> IrregularRows:
        return IrregularRows(f"joins rows that lie in different orders ({self.where})")

    def coupled(self, dim: int) -> IrregularRows:
        """The operator works along the rows, which lie along `dim`."""
        along = f"{self.name} along dimension {dim}"
        return IrregularRows(
            f"has rows that depend on each other ({along} at {line_of(self.node)})",
            f"{along} at {line_of(self.node)} makes rows depend on each other",
        )

    def positional(self) -> IrregularRows:
        return IrregularRows(f"depends on the position of its rows ({self.where})")


def flat_size(sizes: tuple[Any, ...]) -> int:
    """The product of sizes that do not depend on the rows."""
    return prod(int(s) for s in sizes)
