"""Plans with stages that are proposed: from made-up facts of a model to texts that it can run."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from synchromesh.planner.problem import PartitionCache, PlanningProblem
from synchromesh.planner.stages.facts import stage_demands
from synchromesh.planner.stages.plans import orders, plan_of, stage_plans
from synchromesh.planner.stages.problem import PlannedStage, StagePlan
from synchromesh.planner.unequal import slowdowns_of
from synchromesh.planner.uniform import UniformPartitions, uniform_partitions
from synchromesh.trace.capture.capture import trace
from synchromesh.values.layout import Layout, stages_of
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Compute, Curve, Memory, Pattern, Profile
from synchromesh.values.schedule import PIPELINES
from synchromesh.values.unsupported import unsupported

DEVICES, ROWS, LAYERS = 4, 64, 8


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).square().mean()
    return found


@cache
def made() -> tuple[PlanningProblem, UniformPartitions]:
    """Eight equal linear layers on four devices."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(LAYERS)))
    step = trace(model, loss, torch.randn(ROWS, 16), training=True)
    problem = PlanningProblem(step, ROWS, DEVICES)
    return problem, uniform_partitions(PartitionCache(problem))


def line(byte: float) -> Curve:
    return Curve(((0.0, 0.0), (1.0, byte)))


def profile(
    byte: float,
    message: float = 1e-9,
    ranks: Iterable[float] = (1.0,) * DEVICES,
    tensor: bool = True,
) -> Profile:
    """A row of a layer takes 1 ms forward and 2 ms backward, a byte of a collective `byte`."""
    parts = made()[1]
    curves = [line(1e-3 * slow) for slow in ranks]
    backward = [line(2e-3 * slow) for slow in ranks]
    programs = {
        c.program: Compute(tuple(curves), tuple(backward), Memory(kept=line(64.0)))
        for m, p in parts.partitions.items()
        for c in p.components
        if tensor or m == 1
    }
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    patterns = [Pattern(n, s) for n in (2, 3, 4) for s in (1, 2, 3)]
    network = {(kind, p): line(byte) for kind in kinds for p in patterns}
    network |= {("send", Pattern(2, s)): line(message) for s in (1, 2, 3)}
    return Profile(DEVICES, programs, network, state_factor=2.0)


def proposed(told: Profile, **changes: object) -> list[Plan]:
    problem, parts = made()
    return stage_plans(parts, replace(problem, **changes), told)  # type: ignore[arg-type]


def under_1f1b(plans: Iterable[Plan]) -> Plan:
    """The best of these."""
    return next(plan for plan in plans if plan.schedule == "1f1b")


def sizes(plan: Plan) -> list[int]:
    return [len(s.ranks) for s in plan.stages]


def test_every_proposal_is_a_plan_of_the_model() -> None:
    problem, _ = made()
    plans = proposed(profile(1e-6))
    assert {p.schedule for p in plans} == set(PIPELINES)
    for plan in plans:
        assert Plan.parse(str(plan)) == plan
        assert not unsupported(plan)
        layouts = problem.layouts(plan)
        assert len(stages_of(layouts)) == len(plan.stages) > 1
        assert ROWS % plan.micro_batches == 0
        assert sorted({p for x in layouts for p in x.positions}) == list(range(DEVICES))


def test_gradients_that_cost_much_make_a_deep_pipeline() -> None:
    plans = proposed(profile(1.0))
    best = under_1f1b(plans)
    assert sizes(best) == [1, 1, 1, 1]
    assert [s.first for s in best.stages] == ["0", "2", "4", "6"]
    again = plans[0]  # whose fill is half as long
    assert (again.schedule, [s.ranks[0] for s in again.stages]) == (
        "interleaved",
        [0, 1, 2, 3] * 2,
    )
    cheap = under_1f1b(proposed(profile(1e-12)))
    assert sizes(cheap) == [2, 2]


def test_stages_may_be_tensor_parallel() -> None:
    told = profile(1e-12)
    problem, parts = made()
    quick = {
        c.program: Compute((line(1e-4),) * DEVICES, (line(2e-4),) * DEVICES, Memory())
        for m, p in parts.partitions.items()
        if m == 2
        for c in p.components
    }
    both = replace(told, compute={**told.compute, **quick})
    best = stage_plans(parts, problem, both)[0]
    layouts = problem.layouts(best)
    assert {x.tensor for x in layouts} == {2}
    assert layouts[0] == Layout(1, 2)


def test_slow_ranks_get_fewer_layers_and_stand_together() -> None:
    told = profile(1.0, ranks=(1.0, 2.0, 1.0, 2.0))
    assert slowdowns_of(told, DEVICES) == (1.0, 2.0, 1.0, 2.0)
    assert orders((1.0, 2.0, 1.0, 2.0)) == [(0, 1, 2, 3), (0, 2, 1, 3), (1, 3, 0, 2)]
    assert orders((1.0,) * 4) == [(0, 1, 2, 3)]
    names, best = made()[0].names, proposed(told)[0]
    starts = [names.index(s.first) for s in best.stages]
    layers = [b - a for a, b in zip(starts, [*starts[1:], LAYERS], strict=True)]
    slow = [set(s.ranks) <= {1, 3} for s in best.stages]
    assert max(n for n, late in zip(layers, slow, strict=True) if late) < max(layers)
    assert slow in (sorted(slow), sorted(slow, reverse=True))


def test_memory_makes_stages_that_hold_less() -> None:
    free = under_1f1b(proposed(profile(1e-12)))
    assert sizes(free) == [2, 2]
    layer = (16 * 16 + 16) * 4 * 4  # parameters, gradients, state
    tight = proposed(profile(1e-12, tensor=False), limits=(2.6 * layer,) * DEVICES)
    assert sizes(under_1f1b(tight)) == [1, 1, 1, 1]
    assert proposed(profile(1e-12, tensor=False), limits=(layer,) * DEVICES) == []


def test_where_nothing_is_known_of_messages_there_are_no_stages() -> None:
    told = profile(1e-9)
    silent = {k: v for k, v in told.network.items() if k[0] != "send"}
    assert proposed(replace(told, network=silent)) == []


def test_a_model_of_one_component_has_no_stages() -> None:
    step = trace(nn.Linear(4, 4), loss, torch.randn(ROWS, 4), training=True)
    problem = PlanningProblem(step, ROWS, DEVICES)
    parts = uniform_partitions(PartitionCache(problem))
    assert stage_plans(parts, problem, Profile(DEVICES)) == []
    assert stage_demands(parts) == []


# Mixed stages: convolutions that gain nothing by tensor parallelism, and a classifier that no
# device has the memory for


@cache
def classified() -> tuple[PlanningProblem, UniformPartitions]:
    """Six convolutions of 8 channels and a linear classifier of 128 x 512."""
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(6)]
    head = nn.Sequential(nn.Flatten(), nn.Linear(128, 512))
    step = trace(nn.Sequential(*layers, head), loss, torch.randn(ROWS, 8, 4, 4), training=True)
    problem = PlanningProblem(step, ROWS, DEVICES)
    return problem, uniform_partitions(PartitionCache(problem))


def classified_profile() -> Profile:
    """A row takes a convolution about 3 ms under every degree, the classifier 6 ms by degree."""
    told, parts = profile(1e-10), classified()[1]
    programs = {}
    for m, made_of in parts.partitions.items():
        for i, local in enumerate(made_of.components):
            work = 6e-3 / m if i == 6 else 3e-3 / (1 + 0.1 * (m - 1))
            curves = ((line(work / 3),) * DEVICES, (line(work * 2 / 3),) * DEVICES)
            programs[local.program] = Compute(*curves, Memory(kept=line(64.0)))
    return replace(told, compute=programs)


def test_a_stage_has_its_convolutions_data_and_its_classifier_tensor_parallel() -> None:
    problem, parts = classified()
    state = (128 * 512 + 512) * 4 * 4  # parameters, gradients, state
    tight = replace(problem, limits=(0.7 * state,) * DEVICES)
    best, *others = stage_plans(parts, tight, classified_profile())
    assert [x.tensor for x in problem.layouts(best)] == [1, 1, 1, 1, 1, 1, 2]
    assert [(s.ranks, s.first) for s in best.stages] == [((0, 1), "0"), ((2, 3), "5")]
    assert {Plan.parse(str(plan)) for plan in (best, *others)} == {best, *others}
    assert any(problem.layouts(plan)[-2].tensor == 2 for plan in others)  # one degree a stage


def test_degrees_that_differ_in_groups_of_different_sizes_are_told_in_words() -> None:
    problem, parts = made()
    eight = replace(problem, devices=8)
    stages = (
        PlannedStage(0, 3, 4, 0, (0, 1, 2)),
        PlannedStage(3, 5, 2, 1, (1, 0)),
        PlannedStage(5, 6, 1, 0),
        PlannedStage(6, 8, 1, 0),
    )
    plan = plan_of(StagePlan(stages, 4, 1.0), eight.names, parts.degrees, range(8))
    layouts = eight.layouts(Plan.parse(str(plan)))
    assert [(x.first, x.data, x.tensor) for x in layouts] == [
        (0, 4, 1), (0, 2, 2), (0, 1, 4), (4, 1, 2), (4, 2, 1), (6, 1, 1), (7, 1, 1), (7, 1, 1),
    ]  # fmt: skip
