"""The planning of a model on a cluster that need not be there: datasheet, search, prices, reasons.

    trace -> uniform partitions -> datasheet -> search -> best few and the plain plans
                                             -> datasheet of new programs -> exact prices
The same functions decide as on live ranks (`choosing`); only the profile is another one.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from synchromesh import catalogue
from synchromesh.engine import batches
from synchromesh.engine.model import Model
from synchromesh.estimate import network
from synchromesh.estimate.datasheet import SOURCE, datasheet
from synchromesh.planner import candidate as pricing
from synchromesh.planner.assemble import crossings
from synchromesh.planner.candidate import Candidate, readable
from synchromesh.planner.choice import (
    Choice,
    RunnerUp,
    decided,
    misfit,
    pieced,
    plain,
    runner_ups,
    searched,
    uniform,
    unsplit,
)
from synchromesh.planner.unequal import widened
from synchromesh.profiling.facts import Subject, traffic
from synchromesh.trace.capture.capture import trace
from synchromesh.trace.partition.local import Partition
from synchromesh.trace.step import Step
from synchromesh.values.cluster import Cluster
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.optimizer import coupled
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Pattern, Profile
from synchromesh.workloads.workload import Loss

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Planned:
    """A choice for a cluster: candidates with their predictions, and how sure these are."""

    choice: Choice
    cluster: Cluster
    rows: int  # of a global batch
    refusal: str = ""  # why no plan fits

    @property
    def plan(self) -> Plan:
        """The chosen plan. ValueError where none fits: by how much, where, what would help."""
        if self.refusal:
            raise ValueError(self.refusal)
        return self.choice.chosen.plan

    @property
    def components(self) -> tuple[RunnerUp, ...]:
        """Each component's layout and runner-up, where they were asked for."""
        return self.choice.components

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.choice.candidates

    @property
    def certainty(self) -> str:
        """Where the numbers are from and what they may be off by: `datasheet, +-25 %`."""
        return certainty(self.choice.profile)

    def explain(self) -> str:
        """The choice for a reader: a line per candidate, a line per component."""
        out = [f"{self.cluster.name}, {self.rows} rows a step ({self.certainty})"]
        out += [_line(c) for c in self.candidates]
        out += [f"  {row}" for row in self.components]
        return "\n".join([*out, self.refusal] if self.refusal else out)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; its keys are interface."""
        return {
            **self.choice.to_dict(),
            "chosen": None if self.refusal else str(self.choice.chosen.plan),
            "refusal": self.refusal,
            "source": self.choice.profile.source,
            "error_band": self.choice.profile.error_band,
            "emulated": self.choice.profile.emulated,
            "cluster": self.cluster.name,
            "devices": len(self.cluster.ranks),
            "rows": self.rows,
        }


def certainty(profile: Profile) -> str:
    band = f"+-{profile.error_band:.0%}" if profile.error_band else "error not stated"
    return f"{profile.source}, {band}" + (", emulated" if profile.emulated else "")


def _line(c: Candidate) -> str:
    if c.time is None:
        return f"{c.plan}: {c.reason}"
    most = max(m.peak for m in c.memory)
    return (
        f"{c.plan}: {c.seconds * 1e3:.2f} ms a step, {readable(most)} on a device, "
        f"{c.time.communication_share:.0%} waiting for traffic; {c.reason}"
    )


def plan(
    model: nn.Module,
    loss: Loss,
    example_batch: Any,
    *,
    optimizer: MakeOptimizer | Optimizer = torch.optim.AdamW,
    cluster: Cluster | str,
    memory: float | None = None,
    explained: bool = True,
) -> Planned:
    """The plan of least predicted step time for `model` on `cluster`; no device is needed.

    example_batch: a global batch; of its numbers nothing but shapes and types matters.
    optimizer: one over the model's parameters, or what makes one of them.
    cluster: a Cluster, a name of the catalogue (`h100x16`), or a file that `synchromesh doctor`
    wrote. memory: bytes that a rank may use; default: those of its device.
    explained: also finds each component's runner-up.

    Estimates are right to the catalogue's error band (`certainty`). ValueError for a cluster that
    is not known or does not say what is needed.
    """
    place = cluster if isinstance(cluster, Cluster) else cluster_of(cluster)
    held = Model(model)
    rows = batches.row_count(example_batch)
    step = trace(model, loss, example_batch, training=True)
    limits = [memory or float(device.memory_bytes) for _, device in place.ranks]
    if step.opaque:
        return Planned(_whole(step, place), place, rows)
    chosen = optimizer if isinstance(optimizer, Optimizer) else optimizer(model.parameters())
    planned = pricing.Model(step, rows, held.inside(step.chain.names))
    return _choose(
        planned, Subject(step, {}, example_batch, chosen, rows), place, limits, explained
    )


def cluster_of(text: str) -> Cluster:
    """The cluster of a file (.yaml, .yml, .json), else of the catalogue."""
    if text.endswith((".yaml", ".yml", ".json")):
        if not Path(text).is_file():
            raise ValueError(
                f"there is no file {text}: `synchromesh doctor` writes one, and "
                "`synchromesh plan --clusters` lists the names of the catalogue"
            )
        return Cluster.load(text)
    return catalogue.cluster(text)


def _choose(
    planned: pricing.Model,
    subject: Subject,
    cluster: Cluster,
    limits: Sequence[float],
    explained: bool,
) -> Planned:
    devices, whole = len(cluster.ranks), coupled(subject.optimizer)
    parts = uniform(planned, devices, splits=not whole)
    made = list(parts.partitions.values())
    besides = [(kind, pattern) for kind, pattern, _ in crossings(parts)]
    profile = _profile(subject, made, cluster, None, besides=besides)
    began = time.perf_counter()
    result = searched(parts, profile, min(limits))
    spent = time.perf_counter() - began
    texts = [str(p) for p in (*result.plans(planned), *plain(devices, splits=not whole))]
    plans = [Plan.parse(t) for t in dict.fromkeys(texts)]
    all_devices = [p for p in plans if len(p.devices(devices)) == devices]
    profile = _profile(subject, planned.possible(all_devices, devices), cluster, profile)
    began = time.perf_counter()
    found = [pricing.price(planned, p, devices, profile, limits) for p in plans]
    more = widened(planned, found, devices, profile)
    for p in more:
        if p.ranks is not None and (whole or devices % len(p.ranks)):
            profile = _profile(subject, planned.possible([p], devices), cluster, profile, p.ranks)
    found += [pricing.price(planned, p, devices, profile, limits) for p in more]
    found = [c for c in found if c.time is not None or c.plan.ranks is None]
    found = [pieced(planned, c, devices) for c in found] + (
        unsplit(devices, whole) if whole else []
    )
    found = decided(found)
    spent += time.perf_counter() - began
    best = found[0]
    rows = runner_ups(planned, result, best.plan, min(limits)) if explained and best.fits else []
    refusal = "" if best.fits else misfit(found, limits, planned.rows)
    choice = Choice(tuple(found), profile, spent, tuple(rows))
    return Planned(choice, cluster, planned.rows, refusal)


def _profile(
    subject: Subject,
    partitions: Sequence[Partition],
    cluster: Cluster,
    known: Profile | None,
    ranks: Sequence[int] | None = None,
    besides: Sequence[tuple[str, Pattern]] = (),
) -> Profile:
    """The datasheet of `partitions` on `ranks` (all), with the collectives that they or `besides`
    ask for."""
    count = len(cluster.ranks if ranks is None else ranks)
    asked = [w[:2] for p in partitions for w in traffic(p, subject.rows, count)]
    have = {} if known is None else known.network
    new = [w for w in dict.fromkeys([*asked, *besides]) if w not in have]
    return datasheet(subject, partitions, cluster, network.curves(cluster, new, ranks), known)


def _whole(step: Step, cluster: Cluster) -> Choice:
    """The one plan of a model that could not be traced: there is no graph to estimate."""
    count = len(cluster.ranks)
    only = Plan(LayoutSpec("data" if count > 1 else "single"))
    reason = f"the model runs whole, nothing can be estimated: {step.reason}"
    profile = Profile(
        count, source=SOURCE, error_band=cluster.error_band, emulated=cluster.emulated
    )
    return Choice((Candidate(only, None, (), True, reason),), profile, 0.0)
