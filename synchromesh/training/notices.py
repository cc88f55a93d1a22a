"""Notices: what a plan or a model does that its user should know, as warnings of rank 0."""

from collections.abc import Collection, Sequence

from torch import nn

from synchromesh.trace.partition.local import LocalComponent, Partition
from synchromesh.trace.step import Step
from synchromesh.values.caution import caution
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan
from synchromesh.values.plan_item import show_numbers
from synchromesh.values.size import readable


class Notices:
    """Warnings of one trainer; `once` gives each of its texts a single time."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._given: set[str] = set()

    def warn(self, text: str) -> None:
        if self._rank == 0:
            caution(text)

    def once(self, text: str) -> None:
        """As `warn`, but for a text that is empty or was given before."""
        if text and text not in self._given:
            self._given.add(text)
            self.warn(text)

    def mode(self, module: nn.Module) -> None:
        if not any(part.training for part in module.modules()):
            self.once(
                "the model is in evaluation mode and is trained in training mode, as "
                "model.train() sets it; to train with some modules in evaluation mode call "
                "model.train() and then eval() on these"
            )

    def partitioned(
        self, plan: Plan, stated: Sequence[Layout], partition: Partition, step: Step,
        parameters: Collection[str], given: bool = True,
    ) -> None:  # fmt: skip
        """Whatever in a partition is not as `plan` or its user may expect. stated: its layouts.
        parameters: the model's names. given: the plan is the user's, not chosen here. ValueError
        where data ranks would come to different parameters."""
        if given:
            self._unsharded(plan, stated, partition)
        self._row_state(plan, partition, step, parameters)
        self._reports(plan, partition, step)
        divided = any(local.layout.data > 1 for local in partition.components)
        if not divided and any(spec.states != "none" for spec in plan.specs):
            self.once(
                f"{str(plan)!r}: there is one data rank, so there is nothing to shard over, and "
                "it keeps all states"
            )
        if plan.micro_batches > 1:
            if step.changed:
                self.once(
                    f"{', '.join(step.changed)}: the model runs as it is and changes these in "
                    f"each of {plan.micro_batches} micro-batches, where one process does once a "
                    "step"
                )
            self.doubt(step)
        elif divided and step.opaque:
            self.doubt(step)
        elif not divided and len(plan.rows or ()) > 1:
            self.once(
                f"@rows={show_numbers(plan.rows or ())} is left aside, for each rank computes all "
                f"rows: {step.coupled}"
            )
        if step.coupled and (plan.pieces or 1) > 1:
            self.once(
                f"@pieces={plan.pieces} is left aside, for pieces would part rows that belong "
                f"together: {step.coupled}"
            )

    def _reports(self, plan: Plan, partition: Partition, step: Step) -> None:
        names = {r.name for r in step.reports if r.kind == "unknown"}
        data = [local.layout.data for local in partition.components]
        if plan.micro_batches == 1 and partition.reports:
            names &= {x.of[0] for x in partition.reports if data[x.source] > 1}
        if names and plan.micro_batches * max(data) > 1:
            self.once(
                f"what the loss reports as {', '.join(sorted(names))} is not seen to be a mean or "
                "a sum over rows: it is given as the mean of what each rank and micro-batch makes "
                "of its own rows"
            )

    def doubt(self, step: Step) -> None:
        if step.doubt:
            self.once(
                f"the loss is not seen to be a mean over rows ({step.doubt}), and may be another "
                "one where they are divided: return (sum, weight) where they weigh differently "
                "(class weights, padding), and keep them together where they are coupled"
            )

    def undivided(self, stated: Sequence[Layout], made: Partition, step: Step, rows: int) -> None:
        """Where rows stay together although a plan divides them (`stated`), and its cost."""
        parts = zip(made.components, stated, strict=True)
        kept = [local for local, layout in parts if local.layout.data < layout.data]
        if not kept:
            return
        devices, names = kept[0].layout.devices, [local.component.name for local in kept]
        where = ", ".join(names) if len(kept) < len(stated) else "every component"
        cost = f"up to {devices} times the computation of divided rows"
        if size := _gathered_bytes(made, kept, rows):
            cost += f", and {readable(size)} of inputs to gather in a step of {rows} rows"
        self.once(
            f"rows depend on each other ({step.coupled}), so that under every plan each of the "
            f"{devices} ranks computes all rows of {where}, as one process does. That costs {cost}"
        )

    def _unsharded(self, plan: Plan, stated: Sequence[Layout], partition: Partition) -> None:
        """One warning that names the components that are whole although the plan shards them."""
        replicated = {}
        for local, layout in zip(partition.components, stated, strict=True):
            placements = [partition.placements[n, local.layout] for n in local.parameters]
            if layout.tensor > 1 and placements and not any(p.sharded for p in placements):
                replicated[local.component.name] = next(iter(local.unsharded.values()), "")
        if replicated and not any(c.component.opaque for c in partition.components):
            name, reason = next(iter(replicated.items()))
            self.warn(
                f"nothing of {', '.join(replicated)} is sharded under {str(plan)!r}: each rank "
                f"computes it whole ({name}: {reason or 'it would cost more than it saves'})"
            )

    def _row_state(
        self, plan: Plan, partition: Partition, step: Step, parameters: Collection[str]
    ) -> None:
        """A warning that names the buffers that are computed from rows, which data ranks have
        different ones of. ValueError for such parameters: no rule could make these equal again."""
        from_rows = set(step.fed)
        differing: set[str] = set()
        for local in partition.components:
            component = local.component
            if local.layout.data > 1:
                names = {t.name for t in (*component.parameters, *component.buffers)}
                differing |= from_rows if component.opaque else from_rows & names
        changed = sorted(differing.intersection(parameters))
        if changed:
            raise ValueError(
                f"the forward changes {changed[0]} by the rows that it is given (as an embedding "
                f"with max_norm does), so that the data ranks of {str(plan)!r} would hold other "
                "values of it: use a plan without data parallelism (tensor, single), or change "
                "the parameter outside of the forward"
            )
        if differing:
            self.once(
                f"{', '.join(sorted(differing))}: computed from the rows of a batch, of which "
                f"each data rank has others under {str(plan)!r}. They are averaged over the ranks "
                "when the trainer evaluates, saves or switches (whole numbers: rank 0's count), "
                "which need not be what one process computes; a plan whose data degree is 1 there "
                "is exact"
            )


def _gathered_bytes(partition: Partition, parts: Sequence[LocalComponent], rows: int) -> int:
    """Bytes of the values with rows that the parts read and that lie divided where they are made;
    leaves of the batch lie by the largest data degree."""
    layouts = [local.layout for local in partition.components]
    leaf = max(layouts, key=lambda layout: layout.data)
    read = (item for local in parts for item in local.inputs if item.value.rows)
    divided = {
        item.value.name: item.value.bytes(rows)
        for item in read
        if (leaf if item.source is None else layouts[item.source]).data > 1
    }
    return sum(divided.values())
