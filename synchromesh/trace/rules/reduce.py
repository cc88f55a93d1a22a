"""Rules for reductions and for operators along one dimension."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Node

from synchromesh.trace.rules.operator import Choice, Emit, Operator, P, dim_of
from synchromesh.values.placement import Placement, shard


def reduction(op: Operator) -> Iterator[Choice]:
    """Kept dims pass; a sum or mean over a sharded dim is partial."""
    assert op.output is not None
    x = op.inputs[0]
    given = op.constant("dim")
    given = range(len(x.shape)) if given is None or given == [] else given
    gone = {dim_of(d, x.shape) for d in ([given] if isinstance(given, int) else given)}
    keep = bool(op.constant("keepdim", False))
    dims = {
        d: d if keep else d - sum(g < d for g in gone)
        for d in range(len(x.shape))
        if d not in gone
    }
    back = {to: d for d, to in dims.items()}
    states = set(x.states)
    for made in op.outputs:
        states |= {shard(back[s.dim], s.segments) for s in made.states if s.dim in back}
    for s in sorted(states):
        if s.dim in dims:
            yield op.choice({0: s}, shard(dims[s.dim], s.segments))
        elif op.name == "sum" and op.output.floating:
            yield op.choice({0: s}, P)
        elif op.name == "mean":
            yield op.choice({0: s}, P, replace=mean_of_part(op))
    if op.name in ("sum", "mean") and op.output.floating and x.floating:
        yield op.choice({0: P}, P, share=1.0)


def mean_of_part(op: Operator) -> Callable[[Emit, dict[str, Any]], Node]:
    """A rank's contribution to a mean over equal parts: the mean of its part over m."""

    def emit(to: Emit, given: dict[str, Any]) -> Node:
        mean = to.original(op.node, given)
        return to.call(_divide, mean, op.m)

    return emit


def _divide(x: Any, m: int) -> Any:
    return x / m


def along(op: Operator) -> Iterator[Choice]:
    """cumsum, sort, topk...: every dim but the one that is worked along."""
    x = op.inputs[0]
    dim = dim_of(op.constant("dim", -1), x.shape)
    states: set[Placement] = set(x.states)
    for o in op.outputs:
        states |= set(o.states)
    for s in sorted(states):
        if s.dim != dim:
            yield op.choice({0: s}, s)


RULES = {
    **dict.fromkeys(
        ("sum", "mean", "amax", "amin", "argmax", "argmin", "var", "std", "logsumexp"), reduction
    ),
    **dict.fromkeys(("prod", "any", "all", "norm"), reduction),
    **dict.fromkeys(("cumsum", "cumprod", "sort", "argsort", "topk"), along),
}
