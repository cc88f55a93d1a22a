"""The search's problem: its sums are those of a step."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from synchromesh.cost.planned_step import Unmeasured
from synchromesh.cost.step_time import step_time
from synchromesh.planner.candidate import planned_step
from synchromesh.planner.chain.assemble import assemble
from synchromesh.planner.chain.links import crossings
from synchromesh.planner.chain.problem import BATCH, Problem, evaluate
from synchromesh.planner.problem import PartitionCache, PlanningProblem, collectives_of
from synchromesh.planner.uniform import UniformPartitions, uniform_partitions
from synchromesh.trace.capture.capture import trace
from synchromesh.trace.step import Step
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Compute, Curve, Memory, Profile
from tests.models import traced
from tests.planner.chain.test_links import ACROSS, ALL, BYTE, DEVICES, ROWS


class Asked(dict[Any, Curve]):
    """Curves, and the keys that were asked for in vain."""

    def __init__(self, curves: dict[Any, Curve]) -> None:
        super().__init__(curves)
        self.missed: set[Any] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self.missed.add(key)
        return super().get(key, default)


def profiled(found: UniformPartitions, seconds: float = 1.0) -> Profile:
    """What a survey of the uniform partitions measures, each program's time another."""
    programs = {c.program: None for p in found.partitions.values() for c in p.components}
    compute = {}
    for i, key in enumerate(programs):
        forward, backward = (Curve(((8.0, s * (1 + i / 7)),)) for s in (seconds, 2 * seconds))
        compute[key] = Compute((forward,), (backward,), Memory())
    surveyed = [*crossings(found)]
    for made in found.partitions.values():
        surveyed += collectives_of(made, found.rows, found.devices)
    curves = {
        (kind, p): Curve(((1.0, BYTE[kind] * (p.size + p.stride) * 1e-6),))
        for kind, p, _ in surveyed
    }
    return Profile(found.devices, compute, Asked(curves))


def planned(name: str, devices: int = DEVICES) -> tuple[PartitionCache, UniformPartitions]:
    step = traced(name)
    partitions = PartitionCache(PlanningProblem(step, ROWS, devices))
    return partitions, uniform_partitions(partitions)


def chosen(problem: Problem, border: int) -> list[int]:
    """The options of one degree."""
    return [
        next(k for k, o in enumerate(options) if o.border == border)
        for options in problem.components
    ]


def sums(problem: Problem, border: int) -> tuple[float, float]:
    """Seconds forward and backward under one degree: of the components, then of the links."""
    taken = [o[k] for o, k in zip(problem.components, chosen(problem, border), strict=True)]
    forward, backward = sum(o.forward for o in taken), sum(o.backward for o in taken)
    for link in problem.links:
        source = 0 if link.source == BATCH else border
        for form in {link.prices.form[border] for _ in link.targets}:
            forward += link.prices.forward[source, form]
            backward += link.prices.backward[source, form]
    return forward, backward


@pytest.mark.parametrize("name", ["gpt2", "cnn", "padded", "unet"])
def test_one_degree_for_all_takes_what_the_step_time_says(name: str) -> None:
    partitions, found = planned(name)
    told = profiled(found)
    for key in [("all_reduce", ALL), ("all_reduce", ACROSS)]:
        told.network[key] = Curve(((1.0, 0.0),))  # type: ignore[index]  # gradients: none hide here
    problem = assemble(found, told).problem
    compared = 0
    for border, m in enumerate(found.degrees):
        if any(border not in {o.border for o in options} for options in problem.components):
            continue
        plan = Plan.parse(f"hybrid:tensor={m}")
        placed = planned_step(partitions, plan)
        time = step_time(placed, told, 1)
        assert sums(problem, border) == pytest.approx((time.forward, time.backward), rel=1e-12), m
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize("name", ["gpt2", "unet", "bert", "swin"])
def test_the_survey_measures_whatever_may_cross(name: str) -> None:
    _, found = planned(name)
    told = profiled(found)
    problem = assemble(found, told).problem
    assert not cast(Asked, told.network).missed
    assert all((link.prices.forward < float("inf")).any() for link in problem.links)
    assert {kind for kind, _, _ in crossings(found)} <= set(BYTE)


class Inverse(nn.Module):
    """A parameter that only an operator without a rule reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 2)

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.linalg.inv(self.weight)


def test_a_degree_that_shards_nothing_is_not_offered() -> None:
    whole = trace(Inverse(), lambda m, x: m(x).square().mean(), torch.randn(6, 4), training=True)
    for step, offered in ((whole, {0}), (traced("odd_mlp"), {0, 1}), (traced("cnn"), {0, 1})):
        found = uniform_partitions(PartitionCache(PlanningProblem(step, ROWS, 2)))
        problem = assemble(found, profiled(found)).problem
        assert {o.border for options in problem.components for o in options} == offered


def test_of_what_nothing_is_known_there_is_a_name() -> None:
    _, found = planned("cnn", 2)
    told = profiled(found)
    lost = {p.components[0].program for p in found.partitions.values()}
    less = {key: c for key, c in told.compute.items() if key not in lost}
    name = found.step.chain.names[0]
    with pytest.raises(Unmeasured, match=f"no layout of {name} could be measured"):
        assemble(found, Profile(2, less, told.network))


def test_equal_components_share_their_options() -> None:
    step: Step = traced("gpt2")
    _, found = planned("gpt2")
    problem = assemble(found, profiled(found)).problem
    by_structure: dict[str, Any] = {}
    for component, options in zip(step.chain.components, problem.components, strict=True):
        if component.structure:
            assert by_structure.setdefault(component.structure, options) is options
    assert len(by_structure) < len(problem.components)


# Rows that depend on each other


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        z = self.c(self.b(self.a(x).tanh()).tanh())
        return (z @ z.t()).logsumexp(1).mean()  # type: ignore[no-any-return]


def pairs(unsplittable: str = "") -> tuple[PartitionCache, UniformPartitions]:
    step = trace(Pairs(), lambda m, b: m(b), torch.randn(ROWS, 8), training=True)
    assert step.coupling == ("c",)
    partitions = PartitionCache(PlanningProblem(step, ROWS, DEVICES, unsplittable=unsplittable))
    return partitions, uniform_partitions(partitions)


def test_where_rows_depend_on_each_other_there_is_one_degree() -> None:
    partitions, found = pairs()
    told = profiled(found)
    for key in [("all_reduce", ALL), ("all_reduce", ACROSS)]:
        told.network[key] = Curve(((1.0, 0.0),))  # type: ignore[index]  # gradients: none hide here
    problem = assemble(found, told).problem
    *others, last = [{o.border for o in options} for options in problem.components]
    assert others == [{0, 1, 2}, {0, 1, 2}] and last == {2}
    for border, plan in enumerate(["data", "hybrid:tensor=2", "tensor"]):
        borders = (border, border, 2)
        choice = [
            next(k for k, o in enumerate(options) if o.border == b)
            for options, b in zip(problem.components, borders, strict=True)
        ]
        time = step_time(planned_step(partitions, Plan.parse(plan)), told, 1)
        seconds, _ = evaluate(problem, choice)
        assert 0 < seconds < float("inf"), plan
        if border == 2:  # elsewhere neighbours of other degrees hand over other states
            assert seconds == pytest.approx(time.forward + time.backward, rel=1e-12)


def test_where_nothing_may_be_sharded_all_rows_are_computed_with_complete_parameters() -> None:
    partitions, found = pairs("the optimizer needs all of a parameter")
    told = profiled(found)
    problem = assemble(found, told).problem
    assert [{o.border for o in options} for options in problem.components] == [{0}, {0}, {1}]
    for made in (*found.partitions.values(), partitions.partition(Plan.parse("data"))):
        assert [str(c.layout) for c in made.components] == ["4x1", "4x1", "1x4"]
        assert not any(p.sharded for p in made.placements.values())
