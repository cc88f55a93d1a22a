"""The execution of a plan: trace, partition, groups, shards and programs, and how it changes."""

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from synchromesh.checkpoint import checkpoint, manifest
from synchromesh.checkpoint.agreement import agreed, on_first
from synchromesh.checkpoint.export import load_safetensors
from synchromesh.checkpoint.initial import refuse_lost_attributes, refuse_uninitialised
from synchromesh.checkpoint.local_tensor import LocalTensor
from synchromesh.checkpoint.manifest import CheckpointError
from synchromesh.checkpoint.model_state import ModelState
from synchromesh.checkpoint.switch import TransferStats
from synchromesh.data.cursor import Cursor
from synchromesh.data.loaders import LOOKED_AT
from synchromesh.engine import batches
from synchromesh.engine.agreement import MODELS_DIFFER, Marks, require_alike
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.device import EarlyReads
from synchromesh.engine.gradients import GradientSync
from synchromesh.engine.noise_scale import NoiseMeter
from synchromesh.engine.opaque import OpaqueProgram
from synchromesh.engine.optimizer import refuse_foreign
from synchromesh.engine.pieces import PieceCount
from synchromesh.engine.pipeline import MicroBatch
from synchromesh.engine.program import Program
from synchromesh.engine.sharding import Sharding
from synchromesh.engine.world import World
from synchromesh.planning.live import LivePlanning
from synchromesh.programs.model import Model
from synchromesh.programs.random import RandomStreams
from synchromesh.trace.capture.batch import take
from synchromesh.trace.partition.local import users_of
from synchromesh.trace.partition.partition import Partition, overlaps
from synchromesh.trace.step import Step
from synchromesh.training.active_plan import ActivePlan, Options, PlanCheck, unmeasurable
from synchromesh.training.batch_totals import with_totals
from synchromesh.training.carry import Carry
from synchromesh.training.filled_pipeline import FilledPipeline
from synchromesh.training.gradient_sums import GradientSums
from synchromesh.training.losses import NamedLosses
from synchromesh.training.notices import Notices
from synchromesh.training.programs import Programs
from synchromesh.training.reports import Reports
from synchromesh.training.traces import TUNING, Traces
from synchromesh.training.trainer_state import TrainerState
from synchromesh.training.workers import Workers
from synchromesh.values.plan import Plan
from synchromesh.values.sharding import units


class Execution:
    """What every rank makes alike of a plan; `active` is the plan in force."""

    def __init__(
        self, model: Model, optimizer: Optimizer, losses: NamedLosses, example: Any, plan: Plan,
        world: World, options: Options, planning: LivePlanning,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.losses = model, optimizer, losses
        self.world, self.options, self.planning = world, options, planning
        self.streams = RandomStreams(options.seed, world.device)
        self.notices = Notices(world.rank)
        self.traces = Traces(
            model, losses, example, world, options, self.notices, planning.memory.free_bytes
        )
        self.state = ModelState(model, optimizer, world)
        self.carry, self.early = Carry(options.carry, world), EarlyReads(world.device)
        self.workers = Workers(self.state, options.sync_batch_norm, options.by_age)
        self.sums = GradientSums(self.state, losses, options.sync_batch_norm)
        self.workers.flush = self.sums.flush
        self.check = PlanCheck(self.state, planning, self.notices, options, losses.several)
        self._active: ActivePlan | None = None
        self.latest: ActivePlan  # the same, or the one before where a switch did not end
        self.sharding = Sharding()
        self._groups = len(optimizer.param_groups)
        self._earlier: deque[ActivePlan] = deque(maxlen=TUNING.kept)
        self.reports, self.noise = Reports(), NoiseMeter(options.noise_scale)
        if options.follows_noise:
            self.noise.follow(not model.statistics)
        weights = () if options.weights is None else model.persistent
        refuse_uninitialised(model, world.device, weights)
        step = self.traces.training_step(plan.cuts(model.paths()), example)
        if step.opaque or any(x.is_meta for x in step.constants.values()):
            refuse_lost_attributes(model.module)
        require_alike(world.everyone, {"whether the noise scale is measured": options.noise_scale})
        if why := unmeasurable(step, options, model, losses.several, plan):
            raise ValueError(
                f"the noise scale cannot be measured: {why}; leave noise_scale out, and batch "
                "sizes and learning rates that depend on it"
            )
        planning.memory.limit()
        if options.weights is None:
            self.state.compare_first()
        if plan.automatic:
            plan = planning.choose(step)
            # names of components: the chain is cut there
            self.traces.cuts = plan.cuts(model.paths())
        elif plan.open_cuts:
            plan = self._cut(plan, step)
        self._adopt(plan, step, first=True)

    @property
    def active(self) -> ActivePlan:
        """RuntimeError where none is, for a switch failed when state had moved already."""
        if self._active is None:
            raise RuntimeError(
                "no plan is in force, for a switch to another one failed when state had moved "
                "already: close this trainer, prepare another and resume a checkpoint"
            )
        return self._active

    @property
    def in_force(self) -> bool:
        return self._active is not None

    def _start(self) -> None:
        """Gives tensors of the meta device their values, and all of them those of `weights`."""
        path = self.options.weights
        if path is None:
            self.state.start(self.options.seed)
            return
        self.state.start(self.options.seed, self.model.persistent)
        everyone = self.world.everyone
        if on_first(everyone, lambda: (path / manifest.NAME).exists(), ""):
            wanted = {f"model/{n}": h for n, h in self.state.model_tensors("model/").items()}
            beside = ("optimizer/*", "carry/*", "outer/*", "residual/*")
            checkpoint.load(path, wanted, self.world, allow=beside)
            return
        wanted = self.state.model_tensors()
        agreed(everyone, lambda: load_safetensors(path, wanted, self.model.aliases, cast=True), "")

    # Plans

    def shift(self, plan: Plan, regrouped: Step | None = None) -> TransferStats:
        """Makes another plan the active one; ValueError where it does not fit: nothing moved.
        regrouped: the trace, on other ranks than before, whose groups are gone (`Survival`)."""
        cuts, step = self.traces.cuts, regrouped or self.active.step
        known = None if plan.open_cuts else self.planning.solved(step, plan)
        try:
            if plan.open_cuts:
                plan = self._cut(plan, step)
            elif known is None:
                step = self.step_under(step, plan, finer=regrouped is not None)
            return self._adopt(plan, step, known=known, leaves=regrouped is None)
        except ValueError:
            self.traces.cuts = cuts
            raise

    def lose(self) -> None:
        """Other ranks are lost, or come: nothing that is under way comes any more."""
        self.traces.readings.mark = 0  # as of one that comes
        self.noise.abandon()
        self.sums.forget()
        self.sharding = Sharding()
        self._earlier.clear()

    def step_under(self, step: Step, plan: Plan, finer: bool = False) -> Step:
        """The trace, or another one where the plan cuts it elsewhere, unless it may be `finer`."""
        cuts = plan.cuts(self.model.paths())
        there = cuts == self.traces.cuts or (finer and {*cuts} <= {*step.cuts, *step.chain.names})
        return step if there else self.traces.training_step(cuts)

    def stays_alone(self, plan: Plan) -> bool:
        """Whether this is one device and the plan one of several, which is told."""
        why = self.check.lacking_devices(plan, self.active.step)
        told = f"the plan stays {self.active.plan}, as there is one device: {why}"
        self.notices.once(why and told)
        return bool(why)

    def _cut(self, plan: Plan, step: Step) -> Plan:
        plan.check_rows(self.planning.rows)
        plan = self.planning.cut(step, plan)
        self.traces.cuts = plan.cuts(self.model.paths())
        return plan

    def _adopt(
        self, plan: Plan, step: Step, first: bool = False, known: Partition | None = None,
        leaves: bool = False,
    ) -> TransferStats:  # fmt: skip
        """Makes `plan` the active one; tensors move to their new places. Where it does not fit
        (ValueError) the one before goes on. known: its partition of `step`, where there is one.
        leaves: whether another plan is left."""
        new = self.check.passed(plan, step, known)
        if leaves:
            self.settle(states=True)
            self.workers.share_attributes(self.active)
        self.workers.take_means(states=True)
        # there is no way back from here: until all of it is done no plan is in force
        self._active = None
        self.sums.leave()
        self.sharding.drop()
        moved = self.state.move(new.holdings, new.groups, str(plan))
        if first:
            self._start()
        components = new.step.chain.components
        parameters = ([new.holdings[p.name] for p in c.parameters] for c in components)
        self.sharding = Sharding(
            units(parameters), new.groups.position, self.model.parameters, new.groups.gather_group
        )
        self.sharding.whole |= self.workers.adopt(plan, new.holdings, new.groups)
        self.programs = self._programs(new)
        self.sums.adopt(new, self.sharding.whole, self.workers.leaves)
        self.noise.adopt(
            users_of(new.partition.components), new.holdings, new.groups.position,
            self.model.parameters, self.sharding.whole,
            unmeasurable(new.step, self.options, self.model, self.losses.several, plan),
        )  # fmt: skip
        possible = overlaps(new.step, new.partition) and new.plan.stage_count == 1
        # losses that take turns take different times, which say nothing of pieces
        untried = self.losses.several or plan.sync.asynchronous
        pieces = new.plan.pieces or (1 if untried else None)
        self.pieces = PieceCount(self.world.everyone, possible, pieces)
        self.workers.follow(FilledPipeline(new, self.model, self.sums) if plan.kept else None)
        self._earlier.append(new)
        self._active = self.latest = new
        return moved

    @property
    def plan(self) -> Plan:
        """The plan in force with its pieces, as candidates are written."""
        plan, pieces = self.active.plan, self.pieces
        unsaid = pieces.possible and plan.pieces is None
        return replace(plan, pieces=pieces.chosen) if unsaid else plan

    def _programs(self, active: ActivePlan) -> Programs:
        return Programs(active, self.traces, self.state, self.streams, self.sharding)

    @property
    def sync(self) -> GradientSync:
        """Of the gradients of the loss whose turn it is."""
        return self.sums.now

    def others_frozen(self) -> AbstractContextManager[None]:
        """Inside, what the loss whose turn it is does not train needs no gradient."""
        parameters = chain(self.model.parameters.items(), self.sharding.whole.items())
        return self.losses.now.others_frozen(parameters)

    def abandon(self) -> None:
        """After a step that failed: nothing of its backwards is summed or measured."""
        self.sync.abandon()
        self.noise.abandon()

    # Changes of the model

    def outdated(self) -> bool:
        return self.traces.outdated(self.active.step)

    def follow_changes(self) -> None:
        """Traces the changed model anew and adopts the plan. ValueError where ranks differ."""
        marks = self.world.everyone.all_gather_json(self.traces.readings.mark)
        if odd := [rank for rank, mark in enumerate(marks) if mark != marks[0]]:
            raise ValueError(f"ranks {odd} {MODELS_DIFFER.format(0)}")
        self.traces.forget()
        # all ranks fold the same masks, idle ones too, which have none
        local = {n: b.detach() for n, b in self.model.buffers.items() if not b.is_meta}
        buffers = dict(self.state.gathered(local))
        plan = self.active.plan
        step = self.traces.training_step(plan.cuts(self.model.paths()), buffers=buffers)
        earlier = (a.partition for a in self._earlier if a.step is step and a.plan == plan)
        self._adopt(plan, step, known=next(earlier, None))

    @property
    def nothing_to_adapt(self) -> str:
        """Why no other plan could be found while it trains; empty where one could."""
        if self.losses.several:
            return "losses take turns, so that what a step takes says nothing of the plan"
        if why := self.planning.allowed.fixed(self.active.plan):
            return why
        return self.active.step.reason or ("there is one device" if self.world.size == 1 else "")

    def settle(self, states: bool = False) -> None:
        """Makes equal on all data ranks what they have of their own (training/workers.py)."""
        self.workers.settle(self.active, states)

    # Batches

    def marks(self, batch: Any, steps: int, data: str, *call: Hashable) -> Marks:
        """What ranks with one global batch have alike. data: its place; call: how it runs.
        ValueError for a group of the optimizer that came later, of parameters of another model."""
        if (groups := len(self.optimizer.param_groups)) != self._groups:  # add_param_group
            refuse_foreign(self.optimizer, {*self.model.parameters.values()})
            self._groups = groups
        called = self.active.fingerprint, call
        return Marks.of(self.traces.mark, self.optimizer, batch, steps, called, data)

    def meet(
        self, steps: int, batch: Any, marks: Marks, numbers: tuple[int, ...], outdated: bool,
        unknown: bool,
    ) -> None:  # fmt: skip
        """Workers that go on without each other compare settings and rows now and then."""
        if self.workers.asynchronous and steps % LOOKED_AT == 0:
            self.active.agree(batch, marks, numbers, outdated, unknown=unknown)

    def micro_batches(
        self, batch: Any, rows: Sequence[GlobalRows], function: Any = None
    ) -> list[MicroBatch]:
        """What this rank runs of each micro-batch, whose rows follow each other in its batch;
        nothing on an idle rank. function: a metric (none: the loss). All ranks call alike."""
        micro: list[MicroBatch] = []
        start, total = 0, sum(part.total for part in rows)
        for part in rows:
            count = self.active.local_rows(part)
            local = batch if len(rows) == 1 else take(batch, start, start + count)
            start += count
            filled = self.filled(local, part)
            of, planned = function or self.losses.now.loss, self.planning.rows
            program = self.programs.find(filled, of, part, total, planned)
            if program is None:
                continue
            turns = [(filled, part)]
            if function is None:
                turns = self._taking_turns(program, local, filled, part)
            micro.append(MicroBatch(program, part, turns))
        return with_totals(micro, batch, rows, self.active)

    def _taking_turns(
        self, program: Program | OpaqueProgram, batch: Any, filled: Any, rows: GlobalRows
    ) -> list[tuple[Any, GlobalRows]]:
        """The batch, in one part or cut so that computation and traffic overlap."""
        least = 0 if program.coupled or len(program.of) > 1 else min(rows.counts)
        if (count := self.pieces.micro_batches(least)) == 1:
            return [(filled, rows)]
        parts, start = [], 0
        for part in rows.micro(count):
            stop = start + self.active.local_rows(part)
            parts.append((take(batch, start, stop), part))
            start = stop
        return parts

    def filled(self, batch: Any, rows: GlobalRows) -> Any:
        """The batch; where this rank has no rows, one that is another rank's.

        All ranks of the stage call. Such a row is there for its program to run on: nothing that
        is computed from it leaves the rank (engine/absent.py). An idle rank's is zeros, which it
        traces with and never runs on."""
        groups = self.active.groups
        if groups.position is None:
            return batches.one_row(batch)
        if self.active.step.opaque:
            return batch
        leaves = self.active.leaf_layout
        return batches.with_stand_in(batch, rows, leaves, groups.position, groups.everyone)

    # Checkpoints

    def local_tensors(self) -> dict[str, LocalTensor]:
        own = self.carry.local_tensors()
        own |= {**self.workers.momentum(), **self.sums.residuals()}
        return {**self.state.local_tensors(), **own}

    def to_save(
        self, steps: int, seed: int, scheduler: Any, cursors: tuple[Cursor, ...],
        extra: Mapping[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        """What a checkpoint keeps beside tensors. ValueError where it cannot keep it."""
        optimizer = self.state.optimizer_state.describe()
        return TrainerState(
            steps, seed, str(self.plan), self.world.size, self.pieces.to_dict(), optimizer,
            None if scheduler is None else scheduler.state_dict(), cursors, self.carry.rows, extra,
            self.noise.state(),
        ).to_dict()  # fmt: skip

    def load(self, path: Path, saved: TrainerState) -> None:
        """The tensors of a checkpoint. CheckpointError where it does not fit: no change."""
        self.workers.drain()  # what is under way is of what was before
        self.sharding.drop()
        stored = self.carry.stored(saved.carry)
        with self.state.optimizer_state.undone_on_error():
            try:
                self.state.optimizer_state.adopt(saved.optimizer)
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{path}: does not fit: {error}") from None
            outer = self.workers.momentum(new=True)
            owed = self.sums.residuals(new=True)
            wanted = {**self.state.local_tensors(), **stored, **outer, **owed}
            checkpoint.load(path, wanted, self.world, allow=("outer/*", "residual/*"))
        self.workers.resume(self.active.plan, outer)
        self.sums.resume(owed)
        self.carry.adopt(stored, saved.carry)
        self.noise.resume(saved.noise)
        self.workers.rows = 0
        if (saved.plan, saved.ranks) == (str(self.active.plan), self.world.size):
            self.pieces.resume(saved.overlap)
        self.streams = RandomStreams(saved.seed, self.world.device)
        self.programs = self._programs(self.active)

    def close(self) -> None:
        """Ends hooks and programs; the groups are the world's."""
        self.sums.close()
        self.workers.close()
        self.sharding = Sharding()
        if self._active is not None:
            self.programs = self._programs(self._active)
