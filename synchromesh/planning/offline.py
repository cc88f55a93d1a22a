"""Planning without devices: `sm.plan`, for a cluster that need not be there, by estimated facts;
and what a given plan does to a model on pretended ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from synchromesh import catalogue
from synchromesh.estimate.datasheet import MEMORY_ERROR, SOURCE, DatasheetFacts
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.choice import Choice, RunnerUp
from synchromesh.planner.problem import PartitionCache, PlanningProblem, Say, silent
from synchromesh.planner.stages.cuts import cut_plan, estimated_work
from synchromesh.planning.session import PlanningSession, parsed
from synchromesh.planning.session import quickest as _quickest
from synchromesh.programs.model import Model, refuse_held
from synchromesh.trace.capture.batch import know_encodings, row_count
from synchromesh.trace.capture.capture import opaque, trace
from synchromesh.trace.capture.carry import Start, joined
from synchromesh.trace.capture.comparison import compare
from synchromesh.trace.partition.explain import Explanation, explain
from synchromesh.trace.step import Step
from synchromesh.values.allowance import Allowance
from synchromesh.values.cluster import Cluster
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from synchromesh.workloads.stand_in import stand_in
from synchromesh.workloads.workload import Loss, Workload

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Planned:
    """A choice for a cluster: candidates with their predictions, and how sure these are."""

    choice: Choice
    cluster: Cluster
    rows: int  # of a global batch
    refusal: str = ""  # why no plan fits
    warning: str = ""  # of a type that devices lack

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
        out += [self.warning] if self.warning else []
        out += [f"{c.plan}: {c}" for c in self.candidates]
        if self.components and self.choice.of:
            out.append(f"components {self.choice.of}:")
        out += [f"  {row}" for row in self.components]
        out += [self.choice.of_accuracy] if self.choice.of_accuracy else []
        return "\n".join([*out, self.refusal] if self.refusal else out)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; its keys are interface."""
        facts = self.choice.profile
        return {
            **self.choice.to_dict(),
            "chosen": None if self.refusal else str(self.choice.chosen.plan),
            "refusal": self.refusal, "warning": self.warning, "source": facts.source,
            "error_band": facts.error_band, "emulated": facts.emulated,
            "memory_error": MEMORY_ERROR, "cluster": self.cluster.name,
            "devices": len(self.cluster.ranks), "rows": self.rows,
        }  # fmt: skip


def certainty(profile: Profile) -> str:
    band = f"+-{profile.error_band:.0%}" if profile.error_band else "error not stated"
    memory = f", memory +-{MEMORY_ERROR:.0%}" if profile.source == SOURCE else ""
    return f"{profile.source}, time {band}{memory}{', emulated' if profile.emulated else ''}"


def lacking(cluster: Cluster, autocast: torch.dtype | None) -> str:
    """A sentence where devices of known rates have none of the type of autocast; else nothing."""
    name = str(autocast).removeprefix("torch.")
    kinds = {d.kind for _, d in cluster.ranks if autocast and d.flops and name not in d.flops}
    if not kinds:
        return ""
    return (
        f"{', '.join(sorted(kinds))}: no {name} is among the device's rates. What computes in it "
        "is priced at the rate of float32, and devices that emulate it are slower than that: "
        "plan and train there without it"
    )


def traced(
    model: nn.Module, loss: Loss, example_batch: Any, autocast: torch.dtype | None,
    carry: Start | None, say: Say,
) -> tuple[int, Step]:  # fmt: skip
    """The rows of a global batch and the step over it. ValueError without parameters."""
    know_encodings()
    if next(model.parameters(), None) is None:
        raise ValueError("the model has no parameters: there is nothing to train")
    loss, example = joined(loss, example_batch, carry)
    say("tracing the model")
    step = trace(model, loss, example, training=True, autocast=autocast)
    return row_count(example_batch), step


def plan(
    model: nn.Module, loss: Loss, example_batch: Any, *,
    optimizer: MakeOptimizer | Optimizer = torch.optim.AdamW, cluster: Cluster | str,
    memory: float | None = None, headroom: str | None = None, plans: Sequence[Plan | str] = (),
    explained: bool = True, autocast: torch.dtype | None = None, carry: Start | None = None,
    allow: str = "", say: Say = silent,
) -> Planned:  # fmt: skip
    """The plan of least predicted step time for `model` on `cluster`; no device is needed.

    example_batch: a global batch; of its numbers nothing but shapes and types matters.
    optimizer: one over the model's parameters, or what makes one of them.
    cluster: a Cluster, a name of the catalogue (`h100x16`), or a file that `synchromesh doctor`
    wrote. memory: bytes of a rank's device; default: those that it has. headroom: what plans leave
    of these, as `10%` or `4GiB`; default: 5 %, or what predictions of memory may be off by.
    plans: are priced beside those that are found. explained: also finds each component's
    runner-up. autocast, carry, allow: as of `prepare`. say: receives what is being done.

    Estimates are right to the catalogue's error band (`certainty`). ValueError for a cluster that
    is not known or does not say what is needed."""
    refuse_held(model, "plan")
    allowed = Allowance.parse(allow)
    place = cluster if isinstance(cluster, Cluster) else cluster_of(cluster)
    rows, step = traced(model, loss, example_batch, autocast, carry, say)
    asked = [parsed(p) for p in plans]
    if step.opaque:  # no traced graph to estimate: one plan, and those that were given
        count, band = len(place.ranks), place.error_band
        nothing = Profile(count, source=SOURCE, error_band=band, emulated=place.emulated)
        one = Choice.untraced(step, nothing)
        others = (Candidate(p, None, (), False, one.chosen.reason, True) for p in asked)
        return Planned(replace(one, candidates=(one.chosen, *others)), place, rows)
    made = optimizer if isinstance(optimizer, Optimizer) else optimizer(model.parameters())
    facts = DatasheetFacts.of(step, model, made, rows, place, memory, headroom, say)
    session = PlanningSession(facts.allowing(allowed))
    known = session.survey()
    given = [replace(session.priced(p, known)[0], given=True) for p in asked]
    if faults := [f"plan {c.plan}: {c.reason}" for c in given if c.time is None]:
        raise ValueError("; ".join(faults))
    choice = session.choose(known, given=given, explained=explained)
    return Planned(choice, place, rows, session.refusal(choice), lacking(place, autocast))


def quickest(
    step: Step, model: nn.Module, optimizer: MakeOptimizer, example_batch: Any, cluster: Cluster,
    families: Mapping[str, Sequence[str]], allow: str = "",
) -> dict[str, Candidate]:  # fmt: skip
    """Of each family of plans the one of least estimated step time among those that fit; of
    `auto` what the planner chooses of what is allowed. One that does not fit where none does, its
    reason with it."""
    made, rows = optimizer(model.parameters()), row_count(example_batch)
    facts = DatasheetFacts.of(step, model, made, rows, cluster)
    session = PlanningSession(facts.allowing(Allowance.parse(allow)))
    known = session.survey()

    def best(texts: Sequence[str]) -> Candidate:
        if list(texts) == ["auto"]:
            return session.choose(known).chosen
        return _quickest(session.priced(Plan.parse(text), known)[0] for text in texts)

    return {name: best(texts) for name, texts in families.items()}


def explain_plan(
    workload: Workload, plan: Plan, ranks: int, autocast: torch.dtype | None = None
) -> Explanation:
    """Of `plan` on pretended ranks, with the workload's batch size; open cuts by estimates."""
    model, rows = Model(stand_in(workload)), workload.batch_size
    loss, example = joined(workload.loss, workload.example(rows), workload.carry)
    cuts = plan.cuts(model.paths())
    step = trace(model.module, loss, example, training=True, cuts=cuts, autocast=autocast)
    if fault := compare(model.module, loss, example, step, autocast=autocast).fault:
        step = opaque(model.module, example, fault)
    plan.check_rows(rows)
    names = step.chain.names
    partitions = PartitionCache(PlanningProblem(step, rows, ranks, model.inside(names)))
    if plan.open_cuts:
        one = partitions.of_layouts((Layout(),) * len(names))
        plan = cut_plan(step, plan, estimated_work(one), ranks)
    return explain(step, partitions.partition(plan), plan, ranks, rows)


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
