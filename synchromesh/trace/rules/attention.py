"""Rules for scaled dot product attention: by heads, by queries, by the values' own dim."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from synchromesh.values.placement import Placement, shard

from .elementwise import dim_state
from .operator import (
    Emit,
    Operand,
    Operator,
    OpSpec,
    Replace,
    Rule,
    TensorAxis,
    group_states,
    inside_rows,
    spread,
)


def attention(op: Operator) -> Iterator[OpSpec]:
    """query [.., h, L, e], key [.., k, S, e], value [.., k, S, v] -> [.., h, L, v]. Of no queries
    torch makes no gradient for the mask: a rank without heads would not take part in its move."""
    learned = op.slot("attn_mask") is not None and op.tensor("attn_mask").differentiable
    yield from op.on_entries(_specs(op)) if learned else _specs(op)


def _specs(op: Operator) -> Iterator[OpSpec]:
    q, k, v = op.tensor("query"), op.tensor("key"), op.tensor("value")
    if len(q.shape) < 3 or not len(q.shape) == len(k.shape) == len(v.shape):
        return
    for s in sorted({*op.output.states, *q.states, *k.states, *v.states}):
        yield from _along(op, s)
    heads, groups = q.shape[-3], k.shape[-3]
    if heads != groups and heads % groups == 0:
        yield from _by_groups(op, heads, groups)
    # the mask's gradient would need the scores of every value column: `r` above is its sum over
    # the shards


def _along(op: Operator, s: Placement) -> Iterator[OpSpec]:
    q, k, v = op.tensor("query"), op.tensor("key"), op.tensor("value")
    masked = _mask_state(op, s)
    match s.dim - len(op.output.shape):
        case -1:
            if s in v.states:
                # every rank computes all scores, and must drop the same of them
                yield op.spec({"value": s}, s, share=(1 + 1 / op.m) / 2, draws_alike=True)
        case -2:
            if s in q.states and not op.constant("is_causal"):
                yield op.spec({"query": s, "attn_mask": masked}, s)
        case -3 if q.shape[-3] != k.shape[-3]:
            if s in q.states and not inside_rows(s):
                yield op.spec({"query": s, "attn_mask": masked}, s, replace=_own_heads(op, s))
        case _:
            yield op.spec({"query": s, "key": s, "value": s, "attn_mask": masked}, s)


def _by_groups(op: Operator, heads: int, groups: int) -> Iterator[OpSpec]:
    dim = len(op.output.shape) - 3
    known = [(heads, x.cuts(dim)) for x in (op.tensor("query"), op.output)]
    known += [(groups, op.tensor(name).cuts(dim)) for name in ("key", "value")]
    for s in group_states(groups, op.m, known):
        own, read = spread(s, groups, heads, dim, op.m), s.at(dim)
        masked = _mask_state(op, own)
        yield op.spec({"query": own, "key": read, "value": read, "attn_mask": masked}, own)


def _mask_state(op: Operator, state: Placement) -> Placement | None:
    """That of the mask, the output being in `state`; None if absent or along the values' dim."""
    out = op.output
    if op.slot("attn_mask") is None or state.dim == len(out.shape) - 1:
        return None
    scores = Operand((*out.shape[:-1], op.tensor("key").shape[-2]), out.rows_dim, True, True)
    return dim_state(op.tensor("attn_mask"), scores, state)


def _own_heads(op: Operator, state: Placement) -> Replace:
    heads, groups = op.tensor("query").shape[-3], op.tensor("key").shape[-3]
    # all query heads of any rank read one key head
    one = state == shard(state.dim) and heads % op.m == 0 and op.m % groups == 0

    def emit(to: Emit, given: dict[str, Any]) -> Node:
        for name in ("key", "value"):
            of = (op.m // groups,) if one else (heads, state.segments, state.unit)
            given[name] = to.call(own_head if one else own_heads, to.axis, given[name], *of)
        extra = {n: x for n, x in given.items() if n not in ("query", "key", "value")}
        extra["enable_gqa"] = one
        return to.call(
            torch.ops.aten.scaled_dot_product_attention.default,
            given["query"], given["key"], given["value"], **extra,
        )  # fmt: skip

    return emit


def own_head(axis: TensorAxis, x: Tensor, ranks: int) -> Tensor:
    """The one key or value head that this rank's query heads read; `ranks` ranks share each."""
    return x.narrow(-3, axis.index // ranks, 1)


def own_heads(axis: TensorAxis, x: Tensor, heads: int, segments: int, unit: int) -> Tensor:
    """For each of this rank's query heads, the key or value head that it reads."""
    boxes = shard(0, segments, unit).boxes((heads,), axis.size, axis.index)
    own = torch.cat([torch.arange(start, stop, device=x.device) for ((start, stop),) in boxes])
    return x.index_select(-3, own // (heads // x.shape[-3]))


RULES: dict[str, Rule] = {"scaled_dot_product_attention": attention}
