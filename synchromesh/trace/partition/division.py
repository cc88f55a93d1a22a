"""A divided local graph: operators whose weights' gradients come later than those of their inputs
(zero bubble, Qi et al. 2023, arXiv 2401.10241).

    h = linear(x, weight, bias)      ->    h = axis.product("linear", x, weight, bias)
    y = layer_norm(h, gain)          ->    y = layer_norm(h, axis.joined(gain))

A product multiplies what inputs enter by what parameters alone made, so that each of its two
gradients is a product of its own. Other operators (norms, scales, recurrent ones) make both
gradients in one pass; that of the weight is kept, to be added later. What parameters alone make
(a weight that is moved or normalised) runs back once, when its gradient is there."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch.fx import Graph, Node

from synchromesh.trace.nodes import all_arguments, is_operator, short_name
from synchromesh.trace.partition.local import Division, LocalComponent
from synchromesh.trace.rules.operator import ROWS, Operator
from synchromesh.values.component import Value
from synchromesh.values.placement import Placement

_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
# by operator: the names of input, weight and bias, and of what else it is told
PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    "addmm": ("mat1", "mat2", "self"),
    "embedding": ("indices", "weight", "", "padding_idx", "scale_grad_by_freq"),
    "conv1d": _CONVOLUTION, "conv2d": _CONVOLUTION, "conv3d": _CONVOLUTION,
}  # fmt: skip


@dataclass(frozen=True)
class WorkTuning:
    """Operations that take as long as an entry of an operator which memory bounds.

    In four blocks of a layer norm and two products (256 and 1,024 wide, float32, 512 rows) on one
    core the gradients of weights were 0.46 of a divided backward: 120. Devices with more products
    a byte of memory have more."""

    entry: float = 120.0


TUNING = WorkTuning()


def operations(operator: Operator) -> float:
    """Of an operator's forward, for a row: rough, for shares of time."""
    if _is_view(operator):
        return 0.0
    made = sum(prod(o.shape) for o in operator.outputs) / ROWS
    if operator.name.startswith("scaled_dot_product"):  # scores, and the values they weigh
        return made * (TUNING.entry + 4 * operator.tensor("key").shape[-2])
    return operator.work + made * TUNING.entry


def _is_view(operator: Operator) -> bool:
    returned = operator.schema.returns if operator.schema else ()
    return operator.name == "reshape" or any(r.alias_info is not None for r in returned)


def divided(local: LocalComponent, graph: Graph) -> Graph:
    """`graph`, which is that of the component or is for a rank without rows."""
    _, _, *given = graph.find_nodes(op="placeholder")
    uses = WeightUses(graph, given[: len(local.inputs)], _trained(local, given))
    axis, made = next(iter(graph.nodes)), Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        weights = uses.of(node)
        if weights and (product := uses.product(node)):
            named = [copies[x] if isinstance(x, Node) else x for x in product]
            copies[node] = made.call_method("product", (copies[axis], *named))
            continue
        joined = {w: made.call_method("joined", (copies[axis], copies[w])) for w in weights}
        copies[node] = made.node_copy(node, (copies | joined).__getitem__)
    made.lint()
    return made


def _trained(local: LocalComponent, given: list[Node]) -> Iterator[Node]:
    trained = {p.name for p in local.component.parameters if p.trainable}
    for name, node in zip(local.parameters, given[len(local.inputs) :], strict=False):
        if name in trained:
            yield node


class WeightUses:
    """Where in a graph weights, which are what trained parameters alone made, meet what inputs
    enter, or are handed out."""

    def __init__(self, graph: Graph, inputs: Iterable[Node], trained: Iterable[Node]) -> None:
        self._of_inputs = _entered(graph, inputs)
        self._weights = _entered(graph, trained) - self._of_inputs

    def of(self, node: Node) -> list[Node]:
        """The weights that a node of either kind reads; none of others."""
        joins = node.op == "output" or node in self._of_inputs
        return [a for a in node.all_input_nodes if joins and a in self._weights]

    def division(
        self, graph: Graph, flowing: Iterable[Node], work: Mapping[Node, float],
        described: Mapping[Node, tuple[Value, Placement]],
    ) -> Division:  # fmt: skip
        """flowing: inputs that want a gradient. work: `operations` of nodes, which a backward
        takes for every gradient that it makes."""
        needed = _entered(graph, (*flowing, *self._weights))
        waiting: dict[Node, None] = {}
        inputs = weights = 0.0
        for node in graph.nodes:
            of_weights = self.of(node)
            product = self.product(node) if of_weights else ()
            waiting |= dict.fromkeys((product[1], node) if product else of_weights)
            weights += work.get(node, 0.0) if product else 0.0
            others = needed.intersection(node.all_input_nodes) - self._weights
            inputs += work.get(node, 0.0) * len(others)
        share = weights / (weights + inputs) if weights else 0.0
        return Division(share, tuple(described[node] for node in waiting if node in described))

    def product(self, node: Node) -> tuple[Any, ...]:
        """Of a product its name, input, weight, bias, and what else it is told; () of others."""
        name = short_name(node)
        if name not in PRODUCTS or not is_operator(node):
            return ()
        told = all_arguments(node)
        x, weight, bias, *settings = (told.get(argument) for argument in PRODUCTS[name])
        apart = (x in self._weights, weight in self._weights, bias in self._of_inputs)
        plain = (told.get("alpha", 1), told.get("beta", 1), told.get("sparse", False))
        known = not any(isinstance(s, str | Node) for s in settings)
        if known and apart == (False, True, False) and plain == (1, 1, False):
            return name, x, weight, bias, *settings
        return ()


def _entered(graph: Graph, given: Iterable[Node]) -> set[Node]:
    """The nodes that something given enters, and these."""
    entered = set(given)
    for node in graph.nodes:
        if not entered.isdisjoint(node.all_input_nodes):
            entered.add(node)
    return entered
