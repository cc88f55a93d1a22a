"""Weighing: what a loss makes of the rows of a batch, read from its graph.

    mean        (1 / n) sum_i f(row i)          each row weighs alike
    sum         sum_i f(row i)
    fraction    sum_i f(row i) / sum_i w(row i) rows weigh differently: given as the pair of sums
    alike       what no row enters

A mean over rows may be divided over ranks by their numbers of rows; a fraction may not, but its
two sums may. `cross_entropy` and `nll_loss` are fractions, whether or not a target of the example
is ignored; so are sums that are divided by the sum of a mask. With c alike:

    c (s / w) = (c s) / w           s / w + c = (s + c w) / w
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from synchromesh.trace.rules.operator import arguments, constant
from synchromesh.values.component import Value

from .effects import dependent_on_rows
from .lay import number
from .nodes import has_gradients, line_of, short_name
from .rows import irregular

Node = torch.fx.Node
aten = torch.ops.aten
MEAN, SUM = 1, 2  # aten's numbers for reductions
TARGETS = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")
PLUS, TIMES, OVER = ("add", "sub", "rsub"), ("mul",), ("div", "true_divide")
# a f(x) + b f(y) = f(a x + b y), whatever the shape of a value without rows
LINEAR = (
    "neg", "to", "_to_copy", "clone", "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze",
    "expand", "select", "slice", "permute", "transpose", "t", "flatten", "alias", "contiguous",
    "detach", "sum", "mean", "stack", "cat", "real", "type_as", "index_select", "narrow",
)  # fmt: skip
# reductions over all entries of what every row has as many of
MEANS = (
    "mean", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "soft_margin_loss", "poisson_nll_loss",
    "cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "triplet_margin_loss",
    "multi_margin_loss", "multilabel_margin_loss", "ctc_loss",
)  # fmt: skip


class Unproved(Exception):
    """A loss that is not seen to treat rows apart; the message is a clause that says where."""


@dataclass(frozen=True)
class Weight:
    """What a value without rows is; parts: the numerator and the denominator of a fraction."""

    kind: str
    parts: Callable[[], tuple[Node, Node]] | None = None
    targets: int = 1  # what a row of a fraction weighs where nothing is left out


@dataclass(frozen=True)
class Weighed:
    """targets: of a row, where the graph now gives a pair (sum, weight) for a mean, else 0.
    doubt: a clause about a loss that may not treat rows apart; empty where it does."""

    targets: int = 0
    doubt: str = ""


def weigh(graph: torch.fx.Graph) -> Weighed:
    """Reads the annotated graph's loss, and gives it as a pair (sum, weight) where it is a
    fraction."""
    (output,) = graph.find_nodes(op="output")
    nodes = list(output.args[0])
    reader = Reader(graph, output)
    try:
        kinds = [reader.weight(node) for node in nodes]
    except Unproved as why:
        return Weighed(doubt=str(why))
    if len(nodes) == 2:
        odd = next((n for n, w in zip(nodes, kinds, strict=True) if w.kind != "sum"), None)
        return Weighed(doubt="" if odd is None else f"{named(odd)} is no sum over rows")
    (weight,) = kinds
    if weight.kind == "sum":
        return Weighed(doubt=f"{named(nodes[0])} is a sum over rows, and no mean")
    if weight.parts is None:
        return Weighed()
    if nodes[0].meta["val"].dtype is torch.float16:  # whose range a sum may leave
        return Weighed(doubt=f"{named(nodes[0])} is a mean over targets in float16")
    with graph.inserting_before(output):
        output.args = (weight.parts(),)
    return Weighed(targets=weight.targets)


def named(node: Node) -> str:
    return f"{short_name(node) or node.name} at {line_of(node)}"


class Reader:
    """Tells what the values without rows are; writes the parts of a fraction before `output`."""

    def __init__(self, graph: torch.fx.Graph, output: Node) -> None:
        self.graph, self.output = graph, output
        self.of_rows = dependent_on_rows(graph)
        (self.rows,) = (
            n for n in graph.find_nodes(op="placeholder") if n.meta.get("role") == "rows"
        )
        self.known: dict[Node, Weight] = {}

    def weight(self, node: Node) -> Weight:
        if node not in self.known:
            self.known[node] = self.read(node)
        return self.known[node]

    def read(self, node: Node) -> Weight:
        if node not in self.of_rows:
            return Weight("alike")
        value = node.meta.get("value")
        if isinstance(value, Value) and value.rows is not None:
            if irregular(node):
                raise Unproved(f"{named(node)} {irregular(node)}")
            return Weight("rows")
        if value is None:
            return Weight(self.count(node))
        if not isinstance(value, Value):
            raise Unproved(f"{named(node)} takes rows together")
        name, given = short_name(node), every_argument(node)
        inputs = [self.weight(n) for n in tensors_of(node)]
        kinds = {w.kind for w in inputs}
        if "rows" in kinds:
            return self.reduced(node, name, given, kinds)
        if name in LINEAR and kinds - {"alike"} and len(kinds) == 1:
            return self.linear(node, inputs)
        if name in (*PLUS, *TIMES, *OVER) and len(node.args) == 2:
            found = self.combined(node, name, [self.operand(a) for a in node.args])
            if found is not None:
                return found
        if (
            name in ("full", "scalar_tensor", "full_like")
            and self.operand(given.get("fill_value", given.get("s"))).kind == "sum"
        ):
            return Weight("sum")
        raise Unproved(f"{named(node)} works on what rows were reduced to")

    def operand(self, x: Any) -> Weight:
        return self.weight(x) if isinstance(x, Node) else Weight("alike")

    def count(self, node: Node) -> str:
        """A number: `sum` where it is a multiple of the rows."""
        try:
            found = [number(node, n) for n in (1, 2, 3, 5)]
        except (ZeroDivisionError, TypeError, KeyError):
            raise Unproved(f"a number is computed from the rows ({node.target})") from None
        if all(n == found[0] * m for n, m in zip(found, (1, 2, 3, 5), strict=True)):
            return "sum"
        raise Unproved(f"a number is computed from the rows ({node.target})")

    def reduced(self, node: Node, name: str, given: dict[str, Any], kinds: set[str]) -> Weight:
        """An operator that reduces rows."""
        if name in TARGETS:
            return self.targets(node, given)
        reduction = given.get("reduction", MEAN if name == "mean" else SUM)
        if kinds <= {"rows", "alike"}:
            if name == "sum" or (name in MEANS and reduction == SUM and name != "mean"):
                return Weight("sum")
            if name in MEANS and reduction == MEAN:
                return Weight("mean")
        raise Unproved(f"{named(node)} takes rows together")

    def targets(self, node: Node, given: dict[str, Any]) -> Weight:
        target, weight = given["target"], given["weight"]
        if given["reduction"] == SUM:
            return Weight("sum")
        if target.meta["val"].is_floating_point():
            return Weight("mean")  # probabilities of classes: none is left out
        learned = isinstance(weight, Node) and weight.meta["differentiable"]
        if given["reduction"] != MEAN or learned or (weight and given.get("label_smoothing")):
            raise Unproved(f"{named(node)} weighs rows by what they hold")

        def parts() -> tuple[Node, Node]:
            made = {**given, "reduction": SUM}
            total = self.add(node, node.target, *made.values())
            return total, self.weight_of(node, target, weight, given["ignore_index"])

        shape = target.meta["value"].shape
        return Weight("fraction", parts, max(1, int(torch.Size(shape).numel())))

    def weight_of(self, node: Node, target: Node, weight: Node | None, ignored: int) -> Node:
        """The sum of the weights of the targets that are not ignored, in the loss's type."""
        dtype = node.meta["val"].dtype

        def each(operator: Any, *args: Any) -> Node:
            """A value for each target, whose rows lie as the targets' do."""
            made = self.add(node, operator, *args)
            made.meta["value"] = replace(made.meta["value"], **laid)
            return made

        like = target.meta["value"]
        laid = {"shape": like.shape, "rows": like.rows}
        counts = each(aten.ne.Scalar, target, ignored)
        if weight is not None:
            left_out = each(aten.eq.Scalar, target, ignored)
            inside = each(aten.masked_fill.Scalar, target, left_out, 0)
            counts = each(aten.index.Tensor, weight, [inside])
            counts = each(aten.masked_fill.Scalar, counts, left_out, 0)
        return self.add(node, aten.sum.default, counts, dtype=dtype)

    def linear(self, node: Node, inputs: list[Weight]) -> Weight:
        (weight, *others) = inputs
        if weight.parts is None:
            return Weight(weight.kind)
        if others or node.meta["val"].dim():
            raise Unproved(f"{named(node)} puts fractions together")
        return self.through(node, node.args[0], weight)

    def through(self, node: Node, place: Any, weight: Weight) -> Weight:
        """The fraction after an operator that is linear in it: of the numerator alone."""
        before = weight.parts
        assert before is not None

        def parts() -> tuple[Node, Node]:
            total, share = before()
            args = [total if a is place else a for a in node.args]
            return self.add(node, node.target, *args, **node.kwargs), share

        return Weight("fraction", parts, weight.targets)

    def combined(self, node: Node, name: str, pair: list[Weight]) -> Weight | None:
        """A sum, product or quotient of two values; None where nothing is known of it."""
        (a, b), kinds = pair, tuple(w.kind for w in pair)
        x, y = node.args
        if name in PLUS:
            if kinds in (("mean", "mean"), ("mean", "alike"), ("alike", "mean")):
                return Weight("mean")
            if kinds == ("sum", "sum"):
                return Weight("sum")
            if set(kinds) == {"fraction", "alike"} and (name != "rsub" or not node.kwargs):
                return self.shifted(node, a if a.parts else b)
        elif name in TIMES and "alike" in kinds:
            return self.scaled(node, a if b.kind == "alike" else b, x if b.kind == "alike" else y)
        elif name in TIMES and set(kinds) == {"mean", "sum"} and self.is_count(x, y):
            return Weight("sum")
        elif name in OVER and node.kwargs.get("rounding_mode") is None:
            if b.kind == "alike":
                return self.scaled(node, a, x)
            if kinds == ("sum", "sum") and not self.is_count(x):
                if self.is_count(y):
                    return Weight("mean")
                return Weight("fraction", lambda: (self.scalar(x, node), self.scalar(y, node)))
            if kinds == ("mean", "mean"):
                return Weight(
                    "fraction", lambda: (self.times_rows(x, node), self.times_rows(y, node))
                )
        return None

    def is_count(self, *operands: Any) -> bool:
        """Whether one of them is a number that grows with the rows, and no sum of values."""
        return any(isinstance(n, Node) and n.meta.get("value") is None for n in operands)

    def scaled(self, node: Node, weight: Weight, place: Any) -> Weight:
        return Weight(weight.kind) if weight.parts is None else self.through(node, place, weight)

    def shifted(self, node: Node, weight: Weight) -> Weight:
        """s / w + c = (s + c w) / w"""
        before = weight.parts
        assert before is not None
        x, y = node.args if short_name(node) != "rsub" else node.args[1::-1]  # y - x of (x, y)
        first = self.operand(x).parts is not None

        def parts() -> tuple[Node, Node]:
            total, share = before()
            shift = self.add(node, aten.mul.Tensor, share, y if first else x)
            args = (total, shift) if first else (shift, total)
            target = aten.add.Tensor if short_name(node) == "add" else aten.sub.Tensor
            return self.add(node, target, *args, **node.kwargs), share

        return Weight("fraction", parts, weight.targets)

    def times_rows(self, x: Any, like: Node) -> Node:
        return self.add(like, aten.mul.Tensor, x, self.rows)

    def scalar(self, x: Any, like: Node) -> Node:
        """A sum as a tensor of the loss's type."""
        if not x.meta["val"].is_floating_point():
            return self.add(like, aten.to.dtype, x, like.meta["val"].dtype)
        return x  # type: ignore[no-any-return]

    def add(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A node of the module and line of `like`, with its fake value."""
        node = self.graph.call_function(target, args, kwargs)
        vals = torch.fx.node.map_arg((args, kwargs), self.val)
        with like.meta["val"].fake_mode:
            val = node.meta["val"] = target(*vals[0], **vals[1])
        live = any(n.meta["differentiable"] for n in node.all_input_nodes)
        live = live and has_gradients(val.dtype)
        shape = tuple(s if isinstance(s, int) else 1 for s in val.shape)
        dtype = str(val.dtype).removeprefix("torch.")
        node.meta.update(
            owner=like.meta["owner"],
            stack_trace=like.meta.get("stack_trace"),
            differentiable=live,
            value=Value(node.name, shape, dtype, None, live),
        )
        return node

    def val(self, node: Node) -> Any:
        return 1 if node is self.rows else node.meta["val"]


def every_argument(node: Node) -> dict[str, Any]:
    """The operator's arguments by name, defaults included."""
    schema, given = getattr(node.target, "_schema", None), arguments(node)
    return {a.name: constant(schema, given, a.name) for a in schema.arguments} if schema else given


def tensors_of(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if n.meta.get("value") is not None]
