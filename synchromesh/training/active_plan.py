"""The active plan and all that follows from it; what a plan must meet; what else users choose."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from synchromesh.checkpoint.model_state import ModelState
from synchromesh.engine import batches
from synchromesh.engine.agreement import RowAgreement
from synchromesh.engine.batches import GlobalRows, Ranges
from synchromesh.engine.late_agreement import LateAgreement
from synchromesh.engine.optimizer import check as check_optimizer
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.engine.world import World
from synchromesh.launcher.machine import boot
from synchromesh.planning.live import LivePlanning
from synchromesh.programs.model import Model
from synchromesh.trace.capture.carry import Start
from synchromesh.trace.partition.local import users_of
from synchromesh.trace.partition.partition import Partition, partition, unsharded
from synchromesh.trace.step import Step
from synchromesh.training.notices import Notices
from synchromesh.values.allowance import NOTHING, Allowance
from synchromesh.values.caution import caution
from synchromesh.values.holding import Holding, holdings
from synchromesh.values.layout import Layout, leaf_layout_at
from synchromesh.values.optimizer import coupled, needs_sparse
from synchromesh.values.plan import Plan
from synchromesh.values.unsupported import refuse_apart, unsupported

Loss = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Options:
    """What a user may choose besides the plan; see `prepare`."""

    seed: int = 0
    sync_batch_norm: bool = False
    autocast: torch.dtype | None = None
    weights: Path | None = None  # a checkpoint, or safetensors, to begin with
    carry: Start | None = None  # at the beginning of streams
    headroom: str | None = None  # of each device; None: `planner.problem.Headroom`
    noise_scale: bool = False  # whether it is measured
    follows_noise: bool = False  # whether something depends on it: a step of one block is cut
    by_age: bool = False  # servers divide learning rates by a gradient's age
    say: Callable[[str], None] = lambda _: None  # receives a sentence about each measurement
    allowed: Allowance = NOTHING  # what `auto` may choose that one device does not compute

    def allowed_on(self, world: World, model: Model) -> Allowance:
        """What of it can be trained with the other options; a warning names the rest."""
        normalised = self.sync_batch_norm and bool(model.statistics)
        refused = {
            "the noise scale is measured, of exact gradients":
                (self.noise_scale, tuple(Allowance.VARIANTS)),
            "batch norm is synchronised": (normalised, ("local", "asynchronous")),
            "values are carried from step to step": (self.carry is not None, ("asynchronous",)),
            "servers run on CPUs alone so far": (world.backend != "gloo", ("asynchronous",)),
        }  # fmt: skip
        left = self.allowed
        for why, (found, kinds) in refused.items():
            less = left.without(*kinds) if found else left
            if less != left and not world.rank:
                gone = ", ".join(kind for kind in left.kinds if kind not in less.kinds)
                caution(f"auto leaves out {gone}, though it was allowed: {why}")
            left = less
        return left


@dataclass(frozen=True)
class ActivePlan:
    """The plan in force and what follows from it; `PlanCheck` makes them."""

    plan: Plan
    step: Step
    partition: Partition
    groups: PlanGroups
    layouts: Mapping[str, Layout]  # of each component of the training step
    holdings: Mapping[str, Holding]  # where the model's tensors lie
    agree: RowAgreement
    agree_step: RowAgreement  # in training
    fingerprint: int

    @property
    def leaf_layout(self) -> Layout:
        """How the batch's rows lie over the devices of this rank's stage."""
        assert self.groups.position is not None, "an idle rank has no rows"
        return leaf_layout_at(self.partition.leaf_layouts, self.groups.position)

    def divides_model(self, training: bool) -> bool:
        """Whether a rank lacks a part of the model that it runs, in training or of a metric."""
        shards = (p.sharded for p in self.partition.placements.values())
        tensor = (layout.tensor > 1 for layout in self.layouts.values())
        return any(tensor if training else shards) or self.plan.stage_count > 1

    def own_rows(self, rows: int) -> Ranges:
        """[start, stop) of the parts of a global batch of `rows` rows that this rank works on."""
        position = self.groups.position
        if position is None:
            return ((0, 0),)
        layout = self.leaf_layout
        return self.plan.own_rows(rows, layout.data, layout.data_index(position))

    def global_rows(self, rows: GlobalRows, rank: int) -> Ranges:
        """[start, stop) of the parts of an agreed batch that a rank of the world works on, as they
        follow each other in its own batch; none of an idle rank."""
        if rank not in self.groups.ranks:
            return ()
        position = self.groups.ranks.index(rank)
        layout = leaf_layout_at(self.partition.leaf_layouts, position)
        ranges, before = [], 0
        for part in rows.micro_batches():
            start, stop = part.ranges(layout.data)[layout.data_index(position)]
            ranges.append((before + start, before + stop))
            before += part.total
        return tuple(ranges)

    def local_rows(self, rows: GlobalRows) -> int:
        """How many rows of an agreed batch this rank has; none on an idle rank."""
        position = self.groups.position
        if position is None:
            return 0
        layout = self.leaf_layout
        start, stop = rows.ranges(layout.data)[layout.data_index(position)]
        return stop - start


class PlanCheck:
    """Whether a plan can become the active one, before anything changes.

    Every question that may refuse it is asked in `passed`, in this order alone, and who would
    make another plan the active one needs what `passed` returns. All ranks ask alike."""

    DEVICES: ClassVar = 64  # that a plan needs which is asked of one, at most; chosen

    def __init__(
        self, state: ModelState, planning: LivePlanning, notices: Notices, options: Options,
        several: bool,
    ) -> None:  # fmt: skip
        """several: there are losses that take turns."""
        self._state, self._planning, self._notices = state, planning, notices
        self._model, self._optimizer, self._world = state.model, state.optimizer, state.world
        self._several = several
        self._carries = bool(options.carry)  # whether a step reads what the one before has made
        self._synchronised = options.sync_batch_norm and bool(state.model.statistics)

    def passed(self, plan: Plan, step: Step, known: Partition | None = None) -> ActivePlan:
        """`plan` with all that follows from it. known: the partition of `step` under it, where
        there is one. ValueError, on all ranks, where it does not fit."""
        rows, ranks = self._planning.rows, plan.devices(self._world.size)
        plan.check_rows(rows)
        if plan.sync.alone and self._synchronised:
            raise ValueError(
                f"plan {str(plan)!r}: batch norm cannot be synchronised over workers that train "
                "alone: leave sync_batch_norm or @synchronisation out"
            )
        refuse_parts(step, plan.micro_batches)
        refuse_untraced(step, plan)
        self._refuse_asynchronous(plan, step, len(ranks))
        stated = self._stated(plan, step, self._world.size)
        layouts = step.undivided(stated)
        made = known or self._partition(step, layouts)
        self._refuse_unflushed(plan, step, len(ranks), made)
        placed = self._holdings(plan, made, len(ranks))
        refuse_apart(plan, layouts, placed.values())
        self._refuse_optimizer(placed)
        mark = self._agreed_mark(plan, step, placed)
        self._planning.check_held(plan, placed)
        choice = self._planning.choice
        given = choice is None or choice.chosen.plan != plan
        self._notices.partitioned(plan, stated, made, step, self._model.parameters, given)
        self._notices.undivided(stated, made, step, rows)
        undivided = {Layout(1, x.devices, first=x.first) for x in layouts}  # of a metric, maybe
        groups = PlanGroups(self._world, ranks, layouts, placed.values(), undivided)
        everyone, leaves = self._world.everyone, made.leaf_layouts.values()
        agree = RowAgreement(everyone, ranks, leaves, plan, self._carries)
        stepping = _of_worker(groups, leaves, plan) if plan.sync.asynchronous else agree
        if plan.kept:
            stage, steps = groups.stage_group(leaves), plan.kept.steps(plan.micro_batches)
            assert groups.position is not None, "no rank is idle"
            layout = leaf_layout_at(made.leaf_layouts, groups.position)
            stepping = LateAgreement(agree, stage, layout, steps)
        of_components = dict(zip(step.chain.names, layouts, strict=True))
        return ActivePlan(plan, step, made, groups, of_components, placed, agree, stepping, mark)

    def held(self, plan: Plan, step: Step, devices: int) -> dict[str, Holding]:
        """Where the model's tensors lie under a plan that other ranks have, so many."""
        made = self._partition(step, step.undivided(self._stated(plan, step, devices)))
        return self._holdings(plan, made, len(plan.devices(devices)))

    def _partition(self, step: Step, layouts: tuple[Layout, ...]) -> Partition:
        pins = unsharded(step, layouts) if coupled(self._optimizer) else {}
        return partition(step, layouts, rows=self._planning.rows, pins=pins)

    def _holdings(self, plan: Plan, made: Partition, ranks: int) -> dict[str, Holding]:
        return holdings(self._model.described.values(), made.placements, ranks, plan)

    def _refuse_asynchronous(self, plan: Plan, step: Step, ranks: int) -> None:
        """ValueError where workers would need each other within a step."""
        if not plan.sync.asynchronous:
            return
        trained = (p for p in self._model.described.values() if p.trained)
        number = next((p.name for p in trained if not p.shape), "")
        idle = self._world.size - ranks
        served = plan.sync.servers
        hosts = len({*self._world.everyone.all_gather_json(boot())}) if not served else 1
        faults = {
            f"{hosts} hosts have no memory in common": hosts > 1,
            f"{idle} ranks would be idle, who cannot follow it": idle > 0,
            "it runs on CPUs alone so far": self._world.backend != "gloo",
            "it cannot carry values from step to step": self._carries,
            f"rows depend on each other ({step.coupled})": bool(step.coupling),
            f"the model runs untraced ({step.reason})": step.opaque,
            f"{number} is one number without dimensions, which no server keeps: give it one":
                bool(number and served),
        }  # fmt: skip
        if why := next((text for text, found in faults.items() if found), ""):
            raise ValueError(
                f"plan {str(plan)!r}: workers go on without each other, and {why}; or write "
                f"@synchronisation={'' if step.opaque else f'server:{served or 1} or '}local:8"
            )

    def _refuse_unflushed(self, plan: Plan, step: Step, ranks: int, made: Partition) -> None:
        """ValueError where stages of a pipeline without a flush could not go on without others."""
        if not plan.kept:
            return
        users = users_of(made.components)
        shared = next((name for name, stages in users.items() if len(stages) > 1), "")
        faults = {
            f"{self._world.size - ranks} ranks would be idle, who cannot follow them":
                ranks < self._world.size,
            "they run on CPUs alone so far": self._world.backend != "gloo",
            "they cannot carry values from step to step": self._carries,
            "losses take turns": self._several,
            "the loss needs totals of the whole batch": step.totals is not None,
            f"the model runs untraced ({step.reason})": step.opaque,
            f"{shared} is used in several stages, which would have different versions of it":
                bool(shared),
        }  # fmt: skip
        if why := next((text for text, found in faults.items() if found), ""):
            raise ValueError(
                f"plan {str(plan)!r}: stages go on from step to step without each other, and "
                f"{why}; or write @schedule=1f1b or zero-bubble"
            )

    def _stated(self, plan: Plan, step: Step, devices: int) -> tuple[Layout, ...]:
        """Each component's layout as stated. ValueError: the plan names a part of one."""
        inside = self._model.inside(step.chain.names)
        try:
            return plan.layouts(step.chain.names, devices, inside)
        except ValueError as error:
            why = step.merged or step.reason
            raise ValueError(f"{error} ({why})" if why else str(error)) from None

    def lacking_devices(self, plan: Plan, step: Step) -> str:
        """Why one device cannot have a plan that several could; empty where it can, or none."""

        def fault(devices: int) -> str:
            try:
                plan.layouts(step.chain.names, devices, self._model.inside(step.chain.names))
            except ValueError as error:
                return str(error)
            return ""

        if plan.stage_count > 1:
            return f"{plan} has {plan.stage_count} stages"
        why = fault(1)
        return why if why and not all(map(fault, range(2, self.DEVICES + 1))) else ""

    def _refuse_optimizer(self, placed: Mapping[str, Holding]) -> None:
        sharded = [n for n, h in placed.items() if h.placement.sharded or h.parted]
        check_optimizer(self._optimizer, bool(sharded))
        summed = (n for n, h in placed.items() if h.tensor.trained and not h.own_gradient)
        if needs_sparse(self._optimizer) and (name := next(summed, "")):
            raise ValueError(
                "the optimizer SparseAdam takes sparse gradients alone, which ranks do not sum, "
                f"and under this plan they sum that of {name}: train on one rank, or under "
                "@synchronisation=hogwild, or use AdamW"
            )
        for name in sharded:
            self._state.optimizer_state.refuse_pieces(name)

    def _agreed_mark(self, plan: Plan, step: Step, placed: Mapping[str, Holding]) -> int:
        order = [(c.name, [p.name for p in c.parameters]) for c in step.chain.components]
        places = sorted((n, str(h)) for n, h in placed.items())
        mark = batches.fingerprint((str(plan), step.opaque, order, places))
        if len(set(self._world.everyone.all_gather_json(mark))) > 1:
            raise ValueError(
                f"ranks came to different partitions of the model under {str(plan)!r}: start "
                "every rank with the same script, arguments and versions of torch and synchromesh"
            )
        return mark


def _of_worker(groups: PlanGroups, leaves: Iterable[Layout], plan: Plan) -> RowAgreement:
    """How the ranks of a worker agree on a step that others do not take with them."""
    first, own = 0, list[Layout]()
    for layout in sorted(leaves, key=lambda x: x.first):
        own.append(Layout(1, layout.tensor, first=first))
        first += layout.tensor
    its, count = tuple(range(groups.worker.size)), len(groups.workers)
    return RowAgreement(groups.worker, its, own, plan, workers=count)


def checked_plan(plan: Plan | str) -> Plan:
    """The plan of a text, or `auto`. ValueError where this version cannot execute it."""
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    if not isinstance(plan, Plan):
        raise ValueError(f"a plan is a text or a Plan, not {type(plan).__name__}")
    faults = () if plan.automatic else unsupported(plan)
    if faults:
        raise ValueError(f"plan {str(plan)!r}: " + "; ".join(faults))
    return plan


def refuse_parts(step: Step, micro_batches: int) -> None:
    if micro_batches > 1 and step.coupling and not step.doubt:
        raise ValueError(
            f"micro_batches={micro_batches} would part rows that depend on each other "
            f"({step.coupled}) and train another loss: leave it out, or give smaller batches"
        )


def unmeasurable(step: Step, options: Options, model: Model, several: bool, plan: Plan) -> str:
    """Why the gradient noise scale, where it was asked for, cannot be measured of a step. several:
    there are losses that take turns."""
    why = step.coupled if step.coupling else ""
    if options.sync_batch_norm and {*model.statistics} - {*model.never_synchronised}:
        why = why or "batch norm is synchronised over the ranks"
    if why:
        why = f"rows depend on each other ({why}), so that no block of them has its own gradient"
    if several:
        why = "losses take turns, each with a gradient of its own"
    if plan.sync.alone:
        why = f"workers train alone ({plan.synchronisation}), so that no gradient is of all rows"
    if plan.sync.late:
        why = f"gradients come {plan.sync.late} steps late"
    if plan.kept:
        why = f"stages step by gradients of their own at different times ({plan.schedule})"
    if plan.compressed:
        why = f"gradients are sent with a loss (@compression={plan.compression})"
    return why if options.noise_scale else ""


def unkept(plan: Plan, options: Options, changing: bool) -> str:
    """What of a lost rank neither others hold nor copies of its state; empty where there is no
    such thing. changing: whether batches are."""
    faults = {
        "a lost rank's rows of a carry are gone": options.carry is not None,
        f"@synchronisation={plan.synchronisation} is not kept up without a rank so far":
            bool(plan.sync.late) or (plan.sync.alone and not plan.sync.servers),
        "what a lost rank owed of @compression is gone": plan.compressed,
        f"@schedule={plan.schedule} has no flush": bool(plan.kept),
        "the noise scale is of ranks that are lost": options.noise_scale,
        "batches that change are not kept up without a rank so far": changing,
    }  # fmt: skip
    return next((why for why, found in faults.items() if found), "")


def renumbered(plan: Plan, before: Sequence[int]) -> Plan:
    """With the new numbers of servers that compute no rows; workers serve where one of them is
    gone. before: which rank each that stays was."""
    if plan.servers is None:
        return plan
    there = tuple(before.index(rank) for rank in plan.servers if rank in before)
    return replace(plan, servers=there if len(there) == len(plan.servers) else None)


def refuse_untraced(step: Step, plan: Plan) -> None:
    """ValueError where a plan shards states, or recomputes, of a model that runs untraced."""
    served = plan.sync.servers > 0 and not plan.sync.asynchronous
    asked = {
        "keep its parameters on servers": served,
        "shard its states": any(spec.states != "none" for spec in plan.specs),
        "compute its activations again": any(spec.recompute for spec in plan.specs),
    }
    if step.opaque and any(asked.values()):
        wanted = " and ".join(what for what, is_asked in asked.items() if is_asked)
        raise ValueError(
            f"plan {str(plan)!r} is to {wanted}, which needs a trace of the model, and "
            f"{step.reason}; under 'data' and 'single' the model's own activation checkpoints "
            "(torch.utils.checkpoint) save memory"
        )
