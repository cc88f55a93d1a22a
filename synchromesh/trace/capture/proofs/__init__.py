"""Proofs that a value's rows are regular, per family of operators: `prove(case)` is its lay.

What none of them proves raises `Irregular`: it may not be taken apart by rows.
"""

from collections.abc import Callable

import torch

from ..lay import Case, Irregular, Lay
from . import along, entries, picks, views
from .trial import tried

Proof = Callable[[Case], Lay]

# sizes and bounds of these may be computed from the number of rows
SIZED: dict[str, Proof] = {**views.PROOFS, **along.PROOFS}
PROOFS: dict[str, Proof] = {**picks.PROOFS, **entries.PROOFS}


def prove(case: Case) -> Lay:
    """Where the rows of the case's result lie; raises Irregular where that is not proved."""
    lay = proof_of(case)(case)
    assert lay.segments, "a proof finds a way to lie or raises"
    return lay


def crossed(case: Case, why: Irregular) -> Irregular:
    """A result that no lay describes: a grid where rows meet rows and their order is known; else
    some of the rows, or others beside them, which only operators along the rows bring about."""
    first = next((e.fate.dim for e in case.rowed if isinstance(e.fate, Lay)), None)
    if case.name in along.PROOFS and first is not None:
        return Irregular(why.why, mixed=case.mixed(first).mixed)
    return Irregular(why.why, grid=entries.is_grid(case))


def proof_of(case: Case) -> Proof:
    if not isinstance(case.node.target, torch._ops.OpOverload):
        return unknown
    if case.node.target.namespace != "aten":
        return tried
    if case.name in SIZED:
        return SIZED[case.name]
    if case.name == "arange" or (not case.rowed and case.name not in entries.MADE):
        return positional
    if set(case.numbers) - {"size"}:
        return counted
    if case.name in PROOFS:
        return PROOFS[case.name]
    if entries.is_elementwise(case):
        return entries.elementwise
    if entries.last_dims(case) is not None:
        return entries.trailing
    along_dims = any(map(case.takes, entries.DIMS)) and case.name != "renorm"
    return entries.along_dims if along_dims else tried


def positional(case: Case) -> Lay:
    raise case.positional()


def counted(case: Case) -> Lay:
    raise case.counted()


def unknown(case: Case) -> Lay:
    raise case.unproved()
