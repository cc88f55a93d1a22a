"""What of a step no layout changes: found once, for all of its partitions."""

from collections.abc import Hashable
from functools import cache

from synchromesh.trace.capture.effects import dependent_on_rows
from synchromesh.trace.step import Step

from .strategies import Strategies, strategies
from .subgraph import Tensor, gradient_flow, operand_of, reads, results_of, subgraphs

Reader = tuple[int, int]  # an operator of a component, and which of the tensors that it reads


class Analysis:
    """A step's components and the tensors between them. The step must not be opaque.

    kinds: a number for each component, equal where components compute the same function. makers:
    the component that makes a tensor, and by which of its operators. readers: of each tensor, by
    component."""

    def __init__(self, step: Step) -> None:
        assert step.graph is not None, "an opaque step has no graph to partition"
        self.step = step
        self.flow = gradient_flow(step)
        self.subgraphs = subgraphs(step, self.flow)
        numbers: dict[Hashable, int] = {}  # instead of the signatures: they are long to hash
        self.kinds = [numbers.setdefault(s.signature, len(numbers)) for s in self.subgraphs]
        self.of_rows = dependent_on_rows(step.graph)
        self.outputs = [t for n in step.graph.find_nodes(op="output") for t in reads(n)]
        self.makers: dict[Tensor, tuple[int, int]] = {}
        self.readers: dict[Tensor, dict[int, list[Reader]]] = {}
        for subgraph in self.subgraphs:
            for i, node in enumerate(subgraph.nodes):
                self.makers |= dict.fromkeys(results_of(node), (subgraph.index, i))
                for slot, tensor in enumerate(subgraph.reads[i]):
                    by_component = self.readers.setdefault(tensor, {})
                    by_component.setdefault(subgraph.index, []).append((i, slot))
        self.operand = cache(operand_of)
        self._strategies: dict[tuple[int, int], Strategies] = {}

    def strategies(self, index: int, degree: int) -> Strategies:
        """The strategies of component `index` over `degree` ranks."""
        key = (self.kinds[index], degree)
        if key not in self._strategies:
            self._strategies[key] = strategies(self.subgraphs[index], degree)
        return self._strategies[key]
