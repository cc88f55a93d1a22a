"""The lay of a value's batch rows, and an operator's node as the proofs of it see it.

A value has regular rows where, for any rows [a, b) of the batch, what the graph computes of these
alone are the entries [a, b) of what it computes of all: the dimension `dim` holds segments x rows
x inner entries, and no row depends on another one or on its place. Only such values may be taken
apart by rows. Values that are the same for all rows lie in several ways at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

from synchromesh.trace.guards import ROWS
from synchromesh.trace.rules.operator import arguments, constant

from .nodes import line_of, short_name
from .sizes import expression

Node = torch.fx.Node


@dataclass(frozen=True)
class Lay:
    """`dim` has `count` entries for a row; each number in `segments` of segments is proved."""

    dim: int
    count: int
    segments: frozenset[int]

    @property
    def any(self) -> "Lay":
        """The lay of a value that is the same for all rows."""
        ways = frozenset(s for s in range(1, self.count + 1) if self.count % s == 0)
        return Lay(self.dim, self.count, ways)

    def as_(self, segments: Any) -> "Lay":
        return Lay(self.dim, self.count, frozenset(segments))


class Irregular(Exception):
    """Rows that are not proved to be regular.

    mixed: a clause where it is the operator itself that works along the rows.
    grid: every row with every row, both in order; what sums over one of them has the other's rows.
    """

    def __init__(self, why: str, mixed: str = "", grid: bool = False) -> None:
        super().__init__(why)
        self.why, self.mixed, self.grid = why, mixed, grid


Fate = Lay | Irregular | None  # None: a value without rows


def sizes_of(val: Tensor, symbols: set[sympy.Symbol]) -> tuple[Any, ...]:
    """Sizes with the one symbol `ROWS` in place of all that stand for the rows."""
    one = dict.fromkeys(symbols, ROWS)
    return tuple(expression(s).subs(one) for s in val.shape)


def spot(sizes: tuple[Any, ...]) -> Fate:
    """Where the rows of a value of these sizes are, with no way to lie proved."""
    dims = [d for d, e in enumerate(sizes) if ROWS in e.free_symbols]
    if not dims:
        return None
    if len(dims) > 1:
        return Irregular(f"has rows along two dimensions ({dims[0]} and {dims[1]})")
    count = sympy.expand(sizes[dims[0]] / ROWS)
    if not count.is_Integer:
        return Irregular(
            f"has {sizes[dims[0]]} entries along dimension {dims[0]}, which is no multiple of "
            "the rows"
        )
    return Lay(dims[0], int(count), frozenset())


@dataclass(frozen=True)
class Entry:
    """A tensor that an operator reads: who made it, which argument it is, and how it lies."""

    node: Node
    argument: str
    sizes: tuple[Any, ...]
    fate: Fate

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def lay(self) -> Lay:
        """Its lay; raises where there is none."""
        if isinstance(self.fate, Irregular):
            raise Irregular(self.fate.why)
        assert self.fate is not None
        return self.fate

    @property
    def grid(self) -> bool:
        return isinstance(self.fate, Irregular) and self.fate.grid

    @property
    def single(self) -> bool:
        """Whether rows are alone in their dimension, and in order."""
        return isinstance(self.fate, Lay) and self.fate.count == 1

    def shape(self, rows: int) -> tuple[int, ...]:
        return tuple(int(e.subs({ROWS: rows})) for e in self.sizes)


class Case:
    """One result with rows of a node: the arguments by name, and what is read."""

    def __init__(
        self,
        node: Node,
        at: int,
        sizes: tuple[Any, ...],
        place: Fate,
        entry: Callable[[Node, str], Entry | None],
    ) -> None:
        self.node, self.at, self.sizes = node, at, sizes
        self.place = place if isinstance(place, Lay) else Lay(0, 1, frozenset())
        self.name = short_name(node)
        self.schema = getattr(node.target, "_schema", None)
        self.overload: str = self.schema.overload_name if self.schema else ""
        self.arguments = arguments(node)
        self.entries: list[Entry] = []
        self.numbers: list[str] = []  # arguments that are computed from the number of rows
        for argument, value in self.arguments.items():
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, Node):
                    found = entry(item, argument)
                    if found is not None:
                        self.entries.append(found)
                    else:
                        self.numbers.append(argument)

    @cached_property
    def rowed(self) -> list[Entry]:
        """The tensors with rows."""
        return [e for e in self.entries if e.fate is not None]

    @property
    def main(self) -> Entry:
        """The first tensor."""
        return self.entries[0]

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def where(self) -> str:
        return f"{self.name or self.node.target} at {line_of(self.node)}"

    def constant(self, name: str, default: Any = None) -> Any:
        """The argument `name`, else the schema's default."""
        return constant(self.schema, self.arguments, name, default)

    def takes(self, name: str) -> bool:
        return self.schema is not None and any(a.name == name for a in self.schema.arguments)

    # -- what proofs conclude ------------------------------------------------------------

    def kept(self, entries: list[Entry] | None = None) -> Lay:
        """The lay that all `entries` with rows have in common."""
        ways = self.place.any.segments
        for entry in self.rowed if entries is None else entries:
            lay = entry.lay
            if lay.count != self.place.count:
                raise self.unproved()
            if not ways & lay.segments:
                raise Irregular(f"joins rows that lie in different orders ({self.where})")
            ways &= lay.segments
        return self.place.as_(ways)

    def unproved(self) -> Irregular:
        return Irregular(f"has rows in an order that is not known ({self.where})")

    def mixed(self, dim: int) -> Irregular:
        along = f"{self.name} along dimension {dim}"
        return Irregular(
            f"has rows that depend on each other ({along} at {line_of(self.node)})",
            f"{along} at {line_of(self.node)} makes rows depend on each other",
        )

    def positional(self) -> Irregular:
        return Irregular(f"depends on the position of its rows ({self.where})")

    def counted(self) -> Irregular:
        return Irregular(f"depends on the number of rows ({self.where})")


def number(node: Any, rows: int) -> Any:
    """A number of the graph for so many rows."""
    if not isinstance(node, Node):
        return node
    if node.op == "placeholder":
        return rows
    return node.target(*(number(a, rows) for a in node.args))  # type: ignore[operator]


def is_number(node: Node) -> bool:
    return node.meta.get("value") is None and not isinstance(node.meta.get("val"), Tensor | tuple)


def dims_of(given: Any, rank: int) -> list[int]:
    """Dimensions counted from the front."""
    found = [given] if isinstance(given, int) else list(given or ())
    return [d + rank if d < 0 else d for d in found]


def flat_size(sizes: tuple[Any, ...]) -> int:
    return prod(int(s) for s in sizes)


def results(node: Node) -> Iterator[tuple[int, Tensor]]:
    """The tensors that a node makes, with their places in a tuple."""
    val = node.meta.get("val")
    for at, each in enumerate(val if isinstance(val, tuple | list) else (val,)):
        if isinstance(each, Tensor):
            yield at, each
