"""Proofs of operators that pick entries by an index: each row may pick of its own entries alone.

Which rows an index picks is known where it is computed from the number of rows alone, as in
`h[arange(rows), last]`; the identities of rows that it picks then show how they lie."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.fx import Node

from synchromesh.trace import meta
from synchromesh.trace.nodes import by_operator, dims_of

from ..row_layout import Case, RowLayout, RowOperand
from .trial import evaluated, known


def content(case: Case, operand: RowOperand, rows: int) -> Tensor:
    """What an index holds; raises where it depends on more than the number of rows."""
    index = known(operand.node, rows)
    if index is None:
        raise case.coupled(case.first.layout.dim)
    return index


class Index:
    """x[a, b, None]: the indices by the dimension of x that they read, None where they read none.
    chosen: the index at the dimension of the rows of x, if any."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.source, *rest = case.operands
        indices = iter(rest)
        self.given = [
            next(indices) if isinstance(each, Node) else None for each in case.arguments["indices"]
        ]
        self.row_dim = self.source.layout.dim if self.source.rows is not None else -1
        inside = 0 <= self.row_dim < len(self.given)
        self.chosen = self.given[self.row_dim] if inside else None
        self.indices = [e for e in self.given if e is not None]

    def taken(self, ids: dict[int, Tensor], rows: int) -> Tensor:
        """Where the identities of x, or of one of the indices, come out."""
        indices: list[Tensor | None] = []
        for each in self.given:
            if each is None:
                indices.append(None)
            elif each is self.chosen:
                indices.append(content(self.case, each, rows).to(torch.int64))
            else:
                indices.append(torch.zeros(each.shape(rows), dtype=torch.int64))
        if id(self.source) in ids:
            ids_taken: Tensor = torch.ops.aten.index.Tensor(ids[id(self.source)], indices)
            return ids_taken
        shape = torch.broadcast_shapes(*(i.shape for i in indices if i is not None))
        (line,) = ids.values()
        # an index's entries where the result has them: the other dimensions have size 1
        at = [d for d, e in enumerate(self.given) if e is not None]
        adjacent = at == list(range(at[0], at[-1] + 1))
        before = at[0] if adjacent else 0
        after = self.source.rank - len(at) - before
        return line.expand(shape).reshape(*(1,) * before, *shape, *(1,) * after)


def indexed(case: Case) -> RowLayout:
    """x[a, b, None]: the row identities of x and of each index must come out in the same order."""
    index = Index(case)
    source, chosen = index.source, index.chosen
    if any(meta.val(e.node).dtype in (torch.bool, torch.uint8) for e in index.indices):
        raise case.unproved()
    segments = case.result.in_any_order.segments
    for operand in (source, *index.indices):
        if operand.rows is not None and operand is not chosen:
            coupled = partial(case.coupled, index.row_dim)
            fault = coupled if operand is source else case.unproved
            segments &= evaluated(case, index.taken, [operand], fault).segments
    if not segments or not case.with_rows:
        raise case.different_orders()
    if source.rows is None and not index.indices:
        raise case.positional()
    return case.result.with_segments(segments)


def chosen_rows(case: Case) -> RowLayout:
    """index_select: along the rows by a known index alone."""
    source, order = case.operands[:2]
    dim = dims_of(case.constant("dim"), source.rank)[0]
    if source.rows is None:  # as in an embedding, every entry of the index picks for itself
        return case.shared_layout([order])
    if source.layout.dim != dim:
        if order.rows is not None:
            raise case.unproved()
        return case.shared_layout([source])

    def run(ids: dict[int, Tensor], rows: int) -> Tensor:
        return ids[id(source)].index_select(dim, content(case, order, rows))

    return evaluated(case, run, [source], partial(case.coupled, dim))


def gathered(case: Case) -> RowLayout:
    """gather, scatter and their kin: rows at one dim of all, and not the one that is picked of."""
    if case.constant("dim") is None:
        raise case.unproved()  # of all entries at once
    dim = dims_of(case.constant("dim"), case.rank)[0]
    if case.first.rows is None and case.name in ("gather", "take_along_dim"):
        if case.result.dim != dim:
            raise case.positional()  # row i reads the entries [i] of a tensor without rows
        return case.shared_layout(case.operands[1:])
    if case.result.dim == dim:
        raise case.coupled(dim)
    for operand in case.with_rows:
        if operand.layout.dim != case.result.dim or operand.rank != case.rank:
            raise case.unproved()
    for operand in case.operands:
        if operand.rows is None and operand.rank == case.rank:
            raise case.positional()
    return case.shared_layout()


def looked_up(case: Case) -> RowLayout:
    """embedding: every index picks for itself."""
    table, indices = case.operands[:2]
    if table.rows is not None:
        raise case.coupled(table.layout.dim)
    return case.shared_layout([indices])


def bagged(case: Case) -> RowLayout:
    """embedding_bag: the indices of a bag are of one row, and bags come in the rows' order."""
    table, indices, *rest = case.operands
    if table.rows is not None or indices.rows is None:
        raise case.unproved()
    offsets = next((e for e in rest if e.argument == "offsets"), None)
    weights = [e for e in rest if e.argument == "per_sample_weights"]
    if offsets is None or case.index or case.constant("include_last_offset"):
        raise case.unproved()
    if any(e.rows is None or e.layout.segments != indices.layout.segments for e in weights):
        raise case.unproved()

    def run(ids: dict[int, Tensor], rows: int) -> Tensor:
        line, starts = ids[id(indices)], content(case, offsets, rows).tolist()
        bags = [line[a:b] for a, b in pairwise([*starts, len(line)])]
        # the row that all indices of a bag are of; -1 where they are of several or none
        of = [int(b[0]) if len(b) and bool((b == b[0]).all()) else -1 for b in bags]
        return torch.tensor(of)[:, None]

    return evaluated(case, run, [indices], case.unproved)


PROOFS: dict[str, Callable[[Case], RowLayout]] = by_operator({
    indexed: "index",
    chosen_rows: "index_select",
    gathered: "gather take_along_dim scatter scatter_add scatter_reduce",
    looked_up: "embedding",
    bagged: "embedding_bag _embedding_bag",
})  # fmt: skip
