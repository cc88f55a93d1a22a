"""Plans with stages that are proposed: from made-up facts of a model to texts that it can run."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from synchromesh.planner.problem import PartitionCache, PlanningProblem
from synchromesh.planner.stages.facts import GroupFacts, stage_demands, stage_problem, stage_sizes
from synchromesh.planner.stages.mixes import Searches, StagePlace
from synchromesh.planner.stages.plans import orders, plan_of, stage_plans
from synchromesh.planner.stages.problem import PlannedStage, StagePlan, evaluate
from synchromesh.planner.unequal import slowdowns_of
from synchromesh.planner.uniform import UniformPartitions, uniform_partitions
from synchromesh.trace.capture.capture import trace
from synchromesh.values.layout import Layout, stages_of
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Calls, Compute, Curve, Memory, Pattern, Profile

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


def facts_of(told: Profile) -> GroupFacts:
    return GroupFacts(made()[1], told, range(DEVICES))


def under_1f1b(plans: Iterable[Plan]) -> Plan:
    """The best of these."""
    return next(plan for plan in plans if plan.schedule == "1f1b")


def sizes(plan: Plan) -> list[int]:
    return [len(s.ranks) for s in plan.stages]


def test_every_proposal_is_a_plan_of_the_model() -> None:
    problem, _ = made()
    plans = proposed(profile(1e-6))
    assert {"1f1b", "gpipe", "interleaved"} == {p.schedule for p in plans}
    for plan in plans:
        assert Plan.parse(str(plan)) == plan
        assert not plan.unsupported()
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


def test_what_a_stage_takes_is_the_sum_of_its_layers() -> None:
    problem, _ = made()
    told = profile(0.0, message=0.0, tensor=False)
    found = stage_problem(facts_of(told), problem, range(DEVICES), (1.0,) * DEVICES)
    plan = (PlannedStage(0, 5, 3, 0), PlannedStage(5, 8, 1, 0))
    # micro-batches of 16 rows: 6 on a device of the first stage, 16 on the second
    t = (5 * 6 * 3e-3, 3 * 16 * 3e-3)
    assert abs(evaluate(found, plan, 4) - (sum(t) + 3 * max(t))) < 1e-9
    slow = replace(told, calls=Calls(1e-3, -2e-3, 0.25, 0.75, 9.0))
    found = stage_problem(facts_of(slow), problem, range(DEVICES), (1.0,) * DEVICES)
    t = (t[0] - 5e-3 + 1.0, t[1] - 3e-3 + 1.0)
    assert abs(evaluate(found, plan, 4) - (sum(t) + 3 * max(t))) < 1e-9


def test_what_is_measured_for_stages() -> None:
    _, parts = made()
    demands = stage_demands(parts)
    value = 16 * 4
    assert [d for d in demands if d[0] == "send"] == [
        ("send", Pattern(2, size), -(-ROWS // size) * value) for size in (1, 2, 3)
    ]
    groups = {d[1] for d in demands if d[0] == "all_reduce"}
    assert groups == {Pattern(2), Pattern(3)}
    assert stage_sizes(8) == (1, 2, 4, 6, 7)
    assert stage_sizes(1) == ()


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


def test_one_way_for_all_components_of_a_stage_takes_what_its_search_says() -> None:
    problem, parts = classified()
    facts = GroupFacts(parts, classified_profile(), range(DEVICES))
    stages = stage_problem(facts, problem, range(DEVICES), (1.0,) * DEVICES)
    for first, end, size in ((0, 3, 2), (2, 7, 2), (1, 6, 2)):
        for m in (1, 4):
            place = StagePlace(1.0, float("inf"), m, 1)
            stage, ways = PlannedStage(first, end, size, 0), stages.ways(m)
            inside = facts.inside(stage, m)
            assert inside is not None
            for k, way in enumerate(inside.ways):
                found = Searches(place, stage, inside).mix((k,) * (end - first))
                at = (way, first, end, stages.sizes.index(size))
                assert found.stage == replace(stage, way=way)
                t, x, e = (float(a[at]) for a in (ways.seconds, ways.fill, ways.end))
                assert found.passage == pytest.approx(t + x)
                assert found.slowest == pytest.approx((m - 1) * t + e)


def test_degrees_that_differ_in_groups_of_different_sizes_are_told_in_words() -> None:
    problem, parts = made()
    eight = replace(problem, devices=8)
    stages = (
        PlannedStage(0, 3, 4, 0, (0, 1, 2)),
        PlannedStage(3, 5, 2, 1, (1, 0)),
        PlannedStage(5, 6, 1, 0),
        PlannedStage(6, 8, 1, 0),
    )
    plan = plan_of(parts, eight, StagePlan(stages, 4, 1.0), range(8))
    layouts = eight.layouts(Plan.parse(str(plan)))
    assert [(x.first, x.data, x.tensor) for x in layouts] == [
        (0, 4, 1), (0, 2, 2), (0, 1, 4), (4, 1, 2), (4, 2, 1), (6, 1, 1), (7, 1, 1), (7, 1, 1),
    ]  # fmt: skip


def test_degrees_that_do_not_nest_cross_on_all_ranks_of_a_group() -> None:
    problem = replace(made()[0], devices=12)
    parts = uniform_partitions(PartitionCache(problem))
    of_six = [d for d in stage_demands(parts) if d[0] == "all_to_all"]
    assert of_six == [("all_to_all", Pattern(6), ROWS // 2 * 16 * 4 // 2)]
    assert all(kind in ("send", "all_reduce") for kind, *_ in stage_demands(made()[1]))
