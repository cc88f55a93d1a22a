"""The seconds of calls measured: what a step costs beside programs, collectives and bytes.

A program of trivial components, `y = w x` each, is run by the engine's own pipeline. With
f(n) seconds of its forward with n components, b(n) of its backward, and f_1, b_1 those of one such
component that is timed alone, as all programs are (`programs/compute.py`),

    forward         =  (f(n) - f(1)) / (n - 1) - f_1        of a component's call
    backward        =  (b(n) - b(1)) / (n - 1) - b_1        less than 0: alone it has a call of
    begin_forward   =  f(1) - (f(n) - f(1)) / (n - 1)       autograd of its own, of which a step
    begin_backward  =  b(1) - (b(n) - b(1)) / (n - 1)       has one for all components

`step` is what the trainer asks of model, batch and optimizer in every step. Each run of it comes
after something else has filled the caches, as the operators of a step have."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from synchromesh.engine.agreement import Marks, RowAgreement
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.pipeline import MicroBatch, PipelineWalk, Seeds
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.engine.program import Program
from synchromesh.engine.world import World
from synchromesh.programs.batch_norm import BatchNormPolicy
from synchromesh.programs.clock import synchronised
from synchromesh.programs.collectives import GroupAxis
from synchromesh.programs.compute import Bench
from synchromesh.programs.model import Model
from synchromesh.programs.random import RandomStreams
from synchromesh.trace.capture.capture import signature
from synchromesh.trace.capture.model_snapshot import training_modes
from synchromesh.trace.partition.local import Computation, Input, LocalComponent, Output, Partition
from synchromesh.trace.step import Step
from synchromesh.values.component import Chain, Component, Edge, Parameter, Rows, Value
from synchromesh.values.holding import holdings
from synchromesh.values.layout import Layout, leaf_layouts
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.placement import REPLICATED
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Calls


@dataclass(frozen=True)
class CallTuning:
    """How calls are timed. Chosen, not measured."""

    components: int = 9  # of the longer program; the shorter one has one
    runs: int = 15  # of each program, whose median counts
    steps: int = 8  # of what is done once a step, likewise
    cold_bytes: int = 1 << 23  # that are written before each of those: a core's caches and more


TUNING = CallTuning()
_ALONE = Layout(1, 1)
_SINGLE = Plan(LayoutSpec("single"))


def call_seconds(world: World, model: Model, optimizer: Optimizer, batch: Any) -> Calls:
    """Of a step on this rank's clock, without the optimizer's; changes and sends nothing."""
    now = synchronised(world.device)
    one, more = (_trivial(world, n, now) for n in (1, TUNING.components))
    alone = _timed_alone(world.device)
    each = [(b - a) / (TUNING.components - 1) for a, b in zip(one, more, strict=True)]
    forward, backward = (part - own for part, own in zip(each, alone, strict=True))
    begin = [max(0.0, first - part) for first, part in zip(one, each, strict=True)]
    return Calls(forward, backward, begin[0], begin[1], _step(world, model, optimizer, batch, now))


def _trivial(world: World, components: int, now: Callable[[], float]) -> tuple[float, float]:
    step, made = _chain(components)
    device, rows = world.device, GlobalRows((1,), _SINGLE)
    described = [p for c in step.chain.components for p in c.parameters]
    tensors = {p.name: torch.ones(1, device=device, requires_grad=True) for p in described}
    groups = PlanGroups(world, (world.rank,), (_ALONE,))

    def axis(layout: Layout, streams: RandomStreams) -> GroupAxis:
        return GroupAxis(groups.tensor_group(layout), streams, BatchNormPolicy(None))

    placed = holdings(described, made.placements, 1)
    program = Program(step, made, groups, tensors, placed, axis, RandomStreams(0, device))
    x, seed = torch.ones(1, 1, device=device), torch.ones(1, 1, device=device)
    taken = []
    for turn in range(TUNING.runs + 1):
        times = [now()]

        def forwarded(*_: Any, times: list[float] = times) -> None:
            times.append(now())

        def backwards(_: Any, results: Any, times: list[float] = times) -> Seeds:
            times.append(now())
            return [(y, seed) for result in results for y in result.outputs]

        walk = PipelineWalk([MicroBatch(program, rows, [(x, rows)])], groups, turn, 0, 1)
        walk.train("1f1b", forwarded, lambda: None, backwards)
        taken.append((times[1] - times[0], now() - times[2]))
        for parameter in tensors.values():
            parameter.grad = None
    forward, backward = (median(column) for column in zip(*taken[1:], strict=True))
    return forward, backward


def _timed_alone(device: torch.device) -> tuple[float, float]:
    step, made = _chain(2)
    names = [name for local in made.components for name in local.parameters]
    tensors = {name: torch.ones(1) for name in names}
    borders = {e.value.name: torch.ones(1, 1) for e in step.chain.edges}
    bench = Bench(step, made, made.components[1], tensors, borders, 1, device)
    taken = [bench.once() for _ in range(TUNING.runs + 1)]
    forward, backward = (median(column) for column in zip(*taken[1:], strict=True))
    return forward, backward


def _chain(components: int) -> tuple[Step, Partition]:
    values = [Value(f"y{i}", (1,), "float32", Rows(), i > 0) for i in range(components + 1)]
    locals_, edges, placements = [], [], {}
    for i in range(components):
        name = f"w{i}"
        component = Component(f"c{i}", (Parameter(name, (1,), "float32"),))
        graph = torch.fx.Graph()
        _, _, x, w = (graph.placeholder(p) for p in ("axis", "rows", "x", "w"))
        graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, w)),))
        source = i - 1 if i else None
        locals_.append(
            LocalComponent(
                component, _ALONE, torch.fx.GraphModule({}, graph),
                (Input(values[i], source, REPLICATED, REPLICATED),),
                (Output(values[i + 1], REPLICATED),), (name,), (), (), (Computation(1.0),), {},
                name,
            )
        )  # fmt: skip
        edges.append(Edge(values[i], locals_[i - 1].component.name if i else None, (f"c{i}",)))
        placements[name, _ALONE] = REPLICATED
    chain = Chain(tuple(local.component for local in locals_), tuple(edges))
    last = values[-1]
    step = Step(chain, torch.fx.Graph(), {}, (last.name,), (values[0].name,), {})
    output, leaves = (Output(last, REPLICATED),), leaf_layouts([_ALONE])
    return step, Partition(tuple(locals_), placements, output, leaves)


def _step(
    world: World, model: Model, optimizer: Optimizer, batch: Any, now: Callable[[], float]
) -> float:
    alone = world.group((world.rank,))
    agree = RowAgreement(alone, (0,), [_ALONE], _SINGLE)
    streams = RandomStreams(0, world.device)
    others = torch.zeros(TUNING.cold_bytes // 4, device=world.device)
    taken = []
    for _ in range(TUNING.steps + 1):
        others.add_(1)
        began = now()
        now_is = model.trained(), training_modes(model.modules)  # whether the trace holds still
        agree(batch, Marks.of(hash(now_is), optimizer, batch, 0, "", ""))
        signature(batch)  # which program it is
        with streams.preserved():
            _loss(world.device)
        taken.append(now() - began)
    return median(taken[1:])


def _loss(device: torch.device) -> Tensor:
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    sums[0] += sums[1] * 2
    sums[1] += 1
    total = torch.stack([sums]).sum(0)
    return total[0] / total[1]
