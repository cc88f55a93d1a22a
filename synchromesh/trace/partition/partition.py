"""A partition: the local graph of each component of a step, and where every parameter lies.

    Step + a layout per component  ->  units and flows       subgraph, strategies, step_problem
                                   ->  states                placement_problem
                                   ->  local graphs          localise

Between components of equal degrees a value crosses in any placement. Where the consumer wants
another one than the producer has, the move is made once: inside the producer's graph if that
makes it anyway, else by the runner (`Input.have` to `Input.want`); then it stands in
`collectives` of the first component that wants it."""

from collections.abc import Mapping, Sequence

import torch

from synchromesh.trace import meta
from synchromesh.trace.capture.coupling import normalises_batch
from synchromesh.trace.nodes import calls
from synchromesh.trace.step import Step
from synchromesh.values.component import Chain, Component
from synchromesh.values.layout import Layout, leaf_layouts
from synchromesh.values.placement import REPLICATED, Placement

from .analysis import Analysis
from .local import (
    Communication,
    Computation,
    Input,
    LocalComponent,
    Output,
    Partition,
    form_of,
    program_of,
)
from .localise import localise
from .moves import edge_collectives
from .placement_problem import Price, choose
from .step_problem import Assignment, StepProblem

__all__ = [
    "Analysis", "LocalComponent", "Partition", "assign", "overlaps", "partition", "problem_of",
    "unsharded",
]  # fmt: skip


def partition(
    step: Step, layouts: Sequence[Layout], *, rows: int,
    pins: Mapping[tuple[str, Layout], Placement] | None = None,
    leaves: Mapping[range, Layout] | None = None, analysis: Analysis | None = None,
) -> Partition:  # fmt: skip
    """The cheapest partition of `step` with `layouts[i]` for its i-th component.

    rows: global batch rows, for prices. pins: placements fixed beforehand. leaves: the layout in
    which the batch is there on the positions of each stage, where it is not that of the largest
    data degree among `layouts`. analysis: of `step`, where it is known. Equal arguments give an
    equal partition, and layouts of equal meshes the same one under other layouts
    (`Partition.under`)."""
    if step.opaque:
        return opaque_partition(step, layouts)
    analysis = analysis or Analysis(step)
    problem = problem_of(analysis, layouts, rows, pins or {}, Price(), leaves)
    return localise(problem, assign(problem)).under(layouts)


def opaque_partition(step: Step, layouts: Sequence[Layout]) -> Partition:
    """Components whose tensors are replicated and whose graphs are never run, with the values that
    cross between them."""
    chain, moves = step.chain, dict[tuple[str, Layout], list[Communication]]()
    at = {name: layout.mesh for name, layout in zip(chain.names, layouts, strict=True)}
    for edge in chain.edges:
        here = at[edge.source or ""]
        for there, name in {at[name]: name for name in reversed(edge.targets)}.items():
            if there != here:
                sent = edge_collectives(edge.value, REPLICATED, REPLICATED, here, there) or ()
                moved = Communication(sent, here.positions == there.positions)
                moves.setdefault((name, there), []).append(moved)
    components = tuple(
        _opaque(chain, c, layout, moves.get((c.name, layout.mesh), ()))
        for c, layout in zip(chain.components, layouts, strict=True)
    )
    placements = {(n, x.layout): REPLICATED for x in components for n in x.parameters + x.buffers}
    return Partition(components, placements, (), leaf_layouts(layouts))


def _opaque(
    chain: Chain, component: Component, layout: Layout, moves: Sequence[Communication]
) -> LocalComponent:
    empty, place = torch.fx.Graph(), chain.names.index
    empty.output(())
    name, form = component.name, form_of(empty) + component.structure
    tensors = [(t, REPLICATED) for t in (*component.parameters, *component.buffers)]
    return LocalComponent(
        component, layout, torch.fx.GraphModule(torch.nn.Module(), empty),
        tuple(
            Input(e.value, place(e.source or ""), REPLICATED, REPLICATED, flows=True)
            for e in chain.edges if name in e.targets
        ),
        tuple(Output(e.value, REPLICATED) for e in chain.edges if e.source == name),
        tuple(p.name for p in component.parameters), tuple(b.name for b in component.buffers),
        constants=(), events=(*moves, Computation(1.0)), arrivals=len(moves),
        unsharded={},  # `Step.reason` says why, once
        program=program_of(form, (), tensors, (), layout),
    )  # fmt: skip


def problem_of(
    analysis: Analysis, layouts: Sequence[Layout], rows: int,
    pins: Mapping[tuple[str, Layout], Placement], price: Price,
    leaves: Mapping[range, Layout] | None = None,
) -> StepProblem:  # fmt: skip
    assert len(layouts) == len(analysis.subgraphs), "one layout per component"
    check_reduced(analysis.step, layouts)
    meshes = tuple(layout.mesh for layout in layouts)
    leaves = leaves or leaf_layouts(layouts)
    return StepProblem(analysis, meshes, leaves, rows, pins, price)


def unsharded(step: Step, layouts: Sequence[Layout]) -> dict[tuple[str, Layout], Placement]:
    """Pins that replicate parameters where rows depend on each other (some optimizers)."""
    return {
        (parameter.name, layout.mesh): REPLICATED
        for component, layout in zip(step.chain.components, layouts, strict=True)
        if component.name in step.coupling
        for parameter in component.parameters
    }


def check_reduced(step: Step, layouts: Sequence[Layout]) -> None:
    """ValueError where a value reduced over a block of rows would be read by other blocks."""
    assert step.graph is not None
    names = step.chain.names
    for node in filter(meta.reduced, step.graph.nodes):
        at = meta.component(node)
        for to in (meta.component(user) for user in node.users if user.op != "output"):
            if layouts[to].data != layouts[at].data:
                raise ValueError(
                    f"{names[to]} (data {layouts[to].data}) reads {node.name}, which {names[at]} "
                    f"(data {layouts[at].data}) reduces over its rows of the batch: give the two "
                    "components equal data degrees"
                )


def assign(problem: StepProblem) -> Assignment:
    return problem.assignment(choose(problem.problem, problem.must_shard))


def parts_alike(step: Step) -> bool:
    """Whether micro-batches compute what the batch does; not with batch norm or coupled rows."""
    if step.graph is None or step.coupled or any(guard.of_blocks for guard in step.guards):
        return False
    return not any(meta.effect(n) or normalises_batch(n) for n in calls(step.graph))


def overlaps(step: Step, partition: Partition) -> bool:
    """Whether micro-batches can hide traffic and compute the same."""
    return any(c.collectives for c in partition.components) and parts_alike(step)
