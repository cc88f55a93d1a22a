"""Loss reduction: what a loss makes of the rows of a batch, read from its graph.

    mean            (1 / n) sum_i f(row i)              each row weighs the same
    sum             sum_i f(row i)
    weighted mean   sum_i f(row i) / sum_i w(row i)     rows weigh differently: given as two sums
    constant        what no row enters

A mean over rows may be divided over ranks by their numbers of rows; a weighted mean may not, but
its two sums may. `cross_entropy` and `nll_loss` are weighted means, whether or not a target of the
example is ignored; so are sums that are divided by the sum of a mask, and c (s / w) = (c s) / w
with c constant. Sums of several of these: `totals.py`."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node

from synchromesh.trace import meta
from synchromesh.trace.rules.loss import DISTANCES, AtenReduction
from synchromesh.trace.step import Report
from synchromesh.values.component import Value

from ..nodes import all_arguments, ancestors, described, has_gradients, number, outputs, short_name
from .coupling import coupling_operators, dependent_on_rows

aten = torch.ops.aten
WEIGHTED = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")
PLUS, TIMES, OVER = ("add", "sub", "rsub"), ("mul",), ("div", "true_divide")
# a f(x) + b f(y) = f(a x + b y), whatever the shape of a value without rows
LINEAR = (
    "neg", "to", "_to_copy", "clone", "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze",
    "expand", "select", "slice", "permute", "transpose", "t", "flatten", "alias", "contiguous",
    "detach", "sum", "mean", "stack", "cat", "real", "type_as", "index_select", "narrow",
)  # fmt: skip
# reductions over all entries of what every row has as many of
MEANS = (
    "mean", *DISTANCES, "kl_div", "soft_margin_loss", "poisson_nll_loss", "cosine_embedding_loss",
    "hinge_embedding_loss", "margin_ranking_loss", "triplet_margin_loss", "multi_margin_loss",
    "multilabel_margin_loss", "ctc_loss",
)  # fmt: skip
FILLS = ("full", "scalar_tensor", "full_like")


class UnknownReduction(Exception):
    """A loss that is not seen to treat rows apart; the message is a clause that says where."""


@dataclass(frozen=True)
class Reduction:
    """What a value is: "mean", "sum", "weighted mean", "constant"; "rows" for one with rows. sums:
    writes the two sums of a weighted mean. targets: a row's weight where nothing is ignored."""

    kind: str
    sums: Callable[[], tuple[Node, Node]] | None = None
    targets: int = 1


@dataclass(frozen=True)
class LossReduction:
    """targets: of a row, where the graph now gives a pair (sum, weight) for a mean, else 0.
    doubt: a clause about a loss that may not treat rows apart; empty where it does. reports: what
    it reports beside itself."""

    targets: int = 0
    doubt: str = ""
    reports: tuple[Report, ...] = ()


def reduce_to_sums(
    graph: Graph, count: int, reports: Sequence[str] = (), all_rows: Node | None = None
) -> LossReduction:
    """Gives the graph's loss, its first `count` outputs, as (sum, weight) if a weighted mean, and
    each of the `reports` behind it."""
    analysis = ReductionAnalysis(graph, all_rows)
    loss = loss_reduced(graph, count, analysis)
    return replace(loss, reports=analysis.reports(reports, 2 if loss.targets else count))


def loss_reduced(graph: Graph, count: int, analysis: "ReductionAnalysis") -> LossReduction:
    nodes = outputs(graph)[:count]
    try:
        reductions = [analysis.reduction(node) for node in nodes]
    except UnknownReduction as why:
        return LossReduction(doubt=str(why))
    if len(nodes) == 2:
        others = [n for n, w in zip(nodes, reductions, strict=True) if w.kind != "sum"]
        return LossReduction(doubt=f"{described(others[0])} is no sum over rows" if others else "")
    return analysis.with_mean_as_pair()


class ReductionAnalysis:
    """Finds what the values without rows are; writes the sums of a weighted mean at the graph's
    insertion point. all_rows: a leaf, the number of rows of all blocks of a batch, if any. A sum
    that meets a mean is then written as one: as what it would be over all blocks."""

    def __init__(self, graph: Graph, all_rows: Node | None = None) -> None:
        self.graph, self.all_rows = graph, all_rows
        self.of_rows = dependent_on_rows(graph)
        (self.rows,) = meta.placeholders(graph, "rows")
        self.known: dict[Node, Reduction] = {}

    def reduction(self, node: Any) -> Reduction:
        if not isinstance(node, Node):
            return Reduction("constant")
        if node not in self.known:
            self.known[node] = self._reduction(node)
        return self.known[node]

    def known_reduction(self, node: Node) -> Reduction | None:
        """What a node is, None where that is not seen."""
        with suppress(UnknownReduction):
            return self.reduction(node)
        return None

    def _reduction(self, node: Node) -> Reduction:
        if node not in self.of_rows:
            return Reduction("constant")
        value = meta.value(node)
        if value is None:
            return Reduction(self.count(node))
        if not isinstance(value, Value):
            raise UnknownReduction(f"{described(node)} takes rows together")
        if value.rows is not None:
            if why := meta.why_irregular(node):
                raise UnknownReduction(f"{described(node)} {why}")
            return Reduction("rows")
        name = short_name(node)
        tensors = [n for n in node.all_input_nodes if meta.value(n) is not None]
        kinds = {self.reduction(n).kind for n in tensors}
        if name in ("zeros_like", "ones_like"):
            return Reduction("constant")
        if "rows" in kinds:
            return self.of_row_values(node, name, kinds)
        reduction = self.of_reduced(node, name, tensors)
        if reduction is None:
            raise UnknownReduction(f"{described(node)} works on what rows were reduced to")
        return reduction

    def of_reduced(self, node: Node, name: str, tensors: list[Node]) -> Reduction | None:
        """What an operator makes of values without rows; None where that is not seen."""
        if name in LINEAR and {self.reduction(n).kind for n in tensors} == {"weighted mean"}:
            alone = len(tensors) == 1 and not meta.val(node).dim()
            return self.through(node, node.args[0], self.reduction(tensors[0])) if alone else None
        if name in (*LINEAR, *PLUS, "where"):
            terms = [x for x in node.args if isinstance(x, Node) or x != 0]
            return self.affine(node, terms if name in PLUS else tensors)
        if name in TIMES and len(node.args) == 2:
            return self.multiplied(node)
        if name in OVER and node.kwargs.get("rounding_mode") is None:
            return self.divided(node)
        if name in FILLS:
            given = all_arguments(node)
            filled = self.reduction(given.get("fill_value", given.get("s")))
            return filled if filled.kind == "sum" else None
        return None

    def affine(self, node: Node, operands: Sequence[Any]) -> Reduction | None:
        """An operator that is affine in all operands: sums, means and constants."""
        kinds = {self.reduction(x).kind for x in operands}
        if short_name(node) == "where" and self.reduction(operands[0]).kind != "constant":
            return None
        if kinds == {"sum"}:
            return Reduction("sum")
        if not kinds <= {"sum", "mean", "constant"} or ("sum" in kinds and self.all_rows is None):
            return None
        for summed in operands:
            if self.reduction(summed).kind == "sum":
                self.write_as_mean(node, summed)
        return Reduction("mean")

    def with_mean_as_pair(self) -> LossReduction:
        """The graph's one loss as a mean over rows, a weighted one as a pair (sum, weight)."""
        loss, *others = outputs(self.graph)
        output = self.graph.output_node()
        reduction = self.reduction(loss)
        if reduction.kind == "sum" and self.all_rows is not None:
            self.write_as_mean(output, loss)
        elif reduction.kind == "sum":
            return LossReduction(doubt=f"{described(loss)} is a sum over rows, and no mean")
        if reduction.sums is None:
            return LossReduction()
        if meta.val(loss).dtype is torch.float16:  # whose range a sum may leave
            return LossReduction(doubt=f"{described(loss)} is a mean over targets in float16")
        with self.graph.inserting_before(output):
            output.args = ((*reduction.sums(), *others),)
        return LossReduction(targets=reduction.targets)

    def reports(self, names: Sequence[str], first: int) -> tuple[Report, ...]:
        """What the outputs from `first` on are, by their names; weighted means become pairs."""
        output, given = self.graph.output_node(), outputs(self.graph)
        reports, made = list[Report](), list[Node]()
        coupled = dict(coupling_operators(self.graph, reports=True)).keys() if names else set()
        for name, node in zip(names, given[first:], strict=False):
            apart = coupled.isdisjoint(ancestors(node))
            reduction = (self.known_reduction(node) if apart else None) or Reduction("unknown")
            reports.append(Report(name, reduction.kind))
            with self.graph.inserting_before(output):
                made += reduction.sums() if reduction.sums else [node]
        for node in made:
            meta.reported.set(node, node not in given[:first])
        output.args = ((*given[:first], *made, *given[first + len(names) :]),)
        return tuple(reports)

    def write_as_mean(self, user: Node, summed: Node) -> None:
        """A sum over a block as its part in the mean over blocks: S n / m, of m of n rows."""
        if self.is_count(summed):
            raise UnknownReduction(f"{described(user)} joins a number of rows with a total")
        with self.graph.inserting_before(user):
            of_all = self.add(summed, aten.mul.Tensor, summed, self.all_rows)
            user.replace_input_with(summed, self.add(summed, aten.div.Tensor, of_all, self.rows))

    def count(self, node: Node) -> str:
        """An integer: "sum" where it is a multiple of the rows."""
        counts = (1, 2, 3, 5)
        with suppress(ZeroDivisionError, TypeError, KeyError):
            for_one, *more = [number(node, n) for n in counts]
            if all(n == for_one * m for n, m in zip(more, counts[1:], strict=True)):
                return "sum"
        raise UnknownReduction(f"a number is computed from the rows ({node.target})")

    def of_row_values(self, node: Node, name: str, kinds: set[str]) -> Reduction:
        """What an operator makes of values with rows."""
        given = all_arguments(node)
        if name in WEIGHTED:
            return self.weighted(node, given)
        if kinds <= {"rows", "constant"}:
            if name in ("sum", "mean"):
                return Reduction(name)
            by_number = {AtenReduction.SUM: "sum", AtenReduction.MEAN: "mean"}
            kind = by_number.get(given.get("reduction", AtenReduction.SUM))
            if name in MEANS and kind is not None:
                return Reduction(kind)
        raise UnknownReduction(f"{described(node)} takes rows together")

    def weighted(self, node: Node, given: dict[str, Any]) -> Reduction:
        """Cross-entropy and its kin: the mean over targets that are not ignored."""
        target, weight = given["target"], given["weight"]
        if given["reduction"] == AtenReduction.SUM:
            return Reduction("sum")
        if meta.val(target).is_floating_point():
            return Reduction("mean")  # probabilities of classes: none is left out
        learned = isinstance(weight, Node) and meta.differentiable(weight)
        if given["reduction"] != AtenReduction.MEAN or learned:
            raise UnknownReduction(f"{described(node)} weighs rows by what they hold")

        def sums() -> tuple[Node, Node]:
            arguments = {**given, "reduction": AtenReduction.SUM}
            total = self.add(node, node.target, *arguments.values())
            return total, self.weight_of(node, target, weight, given["ignore_index"])

        targets = torch.Size(meta.value(target).shape).numel()
        return Reduction("weighted mean", cache(sums), max(1, targets))

    def weight_of(self, node: Node, target: Node, weight: Node | None, ignored: int) -> Node:
        """The sum of the weights of the targets that are not ignored, in the loss's type."""
        like = meta.value(target)

        def each(operator: Any, *args: Any) -> Node:
            made = self.add(node, operator, *args)
            meta.value.set(made, replace(meta.value(made), shape=like.shape, rows=like.rows))
            return made

        counts = each(aten.ne.Scalar, target, ignored)
        if weight is not None:
            left_out = each(aten.eq.Scalar, target, ignored)
            inside = each(aten.masked_fill.Scalar, target, left_out, 0)
            counts = each(aten.index.Tensor, weight, [inside])
            counts = each(aten.masked_fill.Scalar, counts, left_out, 0)
        return self.add(node, aten.sum.default, counts, dtype=meta.val(node).dtype)

    def through(self, node: Node, place: Any, reduction: Reduction) -> Reduction:
        """What a linear operator makes of its argument `place`: of a weighted mean's numerator."""
        before = reduction.sums
        if before is None:
            return Reduction(reduction.kind)

        def sums() -> tuple[Node, Node]:
            total, weight = before()
            args = [total if a is place else a for a in node.args]
            return self.add(node, node.target, *args, **node.kwargs), weight

        return Reduction("weighted mean", cache(sums), reduction.targets)

    def multiplied(self, node: Node) -> Reduction | None:
        x, y = node.args
        first, second = self.reduction(x), self.reduction(y)
        if second.kind == "constant":
            return self.through(node, x, first)
        if first.kind == "constant":
            return self.through(node, y, second)
        kinds, counted = {first.kind, second.kind}, self.is_count(x) or self.is_count(y)
        return Reduction("sum") if kinds == {"mean", "sum"} and counted else None

    def divided(self, node: Node) -> Reduction | None:
        x, y = node.args
        kinds = self.reduction(x).kind, self.reduction(y).kind
        if kinds[1] == "constant":
            return self.through(node, x, self.reduction(x))
        if kinds != ("sum", "sum") or self.is_count(x):
            return None
        if self.is_count(y):
            return Reduction("mean")
        assert isinstance(y, Node)
        if meta.val(y).numel() > 1:
            raise UnknownReduction(f"{described(node)} puts fractions side by side")

        def sums() -> tuple[Node, Node]:
            weight = self.scalar(y, node)
            alone = self.add(weight, aten.reshape.default, weight, [])
            return self.scalar(x, node), alone if meta.val(y).dim() else weight

        return Reduction("weighted mean", cache(sums))

    def is_count(self, operand: Any) -> bool:
        return isinstance(operand, Node) and meta.value(operand) is None

    def scalar(self, x: Any, like: Node) -> Node:
        """A sum as a tensor of the loss's type."""
        if not meta.val(x).is_floating_point():
            return self.add(like, aten.to.dtype, x, meta.val(like).dtype)
        return x  # type: ignore[no-any-return]

    def add(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A node of the module and line of `like`, with its fake value."""
        node = self.graph.call_function(target, args, kwargs)
        given = args, kwargs
        vals = torch.fx.node.map_arg(given, lambda n: 1 if n is self.rows else meta.val(n))
        with meta.val(like).fake_mode:
            val = target(*vals[0], **vals[1])
        live = has_gradients(val.dtype) and any(map(meta.differentiable, node.all_input_nodes))
        meta.describe(node, val, meta.owner(like), live, meta.stack_trace(like))
        shape = tuple(s if isinstance(s, int) else 1 for s in val.shape)
        dtype = str(val.dtype).removeprefix("torch.")
        meta.value.set(node, Value(node.name, shape, dtype, None, live))
        return node
