"""Rules for scaled dot product attention: by heads, by queries, by the values' own dim."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from synchromesh.trace.nodes import by_operator, dim_of
from synchromesh.values.placement import shard

from .axis import TensorAxis
from .elementwise import dim_state
from .operator import Emit, Operand, Operator, OpSpec, Rule


def attention(op: Operator) -> Iterator[OpSpec]:
    """query [.., h, L, e], key [.., k, S, e], value [.., k, S, v] -> [.., h, L, v]."""
    q, k, v, out = op.tensor("query"), op.tensor("key"), op.tensor("value"), op.output
    if len(q.shape) < 3 or not len(q.shape) == len(k.shape) == len(v.shape):
        return
    n = len(out.shape)
    mask = None if op.slot("attn_mask") is None else op.tensor("attn_mask")
    grouped = q.shape[n - 3] != k.shape[n - 3]
    # what the mask broadcasts to
    scores = Operand((*out.shape[:-1], k.shape[-2]), out.rows_dim, True, True)
    for s in sorted({*out.states, *q.states, *k.states, *v.states}):
        if s.dim < n - 2:
            masked = None if mask is None else dim_state(mask, scores, s)
            yield op.spec({"query": s, "key": s, "value": s, "attn_mask": masked}, s)
            if grouped and s == shard(n - 3) and _one_group(op, q, k):
                yield op.spec({"query": s, "attn_mask": masked}, s, replace=_own_group(op))
        elif s.dim == n - 2 and not op.constant("is_causal"):
            masked = None if mask is None else dim_state(mask, scores, s)
            if s in q.states:
                yield op.spec({"query": s, "attn_mask": masked}, s)
        elif s.dim == n - 1 and s in v.states:
            # every rank computes all scores, and must drop the same of them
            yield op.spec({"value": s}, s, share=(1 + 1 / op.m) / 2, draws_alike=True)
    # the mask's gradient would need the scores of every value column: `r` above is its sum over
    # the shards


def _one_group(op: Operator, q: Operand, k: Operand) -> bool:
    """Whether all query heads of any rank read one key head."""
    heads, groups = q.shape[-3], k.shape[-3]
    return heads % op.m == 0 and op.m % groups == 0 and heads // groups % (heads // op.m) == 0


def _own_group(op: Operator) -> Any:
    ranks = op.m // op.tensor("key").shape[-3]

    def emit(to: Emit, given: dict[str, Any]) -> Node:
        for name in ("key", "value"):
            given[name] = to.call(own_head, to.axis, given[name], ranks)
        extra = {n: x for n, x in given.items() if n not in ("query", "key", "value")}
        return to.call(
            torch.ops.aten.scaled_dot_product_attention.default,
            given["query"], given["key"], given["value"], **extra,
        )  # fmt: skip

    return emit


def own_head(axis: TensorAxis, x: torch.Tensor, ranks: int) -> torch.Tensor:
    """The one key or value head that this rank's query heads read; `ranks` ranks share each."""
    return x.narrow(-3, axis.index // ranks, 1)


def softmax(op: Operator) -> Iterator[OpSpec]:
    """softmax, log_softmax: every dim but the normalised one."""
    yield from op.along(dim_of(op.constant("dim"), len(op.output.shape)))


RULES: dict[str, Rule] = by_operator({
    attention: "scaled_dot_product_attention",
    softmax: "softmax log_softmax _softmax _log_softmax _safe_softmax",
})  # fmt: skip
