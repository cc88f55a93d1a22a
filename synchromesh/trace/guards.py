"""Guards: what tracing assumed about the number of rows, as in `if x.shape[0] > 4`.

A trace follows one branch of such a condition. It stands for the global batches for which the
condition has the same answer. A condition with a division (`x.view(rows // 2, 2, -1)` pairs
rows) must hold for the rows of every data rank as well."""

from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from . import meta

ROWS = sympy.Symbol("rows", integer=True, positive=True)
DIVISIONS = ("Mod", "PythonMod", "FloorDiv", "CleanDiv", "CeilDiv", "CeilToInt", "FloorToInt")


@dataclass(frozen=True)
class Guard:
    """A condition on the number of rows; `text` shows it."""

    condition: sympy.Basic
    text: str

    def holds(self, rows: int) -> bool:
        """Whether the condition is met by a global batch (or a data rank) of so many rows."""
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
    """A step that agrees with its model from so many rows on."""
    return Guard(sympy.Ge(ROWS, rows), f"rows >= {rows}")


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
    """The shape environment of the program's fake tensors; None where no size is a symbol."""
    for node in program.graph.nodes:
        for _, tensor in meta.tensors(node):
            env = getattr(getattr(tensor, "fake_mode", None), "shape_env", None)
            if env is not None:
                return env
    return None
