"""Rules for embeddings and for reading entries by index."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from synchromesh.trace.nodes import by_operator, dim_of
from synchromesh.values.component import ITEM_BYTES
from synchromesh.values.placement import shard

from .operator import Emit, Operator, OpSpec, P, R, Rule, TensorAxis, all_reduces


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


def require_within(indices: Tensor, count: int, what: str) -> None:
    """RuntimeError where an index is none of 0 to count - 1, as of the whole operator: a rank has
    no row for those of other ranks either."""
    inside = ((indices >= 0) & (indices < count)).all()
    torch._assert_async(inside, f"{what} outside of 0 to {count - 1} is in this batch")


def embedding_of_part(
    axis: TensorAxis, weight: Tensor, indices: Tensor, padding: int, words: int
) -> Tensor:
    """Rows of this rank's part of a table, zeros for others'. padding: a row without gradient."""
    require_within(indices, words, "an index of an embedding")
    start, stop = shard(0).share(words, axis.size, axis.index)
    local = indices - start
    elsewhere = (indices < start) | (indices >= stop)
    row = padding - start if start <= padding < stop else None
    rows = F.embedding(local.masked_fill(elsewhere, 0), weight)
    if row is not None:  # not handed to F.embedding: foreign indices are mapped to row 0
        elsewhere_or_padding = (local == row).unsqueeze(-1)
        rows = torch.where(elsewhere_or_padding, rows.detach(), rows)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


class BagMode:
    """aten's numbers for what becomes of the entries of a bag."""

    SUM, MEAN, MAX = 0, 1, 2


@dataclass(frozen=True)
class Bags:
    """Which entries of a table are in which bag, as aten's embedding_bag is told."""

    indices: Tensor  # of all bags, one after the other
    offsets: Tensor  # where each bag begins
    mode: int = BagMode.SUM
    per_sample_weights: Tensor | None = None
    include_last_offset: bool = False
    padding_idx: int | None = None


def embedding_bag(op: Operator) -> Iterator[OpSpec]:
    """weight [vocabulary, hidden]: by hidden, by vocabulary (partial); the indices are replicated.
    Later results count indices and bags; `max_indices` has a column for each of the maxima."""
    w, out, largest = op.tensor("weight"), op.output, op.constant("mode") == BagMode.MAX
    rest = (R,) * (len(op.outputs) - 1)
    for s in sorted(cut.at(1) for cut in w.cuts(1) | out.cuts(1)):
        if w.populated(s, op.m):
            yield op.spec({"weight": s}, (s, *rest[:-1], s if largest else R))
    counts_read = any(reader.args[1] for reader in op.node.users)
    if op.constant("scale_grad_by_freq") or counts_read or not w.populated(shard(0), op.m):
        return

    def emit(to: Emit, given: dict[str, Any]) -> Node:
        bag_arguments = [field.name for field in fields(Bags)]
        bags = {n: x for n, x in given.items() if n in bag_arguments}
        sums = to.call(embedding_bag_of_part, to.axis, given["weight"], w.shape[0], **bags)
        return to.call(first_of, sums, len(op.outputs))

    # a maximum of the entries, and one of their places, for every column
    sent = all_reduces(op.m, out, (out.item, ITEM_BYTES["int64"])) if largest else ()
    yield op.spec({"weight": shard(0)}, (P, *rest), replace=emit, collectives=sent)


def first_of(x: Tensor, count: int) -> tuple[Tensor | None, ...]:
    return (x, *(None,) * (count - 1))


def embedding_bag_of_part(axis: TensorAxis, weight: Tensor, words: int, **given: Any) -> Tensor:
    """What this rank's part of a table of so many words contributes to each of the bags (`Bags`)
    that are given: the sums over ranks are the bags. A mean is a sum of entries over their number.
    A largest entry is contributed by the rank that has it, of equal ones by that of the first in
    the bag, whose gradient it gets."""
    bags = Bags(**given)
    indices, offsets = bags.indices, bags.offsets
    require_within(indices, words, "an index of an embedding bag")
    start, stop = shard(0).share(words, axis.size, axis.index)
    counted = torch.ones_like(indices, dtype=torch.bool)  # of an entry, and no padding
    if bags.padding_idx is not None and bags.padding_idx >= 0:
        counted = indices != bags.padding_idx
    places = torch.arange(len(indices), dtype=offsets.dtype, device=offsets.device)
    bag = torch.searchsorted(offsets, places, right=True).to(torch.int64) - 1  # of each index
    count = len(offsets) - bool(bags.include_last_offset)
    mine = counted & (indices >= start) & (indices < stop)
    local = (indices - start).masked_fill(~mine, 0)
    if bags.mode == BagMode.MAX:
        return _largest_of_part(axis, F.embedding(local, weight), mine, bag, count)
    share = mine.to(weight.dtype)
    if bags.mode == BagMode.MEAN:
        entries = share.new_zeros(count).index_add(0, bag, counted.to(share.dtype))
        share = share / entries.clamp(min=1)[bag]
    if bags.per_sample_weights is not None:
        share = share * bags.per_sample_weights
    sums: Tensor = F.embedding_bag(
        local, weight, offsets, mode="sum", per_sample_weights=share,
        include_last_offset=bags.include_last_offset,
    )  # fmt: skip
    return sums


def _largest_of_part(
    axis: TensorAxis, entries: Tensor, mine: Tensor, bag: Tensor, bags: int
) -> Tensor:
    """The largest of the entries [indices, columns] of each bag where this rank has it, 0 else."""
    count, columns = entries.shape
    to = bag[:, None].expand(count, columns)
    seen = entries.detach().masked_fill(~mine[:, None], -inf)
    largest = seen.new_full((bags, columns), -inf).scatter_reduce(0, to, seen, "amax")
    equal = (seen == axis.maximum(largest)[bag]) & mine[:, None]
    places = torch.arange(count, device=bag.device)[:, None]
    last = torch.where(equal, -places, -count)  # the first place is the largest of the negative
    first = last.new_full((bags, columns), -count).scatter_reduce(0, to, last, "amax")
    chosen = equal & (-places == axis.maximum(first)[bag])
    return entries.new_zeros(bags, columns).index_add(0, bag, entries.masked_fill(~chosen, 0))


def index(op: Operator) -> Iterator[OpSpec]:
    """table[.., i, j, ..]: dims of the table that no index reads; the indices are replicated."""
    given, slots = op.constant("indices"), op.slots("indices")
    read = [d for d, item in enumerate(given) if item is not None]
    table = op.tensor("self")
    if not read or read != list(range(read[0], read[-1] + 1)):
        return  # indices apart from each other: their dims move to the front
    chosen = [op.inputs[slot] for d in read if (slot := slots[d]) is not None]
    if len(chosen) < len(read):
        return
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
    embedding_bag: "embedding_bag _embedding_bag",
    index: "index",
    index_select: "index_select",
    gather: "gather take_along_dim",
})  # fmt: skip
