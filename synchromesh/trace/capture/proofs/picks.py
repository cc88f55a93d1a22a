"""Proofs of operators that pick entries by an index: each row may pick of its own entries alone.

Which rows an index picks is known where it is computed from the number of rows alone, as in
`h[arange(rows), last]`; the identities of rows that it picks then tell how they lie.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..lay import Case, Entry, Irregular, Lay, dims_of
from ..masks import evaluate
from .identities import evaluated

Node = torch.fx.Node


def known(node: Node, rows: int) -> Tensor | None:
    """What a tensor holds that depends on the number of rows alone."""
    found = evaluate(node.graph, node, {}, rows)
    return None if found is None else found.cpu()


def content(case: Case, entry: Entry, rows: int) -> Tensor:
    found = known(entry.node, rows)
    if found is None:
        raise case.mixed(case.main.lay.dim)
    return found


def index(case: Case) -> Lay:
    """x[a, b, None]: the row identities of the value and of each index must come out alike."""
    source, *rest = case.entries
    places = case.arguments["indices"]
    given: list[Entry | None] = []
    left = iter(rest)
    for each in places:
        given.append(next(left) if isinstance(each, Node) else None)
    picked = [e for e in given if e is not None]
    lead = source.lay.dim if source.fate is not None else -1
    chosen = given[lead] if 0 <= lead < len(given) else None

    def run(what: Entry) -> Callable[[dict[int, Tensor], int], Any]:
        """Where the identities of `what` come out."""

        def indexed(ids: dict[int, Tensor], rows: int) -> Tensor:
            indices: list[Tensor | None] = []
            for each in given:
                if each is None:
                    indices.append(None)
                elif each is chosen:
                    indices.append(content(case, each, rows).to(torch.int64))
                else:
                    indices.append(torch.zeros(each.shape(rows), dtype=torch.int64))
            if what is source:
                found: Tensor = torch.ops.aten.index.Tensor(ids[id(source)], indices)
                return found
            of = torch.broadcast_tensors(*(i for i in indices if i is not None))
            line = ids[id(what)].expand(of[0].shape)
            return taken_to(line, source, given)

        return indexed

    if any(e.node.meta["val"].dtype in (torch.bool, torch.uint8) for e in picked):
        raise case.unproved()
    ways = case.place.any.segments
    for entry in ([source] if source.fate is not None else []) + [
        e for e in picked if e.fate is not None and e is not chosen
    ]:
        found = evaluated(case, run(entry), [entry])
        if found is None:
            raise case.mixed(max(lead, 0)) if entry is source else case.unproved()
        ways &= found.segments
    if not ways or not case.rowed or (chosen is not None and source.fate is None):
        raise Irregular(f"joins rows that lie in different orders ({case.where})")
    if source.fate is None and all(e is chosen for e in picked):
        raise case.positional()
    return case.place.as_(ways)


def taken_to(line: Tensor, source: Entry, given: list[Entry | None]) -> Tensor:
    """An index's entries where the result has them: the other dimensions have size 1."""
    at = [d for d, e in enumerate(given) if e is not None]
    together = at == list(range(at[0], at[-1] + 1))
    before = at[0] if together else 0
    after = source.rank - len(at) - before
    return line.reshape(*(1,) * before, *line.shape, *(1,) * after)


def chosen_rows(case: Case) -> Lay:
    """index_select: along the rows by a known index alone."""
    source, order = case.entries[:2]
    dim = dims_of(case.constant("dim"), source.rank)[0]
    if source.fate is None:  # as in an embedding, every entry of the index picks for itself
        return case.kept([order])
    if source.lay.dim != dim:
        if order.fate is not None:
            raise case.unproved()
        return case.kept([source])

    def run(ids: dict[int, Tensor], rows: int) -> Tensor:
        return ids[id(source)].index_select(dim, content(case, order, rows))

    found = evaluated(case, run, [source])
    if found is None:
        raise case.mixed(dim)
    return found


def gathered(case: Case) -> Lay:
    """gather, scatter and their kin: rows at one dim of all, and not the one that is picked of."""
    if case.constant("dim") is None:
        raise case.unproved()  # of all entries at once
    dim = dims_of(case.constant("dim"), case.rank)[0]
    if case.main.fate is None and case.name in ("gather", "take_along_dim"):
        if case.place.dim != dim:
            raise case.positional()  # row i reads the entries [i] of a tensor without rows
        return case.kept(case.entries[1:])
    if case.place.dim == dim:
        raise case.mixed(dim)
    if any(e.lay.dim != case.place.dim or e.rank != case.rank for e in case.rowed):
        raise case.unproved()
    if any(e.fate is None and e.rank == case.rank for e in case.entries):
        raise case.positional()
    return case.kept()


def looked_up(case: Case) -> Lay:
    """embedding: every index picks for itself."""
    table, indices = case.entries[:2]
    if table.fate is not None:
        raise case.mixed(table.lay.dim)
    return case.kept([indices])


def bagged(case: Case) -> Lay:
    """embedding_bag: the indices of a bag are of one row, and bags come in the rows' order."""
    table, indices, *rest = case.entries
    if table.fate is not None or indices.fate is None:
        raise case.unproved()
    offsets = next((e for e in rest if e.argument == "offsets"), None)
    weights = [e for e in rest if e.argument == "per_sample_weights"]
    if offsets is None or case.at or case.constant("include_last_offset"):
        raise case.unproved()
    if any(e.fate is None or e.lay.segments != indices.lay.segments for e in weights):
        raise case.unproved()

    def run(ids: dict[int, Tensor], rows: int) -> Tensor:
        line = ids[id(indices)]
        starts = content(case, offsets, rows)
        ends = torch.cat([starts[1:], starts.new_tensor([len(line)])])
        bags = [line[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        alike = [int(b[0]) if len(b) and bool((b == b[0]).all()) else -1 for b in bags]
        return torch.tensor(alike)[:, None]

    found = evaluated(case, run, [indices])
    if found is None:
        raise case.unproved()
    return found


PROOFS: dict[str, Callable[[Case], Lay]] = {
    "index": index,
    "index_select": chosen_rows,
    **dict.fromkeys(
        ("gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce"), gathered
    ),
    "embedding": looked_up,
    **dict.fromkeys(("embedding_bag", "_embedding_bag"), bagged),
}
