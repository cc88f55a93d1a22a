"""Plans with made-up profiles: every duration is chosen, so every prediction can be drawn."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from synchromesh.cost.planned_step import PlannedStep
from synchromesh.trace.partition.local import (
    Computation,
    Division,
    Event,
    LocalComponent,
    Partition,
)
from synchromesh.trace.partition.partition import overlaps, partition
from synchromesh.trace.step import Step
from synchromesh.values.component import Component, Parameter
from synchromesh.values.holding import holdings
from synchromesh.values.layout import Layout, leaf_layouts
from synchromesh.values.placement import REPLICATED
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Compute, Curve, Memory, Pattern, Profile
from tests.models import traced


def placed(family: str, layouts: Callable[[int], Layout] | Layout, rows: int = 8) -> PlannedStep:
    """A family's step under a layout for each component, as it would run."""
    step = traced(family)
    count = len(step.chain.components)
    found = [layouts(i) if callable(layouts) else layouts for i in range(count)]
    return planned_step(step, partition(step, found, rows=rows), found[0].devices, rows)


def planned_step(step: Step, made: Partition, devices: int, rows: int) -> PlannedStep:
    tensors = {t.name: t for c in step.chain.components for t in (*c.parameters, *c.buffers)}
    held = holdings(tensors.values(), made.placements, devices)
    data = Plan.parse("data")
    return PlannedStep(made, held, data, devices, rows, overlaps(step, made))


def flat(planned: PlannedStep, seconds: float = 1.0, traffic: float = 0.0) -> Profile:
    """Every program takes `seconds` forward and twice that backward, every collective `traffic`,
    whatever the size."""
    programs = {c.program for c in planned.partition.components}
    forward, backward = (Curve(((0.0, s), (1.0, s))) for s in (seconds, 2 * seconds))
    wire = Curve(((0.0, traffic), (1.0, traffic)))
    links = {
        (c.kind, Pattern(c.ranks, c.stride)): wire
        for local in planned.partition.components
        for c in local.collectives
    }
    links |= {
        (kind, Pattern(size, stride)): wire
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
        for size in range(2, planned.devices + 1)
        for stride in range(1, planned.devices + 1)
    }
    compute = {p: Compute((forward,), (backward,), Memory()) for p in programs}
    return Profile(planned.devices, compute, links)


def drawn(
    parts: Sequence[Mapping[str, Any]],
    layouts: Layout | Sequence[Layout],
    rows: int = 4,
    plan: str = "data",
) -> PlannedStep:
    """A chain of components of which only events, parameters and borders are known.

    parts: {"events": (...), "parameters": {name: numbers}, "inputs": (...), "outputs": (...),
    "division": ...}.
    layouts: of each of them; one: of all.
    """
    chain, made = [], []
    layouts = [layouts] * len(parts) if isinstance(layouts, Layout) else layouts
    for i, (part, layout) in enumerate(zip(parts, layouts, strict=True)):
        numbers = part.get("parameters", {})
        assert isinstance(numbers, dict)
        component = Component(
            f"c{i}", tuple(Parameter(n, (k,), "float32") for n, k in numbers.items())
        )
        chain.append(component)
        made.append(_local(component, layout, part))
    placements = {
        (p.name, layout): REPLICATED
        for c, layout in zip(chain, layouts, strict=True)
        for p in c.parameters
    }
    result = Partition(tuple(made), placements, (), leaf_layouts(layouts))
    devices = max(layout.positions.stop for layout in layouts)
    parameters, asked = [p for c in chain for p in c.parameters], Plan.parse(plan)
    held = holdings(parameters, placements, devices, asked)
    return PlannedStep(result, held, asked, devices, rows, True)


def _local(component: Component, layout: Layout, part: Mapping[str, Any]) -> LocalComponent:
    events: tuple[Event, ...] = part.get("events", (Computation(1.0),))
    graph = torch.fx.Graph()
    graph.placeholder("axis")
    graph.output(())
    return LocalComponent(
        component, layout, torch.fx.GraphModule({}, graph),
        part.get("inputs", ()), part.get("outputs", ()),
        tuple(p.name for p in component.parameters), (), (), events, {},
        f"{component.name} {layout.tensor}", division=part.get("division", Division()),
    )  # fmt: skip
