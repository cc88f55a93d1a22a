"""The facts of a layer profile, so that its plans are walked as those of a model are.

A layer is an opaque component: it has data layouts only, takes what was measured of it and hands
its value to its readers. Links and the optimizer, SGD with momentum, are as data sheets have
them."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

import torch

from synchromesh.estimate.datasheet import DatasheetFacts, headrooms
from synchromesh.planner.problem import PartitionCache, PlanningProblem, program_rows
from synchromesh.planning.layer_profile import Layer, LayerProfile
from synchromesh.planning.layers import plan_layers, scaled, slowdowns
from synchromesh.trace.partition.local import Partition
from synchromesh.trace.step import Step
from synchromesh.values.cluster import Cluster
from synchromesh.values.component import Chain, Component, Edge, Parameter, Rows, Value
from synchromesh.values.compute import Compute, Curve, Memory
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


@dataclass(frozen=True, kw_only=True)
class LayerFacts(DatasheetFacts):
    """Of `layers`, of which `profiled` rows were measured; implements `planner.problem.Facts`."""

    layers: LayerProfile
    profiled: int
    asked: tuple[int, float | None, str | None]  # rows of a global batch, memory, headroom

    @classmethod
    def of_layers(
        cls, layers: LayerProfile, cluster: Cluster, rows: int, memory: float | None,
        headroom: str | None,
    ) -> "LayerFacts":  # fmt: skip
        """memory, headroom: as of `sm.plan`. ValueError where the profile lacks its rows."""
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
        profiled, rooms = layers.needed_rows, headrooms(cluster, memory, headroom)
        step = Step(_chain(layers, profiled), None, {}, ("loss",), (), {})
        cache = PartitionCache(PlanningProblem.of(step, rows, {}, rooms, optimizer))
        asked = (rows, memory, headroom)
        return cls(cache, optimizer, cluster, layers=layers, profiled=profiled, asked=asked)

    def quickest(self) -> Plan:
        """That of `plan --profile`. ValueError where none fits."""
        return plan_layers(self.layers, self.cluster, self.profiled, *self.asked).plan

    @cached_property
    def _slowdowns(self) -> tuple[float, ...]:
        """Of each device; one where all are alike."""
        found = slowdowns(self.cluster)
        return found if len({*found}) > 1 else (1.0,)

    def profile(
        self, partitions: Iterable[Partition], known: Profile | None,
        ranks: Sequence[int] | None = None, *, micro_batches: Collection[int] = (1,),
        **others: Any,
    ) -> Profile:  # fmt: skip
        """As of a model, but for programs, of which nothing is left to be counted."""
        made, parts = super().profile((), known), list(partitions)
        compute, programs = dict(made.compute), [c for part in parts for c in part.components]
        for local, layer in zip(programs, self.layers.layers * len(parts), strict=True):
            if local.layout.tensor > 1:
                raise ValueError(
                    f"a layer profile knows nothing of tensor sharding, and {local.layout} has "
                    f"tensor({local.layout.tensor}): its plans are `data`, also in stages"
                )
            rows = program_rows(self.partitions.problem.rows, local.layout, micro_batches)
            new, old = self._compute(layer, rows), compute.get(local.program)
            compute[local.program] = old.joined(new) if old else new
        made = replace(made, compute=compute)
        return super().profile(parts, made, ranks, micro_batches=micro_batches, **others)

    def _compute(self, layer: Layer, sizes: Sequence[int]) -> Compute:
        shares = {rows: rows / self.profiled for rows in sizes}

        def curves(measured: Curve) -> tuple[Curve, ...]:
            one = Curve.of((n, float(scaled([measured], x)[0])) for n, x in shares.items())
            return tuple(map(one.scaled, self._slowdowns))

        kept, value, held = layer.kept, layer.value, layer.parameters
        working = {n: x * (kept + value) + held for n, x in shares.items()}
        points = [(n, x * kept, x * value, working[n], working[n]) for n, x in shares.items()]
        memory = Memory.of(points, (), (0,) if kept else ())
        return Compute(curves(layer.forward), curves(layer.backward), memory)


def _chain(layers: LayerProfile, profiled: int) -> Chain:
    names = [layer.name for layer in layers.layers]
    components, edges = [], []
    for layer, readers in zip(layers.layers, layers.readers, strict=True):
        shape = (ceil(layer.parameters / 4),)
        held = (Parameter(f"{layer.name}.all", shape, "float32"),) if shape[0] else ()
        components.append(Component(layer.name, held, structure=layer.name))
        if readers:
            value = Value(layer.name, (ceil(layer.value / profiled),), "uint8", Rows(), True)
            edges.append(Edge(value, layer.name, tuple(names[i] for i in readers)))
    return Chain(tuple(components), tuple(edges))
