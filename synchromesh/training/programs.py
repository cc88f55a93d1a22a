"""Programs: what this rank runs under a plan, one for each function and shape of batch."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from synchromesh.checkpoint.model_state import ModelState
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.opaque import OpaqueProgram
from synchromesh.engine.program import Program
from synchromesh.engine.sharding import Sharding
from synchromesh.programs.batch_norm import BatchNormPolicy
from synchromesh.programs.collectives import GroupAxis
from synchromesh.programs.random import RandomStreams
from synchromesh.trace.capture.capture import changed, signature
from synchromesh.trace.partition.local import deliveries
from synchromesh.trace.partition.partition import Partition, partition
from synchromesh.trace.step import Report, Step
from synchromesh.training.active_plan import ActivePlan
from synchromesh.training.traces import Traces
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED

AnyProgram = Program | OpaqueProgram


class Programs:
    """The programs of one plan in force, made when they are first needed."""

    MANY_SHAPES: ClassVar = 8  # of batches, traced before the user is warned; chosen

    def __init__(
        self, active: ActivePlan, traces: Traces, state: ModelState, streams: RandomStreams,
        sharding: Sharding,
    ) -> None:  # fmt: skip
        self.active, self.traces, self.state, self.streams = active, traces, state, streams
        self.sharding = sharding
        self.reports: tuple[Report, ...] = ()  # of what was found last
        self._made: dict[tuple[Any, Any, int], tuple[Step, AnyProgram | None]] = {}
        self._readers: dict[Any, Any] = {}  # of the carry, by function

    def find(
        self, batch: Any, function: Any, rows: GlobalRows, total: int, planned_rows: int
    ) -> AnyProgram | None:
        """What this rank runs for `function` (the loss in training, else a metric) on a
        (micro-)batch of `rows`; None on a rank that has no part in it.

        total: rows of the global batch, which conditions on the number of rows are of.
        batch: this rank's rows, one at least (`Execution.filled`). planned_rows: of the global
        batches that partitions are made for."""
        shape, function = signature(batch), self.traces.canonical(function)
        step = self.traces.find(function, shape, batch, total, self.active)
        self.reports = step.reports
        self._check_blocks(step, rows)
        key = (function, shape, id(step))
        if key not in self._made:
            known = step is self.active.step
            learns = self.traces.losses.turn_of(function) is not None
            made = self.active.partition if known else self._partition(step, planned_rows, learns)
            self._check_carry(function, made)
            self._made[key] = step, self._program(step, made, function)
            shapes = list(dict.fromkeys(s for f, s, _ in self._made if f is function))
            if len(shapes) == self.MANY_SHAPES and shapes[-1] == shape:
                self.traces.notices.once(
                    f"{self.MANY_SHAPES} kinds of batches were traced so far, which takes seconds "
                    f"for each; in the last two {changed(shapes[-2], batch)}"
                )
        return self._made[key][1]

    def _check_carry(self, function: Any, made: Partition) -> None:
        """ValueError, everywhere, where this shape's carry is read by stages without it."""
        readers = [[way.target for way in ways] for _, ways in deliveries(made)]
        if self._readers.setdefault(function, readers) != readers:
            raise ValueError(
                "this shape of batch reads the carry in other stages than an earlier one: train "
                "on one stage, or pad batches to one length"
            )

    def _check_blocks(self, step: Step, rows: GlobalRows) -> None:
        """ValueError on every rank where rows that belong together would come to other ranks."""
        guards = [guard for guard in step.guards if guard.of_blocks]
        if not guards:
            return
        for layout in set(self.active.layouts.values()):
            for start, stop in rows.ranges(layout.data):
                for guard in guards:
                    if stop > start and not guard.holds(stop - start):
                        raise ValueError(
                            f"the model needs {guard.text} of the rows of each data rank, but one "
                            f"has {stop - start} of {rows.total} under {layout}: choose a batch "
                            "size that gives every rank such a number, or a plan with fewer data "
                            "ranks"
                        )

    def _program(self, step: Step, made: Partition, function: Any) -> AnyProgram | None:
        active, model, options = self.active, self.state.model, self.traces.options
        groups = active.groups
        # a metric may need the components of some stages alone
        if not any(groups.position in c.layout.positions for c in made.components):
            return None
        if step.opaque:
            return OpaqueProgram(
                function, model, active.leaf_layout, groups, self.streams,
                options.sync_batch_norm, active.step.changed, options.autocast,
            )  # fmt: skip

        def axis(layout: Layout, streams: RandomStreams) -> GroupAxis:
            group = groups.data_group(layout) if options.sync_batch_norm else None
            return GroupAxis(groups.tensor_group(layout), streams, BatchNormPolicy(group))

        tensors = {**model.parameters, **model.buffers, **self.sharding.whole}
        holdings, sharding = self.state.holdings, self.sharding
        return Program(step, made, groups, tensors, holdings, axis, self.streams, sharding)

    def _partition(self, step: Step, planned_rows: int, learns: bool) -> Partition:
        """The partition of another trace of the same model, with its tensors where they are.
        learns: gradients are wanted; if not, what all ranks have complete serves any layout."""
        if step.opaque:  # all layouts are of tensor degree 1
            return self.active.partition
        layouts = step.undivided(self._layouts(step.chain.names))
        holdings = {n: h for n, h in self.state.holdings.items() if not h.partial_gradient}
        complete = set() if learns else {n for n, h in holdings.items() if not h.placement.sharded}
        pins = {(n, layout.mesh): REPLICATED for n in complete for layout in layouts}
        pins |= {(n, h.layout): h.placement for n, h in holdings.items()}
        leaves = self.active.partition.leaf_layouts
        made = partition(step, layouts, rows=planned_rows, pins=pins, leaves=leaves)
        _require_places(made, holdings, complete, step)
        return made

    def _layouts(self, names: Sequence[str]) -> list[Layout]:
        """Of another trace's components: of that name, of what it is of, or the one before."""
        known, layouts = self.active.layouts, list[Layout]()
        layout = next(iter(known.values()))
        for name in names:
            layout = known.get(name, known.get(name.partition("@")[0], layout))
            layouts.append(layout)
        return layouts


def _require_places(
    made: Partition, holdings: Mapping[str, Holding], complete: Collection[str], step: Step
) -> None:
    """ValueError where a tensor, not complete everywhere, is not as another trace reads it."""
    for (name, layout), placement in made.placements.items():
        holding = holdings.get(name)
        if holding is None or (name in complete and placement == REPLICATED):
            continue
        if (holding.layout, holding.placement) != (layout.mesh, placement):
            why = f" ({step.coupled})" if step.coupling else ""
            raise ValueError(
                f"{name} lies as {holding.placement} on {holding.layout}, but another trace "
                f"of the model uses it as {placement} on {layout}{why}: give the components "
                "that use it equal layouts"
            )
