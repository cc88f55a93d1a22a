"""Rules for scaled dot product attention: by heads, by queries, by the values' own dim."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from synchromesh.trace.nodes import by_operator, dim_of
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
    """query [.., h, L, e], key [.., k, S, e], value [.., k, S, v] -> [.., h, L, v].

    Of no queries torch makes no gradient for the mask, so that a rank without heads would not
    take part in what moves it."""
    learned = op.slot("attn_mask") is not None and op.tensor("attn_mask").differentiable
    yield from op.on_entries(_specs(op)) if learned else _specs(op)


def _specs(op: Operator) -> Iterator[OpSpec]:
    q, k, v, out = op.tensor("query"), op.tensor("key"), op.tensor("value"), op.output
    if len(q.shape) < 3 or not len(q.shape) == len(k.shape) == len(v.shape):
        return
    n = len(out.shape)
    mask = None if op.slot("attn_mask") is None else op.tensor("attn_mask")
    heads, groups = q.shape[n - 3], k.shape[n - 3]
    # what the mask broadcasts to
    scores = Operand((*out.shape[:-1], k.shape[-2]), out.rows_dim, True, True)
    for s in sorted({*out.states, *q.states, *k.states, *v.states}):
        masked = None if mask is None or s.dim == n - 1 else dim_state(mask, scores, s)
        if s.dim < n - 3 or (s.dim == n - 3 and heads == groups):
            yield op.spec({"query": s, "key": s, "value": s, "attn_mask": masked}, s)
        elif s.dim == n - 3 and s in q.states and not inside_rows(s):
            yield op.spec({"query": s, "attn_mask": masked}, s, replace=_own_heads(op, s))
        elif s.dim == n - 2 and not op.constant("is_causal"):
            if s in q.states:
                yield op.spec({"query": s, "attn_mask": masked}, s)
        elif s.dim == n - 1 and s in v.states:
            # every rank computes all scores, and must drop the same of them
            yield op.spec({"value": s}, s, share=(1 + 1 / op.m) / 2, draws_alike=True)
    if heads != groups and heads % groups == 0:
        known = [(heads, x.cuts(n - 3)) for x in (q, out)]
        known += [(groups, x.cuts(n - 3)) for x in (k, v)]
        for s in group_states(groups, op.m, known):
            own, read = spread(s, groups, heads, n - 3, op.m), s.at(n - 3)
            masked = None if mask is None else dim_state(mask, scores, own)
            yield op.spec({"query": own, "key": read, "value": read, "attn_mask": masked}, own)
    # the mask's gradient would need the scores of every value column: `r` above is its sum over
    # the shards


def _own_heads(op: Operator, state: Placement) -> Replace:
    heads, groups = op.tensor("query").shape[-3], op.tensor("key").shape[-3]
    # all query heads of any rank read one key head
    one = state == shard(state.dim) and heads % op.m == 0 and op.m % groups == 0

    def emit(to: Emit, given: dict[str, Any]) -> Node:
        for name in ("key", "value"):
            given[name] = (
                to.call(own_head, to.axis, given[name], op.m // groups)
                if one
                else to.call(own_heads, to.axis, given[name], heads, state.segments, state.unit)
            )
        extra = {n: x for n, x in given.items() if n not in ("query", "key", "value")}
        extra["enable_gqa"] = one
        return to.call(
            torch.ops.aten.scaled_dot_product_attention.default,
            given["query"], given["key"], given["value"], **extra,
        )  # fmt: skip

    return emit


def own_head(axis: TensorAxis, x: torch.Tensor, ranks: int) -> torch.Tensor:
    """The one key or value head that this rank's query heads read; `ranks` ranks share each."""
    return x.narrow(-3, axis.index // ranks, 1)


def own_heads(
    axis: TensorAxis, x: torch.Tensor, heads: int, segments: int, unit: int
) -> torch.Tensor:
    """For each of this rank's query heads, the key or value head that it reads."""
    boxes = shard(0, segments, unit).boxes((heads,), axis.size, axis.index)
    own = torch.cat([torch.arange(start, stop, device=x.device) for ((start, stop),) in boxes])
    return x.index_select(-3, own // (heads // x.shape[-3]))


def softmax(op: Operator) -> Iterator[OpSpec]:
    """softmax, log_softmax: every dim but the normalised one."""
    yield from op.along(dim_of(op.constant("dim"), len(op.output.shape)))


RULES: dict[str, Rule] = by_operator({
    attention: "scaled_dot_product_attention",
    softmax: "softmax log_softmax _softmax _log_softmax _safe_softmax",
})  # fmt: skip
