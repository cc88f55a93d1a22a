"""The planning of a layer profile on a cluster: stages that are data parallel inside.

A text profile knows nothing of tensor sharding, so a stage of g devices has g x 1. Of a global
batch of N rows in m micro-batches, of R rows profiled, per device, the quickest ones being as
quick as the profiled one:

    share     = ceil(N / m / g) / R                 times a layer's kept bytes and messages, and
                                                    its seconds, no less than an operator's launch
    message   = latency + share bytes over the cut / rate
    rate      = of the links inside the host where there is one host, else of a host's network link
                over the devices of the stage on it
    gradient  = bytes x seconds of an all-reduce of a bucket / its bytes
    update    = 5 bytes / bandwidth of memory       SGD with momentum reads three, writes two
    resident  = 3 bytes                             parameters, gradients, momentum

Rates are those of the cluster's links, so how efficient a network is stands in its file or in the
catalogue. Messages are hidden behind computation as far as that lasts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil
from typing import Any, ClassVar

import numpy as np

from synchromesh.cost.alive_bytes import PeakMemory
from synchromesh.cost.step_time import StepTime
from synchromesh.estimate.datasheet import headrooms
from synchromesh.estimate.network import GroupPlacement, group_seconds
from synchromesh.estimate.roofline import LAUNCH_SECONDS
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.chain.problem import Floats
from synchromesh.planner.stages.plans import plan_of
from synchromesh.planner.stages.problem import (
    PlannedStage,
    StageFacts,
    StagePlan,
    StageProblem,
    group_sizes,
    micro_batch_numbers,
    stage_costs,
)
from synchromesh.planner.stages.search import search
from synchromesh.planning.layer_profile import LayerProfile
from synchromesh.values.buckets import SIZES
from synchromesh.values.cluster import Cluster
from synchromesh.values.compute import Curve
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.plan import Plan
from synchromesh.values.schedule import most_in_flight
from synchromesh.values.size import readable


@dataclass(frozen=True, kw_only=True)
class LayerCandidate(Candidate):
    """A plan of a layer profile with what it should take; memory of a device of each stage."""

    stages: tuple[PlannedStage, ...]
    stage_seconds: tuple[float, ...]  # of a micro-batch
    idle: float  # part of all devices' time in which nothing is computed
    gap: float


@dataclass(frozen=True)
class LayerPlanned:
    """The plans of a layer profile on a cluster, the quickest first; none where memory forbids."""

    candidates: tuple[LayerCandidate, ...]
    profile: LayerProfile
    cluster: Cluster
    rows: int  # of a global batch
    planning_seconds: float
    refusal: str = ""  # why no plan fits

    @property
    def plan(self) -> Plan:
        """The quickest plan. ValueError where none fits."""
        if self.refusal:
            raise ValueError(self.refusal)
        return self.candidates[0].plan

    def to_dict(self) -> dict[str, Any]:
        layers, cluster = self.profile.layers, self.cluster

        def stage(s: PlannedStage, seconds: float) -> dict[str, Any]:
            names = [layer.name for layer in layers[s.first : s.end]]
            return {"layers": names, "devices": s.devices, "micro_batch_seconds": seconds}

        candidates = [
            {
                "plan": str(c.plan), "step_seconds": c.seconds,
                "memory_bytes": [m.peak for m in c.memory], "idle_share": c.idle, "gap": c.gap,
                "stages": list(map(stage, c.stages, c.stage_seconds)),
            }
            for c in self.candidates
        ]  # fmt: skip
        return {
            "candidates": candidates, "chosen": None if self.refusal else str(self.plan),
            "refusal": self.refusal, "source": cluster.source, "error_band": cluster.error_band,
            "emulated": cluster.emulated, "cluster": cluster.name, "devices": len(cluster.ranks),
            "rows": self.rows, "planning_seconds": self.planning_seconds,
        }  # fmt: skip


def plan_layers(
    profile: LayerProfile, cluster: Cluster, profiled: int, rows: int | None = None,
    memory: float | None = None, headroom: str | None = None,
) -> LayerPlanned:  # fmt: skip
    """The quickest plans of one stage (`data`) and of several. profiled: rows of the profile's
    minibatch. rows: of a global batch; default: the profiled ones on each device."""
    began = time.perf_counter()
    count = len(cluster.ranks)
    limits = tuple(x.usable for x in headrooms(cluster, memory, headroom))
    made = _Planning(profile, cluster, profiled, rows or profiled * count, limits)
    layers = len(profile.layers)
    one = made.problem.only(lambda first, end, size: (end - first == layers) & (size > 0))
    several = made.problem.only(lambda first, end, size: (end - first < layers) & (size > 0))
    plans = [p for p in (search(one), search(several)) if p is not None]
    order = tuple(sorted((made.candidate(p) for p in plans), key=lambda c: c.seconds))
    refusal = "" if order else made.misfit()
    return LayerPlanned(order, profile, cluster, made.rows, time.perf_counter() - began, refusal)


def scaled(measured: Sequence[Curve], share: float) -> Floats:
    """Seconds of layers for a share of their rows: those that take any time are launched."""
    seconds = np.array([curve(share) for curve in measured])
    taking = np.array([curve(1.0) > 0 for curve in measured])
    return np.where(taking, np.maximum(seconds, LAUNCH_SECONDS), 0.0)


def slowdowns(cluster: Cluster) -> tuple[float, ...]:
    """Seconds of each device for one of the quickest; 1 where a rate is not known."""
    rates = [device.flops.get("float32", 0.0) for _, device in cluster.ranks]
    most, all_known = max(rates), min(rates) > 0
    return tuple(most / rate if all_known else 1.0 for rate in rates)


@dataclass(frozen=True)
class _Planning:
    profile: LayerProfile
    cluster: Cluster
    profiled: int
    rows: int
    limits: tuple[float, ...]  # bytes that plans may use of each device

    UPDATE: ClassVar[float] = 5.0  # bytes moved and ...
    RESIDENT: ClassVar[float] = 3.0  # held for one of a parameter: SGD with momentum

    @cached_property
    def problem(self) -> StageProblem:
        sizes, count = group_sizes(len(self.cluster.ranks)), len(self.profile.layers)
        costs = cache(lambda m: stage_costs(self.facts, m, sizes, (1,), count))
        numbers = micro_batch_numbers(self.rows)
        slower = slowdowns(self.cluster)
        return StageProblem(count, sizes, self.limits, slower, numbers, costs)

    def facts(self, size: int, _: int, micro_batches: int) -> StageFacts | None:
        """What layers take on `size` devices; None where a device would have no row."""
        layers = self.profile.layers
        if micro_batches * size > self.rows:
            return None
        share = ceil(self.rows / (micro_batches * size)) / self.profiled
        parameters = np.array([layer.parameters for layer in layers])
        device = self.cluster.ranks[0][1]
        bandwidth = device.bytes_per_second or float("inf")
        group = GroupPlacement.of(self.cluster, range(size))
        bucket = group_seconds("all_reduce", SIZES.full, group) / SIZES.full
        return StageFacts(
            forward=scaled([layer.forward for layer in layers], share),
            backward=scaled([layer.backward for layer in layers], share),
            gradient=bucket * parameters, update=self.UPDATE * parameters / bandwidth,
            resident=self.RESIDENT * parameters, message=self._messages(share, size),
            kept=share * np.array([layer.kept for layer in layers]),
        )  # fmt: skip

    def _messages(self, share: float, size: int) -> Floats:
        """Seconds by cut of what a device of a stage sends."""
        hosts = self.cluster.hosts
        if len(self.cluster.ranks) == 1:
            return np.zeros(len(self.profile.layers) + 1)
        ends = (hosts[0].name, hosts[min(1, len(hosts) - 1)].name)
        link, together = self.cluster.link(*ends), 1
        if len(hosts) > 1:
            together = max(1, min(size, max(len(h.devices) for h in hosts)) // link.lanes)
        over = share * together * np.array(self.profile.over_cuts)
        return np.where(over, link.latency_seconds + over / link.bytes_per_second, 0.0)

    def candidate(self, staged: StagePlan) -> LayerCandidate:
        m, costs = staged.micro_batches, self.problem.costs(staged.micro_batches)
        devices, layers = self.problem.devices, self.profile.layers
        memory, seconds, busy = [], [], 0.0
        for s, stage in enumerate(staged.stages):
            at = (stage.way, stage.first, stage.end, self.problem.sizes.index(stage.devices))
            resident, kept = float(costs.resident[at]), float(costs.kept[at])
            held = most_in_flight(len(staged.stages), (s,), m) * kept
            memory.append(PeakMemory(round(resident), round(resident + held)))
            seconds.append(float(costs.seconds[at]))
            work = sum(x.forward(1.0) + x.backward(1.0) for x in layers[stage.first : stage.end])
            busy += work * self.rows / self.profiled
        plan = plan_of(staged, [x.name for x in layers], (1,), range(devices))
        if len(staged.stages) == 1:
            plan = Plan(LayoutSpec("data" if devices > 1 else "single"), micro_batches=m)
        time = StepTime(
            staged.seconds, forward=0.0, backward=0.0, update=0.0, computed=busy / devices,
            waited=0.0, pieces=1,
        )  # fmt: skip
        idle = max(0.0, 1 - busy / (devices * staged.seconds))
        return LayerCandidate(
            plan=plan, time=time, memory=tuple(memory), fits=True, reason="", stages=staged.stages,
            stage_seconds=tuple(seconds), idle=idle, gap=staged.gap,
        )  # fmt: skip

    def misfit(self) -> str:
        layers, limit = self.profile.layers, min(self.problem.limits)
        resident = [self.RESIDENT * x.parameters for x in layers]
        held = [r + x.kept / self.profiled for r, x in zip(resident, layers, strict=True)]
        largest = max(range(len(layers)), key=held.__getitem__)
        return (
            f"no stages fit {self.problem.devices} devices, of which plans may use "
            f"{readable(limit)} each (--headroom leaves the rest): parameters, "
            f"gradients and momentum are {readable(sum(resident))} "
            f"in all, and the largest layer, {layers[largest].name}, needs "
            f"{readable(held[largest])} with one row. Use more devices, devices of more memory, "
            "or a smaller --batch-size"
        )
