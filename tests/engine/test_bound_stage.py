"""A bound stage: every form that a component reads is there, and nothing stays too long."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from synchromesh.cost.planned_step import PlannedStep
from synchromesh.engine.bound_stage import Binding, BoundStage
from synchromesh.trace.partition.local import crossings
from synchromesh.values.layout import Layout, stages_of
from tests.cost.plans import placed
from tests.models import traced


def binding_of(name: str, planned: PlannedStep, position: int) -> Binding:
    made = planned.partition
    return Binding(
        traced(name), made, position,
        {n: torch.empty(0, device="meta") for n in planned.holdings}, planned.holdings,
        crossings(made), ((),) * len(made.components),
    )  # fmt: skip


def bound(name: str, planned: PlannedStep, position: int = 0) -> list[BoundStage]:
    made, binding = planned.partition, binding_of(name, planned, position)
    stages = stages_of([local.layout for local in made.components])
    here = [s for s in stages if position in made.components[s[0]].layout.positions]
    return [binding.stage(stages.index(stage), stage) for stage in here]


@pytest.mark.parametrize("name", ["cnn", "unet", "gpt2"])
@pytest.mark.parametrize("position", [0, 2])
def test_what_is_read_is_there_and_what_nobody_reads_is_dropped(name: str, position: int) -> None:
    """Of two stages: the second half of the chain is on other devices."""
    count = len(traced(name).chain.components)
    planned = placed(name, lambda i: Layout(1, 2, first=2 * (i >= count // 2)))
    (stage,) = bound(name, planned, position)
    leaves = set(binding_of(name, planned, position).leaves)
    there = {*leaves, *stage.arriving}
    kept = {*stage.handed, *(form for form, _ in stage.outputs)}
    for number, (_, part) in enumerate(stage.parts):
        assert {f.made for f in part.fetches} <= there, "it is fetched from what is there"
        assert not {f.read for f in part.fetches} & there, "once"
        there |= {f.read for f in part.fetches}
        assert set(part.reads) <= there
        there = (there | set(part.results)) - set(part.dropped)
        later = {x for _, p in stage.parts[number + 1 :] for x in p.reads}
        assert not (there - kept - later - {f.made for _, p in stage.parts for f in p.fetches}
                    - leaves - set(stage.arriving))  # fmt: skip
    assert kept <= there
    assert bool(stage.handed) == (position == 0) != bool(stage.outputs)


def test_a_stage_pauses_at_each_fetch_and_each_move() -> None:
    (alone,), (cut,) = (bound("gpt2", placed("gpt2", Layout(*x))) for x in ((1, 1), (1, 2)))
    assert alone.turns == 1 < cut.turns
    assert not any(part.uses for _, part in alone.parts)


def test_an_output_of_an_earlier_stage_is_refused() -> None:
    planned = placed("cnn", Layout(1, 1))
    made = planned.partition
    output = SimpleNamespace(value=SimpleNamespace(name="no such"), placement=None)
    object.__setattr__(made, "outputs", (cast(Any, output),))
    with pytest.raises(ValueError, match="the output no such is made in another stage"):
        bound("cnn", planned)
