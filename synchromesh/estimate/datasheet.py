"""A datasheet's profile: what a choice of plan needs, without any device.

The very programs that would run are walked on fake tensors, which have shapes and no numbers: the
roofline gives their seconds, live storages their memory. Seconds of collectives come from the
cluster's links (`estimate.network`). Nothing here is measured: the
profile says `datasheet` and carries the cluster's error band."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from synchromesh.estimate import network
from synchromesh.estimate.roofline import LAUNCH_SECONDS, Operation, Operations, seconds
from synchromesh.planner.problem import (
    Demand,
    Find,
    Headroom,
    PartitionCache,
    PlanningProblem,
    Read,
    Say,
    T,
    Write,
    collectives_of,
    program_rows,
    silent,
)
from synchromesh.programs.borders import StandIns
from synchromesh.programs.compute import Bench, Bytes
from synchromesh.programs.model import Model
from synchromesh.programs.optimizer import OptimizerCost, states_of
from synchromesh.trace.partition.local import LocalComponent, Partition
from synchromesh.trace.step import Step
from synchromesh.values.allowance import Allowance
from synchromesh.values.cluster import Cluster, Device
from synchromesh.values.optimizer import trial_gradient, twin_of
from synchromesh.values.profile import Calls, Compute, Curve, Memory, Pattern, Profile

SOURCE = "datasheet"
# No data sheet says what Python takes: measured (profiling/calls.py) on one core of a 2-core Intel
# Xeon that was busy, torch 2.13, 2026-11-22, of models of 10 and of 100 parameters. A component's
# backward has no call of its own here, so nothing is to be taken away from it.
CALLS = Calls(forward=3e-6, begin_forward=13e-6, begin_backward=15e-6, step=350e-6)
# Of predicted bytes; assumed. They are a live run's to within 5 % (benchmarks/README.md), but a
# GPU's allocator leaves holes, and under autocast a GPU keeps more in float32 than a CPU does.
MEMORY_ERROR = 0.1
CPU = torch.device("cpu")  # where fake tensors say that they are


@dataclass(frozen=True)
class Counted:
    """One program at some rows: the operators of its forward and backward, its memory."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    bytes: Bytes


def headrooms(
    cluster: Cluster, memory: float | None = None, asked: str | None = None
) -> tuple[Headroom, ...]:
    """Of every rank: of `memory` bytes, else of those of its device; as `asked`."""
    reserve = Headroom.RESERVE
    return tuple(
        Headroom.of(memory or d.memory_bytes, asked, MEMORY_ERROR, reserve * (d.kind == "cpu"))
        for _, d in cluster.ranks
    )


@dataclass(frozen=True)
class DatasheetFacts:
    """The facts of a planning problem on a cluster; implements `planner.problem.Facts`."""

    partitions: PartitionCache
    optimizer: Optimizer
    cluster: Cluster
    extrapolation: float = 1.0  # rooflines bend: what moves weights alone computes with more rows

    @classmethod
    def of(
        cls, step: Step, model: nn.Module, optimizer: Optimizer, rows: int, cluster: Cluster,
        memory: float | None = None, headroom: str | None = None, say: Say = silent,
    ) -> "DatasheetFacts":  # fmt: skip
        """For global batches of `rows`. ValueError for an optimizer that cannot be used."""
        modules = Model(model).inside(step.chain.names)
        rooms = headrooms(cluster, memory, headroom)
        problem = PlanningProblem.of(step, rows, modules, rooms, optimizer)
        return cls(PartitionCache(problem, say), optimizer, cluster)

    def allowing(self, allowed: Allowance) -> "DatasheetFacts":
        """The same, where `auto` may choose more than what one device computes."""
        cache = self.partitions
        problem = replace(cache.problem, allowed=allowed)
        return replace(self, partitions=PartitionCache(problem, cache.say))

    def profile(
        self, partitions: Iterable[Partition], known: Profile | None,
        ranks: Sequence[int] | None = None, *, rows: int = 0, quick: bool = False,
        besides: Iterable[Demand] = (), micro_batches: Collection[int] = (1,),
    ) -> Profile:  # fmt: skip
        """The data sheet of `partitions`, with the collectives that they or `besides` ask for."""
        problem, parts = self.partitions.problem, list(partitions)
        count = len(self.cluster.ranks if ranks is None else ranks)
        demands = [d for p in parts for d in collectives_of(p, problem.rows, count)]
        have = {} if known is None else known.network
        new = [d[:2] for d in (*demands, *besides) if d[:2] not in have]
        links = network.curves(self.cluster, new, ranks)
        return datasheet(problem, self.optimizer, parts, self.cluster, links, known, micro_batches)

    def agreed(self, find: Find[T], write: Write[T], read: Read[T]) -> list[T]:
        return find()


def datasheet(
    problem: PlanningProblem, optimizer: Optimizer, partitions: Iterable[Partition],
    cluster: Cluster, network: Mapping[tuple[str, Pattern], Curve], known: Profile | None = None,
    micro_batches: Collection[int] = (1,),
) -> Profile:  # fmt: skip
    """The profile of `partitions` on all devices of `cluster`, with what `known` has besides.
    network: seconds by payload of every collective that may be asked for. micro_batches: into how
    many a plan may cut a global batch. ValueError where the cluster says no rate of a type that
    the model computes in."""
    began = time.perf_counter()
    devices = [device for _, device in cluster.ranks]
    profile = _besides(optimizer, cluster) if known is None else known
    wanted: dict[str, tuple[Partition, LocalComponent, tuple[int, ...]]] = {}
    for partition in partitions:
        for local in partition.components:
            rows = program_rows(problem.rows, local.layout, micro_batches)
            before = profile.compute.get(local.program)
            if not before or rows[0] < before.fewest or rows[-1] > before.reach:
                wanted.setdefault(local.program, (partition, local, rows))
    compute = {}
    if wanted:
        step, values = problem.step, [edge.value for edge in problem.step.chain.edges]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            constants = {n: mode.from_tensor(x.detach()) for n, x in step.constants.items()}
            borders = {v.name: torch.empty(v.shape, dtype=getattr(torch, v.dtype)) for v in values}
            step, tensors = replace(step, constants=constants), StandIns(step.chain, {}, CPU)
            for key, (partition, local, sizes) in wanted.items():
                counted = {
                    n: count(CountingBench(step, partition, local, tensors, borders, n, CPU))
                    for n in sizes
                }
                made = _compute(counted, devices)
                old = profile.compute.get(key)
                compute[key] = old.joined(made) if old else made
    return replace(
        profile,
        compute={**profile.compute, **compute},
        network={**profile.network, **network},
        seconds=profile.seconds + time.perf_counter() - began,
    )


class CountingBench(Bench):
    def forward(self) -> tuple[Tensor, ...]:
        with Operations() as self.ran_forward:
            return super().forward()

    def seed(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A gradient whose numbers nobody writes: filling it is no operator of the program."""
        return torch.empty(shape, dtype=dtype)

    def backward(self, seeded: Sequence[tuple[Tensor, Tensor]]) -> None:
        with Operations() as self.ran_backward:
            super().backward(seeded)


def count(bench: CountingBench) -> Counted:
    with plain_operators():
        used = bench.bytes()
    return Counted(tuple(bench.ran_forward.operators), tuple(bench.ran_backward.operators), used)


@contextmanager
def plain_operators() -> Iterator[None]:
    """Without mkldnn, which has whole layers as one operator that no formula counts."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _compute(counted: Mapping[int, Counted], devices: Sequence[Device]) -> Compute:
    """Seconds on each device; one curve where all are alike."""
    different = list(dict.fromkeys(devices))

    def curves(direction: str) -> tuple[Curve, ...]:
        of_device = {
            d: Curve.of((n, seconds(getattr(c, direction), d)) for n, c in counted.items())
            for d in different
        }
        return tuple(of_device[d] for d in (devices if len(different) > 1 else different))

    used = {n: c.bytes for n, c in counted.items()}
    most = used[max(used)]
    points = [(n, b.kept, b.forward, b.backward, b.staying) for n, b in used.items()]
    memory = Memory.of(points, most.kept_inputs, most.kept_outputs)
    return Compute(curves("forward"), curves("backward"), memory)


def _besides(optimizer: Optimizer, cluster: Cluster) -> Profile:
    """What no component has: the optimizer on the slowest device."""
    devices = list(dict.fromkeys(device for _, device in cluster.ranks))
    updates = [update(optimizer, device) for device in devices]
    slowest = max(updates, key=lambda u: u.byte)
    return Profile(
        devices=len(cluster.ranks), update_byte=slowest.byte,
        update_tensor=max(u.tensor for u in updates),
        copy_byte=max(u.copy_byte for u in updates),
        state_factor=slowest.state_factor, calls=CALLS, host=max(u.once for u in updates),
        source=SOURCE, error_band=cluster.error_band, emulated=cluster.emulated,
    )  # fmt: skip


def update(optimizer: Optimizer, device: Device) -> OptimizerCost:
    """From the operators that a twin of the optimizer runs on a few tensors of its own. Bytes are
    those that its operators move: parameters, gradients and states as often as they are read and
    written. Two numbers of tensors tell what an operator a tensor costs from what an operator for
    all of them (`foreach`, PyTorch's default on a GPU) costs."""
    few, many = 2, 6
    operators, moved, factor = _counted(optimizer, device, few)
    more, _, _ = _counted(optimizer, device, many)
    each = max(0.0, (more - operators) / (many - few))
    once = max(0.0, operators - each * few)
    byte = 1 / device.bytes_per_second if device.bytes_per_second else 0.0  # seconds to move one
    return OptimizerCost(
        once * LAUNCH_SECONDS, moved * byte, each * LAUNCH_SECONDS, 2 * byte, factor
    )


def _counted(optimizer: Optimizer, device: Device, tensors: int) -> tuple[int, float, float]:
    """Operators of a step, bytes that they move and bytes of state, both a parameter byte."""
    dtype = optimizer.param_groups[0]["params"][0].dtype
    made = [nn.Parameter(torch.ones(128, 128, dtype=dtype)) for _ in range(tensors)]
    twin = twin_of(optimizer, made)
    group = twin.param_groups[0]
    if device.kind != "cpu" and group.get("foreach", False) is None and not group.get("fused"):
        group["foreach"] = True
    for _ in range(2):  # the first step makes the states
        for p in made:
            p.grad = trial_gradient(optimizer, p)
        with Operations() as counted:
            twin.step()
    size = sum(p.nbytes for p in made)
    moved = sum(o.bytes for o in counted.operators) / size
    states = sum(x.nbytes for x in states_of(twin) if x.numel() > 1) / size
    return len(counted.operators), moved, states
