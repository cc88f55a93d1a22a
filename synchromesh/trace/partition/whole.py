"""A whole partition: an opaque step as one component that every rank of a block runs whole."""

from collections.abc import Sequence

import torch

from synchromesh.trace.partition.local import Computation, LocalComponent, Partition
from synchromesh.trace.step import Step
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED


def whole_partition(step: Step, layouts: Sequence[Layout]) -> Partition:
    """One component without borders whose tensors are replicated; its graph is never run."""
    assert step.opaque and len(layouts) == 1, "an opaque step is one component"
    (component,), (layout,) = step.chain.components, layouts
    nothing = torch.fx.Graph()
    nothing.output(())
    parameters = tuple(p.name for p in component.parameters)
    buffers = tuple(b.name for b in component.buffers)
    reason = "the model could not be traced"
    local = LocalComponent(
        component,
        layout,
        torch.fx.GraphModule(torch.nn.Module(), nothing),
        inputs=(),
        outputs=(),
        parameters=parameters,
        buffers=buffers,
        constants=(),
        events=(Computation(1.0),),
        unsharded=dict.fromkeys(parameters, reason) if layout.tensor > 1 else {},
    )
    placements = {(name, layout): REPLICATED for name in (*parameters, *buffers)}
    return Partition((local,), placements, ())
