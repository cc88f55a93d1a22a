"""The planning of a model on a cluster that need not be there: `sm.plan`.

Decides as live ranks do (`planner.decide`), by facts that are estimated from data sheets.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from synchromesh import catalogue
from synchromesh.engine.model import Model
from synchromesh.estimate import network
from synchromesh.estimate.datasheet import SOURCE, datasheet
from synchromesh.planner.candidate import Candidate, readable
from synchromesh.planner.choice import Choice, RunnerUp
from synchromesh.planner.decide import Find, Read, Write, decide, survey
from synchromesh.planner.demand import Demand, collectives_of
from synchromesh.planner.misfit import misfit
from synchromesh.planner.planning_problem import PartitionCache, PlanningProblem
from synchromesh.trace.capture.batch import row_count
from synchromesh.trace.capture.capture import trace
from synchromesh.trace.capture.carry import Start, joined
from synchromesh.trace.partition.local import Partition
from synchromesh.trace.step import Step
from synchromesh.values.cluster import Cluster
from synchromesh.values.optimizer import coupled, refuse_unusable
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from synchromesh.workloads.workload import Loss

T = TypeVar("T")
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
        """All that were considered, the chosen one first."""
        return self.choice.candidates

    @property
    def certainty(self) -> str:
        """Where the numbers are from and what they may be off by: `datasheet, +-25 %`."""
        return certainty(self.choice.profile)

    def explain(self) -> str:
        """The choice for a reader: a line per candidate, a line per component."""
        out = [f"{self.cluster.name}, {self.rows} rows a step ({self.certainty})"]
        out += [_line(c) for c in self.candidates]
        if self.components and self.choice.of:
            out.append(f"components {self.choice.of}:")
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
    """Where the numbers of a profile are from and what they may be off by."""
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
    autocast: torch.dtype | None = None,
    carry: Start | None = None,
) -> Planned:
    """The plan of least predicted step time for `model` on `cluster`; no device is needed.

    example_batch: a global batch; of its numbers nothing but shapes and types matters.
    optimizer: one over the model's parameters, or what makes one of them.
    cluster: a Cluster, a name of the catalogue (`h100x16`), or a file that `synchromesh doctor`
    wrote. memory: bytes that a rank may use; default: those of its device.
    explained: also finds each component's runner-up. autocast, carry: as of `prepare`.

    Estimates are right to the catalogue's error band (`certainty`). ValueError for a cluster that
    is not known or does not say what is needed.
    """
    place = cluster if isinstance(cluster, Cluster) else cluster_of(cluster)
    rows = row_count(example_batch)
    loss, example = joined(loss, example_batch, carry)
    step = trace(model, loss, example, training=True, autocast=autocast)
    if step.opaque:
        return Planned(_opaque(step, place), place, rows)
    if next(model.parameters(), None) is None:
        raise ValueError("the model has no parameters: there is nothing to train")
    made = optimizer if isinstance(optimizer, Optimizer) else optimizer(model.parameters())
    refuse_unusable(made)
    limits = tuple(memory or float(device.memory_bytes) for _, device in place.ranks)
    modules = Model(model).inside(step.chain.names)
    problem = PlanningProblem(step, rows, len(limits), modules, limits, coupled(made))
    partitions, facts = PartitionCache(problem), DatasheetFacts(problem, made, place)
    choice = decide(partitions, facts, survey(partitions, facts), explained=explained)
    refusal = "" if choice.chosen.fits else misfit(choice, partitions)
    return Planned(choice, place, rows, refusal)


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


@dataclass(frozen=True)
class DatasheetFacts:
    """The facts of a planning problem on a cluster; implements `planner.decide.Facts`."""

    problem: PlanningProblem
    optimizer: Optimizer
    cluster: Cluster
    extrapolation: float = float("inf")  # the roofline is a line over rows

    def profile(
        self,
        partitions: Iterable[Partition],
        known: Profile | None,
        ranks: Sequence[int] | None = None,
        *,
        rows: int = 0,
        quick: bool = False,
        besides: Iterable[Demand] = (),
        micro_batches: Collection[int] = (1,),
    ) -> Profile:
        """The data sheet of `partitions`, with the collectives that they or `besides` ask for."""
        parts = list(partitions)
        count = len(self.cluster.ranks if ranks is None else ranks)
        demands = [d for p in parts for d in collectives_of(p, self.problem.rows, count)]
        have = {} if known is None else known.network
        new = [d[:2] for d in (*demands, *besides) if d[:2] not in have]
        links = network.curves(self.cluster, new, ranks)
        problem, optimizer = self.problem, self.optimizer
        return datasheet(problem, optimizer, parts, self.cluster, links, known, micro_batches)

    def agreed(self, find: Find[T], write: Write[T], read: Read[T]) -> list[T]:
        """What is found: there is nobody else."""
        return find()


def _opaque(step: Step, cluster: Cluster) -> Choice:
    """The one plan of a model that could not be traced: there is no graph to estimate."""
    profile = Profile(
        len(cluster.ranks), source=SOURCE, error_band=cluster.error_band, emulated=cluster.emulated
    )
    return Choice.untraced(step, profile)
