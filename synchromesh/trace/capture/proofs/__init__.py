"""Proofs that a value's rows are regular, per family of operators: `prove(case)` is its layout.

What none of them proves raises `IrregularRows`: it may not be taken apart by rows."""

from collections.abc import Callable

from ..row_layout import Case, IrregularRows, RowLayout
from . import elementwise, indexing, order, views
from .trial import tried

Proof = Callable[[Case], RowLayout]

# sizes and bounds of these may be computed from the number of rows
SIZED: dict[str, Proof] = views.PROOFS
PROOFS: dict[str, Proof] = {**indexing.PROOFS, **elementwise.PROOFS}


def prove(case: Case) -> RowLayout:
    """Where the rows of the case's result lie; raises IrregularRows where that is not proved."""
    if order.concerns(case):
        return order.carried(case, prove)
    layout = proof_of(case)(case)
    assert layout.segments, "a proof finds a number of segments or raises"
    return layout


def crossed(case: Case, why: IrregularRows) -> IrregularRows:
    """A result that no layout describes: a grid where rows meet rows in order; else some of the
    rows, or others beside them, which only operators along the rows bring about."""
    first = next((e.rows.dim for e in case.with_rows if isinstance(e.rows, RowLayout)), None)
    if case.name in views.ALONG and first is not None:
        return IrregularRows(why.why, coupling=case.coupled(first).coupling)
    return IrregularRows(why.why, grid=elementwise.is_grid(case))


def proof_of(case: Case) -> Proof:
    """The proof for the case's operator; raises where there can be none."""
    if case.schema is None:
        raise case.unproved()
    if not case.schema.name.startswith("aten::"):
        return tried
    if case.name in SIZED:
        return SIZED[case.name]
    if case.name == "arange" or (not case.with_rows and case.name not in elementwise.MADE):
        raise case.positional()
    if set(case.numbers) - {"size"}:
        raise IrregularRows(f"depends on the number of rows ({case.where})")
    if case.name in PROOFS:
        return PROOFS[case.name]
    if elementwise.is_elementwise(case):
        return elementwise.elementwise
    if elementwise.last_dims(case) is not None:
        return elementwise.trailing
    along_dims = any(map(case.takes, elementwise.DIMS)) and case.name != "renorm"
    return elementwise.along_dims if along_dims else tried
