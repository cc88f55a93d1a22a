"""Reasons: why a parameter, or a whole component, is not sharded."""

from torch.fx import Node

from synchromesh.trace.rules import rule_of
from synchromesh.trace.step import Step

from .analysis import Analysis
from .strategies import Strategies
from .subgraph import Subgraph, value_of


def obstacle(step: Step, component: int, degree: int) -> str | None:
    """Why no parameter of the component can be sharded over `degree` ranks; None where one can."""
    analysis = Analysis(step)
    subgraph, found = analysis.subgraphs[component], analysis.strategies(component, degree)
    if any(s.sharded for n in subgraph.parameters for s in found.states_read(subgraph, n)):
        return None
    if not subgraph.parameters:
        return "it has no parameters"
    reasons = {why_replicated(subgraph, found, n, degree) for n in subgraph.parameters}
    return "; ".join(sorted(reasons))


def why_replicated(subgraph: Subgraph, found: Strategies, parameter: Node, degree: int) -> str:
    """A sentence for a parameter that is not sharded."""
    value = value_of((parameter, 0))
    readers = [i for i, n in enumerate(subgraph.nodes) if parameter in n.all_input_nodes]
    operators = [found.operators[i] for i in readers]
    if any(s.sharded for s in found.states_read(subgraph, parameter)):
        return (
            f"sharding its {value.bytes(1)} bytes would cost traffic or keep another tensor whole"
        )
    if unruled := sorted({op.name for op in operators if rule_of(op) is None}):
        return f"no rule shards {', '.join('aten.' + n for n in unruled)}"
    sizes = " and ".join(str(n) for n in value.shape) or "a scalar"
    names = ", ".join(sorted({op.name for op in operators}))
    if max(value.shape, default=1) < 2:
        return f"{sizes} has one entry"
    return f"{names} of shape {list(value.shape)} has no sharded form over {degree} ranks"
