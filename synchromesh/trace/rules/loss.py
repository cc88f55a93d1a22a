"""Rules for losses: cross-entropy on sharded classes, and those elementwise before a sum."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from synchromesh.values.placement import REPLICATED, shard

from .indexing import require_within
from .operator import Emit, Operator, OpSpec, P, TensorAxis, all_reduces
from .reduce import mean_of_part


class AtenReduction:
    """aten's numbers for what a loss makes of its entries."""

    NONE, MEAN, SUM = 0, 1, 2


def cross_entropy(op: Operator) -> Iterator[OpSpec]:
    """By classes (replicated class indices), or by a dim behind them where nothing is averaged."""
    target = op.tensor("target")
    if not target.floating and op.slot("weight") is None:
        yield from _by_classes(op)
        reduction = op.constant("reduction")
        for s in op.tensor("self").states if reduction != AtenReduction.MEAN else ():
            if s.dim > 1:
                out = P if reduction == AtenReduction.SUM else s.at(s.dim - 1)
                yield op.spec({"self": s, "target": s.at(s.dim - 1)}, out)


def _by_classes(op: Operator) -> Iterator[OpSpec]:
    """Every rank has some of the classes, whose logits are [rows, classes, ...] or [classes]."""
    logits = op.tensor("self")
    dim = 1 if len(logits.shape) > 1 else 0
    if shard(dim) not in logits.states or not logits.populated(shard(dim), op.m):
        return

    def emit(to: Emit, given: dict[str, Any]) -> Node:
        return to.call(
            cross_entropy_of_part, to.axis, given["self"], given["target"],
            op.constant("reduction"), given.get("ignore_index", -100),
            given.get("label_smoothing", 0.0), logits.shape[dim],
        )  # fmt: skip

    # a maximum and one sum of two (smoothing: three) numbers for every target
    entries = logits.item, logits.item * (3 if op.constant("label_smoothing") else 2)
    sent = all_reduces(op.m, op.tensor("target"), entries)
    yield op.spec({"self": shard(dim)}, REPLICATED, replace=emit, collectives=sent)


def cross_entropy_of_part(
    axis: TensorAxis, logits: Tensor, target: Tensor, reduction: int, ignore_index: int,
    smoothing: float, classes: int,
) -> Tensor:  # fmt: skip
    """Cross-entropy where `logits` are this rank's part of the classes and `target` is replicated.
    loss = log sum exp(l) - (1 - s) l[target] - s mean(l), with the sums over the classes of all
    ranks, of which every rank has one at least."""
    ignored = target == ignore_index
    require_within(target.masked_fill(ignored, 0), classes, "a target of a cross-entropy")
    dim = 1 if logits.dim() > 1 else 0
    start, stop = shard(0).share(classes, axis.size, axis.index)
    top = axis.maximum(logits.detach().amax(dim))
    shifted = logits - top.unsqueeze(dim)
    elsewhere = (target < start) | (target >= stop)
    local = target - start
    own = shifted.gather(dim, local.masked_fill(elsewhere, 0).unsqueeze(dim)).squeeze(dim)
    sums = [shifted.exp().sum(dim), own.masked_fill(elsewhere, 0)]
    if smoothing:
        sums.append(shifted.sum(dim))
    total = axis.move(torch.stack(sums), "P", "R")
    each: Tensor = total[0].log() - (1 - smoothing) * total[1]
    if smoothing:
        each = each - smoothing / classes * total[2]
    each = each.masked_fill(ignored, 0)
    if reduction == AtenReduction.MEAN:
        each = each.sum() / (~ignored).sum()
    return each.sum() if reduction == AtenReduction.SUM else each


def distance(op: Operator) -> Iterator[OpSpec]:
    """mse, l1, huber, binary cross-entropy ...: elementwise, then none, sum, mean (partial)."""
    reduction = op.constant("reduction", AtenReduction.MEAN)
    x = op.inputs[0]
    if any(y.shape != x.shape for y in op.inputs):
        return
    for s in sorted({s for y in op.inputs for s in y.states}):
        same = dict.fromkeys(range(len(op.inputs)), s)
        if reduction == AtenReduction.MEAN and x.populated(s, op.m):
            yield op.spec(same, P, replace=mean_of_part(op, x, s))
        elif reduction != AtenReduction.MEAN:
            yield op.spec(same, P if reduction == AtenReduction.SUM else s)


DISTANCES = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)  # fmt: skip
RULES = {"cross_entropy_loss": cross_entropy, **dict.fromkeys(DISTANCES, distance)}
