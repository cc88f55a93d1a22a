"""Reasons: why a parameter, or a whole component, is not sharded."""

from torch.fx import Node

from synchromesh.trace.partition.analysis import Menu, Work, flow_of, menu, reads, value_of, works
from synchromesh.trace.rules import rule_of
from synchromesh.trace.step import Step
from synchromesh.values.placement import Placement


def obstacle(step: Step, component: int, degree: int) -> str | None:
    """Why no parameter of the component can be sharded over `degree` ranks; None where one can."""
    flow = flow_of(step)
    work = works(step, flow)[component]
    found = menu(work, degree)
    if any(s.sharded for n in work.parameters for s in parameter_states(work, found, n)):
        return None
    if not work.parameters:
        return "it has no parameters"
    reasons = {why_whole(work, found, n, degree) for n in work.parameters}
    return "; ".join(sorted(reasons))


def parameter_states(work: Work, found: Menu, parameter: Node) -> list[Placement]:
    """States in which the component's operators can read a parameter."""
    states: set[Placement] = set()
    for node, options in zip(work.nodes, found.choices, strict=True):
        for slot, tensor in enumerate(reads(node)):
            if tensor == (parameter, 0):
                states |= {c.inputs[slot] for c in options}
    return sorted(states)


def why_whole(work: Work, found: Menu, parameter: Node, degree: int) -> str:
    """A sentence for a parameter that is not sharded."""
    value = value_of((parameter, 0))
    readers = [i for i, n in enumerate(work.nodes) if parameter in n.all_input_nodes]
    unruled = sorted(
        {found.operators[i].name for i in readers if rule_of(found.operators[i]) is None}
    )
    if any(s.sharded for s in parameter_states(work, found, parameter)):
        return (
            f"sharding its {value.bytes(1)} bytes would cost traffic or keep another tensor whole"
        )
    if unruled:
        return f"no rule shards {', '.join('aten.' + n for n in unruled)}"
    sizes = " and ".join(str(n) for n in value.shape) or "a scalar"
    names = ", ".join(sorted({found.operators[i].name for i in readers}))
    if not any(n and n % degree == 0 for n in value.shape):
        return f"{sizes} does not divide by {degree}"
    return f"{names} of shape {list(value.shape)} has no sharded form over {degree} ranks"
