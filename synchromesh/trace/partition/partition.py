"""A partition: the local graph of each component of a step, and where every parameter lies.

    Step + a layout per component  ->  units and links       analysis, draft
                                   ->  states                choose
                                   ->  local graphs          localise

Between components of equal degrees a value crosses in any placement. Where the consumer wants
another one than the producer has, the move is made once: inside the producer's graph if that
makes it anyway, else by the runner (`Input.have` to `Input.want`); then it stands in
`collectives` of the first component that wants it.
"""

import random
from collections.abc import Mapping, Sequence

from synchromesh.trace.capture.effects import norms
from synchromesh.trace.partition.analysis import flow_of, works
from synchromesh.trace.partition.assignment import Price, choose, sample
from synchromesh.trace.partition.draft import Assignment, Draft
from synchromesh.trace.partition.local import Input, LocalComponent, Output, Partition
from synchromesh.trace.partition.localise import localise
from synchromesh.trace.partition.reasons import obstacle
from synchromesh.trace.partition.whole import whole_partition
from synchromesh.trace.step import Step
from synchromesh.values.layout import Layout
from synchromesh.values.placement import Placement

__all__ = [
    "Input",
    "LocalComponent",
    "Output",
    "Partition",
    "assign",
    "draft_of",
    "obstacle",
    "overlaps",
    "partition",
]


def partition(
    step: Step,
    layouts: Sequence[Layout],
    *,
    rows: int,
    pins: Mapping[tuple[str, Layout], Placement] | None = None,
    sample: random.Random | None = None,
    price: Price | None = None,
) -> Partition:
    """The cheapest partition of `step` with `layouts[i]` for its i-th component.

    rows: global batch rows, for prices. pins: placements fixed beforehand. sample: take a
    random valid assignment instead of the cheapest. Equal arguments give an equal partition.
    """
    if step.opaque:
        return whole_partition(step, layouts)
    draft = draft_of(step, layouts, rows, pins or {}, price or Price())
    return localise(draft, assign(draft, sample))


def draft_of(
    step: Step,
    layouts: Sequence[Layout],
    rows: int,
    pins: Mapping[tuple[str, Layout], Placement],
    price: Price,
) -> Draft:
    """The integer program of a step."""
    assert not step.opaque, "an opaque step has no graph to partition"
    assert len(layouts) == len(step.chain.components), "one layout per component"
    assert len({layout.devices for layout in layouts}) == 1, (
        "layouts of one stage have equal devices"
    )
    check_reduced(step, layouts)
    flow = flow_of(step)
    return Draft(step, flow, works(step, flow), tuple(layouts), rows, pins, price)


def check_reduced(step: Step, layouts: Sequence[Layout]) -> None:
    """ValueError where a value reduced over a block of rows would be read by blocks of other
    rows."""
    assert step.graph is not None
    names = step.chain.names
    for node in step.graph.nodes:
        if not node.meta.get("reduced"):
            continue
        at = node.meta["component"]
        for user in node.users:
            to = user.meta.get("component", at)
            if layouts[to].data != layouts[at].data:
                raise ValueError(
                    f"{names[to]} (data {layouts[to].data}) reads {node.name}, which {names[at]} "
                    f"(data {layouts[at].data}) reduces over its rows of the batch: give the two "
                    "components equal data degrees"
                )


def assign(draft: Draft, chance: random.Random | None) -> Assignment:
    if chance is not None:
        return draft.assignment(sample(draft.problem, chance))
    return draft.assignment(choose(draft.problem, draft.weighty))


def overlaps(step: Step, partition: Partition) -> bool:
    """Whether walking in pieces can hide traffic and computes the same (batch norm would not, nor
    would a loss that couples rows)."""
    if step.graph is None or any(n.meta.get("effect") or norms(n) for n in step.graph.nodes):
        return False
    if step.coupled or any(guard.of_blocks for guard in step.guards):
        return False
    return any(c.collectives for c in partition.components)
