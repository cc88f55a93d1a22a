"""The trainer: a model that trains under a plan, seen from one rank."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from synchromesh.adapt.adapter import Adapter
from synchromesh.adapt.decision import Decision
from synchromesh.checkpoint import checkpoint
from synchromesh.checkpoint.agreement import agreed
from synchromesh.checkpoint.export import save_safetensors
from synchromesh.checkpoint.switch import Moved
from synchromesh.data.fetch import LoadingOptions
from synchromesh.data.loader import Batching, Loader
from synchromesh.data.loaders import Loaders
from synchromesh.data.reading import Collate
from synchromesh.engine import batches
from synchromesh.engine.agreement import LoneRankFailed
from synchromesh.engine.control_channel import EVALUATE, checked_gather
from synchromesh.engine.noise_averages import NoiseScale
from synchromesh.engine.world import World
from synchromesh.launcher.generation import Regrouped
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.choice import Choice
from synchromesh.planning.live import LivePlanning
from synchromesh.programs.model import Model
from synchromesh.trace.capture.batch import take_parts
from synchromesh.trace.partition.partition import Partition
from synchromesh.trace.step import Step
from synchromesh.training import learning_rate
from synchromesh.training.accumulation import Accumulation, BackwardCall
from synchromesh.training.active_plan import Options, checked_plan
from synchromesh.training.adaptation import Adaptation
from synchromesh.training.batch_sizes import BatchChange
from synchromesh.training.evaluation import Metric, means
from synchromesh.training.execution import Execution
from synchromesh.training.losses import NamedLosses
from synchromesh.training.own_loop import OwnLoop, again, part
from synchromesh.training.recovery import Survival
from synchromesh.training.trainer_state import TrainerState
from synchromesh.values.plan import Plan


class Trainer:
    """A model under a plan. Made by `prepare`; all ranks call its methods alike, in one order.

    steps           updates done
    steps_to_come   as the caller says and `update` counts down; 0: not known
    reports, sums   what the loss reports beside itself, since the last update; sums of gradients
    on_event        is called with decisions of the adapter, what came of them, changes of batches
    stop_request    goes with a step; agreed_stop_request: the greatest of the ranks' (`Stop`)"""

    def __init__(
        self, model: Model, optimizer: Optimizer, losses: NamedLosses, example: Any, plan: Plan,
        world: World, options: Options,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.world, self.options = model, optimizer, world, options
        self.scheduler: LRScheduler | learning_rate.ScaledRate | None = None
        self.steps = self.steps_to_come = self.stop_request = self.agreed_stop_request = 0
        self.on_event: Callable[[Decision | BatchChange], None] | None = None
        self._loaders = Loaders(self.own_rows, world, options.carry is not None, model.module)
        asked = options.headroom, options.say, options.allowed_on(world, model)
        planning = LivePlanning(model, optimizer, example, world, *asked)
        execution = Execution(model, optimizer, losses, example, plan, world, options, planning)
        self._execution, self.planning, self.state = execution, planning, execution.state
        self.reports, self.workers = execution.reports, execution.workers
        self.sums, self._accumulation = execution.sums, Accumulation(execution)
        self.adaptation = Adaptation(execution, self.switch)
        self.survival = survival = Survival(execution, self._loaders, self.adaptation)
        self.own_loop = OwnLoop(survival, execution, self._loaders)

    @property
    def rank(self) -> int:
        """This process among all."""
        return self.world.rank

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._execution.active.plan

    @property
    def traced(self) -> Step:
        """The trace of the training step."""
        return self._execution.active.step

    @property
    def partition(self) -> Partition:
        """The trace under the plan in force."""
        return self._execution.active.partition

    @property
    def choice(self) -> Choice | None:
        """How the plan was found, where it was `auto`."""
        return self.planning.choice

    @property
    def adapter(self) -> Adapter | None:
        """What may change the plan while training runs; None without `adapt`."""
        return self.adaptation.adapter

    @property
    def settled(self) -> bool:
        """Whether nothing is tried any more (engine/pieces.py, adapt/trials.py)."""
        return not self.adaptation.trying and self._execution.pieces.chosen is not None

    def predict(self) -> Candidate:
        """What a step takes under the current plan, composed of measurements of components and
        collectives, and the memory of each device; for batches as the example, or as they are now.
        Measures what is not known yet, which takes seconds; all ranks call alike."""
        self._check_method("predict")
        known = None if self.adapter is None else self.adapter.profile
        return self.planning.predict(self.traced, self.plan, known)

    def adapt(self) -> None:
        """From now on `step` watches what steps take and may switch at its end (`decisions` says
        why). Measures model and links first where that was not done; all ranks call alike."""
        self._check_method("adapt")
        if why := self._execution.nothing_to_adapt:
            self.options.say(f"there is nothing to adapt: {why}")
        else:
            self.adaptation.begin(self.predict)

    @property
    def decisions(self) -> list[Decision]:
        """What the adapter has decided so far; none where it was not asked for."""
        return self.adaptation.decisions

    @property
    def noise_scale(self) -> NoiseScale | None:
        """What is known of the gradient noise scale; None where it was not asked for."""
        return self._execution.noise.scale()

    # Training

    def shard(self, batch: Any) -> Any:
        """This rank's rows of a global batch, under the current plan (none on an idle rank)."""
        self._loaders.gave += 1
        rows = take_parts(batch, self.own_rows(batches.row_count(batch)))
        return self.own_loop.handed(rows, lambda: self.shard(batch))

    def own_rows(self, rows: int) -> tuple[tuple[int, int], ...]:
        """[start, stop) of this rank's rows of `rows` global ones, by the plan's micro-batch."""
        return self._execution.active.own_rows(rows)

    def step(self, batch: Any, micro_batches: int = 1, loss: str | None = None) -> Tensor:
        """Forward, backward, synchronise, update. batch: this rank's rows. Returns the global mean
        loss (0-d). loss: whose turn it is, where `prepare` was given several. micro_batches: into
        how many parts each rank cuts its rows to save memory; gradients accumulate. ValueError
        where rows depend on each other."""
        if micro_batches < 1:
            raise ValueError(f"micro_batches must be at least 1, got {micro_batches}")
        self._accumulation.require_none("step")
        return self.own_loop.step(self, batch, lambda rows: self._step(rows, micro_batches, loss))

    def _step(self, batch: Any, micro_batches: int, loss: str | None) -> Tensor:
        began, waited = time.perf_counter(), self.world.waited
        cut = self._execution.noise.parts(self.steps, self.plan)
        value, rows = self._backward(batch, BackwardCall(True, max(micro_batches, cut), loss=loss))
        self.own_loop.note(value)
        self.update()
        seconds, waited = time.perf_counter() - began, self.world.waited - waited
        self._execution.pieces.add(seconds)
        self._report(self.adaptation.note(seconds, waited, rows, self.steps, self.steps_to_come))
        self._report(self.adaptation.resize(self.steps, self.steps_to_come))
        return value

    def backward(
        self, batch: Any, last: bool = True, loss: str | None = None, share: float | None = None
    ) -> Tensor:
        """Forward and backward of this rank's rows; gradients add up until `update`. Returns the
        global mean loss of everything since the last update. A carry goes on with every call.
        last: whether the accumulation ends here (gradients are summed over ranks then). share: of
        this batch's mean in the loss, which is a sum then; gradients are summed at every call."""
        batch = self.own_loop.current(batch)
        return self._backward(batch, BackwardCall(last, loss=loss, share=share))[0]

    @part
    def _backward(self, batch: Any, call: BackwardCall) -> tuple[Tensor, int]:
        execution = self._execution
        self._accumulation.require_open()
        self._accumulation.take_turn(call.loss)
        outdated = execution.outdated()
        marks = execution.marks(batch, self.steps, self._loaders.place, *call)
        batch = batches.to_device(batch, self.world.device)
        agree, unknown = execution.active.agree_step, self._loaders.unknown(self.steps)
        numbers = self.stop_request, *self.adaptation.cost, *execution.noise.take()
        at_once = call.micro_batches == self.plan.micro_batches == 1
        try:
            execution.meet(self.steps, batch, marks, numbers, outdated, unknown)
            rows = agree(batch, marks, numbers, outdated, at_once=at_once, unknown=unknown)
        except LoneRankFailed:
            self._forget_accumulation()  # as that rank does
            raise
        if agree.outdated:
            self._accumulation.require_none(
                "freezing or releasing parameters, or changing modes, masks or numbers it reads,"
            )
            self.workers.forget_gradients()
            execution.follow_changes()
        self._accumulation.require_rows(rows)
        if not self._accumulation.calls:
            self.workers.forget_gradients()
            self.survival.begin_step()
        if self._loaders.begins:
            execution.carry.forget()
            self._loaders.begins = False
        try:
            value = self._accumulation.add(batch, rows, call, self.steps)
        except BaseException:
            if agree.refused and self._accumulation.calls:
                self._execution.sync.abandon()  # before any backward
            else:
                self._forget_accumulation()  # a part of one is of no use
            agree.give_up()
            raise
        self.agreed_stop_request = max(request for request, *_ in agree.numbers)
        self._report(self.adaptation.collect([sent[1:3] for sent in agree.numbers]))
        execution.noise.collect([sent[3:] for sent in agree.numbers])
        return value, rows.total

    def _report(self, event: Decision | BatchChange | None) -> None:
        if self.on_event is not None and event is not None:
            self.on_event(event)

    def _forget_accumulation(self) -> None:
        self._execution.abandon()
        self.workers.forget_gradients()
        self._accumulation = Accumulation(self._execution)

    def forget_carry(self) -> None:
        """The next batch begins new streams, as the first one of an epoch of `loader` does."""
        self._execution.carry.forget()

    def clip(self, max_norm: float) -> Tensor:
        """Scales gradients to a global norm of at most `max_norm`; returns it before (0-d)."""
        return self._accumulation.clip(max_norm)

    @part
    def update(self) -> None:
        """The optimizer's step, and the scheduler's. Gradients stay until the next backward."""
        self._accumulation.require_last("update")
        self._accumulation.warn_of_parts(self.steps)
        self.survival.agree(self.steps)
        self._complete()

    def _complete(self) -> None:
        self._accumulation.update(self.scheduler)
        self.steps += 1
        self.survival.end_step()
        self.steps_to_come -= self.steps_to_come > 1
        self.workers.updated(self.steps)
        self._accumulation = Accumulation(self._execution)
        self.planning.memory.relieve(self.steps)

    # Evaluation, data, plans and state

    @again
    def evaluate(self, loader: Iterable[Any], metric: Metric) -> dict[str, float]:
        """Means over the rows of `loader`: metric(model, batch) -> {name: sum over its rows}; with
        a carry, which begins anew, metric(model, batch, carry) -> ({name: sum}, carry)."""
        self._check_method(EVALUATE)
        if not self._accumulation.calls:
            self.workers.forget_gradients()
        self._execution.settle()
        with self._loaders.evaluating(loader):
            return means(self._execution, loader, metric, self.steps, lambda: self._loaders.place)

    def loader(
        self, dataset: Any, batch_size: int | str | None = None, shuffle: bool = False,
        seed: int = 0, drop_last: bool = False, collate: Collate | None = None,
        continuing: bool = False, **loading: Unpack[LoadingOptions],
    ) -> Loader:  # fmt: skip
        """Global batches of `batch_size` rows, of which each rank loads its own under any plan, on
        its device; `auto`, `auto:MIN-MAX`: as the noise scale says (docs/python.md: "Batch sizes
        that change"). dataset: samples by index, a stream (an iterable data set), or a torch
        `DataLoader` of global batches, which says all else but `seed` and `continuing` itself.

        Iterating takes one epoch, or what is left of it after `resume`, the next time the next. A
        second call for the same data set and `shuffle` gives the same loader; its `batch_size` may
        be set at any time. The order depends on `seed` (or a `DataLoader`'s generator) and epoch.
        continuing: row i of a batch is the sample behind row i of the one before."""
        batching = Batching(shuffle, drop_last, collate, continuing)
        rows = self.planning.rows if isinstance(batch_size, str) else batch_size
        loader = self._loaders.asked(dataset, rows, batching, seed, loading)
        if isinstance(batch_size, str):
            self.adaptation.sizes(loader, self.scheduler).choose(batch_size)
        return loader

    def switch(self, plan: Plan | str) -> Moved:
        """Shifts to another plan between two steps; state moves over the network. One device stays
        as it is, with a notice, where the plan needs more."""
        began = time.perf_counter()
        self._check_method("switch")
        self._accumulation.require_none("switch")
        self.workers.forget_gradients()
        plan = checked_plan(plan)
        if any(self.world.everyone.all_gather_json(self._execution.outdated())):
            self._execution.follow_changes()
        if plan.automatic:
            plan = self.planning.choose(self.traced)
        elif self.world.size == 1 and self._execution.stays_alone(plan):
            return Moved(0.0, 0, 0)
        with self.survival.replication.kept(self.steps, self.scheduler):
            moved = Moved.of_ranks(self._execution.shift(plan), self.world.everyone, began)
        self.adaptation.restart()
        return moved

    def state_dict(self) -> dict[str, Tensor]:
        """The model's own names and shapes, complete, on every rank's host memory."""
        self._check_method("state_dict")
        self._execution.settle()
        return self.state.state_dict()

    @contextmanager
    def whole(self, rank: int | None = None) -> Iterator[nn.Module | None]:
        """Inside, the model as a plain module with entire tensors on this rank's device. All ranks
        enter alike; rank: the only one that gets it, the others None. RuntimeError where a
        parameter was changed inside; changes of buffers are dropped."""
        self._check_method("whole")
        self._execution.settle()
        with self.state.whole(rank) as module:
            yield module

    def parameters(self) -> dict[str, Tensor]:
        """This rank's shards of the parameters by name."""
        return {n: p.detach() for n, p in self.model.parameters.items()}

    def gradients(self) -> dict[str, Tensor]:
        """This rank's shards of the gradients by name, zeros where a trained one has none."""
        own = ((n, p, p.grad) for n, p in self.workers.leaves.items() if p.requires_grad)
        return {n: torch.zeros_like(p) if g is None else g.to_dense() for n, p, g in own}

    def buffers(self) -> dict[str, Tensor]:
        """This rank's shards of the buffers by name, those of own rows made equal before."""
        self._check_method("buffers")
        self._execution.settle()
        return {n: b.detach() for n, b in self.model.buffers.items()}

    def gather_numbers(self, number: int) -> list[int]:
        """One number of every rank."""
        return [*map(int, self.world.everyone.all_gather_json(number))]

    @again
    def save(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Writes a checkpoint that any plan on any number of devices can resume; a crash leaves
        the old one."""
        self._check_method("save")
        self._accumulation.require_none("save")
        self.workers.forget_gradients()
        self._execution.settle(states=True)
        own = self.steps, self.options.seed, self.scheduler, self._loaders.places(), extra or {}
        saved = agreed(self.world.everyone, lambda: self._execution.to_save(*own), str(path))
        saved["optimizer"] = self.state.described_optimizer(saved["optimizer"])
        saved = self.world.everyone.broadcast_json(saved, self._execution.active.groups.ranks[0])
        checkpoint.save(Path(path), self._execution.local_tensors(), saved, self.world)

    def export(self, path: str | Path) -> None:
        """Writes the model's complete weights to one safetensors file, under its own names."""
        self._check_method("export")
        self._execution.settle()
        save_safetensors(path, self.state.model_tensors(), self.world, self.model.aliases)

    def resume(self, path: str | Path) -> dict[str, Any]:
        """Continues from a checkpoint of any plan; returns what `save` was given as `extra`.
        CheckpointError, on all ranks, for one that is damaged or of another model; nothing has
        changed then."""
        self._check_method("resume")
        saved = TrainerState.from_dict(checkpoint.read_extra(path := Path(path), self.world), path)
        self._execution.load(path, saved)
        self._forget_accumulation()
        self.steps, self.options = saved.steps, replace(self.options, seed=saved.seed)
        if self.scheduler is not None and saved.scheduler is not None:
            learning_rate.resume(self.scheduler, saved.scheduler)
        self._loaders.go_on(saved.cursors)
        self.adaptation.resume()
        return dict(saved.extra)

    def recover(self, error: Exception) -> Regrouped:
        """Goes on without ranks that are lost, behind `error` of a call (`Survival.recover`)."""
        regrouped = self.survival.recover(error, self, self._complete)
        self._accumulation = Accumulation(self._execution)
        return regrouped

    def _check_method(self, method: str) -> None:
        checked_gather(self.world.everyone, method)

    def close(self) -> None:
        """Ends the groups; the model stays cut unless this is the only rank."""
        self._execution.close()
        self.model.release()
        self.world.close()
