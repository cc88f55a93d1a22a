"""The active plan: the plan in force with its trace, partition, ranks and layouts."""

from collections.abc import Mapping
from dataclasses import dataclass

from synchromesh.engine.agreement import RowAgreement
from synchromesh.engine.batches import GlobalRows, Ranges
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.trace.partition.partition import Partition
from synchromesh.trace.step import Step
from synchromesh.values.layout import Layout, leaf_layout_at
from synchromesh.values.plan import Plan


@dataclass(frozen=True)
class ActivePlan:
    """The plan in force and what follows from it."""

    plan: Plan
    step: Step
    partition: Partition
    groups: PlanGroups
    layouts: Mapping[str, Layout]  # of each component of the training step
    agree: RowAgreement
    fingerprint: int

    @property
    def leaf_layout(self) -> Layout:
        """How the batch's rows lie over the devices of this rank's stage."""
        assert self.groups.position is not None, "an idle rank has no rows"
        return leaf_layout_at(self.partition.leaf_layouts, self.groups.position)

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
        found, before = [], 0
        for part in rows.micro_batches():
            start, stop = part.ranges(layout.data)[layout.data_index(position)]
            found.append((before + start, before + stop))
            before += part.total
        return tuple(found)

    def local_rows(self, rows: GlobalRows) -> int:
        """How many rows of an agreed batch this rank has; none on an idle rank."""
        position = self.groups.position
        if position is None:
            return 0
        layout = self.leaf_layout
        start, stop = rows.ranges(layout.data)[layout.data_index(position)]
        return stop - start


def checked_plan(plan: Plan | str) -> Plan:
    """The plan of a text, or `auto`. ValueError where this version cannot execute it."""
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    if not isinstance(plan, Plan):
        raise ValueError(f"a plan is a text or a Plan, not {type(plan).__name__}")
    faults = () if plan.automatic else plan.unsupported()
    if faults:
        raise ValueError(f"plan {str(plan)!r}: " + "; ".join(faults))
    return plan


def refuse_parts(step: Step, micro_batches: int) -> None:
    """ValueError where rows that depend on each other would come into several micro-batches."""
    if micro_batches > 1 and step.coupling and not step.doubt:
        raise ValueError(
            f"micro_batches={micro_batches} would part rows that depend on each other "
            f"({step.coupled}) and train another loss: leave it out, or give smaller batches"
        )


def refuse_untraced(step: Step, plan: Plan) -> None:
    """ValueError where a plan shards states, or recomputes, of a model that runs untraced."""
    asked = {
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
