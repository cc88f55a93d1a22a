"""The planning of a model on a cluster that need not be there: `sm.plan`.

Decides as live ranks do (`planner/decision/decide.py`), by facts that are estimated."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from synchromesh import catalogue
from synchromesh.estimate import network
from synchromesh.estimate.datasheet import MEMORY_ERROR, SOURCE, datasheet, headrooms
from synchromesh.planner.candidate import Candidate, price
from synchromesh.planner.choice import Choice, RunnerUp
from synchromesh.planner.decision.decide import Find, Read, Write, decide, survey
from synchromesh.planner.demand import Demand, collectives_of
from synchromesh.planner.memory.misfit import misfit
from synchromesh.planner.problem import PartitionCache, PlanningProblem, Say
from synchromesh.planner.stages.cut import cut_plan, measured_work, unstaged
from synchromesh.programs.model import Model
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
        out += [f"{c.plan}: {c}" for c in self.candidates]
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
            "memory_error": MEMORY_ERROR,
            "cluster": self.cluster.name,
            "devices": len(self.cluster.ranks),
            "rows": self.rows,
        }


def certainty(profile: Profile) -> str:
    """Where the numbers of a profile are from and what they may be off by."""
    band = f"+-{profile.error_band:.0%}" if profile.error_band else "error not stated"
    memory = f", memory +-{MEMORY_ERROR:.0%}" if profile.source == SOURCE else ""
    return f"{profile.source}, time {band}{memory}{', emulated' if profile.emulated else ''}"


def plan(
    model: nn.Module,
    loss: Loss,
    example_batch: Any,
    *,
    optimizer: MakeOptimizer | Optimizer = torch.optim.AdamW,
    cluster: Cluster | str,
    memory: float | None = None,
    headroom: str | None = None,
    plans: Sequence[Plan | str] = (),
    explained: bool = True,
    autocast: torch.dtype | None = None,
    carry: Start | None = None,
    say: Say = lambda _: None,
) -> Planned:
    """The plan of least predicted step time for `model` on `cluster`; no device is needed.

    example_batch: a global batch; of its numbers nothing but shapes and types matters.
    optimizer: one over the model's parameters, or what makes one of them.
    cluster: a Cluster, a name of the catalogue (`h100x16`), or a file that `synchromesh doctor`
    wrote. memory: bytes of a rank's device; default: those that it has. headroom: what plans leave
    of these, as `10%` or `4GiB`; default: 5 %, or what predictions of memory may be off by.
    plans: are priced beside those that are found. explained: also finds each component's
    runner-up. autocast, carry: as of `prepare`. say: receives what is being done.

    Estimates are right to the catalogue's error band (`certainty`). ValueError for a cluster that
    is not known or does not say what is needed."""
    place = cluster if isinstance(cluster, Cluster) else cluster_of(cluster)
    rows = row_count(example_batch)
    loss, example = joined(loss, example_batch, carry)
    say("tracing the model")
    step = trace(model, loss, example, training=True, autocast=autocast)
    asked = [Plan.parse(p) if isinstance(p, str) else p for p in plans]
    if step.opaque:
        return Planned(_opaque(step, place, asked), place, rows)
    if next(model.parameters(), None) is None:
        raise ValueError("the model has no parameters: there is nothing to train")
    made = optimizer if isinstance(optimizer, Optimizer) else optimizer(model.parameters())
    partitions, facts = estimating(step, model, made, rows, place, memory, headroom, say)
    known = survey(partitions, facts)
    given = [price_given(partitions, facts, known, p) for p in asked]
    if faults := [f"plan {c.plan}: {c.reason}" for c in given if c.time is None]:
        raise ValueError("; ".join(faults))
    choice = decide(partitions, facts, known, explained=explained, given=given)
    refusal = "" if choice.chosen.fits else misfit(choice, partitions)
    return Planned(choice, place, rows, refusal)


def estimating(
    step: Step, model: nn.Module, optimizer: Optimizer, rows: int, cluster: Cluster,
    memory: float | None = None, headroom: str | None = None, say: Say = lambda _: None,
) -> "tuple[PartitionCache, DatasheetFacts]":  # fmt: skip
    """What plans of a traced step for global batches of `rows` are searched and priced with."""
    refuse_unusable(optimizer)
    modules, rooms = Model(model).inside(step.chain.names), headrooms(cluster, memory, headroom)
    limits, split = tuple(x.usable for x in rooms), coupled(optimizer)
    problem = PlanningProblem(step, rows, len(rooms), modules, limits, split, min(rooms))
    return PartitionCache(problem, say), DatasheetFacts(problem, optimizer, cluster)


def price_given(
    partitions: PartitionCache, facts: "DatasheetFacts", known: Profile, plan: Plan
) -> Candidate:
    """What a given plan is estimated to take; where it cannot run, why."""

    def profile(laid: Plan) -> Profile:  # with the partition of `laid`
        ranks, partition = partitions.problem.ranks(laid), partitions.partition(laid)
        return facts.profile([partition], known, ranks, micro_batches=(plan.micro_batches,))

    try:
        if plan.open_cuts:
            devices = partitions.problem.devices
            work = measured_work(partitions, plan, profile(unstaged(plan, devices)))
            plan = cut_plan(partitions.problem.step, plan, work, devices)
        return replace(price(partitions, plan, profile(plan)), given=True)
    except ValueError as error:
        return Candidate(plan, None, (), False, str(error))


def quickest(
    step: Step, model: nn.Module, optimizer: MakeOptimizer, example_batch: Any, cluster: Cluster,
    families: Mapping[str, Sequence[str]],
) -> dict[str, Candidate]:  # fmt: skip
    """Of each family of plans the one of least estimated step time among those that fit; of
    `auto` what the planner chooses. One that does not fit where none does, its reason with it."""
    made, rows = optimizer(model.parameters()), row_count(example_batch)
    partitions, facts = estimating(step, model, made, rows, cluster)
    known = survey(partitions, facts)
    found: dict[str, Candidate] = {}
    for name, plans in families.items():
        if list(plans) == ["auto"]:
            found[name] = decide(partitions, facts, known).chosen
            continue
        candidates = [price_given(partitions, facts, known, Plan.parse(text)) for text in plans]
        found[name] = min(candidates, key=lambda c: (not c.fits, c.seconds))
    return found


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
    """The facts of a planning problem on a cluster; implements `planner.decision.decide.Facts`."""

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


def _opaque(step: Step, cluster: Cluster, given: Sequence[Plan]) -> Choice:
    """The one plan of a model that could not be traced, and those that were given: there is no
    graph to estimate."""
    profile = Profile(
        len(cluster.ranks), source=SOURCE, error_band=cluster.error_band, emulated=cluster.emulated
    )
    choice = Choice.untraced(step, profile)
    others = (Candidate(p, None, (), False, choice.chosen.reason, True) for p in given)
    return replace(choice, candidates=(choice.chosen, *others))
