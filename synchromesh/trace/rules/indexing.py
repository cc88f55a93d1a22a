"""Rules for embeddings and for reading entries by index."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from synchromesh.trace.nodes import by_operator, dim_of
from synchromesh.values.placement import shard

from .axis import TensorAxis
from .operator import Emit, Operator, OpSpec, P, Rule


def embedding(op: Operator) -> Iterator[OpSpec]:
    """weight [vocabulary, hidden]: by hidden, by vocabulary (partial), by a dim of the indices."""
    w, indices = op.tensor("weight"), op.tensor("indices")
    last = len(op.output.shape) - 1
    if op.constant("sparse"):
        return
    for s in sorted(op.output.cuts(last) | w.cuts(1)):
        yield op.spec({"weight": s.at(1)}, s.at(last))
    if w.populated(shard(0), op.m) and not op.constant("scale_grad_by_freq"):

        def emit(to: Emit, given: dict[str, Any]) -> Node:
            padding = given.get("padding_idx", -1)
            weight, indices = given["weight"], given["indices"]
            return to.call(embedding_of_part, to.axis, weight, indices, padding, w.shape[0])

        yield op.spec({"weight": shard(0)}, P, replace=emit)
    for s in sorted({*indices.states, *(s for s in op.output.states if s.dim < last)}):
        if not op.constant("scale_grad_by_freq"):
            yield op.spec({"indices": s}, s)


def embedding_of_part(
    axis: TensorAxis, weight: Tensor, indices: Tensor, padding: int, words: int
) -> Tensor:
    """Rows of this rank's part of a table of so many words, zeros where another rank has the row.

    `padding`: the global index whose row gets no gradient, -1 for none.
    """
    start, stop = shard(0).share(words, axis.size, axis.index)
    local = indices - start
    elsewhere = (indices < start) | (indices >= stop)
    row = padding - start if start <= padding < stop else None
    found = F.embedding(local.masked_fill(elsewhere, 0), weight)
    if row is not None:  # not handed to F.embedding: foreign indices are mapped to row 0
        elsewhere_or_padding = (local == row).unsqueeze(-1)
        found = torch.where(elsewhere_or_padding, found.detach(), found)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


def index(op: Operator) -> Iterator[OpSpec]:
    """table[.., i, j, ..]: dims of the table that no index reads; the indices are replicated."""
    given = op.constant("indices")
    slots = op.slots("indices")
    read = [d for d, item in enumerate(given) if item is not None]
    table = op.tensor("self")
    if not read or read != list(range(read[0], read[-1] + 1)):
        return  # indices apart from each other: their dims move to the front
    if any(slots[d] is None for d in read):
        return
    chosen = [op.inputs[slot] for d in read if (slot := slots[d]) is not None]
    made = max(len(x.shape) for x in chosen)
    shift = made - len(read)
    if len(op.output.shape) != len(table.shape) + shift:
        return  # a mask of more than one dim
    for s in table.states:
        if s.dim < read[0]:
            yield op.spec({"self": s}, s)
        elif s.dim > read[-1]:
            yield op.spec({"self": s}, s.at(s.dim + shift))


def index_select(op: Operator) -> Iterator[OpSpec]:
    """Every dim of the table but the one that is read along; linear in the table."""
    x = op.tensor("self")
    dim = dim_of(op.constant("dim"), len(x.shape))
    for s in x.states:
        if s.dim != dim:
            yield op.spec({"self": s}, s)
    yield op.spec({"self": P}, P, share=1.0)


def gather(op: Operator) -> Iterator[OpSpec]:
    """Every dim but the one that is read along, where the index covers all of it."""
    name = "indices" if op.name == "take_along_dim" else "index"
    x, idx = op.tensor("self"), op.tensor(name)
    if op.constant("dim") is None or len(idx.shape) != len(x.shape):
        return  # along the flat tensor
    dim = dim_of(op.constant("dim"), len(x.shape))
    for s in sorted({*x.states, *idx.states}):
        if s.dim != dim and x.shape[s.dim] == idx.shape[s.dim]:
            yield op.spec({"self": s, name: s}, s)


RULES: dict[str, Rule] = by_operator({
    embedding: "embedding",
    index: "index",
    index_select: "index_select",
    gather: "gather take_along_dim",
})  # fmt: skip
