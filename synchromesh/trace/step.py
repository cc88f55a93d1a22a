"""A step, the traced training step: one flat graph, its chain of components, and its constants.

Guards are what tracing assumed about the number of rows, as in `if x.shape[0] > 4`: a trace
follows one branch of such a condition, and stands for the global batches that give the same
answer. A condition with a division (`x.view(rows // 2, 2, -1)` pairs rows) must hold for the rows
of every data rank as well."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

from synchromesh.values.component import Chain
from synchromesh.values.layout import Layout

from . import meta

ROWS = sympy.Symbol("rows", integer=True, positive=True)
DIVISIONS = ("Mod", "PythonMod", "FloorDiv", "CleanDiv", "CeilDiv", "CeilToInt", "FloorToInt")


@dataclass(frozen=True)
class Guard:
    """A condition on the number of rows; `text` shows it."""

    condition: sympy.Basic
    text: str

    def holds(self, rows: int) -> bool:
        try:
            return bool(self.condition.subs(ROWS, rows))
        except ZeroDivisionError:  # few rows make a divisor zero
            return False

    @property
    def of_blocks(self) -> bool:
        """Whether it must hold for the rows of each data rank too."""
        if not isinstance(self.condition, sympy.Equality):
            return False
        parts = sympy.preorder_traversal(self.condition)
        return any(type(part).__name__ in DIVISIONS for part in parts)


def at_least(rows: int) -> Guard:
    return Guard(sympy.Ge(ROWS, rows), f"rows >= {rows}")


@dataclass(frozen=True)
class Report:
    """A value that a loss reports beside itself. kind: "mean", "sum" or "weighted mean" over rows,
    the last as two outputs, (sum, weight); "constant", "unknown"."""

    name: str
    kind: str = "unknown"


@dataclass(frozen=True)
class Step:
    """What `trace` found. docs/design.md has the graph's contract; `graph` is None when opaque."""

    chain: Chain
    graph: torch.fx.Graph | None
    constants: Mapping[str, Tensor]  # tensors that tracing lifted out of the code, by name
    outputs: tuple[str, ...]  # ("loss",), ("sum", "weight") or names of metrics
    leaves: tuple[str, ...]  # the batch's tensor leaves in flattening order, and its totals
    shared: Mapping[str, str]  # a parameter's other names in the model -> its first name
    reason: str = ""  # why the step is opaque
    reports: tuple[Report, ...] = ()  # what it gives beside a loss, behind outputs
    carry: tuple[str, ...] = ()  # the leaves that it gives anew for the next batch, behind those
    guards: tuple[Guard, ...] = ()  # conditions on the rows of a global batch
    assumed: Mapping[str, str] = field(default_factory=dict)  # buffers folded into it: digests
    fed: tuple[str, ...] = ()  # what it changes by the values of its rows, but for norms
    changed: tuple[str, ...] = ()  # what an opaque step changes whatever its rows
    coupled: str = ""  # why its rows may depend on each other: no micro-batches then
    coupling: tuple[str, ...] = ()  # components in which they do, as the graph shows
    least: tuple[Guard, ...] = ()  # those that a comparison with the model has found
    merged: str = ""  # why components that might stand alone were made one
    doubt: str = ""  # where its loss, and nothing else, is not seen to treat rows apart
    totals: torch.fx.Graph | None = None  # of what a batch's leaves add up to over all its rows
    read: tuple[Any, ...] = ()  # Python values that its code has found (`capture/readings.py`)
    cuts: tuple[str, ...] = ()  # paths of modules at which it was asked to be cut
    targets: int = 0  # of a mean over targets, by row: it is given as (sum, weight); 0: others

    def takes(self, rows: int) -> bool:
        return all(guard.holds(rows) for guard in self.guards)

    def undivided(self, layouts: Sequence[Layout]) -> tuple[Layout, ...]:
        """`layouts` of the components, but 1 x K where rows depend on each other: every one of the
        K devices computes all rows there, whatever a plan says.

            rows depend on each other in c       a   b   c            a   b   c
                                                4x1 2x2 4x1    ->    4x1 2x2 1x4"""
        return tuple(
            replace(layout, data=1, tensor=layout.devices) if name in self.coupling else layout
            for name, layout in zip(self.chain.names, layouts, strict=True)
        )

    @property
    def reported(self) -> tuple[tuple[str, int], ...]:
        """The outputs that reports are: of each its name, and 0, or 1 for its weight."""
        parts = ((r, (0, 1) if r.kind == "weighted mean" else (0,)) for r in self.reports)
        return tuple((r.name, part) for r, of in parts for part in of)

    @property
    def opaque(self) -> bool:
        return self.graph is None


def guards_of(program: torch.export.ExportedProgram) -> tuple[Guard, ...]:
    """The conditions on the number of rows under which the program was exported."""
    by_text: dict[str, Guard] = {}
    shapes = _shapes(program)
    sizes: set[Any] = set(getattr(shapes, "backed_var_to_val", ()))
    for guard in getattr(shapes, "guards", ()):
        symbols = guard.expr.free_symbols
        if symbols and symbols <= sizes:  # sizes alone: each of them is the rows of some leaf
            condition = guard.expr.xreplace(dict.fromkeys(symbols, ROWS))
            if condition != sympy.true:
                by_text.setdefault(str(condition), Guard(condition, str(condition)))
    return tuple(by_text.values())


def _shapes(program: torch.export.ExportedProgram) -> Any:
    tensors = (tensor for node in program.graph.nodes for _, tensor in meta.tensors(node))
    envs = (getattr(getattr(x, "fake_mode", None), "shape_env", None) for x in tensors)
    return next((env for env in envs if env is not None), None)
