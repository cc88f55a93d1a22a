"""The trainer: a model that trains under a plan, seen from one rank; `step`, `evaluate`, `switch`,
`save`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from synchromesh.adapt.adapter import Adapter, Event
from synchromesh.engine import batches
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.groups import World
from synchromesh.engine.model import Model
from synchromesh.engine.opaque import OpaqueProgram
from synchromesh.engine.optimizer import clip_norm
from synchromesh.engine.overlap import PIECES
from synchromesh.engine.program import Program, Result
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.choice import Choice
from synchromesh.planner.decide import next_best, survey
from synchromesh.profiling.live_facts import LiveFacts
from synchromesh.profiling.planning import choose, memory_limits, predict
from synchromesh.state import checkpoint
from synchromesh.state.checkpoint import CheckpointError
from synchromesh.state.cursor import Loader
from synchromesh.state.export import save_safetensors
from synchromesh.state.loaders import Loaders
from synchromesh.state.model_state import plain
from synchromesh.trace.capture.capture import signature
from synchromesh.trace.capture.export import take
from synchromesh.trace.capture.modes import training_modes
from synchromesh.trace.partition.partition import Partition, overlaps
from synchromesh.trace.step import Step
from synchromesh.training.evaluation import Metric, means
from synchromesh.training.execution import Execution, Loss, Options
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile

RESIZED = 8, 12  # so many of the last batches had another size: plans are made for it


@dataclass(frozen=True)
class Moved:
    """What a switch took: seconds of pause, bytes that all ranks sent together, the most that one
    of them sent or received."""

    seconds: float
    bytes: int
    most: int


@dataclass
class Pending:
    """An accumulation: what the backward calls since the last update add up to."""

    unit: float = 0.0  # global weight for which a gradient is not scaled
    rows: int = 0  # global rows of the first backward call
    calls: int = 0
    summed: bool = False  # the last backward has summed the gradients over the ranks
    totals: list[tuple[Tensor, Any]] = field(
        default_factory=list
    )  # ([loss sum, weight, whether it is a pair, whether it cannot be added up], work under way)


class Trainer:
    """A model under a plan. Made by `prepare`; all ranks call its methods alike and in the same
    order.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        loss: Loss,
        example: Any,
        plan: Plan,
        world: World,
        options: Options,
    ) -> None:
        self.model, self.optimizer, self.world = model, optimizer, world
        self.options = options
        self.scheduler: LRScheduler | None = None
        self.steps = 0  # updates done
        self._loaders = Loaders(self.row_range)
        self._everyone = world.everyone
        self._pending = Pending()
        self._example = example
        self.choice: Choice | None = None  # how the plan was found, where it was `auto`
        self._profile: Profile | None = None
        self._asked: LiveFacts | None = None
        held = [*model.parameters.values(), *model.buffers.values()]
        self._limits = memory_limits(world, held)  # while the process holds nothing else
        self.adapter: Adapter | None = None  # where the plan may change while training runs
        self.steps_to_come = 0  # as the caller says and `update` counts down; 0: not known
        self.on_event: Callable[[Event], None] | None = None  # a decision, and what came of it
        self._seen_rows = 0  # that this rank has computed with since buffers were last settled
        self._cost: tuple[int, ...] = (0, 0)  # microseconds computing, waiting, of the last step
        self._rows_done = 0
        self._rows = batches.row_count(example)  # of the global batches that are planned for
        self._chosen_rows = self._rows  # for which `choice` was made
        self._sizes: deque[int] = deque(maxlen=RESIZED[1])  # of the last global batches

        self._arranged = Execution(
            model, optimizer, loss, example, plan, world, options, self._choose
        )
        self.state = self._arranged.state

    # The plan: trace, partition, pieces

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def plan(self) -> Plan:
        return self._arranged.now.plan

    @property
    def traced(self) -> Step:
        return self._arranged.now.traced

    @property
    def partition(self) -> Partition:
        return self._arranged.now.partition

    def _question(self, step: Step) -> LiveFacts:
        """What a plan is wanted for; partitions that were solved for it are kept with it."""
        asked = self._asked
        if asked is None or asked.problem.step is not step or asked.problem.rows != self._rows:
            example, limits = self._example, self._limits
            asked = self._asked = LiveFacts.of(
                self.world, self.model, step, self.optimizer, example, self._rows, limits
            )
        return asked

    def _choose(self, step: Step) -> Plan:
        self.choice, self._chosen_rows = choose(self._question(step), self.options.say), self._rows
        self._profile = self.choice.profile if self.choice.chosen.time else None
        return self.choice.chosen.plan

    def predict(self) -> Candidate:
        """What a step takes under the current plan, composed of measurements of components and
        collectives, and the memory of each device; for global batches of as many rows as the
        example, or as `adapt` has noticed that they have now.

        Measures what is not known yet, which takes seconds; all ranks call alike.
        """
        chosen = None if self.choice is None else self.choice.chosen
        as_chosen = self._rows == self._chosen_rows
        if as_chosen and chosen and chosen.time is not None and chosen.plan == self.plan:
            return chosen
        known = self._profile if self.adapter is None else self.adapter.profile
        found, self._profile = predict(
            self._question(self.traced), self.plan, known, self.options.say
        )
        return found

    def explained(self) -> Choice | None:
        """How the plan was found, where it was `auto`, with what each component's next best layout
        would cost. On this rank alone: no other need call."""
        if self.choice is None or self.choice.chosen.time is None or self.choice.components:
            return self.choice
        self.choice = replace(
            self.choice, components=next_best(self._question(self.traced).partitions, self.choice)
        )
        return self.choice

    def adapt(self) -> None:
        """From now on `step` watches what steps take and may switch at its end (`decisions` says
        why and what came of it). Measures the model and the links first, where that has not been
        done; all ranks call alike.
        """
        if self.traced.opaque or self.world.size == 1:
            why = self.traced.reason if self.traced.opaque else "there is one device"
            self.options.say(f"there is nothing to adapt: {why}")
            return
        if self.choice is None or self._profile is None:
            self.options.say("measuring the other layouts, to know what there is to change to ...")
            facts = self._question(self.traced)
            self._profile = survey(facts.partitions, facts, self._profile)
        self.adapter = Adapter(self._profile, self.switch)

    @property
    def decisions(self) -> list[Event]:
        """What the adapter has decided so far; none where it was not asked for."""
        return [] if self.adapter is None else self.adapter.events

    # Training

    def shard(self, batch: Any) -> Any:
        """This rank's rows of a global batch, under the current plan (none on an idle rank)."""
        return take(batch, *self.row_range(batches.row_count(batch)))

    def row_range(self, rows: int) -> tuple[int, int]:
        """[start, stop) of a global batch of `rows` rows that this rank works on."""
        position = self._arranged.now.stage.position
        if position is None:
            return (0, 0)
        layout = self._arranged.now.leaf_layout
        return self.plan.row_ranges(rows, layout.data)[layout.data_index(position)]

    def step(self, batch: Any, micro_batches: int = 1) -> Tensor:
        """Forward, backward, synchronise, update. batch: this rank's rows. Returns the global mean
        loss (0-d).

        micro_batches: into how many parts each rank cuts its rows to save memory; gradients
        accumulate.
        """
        if micro_batches < 1:
            raise ValueError(f"micro_batches must be at least 1, got {micro_batches}")
        began, waited = time.perf_counter(), self.world.waited
        self._between_steps("step")
        value = self._backward(batch, True, micro_batches)
        self.update()
        seconds = time.perf_counter() - began
        self._arranged.overlap.tell(seconds)
        if self.adapter is not None:
            self._adapt(seconds, self.world.waited - waited)
        return value

    def _adapt(self, seconds: float, waited: float) -> None:
        """Notes what the step took, for all ranks to know with the next one; acts on a drift."""
        assert self.adapter is not None
        self._notice_rows()
        full = self._rows_done == self._rows
        settled = self._arranged.overlap.chosen is not None
        waited = min(waited, seconds)
        self._cost = (
            (int((seconds - waited) * 1e6), int(waited * 1e6)) if full and settled else (0, 0)
        )
        plan = self.plan
        if plan.pieces is None and overlaps(self.traced, self.partition):
            plan = replace(plan, pieces=self._arranged.overlap.chosen)  # as candidates are told
        event = self.adapter.act(
            self._question(self.traced), plan, self.partition, self.steps, self.steps_to_come
        )
        if event is not None:
            if event.measuring_seconds:
                self._cost = (0, 0)  # of a plan that may be gone
            if self.on_event is not None:
                self.on_event(event)

    def _notice_rows(self) -> None:
        """Plans for another size of global batches once most of the last ones have had it; each
        time more of them must, so that sizes that take turns are not followed for ever."""
        assert self.adapter is not None
        most, last = RESIZED
        rows, sizes = self._rows_done, self._sizes
        sizes.append(rows)
        times = (sizes.maxlen or last) // last
        if rows != self._rows and sizes.count(rows) >= most * times:
            self.adapter.resize(self._rows, rows)
            self._rows = self._arranged.rows = rows
            self._sizes = deque(maxlen=2 * times * last)

    def backward(self, batch: Any, last: bool = True) -> Tensor:
        """Forward and backward of this rank's rows; gradients add up until `update`.

        last: whether the accumulation ends here (gradients are summed over ranks then). Returns
        the global mean loss of everything since the last update.
        """
        return self._backward(batch, last, 1)

    def _backward(self, batch: Any, last: bool, parts: int) -> Tensor:
        outdated, key = self._arranged.outdated(), self._key(batch)
        batch = batches.to_device(batch, self.world.device)
        agree = self._arranged.now.agree
        rows = agree(batch, key, self._cost, outdated)
        self._rows_done = rows.total
        self._hear()
        if agree.outdated:
            self._between_steps(
                "freezing or releasing parameters, or changing modes of modules or masks,"
            )
            self._forget_gradients()
            self._arranged.follow_changes()
        if rows.total == 0:
            raise ValueError(
                "a step needs at least one row, but every rank's batch is empty (0 rows)"
            )
        if self._pending.summed:
            raise ValueError(
                "backward after the last one of an accumulation: its gradients are summed over "
                "the ranks already; call update first, or give last=False to all but the last"
            )
        if not self._pending.calls:
            self._forget_gradients()
        try:
            return self._accumulate(batch, rows, last, parts)
        except BaseException:
            self._arranged.sync.abandon()  # a part of an accumulation is of no use
            self._clear()
            raise

    def _accumulate(self, batch: Any, rows: GlobalRows, last: bool, parts: int) -> Tensor:
        pending, start = self._pending, 0
        micro = [part for part in rows.micro(parts) if part.total]  # no rank runs what is empty
        with self._arranged.streams.preserved():
            for part in micro:
                count = self._mine(part)
                piece = batch if parts == 1 else take(batch, start, start + count)
                start += count
                if last and part is micro[-1]:
                    self._arranged.sync.begin()
                self._seen_rows += count
                self._forward_backward(piece, part, rows.total, alone=last and len(micro) == 1)
        value = self._loss_so_far()
        if last:
            weight = float(sum(total[1] for total, _ in pending.totals))
            if not weight:
                raise ValueError(
                    "the loss's weight is 0 over all ranks (nothing in the batch counts), so its "
                    "mean is not defined: leave such a batch out"
                )
            self._arranged.sync.finish(None if weight == pending.unit else pending.unit / weight)
            pending.summed = True
        return value

    def _hear(self) -> None:
        """Shows the adapter what the last step cost every rank that takes part."""
        if self.adapter is not None:
            told = [self._arranged.now.agree.told[r] for r in self._arranged.now.stage.ranks]
            if all(sum(cost) > 0 for cost in told):
                table = [(cost[0], cost[1]) for cost in told]
                event = self.adapter.see(table, self._arranged.now.stage.ranks)
                if event is not None and self.on_event is not None:
                    self.on_event(event)
            self._cost = (0, 0)

    def _mine(self, rows: GlobalRows) -> int:
        position = self._arranged.now.stage.position
        return (
            0
            if position is None
            else rows.counts[self._arranged.now.leaf_layout.data_index(position)]
        )

    def _key(self, batch: Any) -> int:
        now = self._arranged.now.fingerprint, self.steps, self.model.trained(), self._modes()
        return batches.fingerprint((signature(batch), batches.common(batch), *now))

    def _modes(self) -> tuple[bool, ...]:
        return training_modes(self.model.module)

    def _forward_backward(
        self, batch: Any, rows: GlobalRows, total: int, alone: bool = True
    ) -> None:
        """One micro-batch: adds to gradients and to the pending loss. alone: it is the only one of
        its accumulation."""
        pending, arranged = self._pending, self._arranged
        filled = arranged.filled(batch, rows)
        program = arranged.program(filled, arranged.loss, rows)
        alone = alone and not pending.calls
        pending.rows = pending.rows or total
        sums = torch.zeros(4, dtype=torch.float64, device=self.world.device)
        results: list[Result] = []
        if program is not None:
            pieces = self._in_pieces(program, batch, filled, rows)
            results = program.run(pieces, self.steps, pending.calls)
        for result in results:
            weighted = len(result.outputs) == 2
            if not pending.unit:
                targets = 0 if program is None else program.targets
                pending.unit = _unit(weighted, targets, pending.rows)
            if result.rows and result.leads:
                value = result.outputs[0].detach()
                sums[0] += value if weighted else value * result.rows
                sums[1] += result.outputs[1].detach() if weighted else result.rows
                sums[2] = weighted
            sums[3] = weighted and result.outputs[1].requires_grad and not alone
        work = self._everyone.all_reduce(sums, asynchronous=True, counted=False)
        pending.totals.append((sums, work))
        pending.calls += PIECES
        if program is not None:
            with program.backward():
                self._backward_of(results)
            program.after_backward(bool(results))

    def _backward_of(self, results: Sequence[Result]) -> None:
        """Backward of the outputs, each with its share of the global loss.

        L = S / W       dL = (dS - L dW) / W        W: where it depends on parameters
        """
        unit, values, seeds = self._pending.unit, list[Tensor](), list[Tensor]()
        for result in results:
            weighted = len(result.outputs) == 2
            weight = (1.0 if weighted else result.rows) / unit if result.rows else 0.0
            values.append(result.outputs[0])
            seeds.append(torch.full_like(values[-1], weight))
            if weighted and result.outputs[1].requires_grad:
                loss = self._loss_so_far()
                values.append(result.outputs[1])
                seeds.append((-loss * weight).to(values[-1].dtype))
        live = [(v, s) for v, s in zip(values, seeds, strict=True) if v.requires_grad]
        if live:
            torch.autograd.backward([v for v, _ in live], [s for _, s in live])

    def _in_pieces(
        self, program: Program | OpaqueProgram, batch: Any, filled: Any, rows: GlobalRows
    ) -> list[tuple[Any, GlobalRows]]:
        """The batch whole, or cut so that computation and traffic overlap."""
        count = self._arranged.overlap.pieces(0 if program.coupled else min(rows.counts))
        if count == 1:
            return [(filled, rows)]
        pieces, start = [], 0
        for part in rows.micro(count):
            stop = start + self._mine(part)
            pieces.append((take(batch, start, stop), part))
            start = stop
        return pieces

    def _loss_so_far(self) -> Tensor:
        """The global mean loss of the accumulation; waits for the small all-reduces."""
        for index, (total, work) in enumerate(self._pending.totals):
            if work is not None:
                self.world.wait(work)
                self._pending.totals[index] = (total, None)
        value = torch.stack([total for total, _ in self._pending.totals]).sum(0)
        if value[3]:
            raise ValueError(
                "the loss's weight depends on parameters, and its gradient needs the loss of all "
                "rows before any backward: give such a batch at once (no micro-batches, no "
                "accumulation), or detach the weight"
            )
        if not self._pending.unit:  # of a rank that ran nothing
            self._pending.unit = _unit(bool(value[2]), 0, self._pending.rows)
        return value[0] / value[1]

    def clip(self, max_norm: float) -> Tensor:
        """Scales gradients so that their global norm is at most `max_norm`; returns the norm
        before (0-d).
        """
        self._after_last("clip")
        return clip_norm(self.state.copies(), self._everyone, max_norm)

    def update(self) -> None:
        """The optimizer's step (and the scheduler's, where `prepare` was given one). Gradients
        stay until the next backward begins.
        """
        self._after_last("update")
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.steps += 1
        if self.steps_to_come > 1:
            self.steps_to_come -= 1
        self._pending = Pending()

    def _between_steps(self, what: str) -> None:
        if self._pending.calls:
            raise ValueError(
                f"{what} in the middle of an accumulation ({len(self._pending.totals)} backward "
                "calls since the last update) would lose its gradients: call update first"
            )

    def _after_last(self, what: str) -> None:
        if not self._pending.summed:
            raise ValueError(
                f"{what} needs the whole gradient, which is summed over the ranks by the last "
                f"backward of an accumulation ({len(self._pending.totals)} backward calls so far, "
                "none of them the last): call backward(batch) before"
            )

    def _clear(self) -> None:
        self._forget_gradients()
        self._pending = Pending()

    def _forget_gradients(self) -> None:
        """Lets go of the gradients of the last step: when the next one begins, not when it ends.

        At the end of a step they lie on top of the heap, and glibc hands them back to the system
        and gets them anew, page by page, in every step: 7 % of ResNet-18's time on one CPU rank.
        """
        for parameter in self.model.parameters.values():
            parameter.grad = None

    # Evaluation

    def evaluate(self, loader: Iterable[Any], metric: Metric) -> dict[str, float]:
        """Means over the rows of `loader`: metric(model, batch) -> {name: sum over the batch's
        rows}.
        """
        cursor = loader.cursor if isinstance(loader, Loader) else None
        if isinstance(loader, Loader):
            loader.cursor = replace(loader.cursor, position=0)
        if not self._pending.calls:
            self._forget_gradients()
        self._settle()
        try:
            return means(self._arranged, loader, metric, self._key, self.steps)
        finally:
            if isinstance(loader, Loader) and cursor is not None:
                loader.cursor = cursor  # evaluation is no training: the data order does not move

    def _settle(self) -> None:
        """Makes buffers that are computed from rows, which data ranks have of their own, equal on
        all ranks: running statistics of batch norm (but where they are synchronised) and others.
        """
        now = self._arranged.now
        model = self.model
        names = model.never_synchronised if self.options.sync_batch_norm else model.statistics
        fed = [n for n in now.traced.fed if n in self.model.buffers and n not in names]
        self.state.settle_buffers(now.stage, (*names, *fed), self._seen_rows)
        self._seen_rows = 0

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        timeout: float = 0.0,
    ) -> Loader:
        """Global batches of `batch_size` rows, of which each rank loads its own under any plan.

        Iterating takes one epoch, or what is left of it after `resume`; the next iteration goes on
        with the next epoch. A second call for the same data set and `shuffle` gives the same
        loader; its `batch_size` may be set at any time. The order depends on `seed` and epoch
        alone. timeout: seconds to wait for a worker, 0 for ever.
        """
        return self._loaders.one(
            dataset, batch_size, shuffle, seed, drop_last, collate, num_workers, timeout
        )

    # Plans and state

    def switch(self, plan: Plan | str) -> Moved:
        """Shifts to another plan between two steps; parameters, optimizer state and buffers move
        over the network.
        """
        began = time.perf_counter()
        self._between_steps("switch")
        self._forget_gradients()
        plan = checked_plan(plan)
        if plan.automatic:
            plan = self._choose(self.traced)
        self._settle()
        self._arranged.share_attributes()
        made = None if self._asked is None else self._asked.solved(self.traced, plan)
        moved = self._arranged.shift(plan, made)
        if self.adapter is not None:
            self.adapter.restart()
        self._cost = (0, 0)  # of a plan that is gone
        told = self._everyone.all_gather_json([moved.bytes, moved.received])
        sent = [n for n, _ in told]
        return Moved(time.perf_counter() - began, sum(sent), max(max(pair) for pair in told))

    def state_dict(self) -> dict[str, Tensor]:
        """The model's own names and shapes, whole, on every rank's host memory."""
        self._settle()
        return self.state.state_dict()

    def parameters(self) -> dict[str, Tensor]:
        """This rank's pieces of the parameters by name."""
        return {n: p.detach() for n, p in self.model.parameters.items()}

    def gradients(self) -> dict[str, Tensor]:
        """This rank's pieces of the gradients by name (zeros where a trained parameter has
        none).
        """
        return {
            n: torch.zeros_like(p) if p.grad is None else p.grad
            for n, p in self.model.parameters.items()
            if p.requires_grad
        }

    def gathered(self, local: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of `local`, pieces that lie like the parameters of the same name, whole on
        every rank.
        """
        return self.state.gathered(local)

    def gather_numbers(self, number: int) -> list[int]:
        """One number of every rank."""
        return [int(n) for n in self._everyone.all_gather_json(number)]

    def parameter_bytes(self) -> int:
        """Bytes of the parameters of the chain that live on this rank."""
        names = {p.name for c in self.traced.chain.components for p in c.parameters}
        mine = (p for n, p in self.model.parameters.items() if n in names)
        return sum(p.numel() * p.element_size() for p in mine)

    def computes_in(self, dtype: torch.dtype) -> bool:
        """Whether the traced step makes values of this floating-point type."""
        if self.traced.graph is None:
            return False
        values = (n.meta.get("val") for n in self.traced.graph.nodes if n.op == "call_function")
        return any(isinstance(v, Tensor) and v.dtype is dtype for v in values)

    def save(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Writes a checkpoint that any plan on any number of devices can resume; a crash leaves
        the old one.
        """
        self._between_steps("save")
        self._forget_gradients()
        self._settle()
        scheduler = self.scheduler
        told = {
            "steps": self.steps,
            "seed": self.options.seed,
            "plan": str(self.plan),
            "ranks": self.world.size,
            "overlap": self._arranged.overlap.to_dict(),
            "optimizer": self.state.describe_optimizer(),
            "scheduler": None if scheduler is None else plain(scheduler.state_dict(), "scheduler"),
            "cursors": self._loaders.to_list(),
            "extra": dict(extra or {}),
        }
        told = self._everyone.broadcast_json(told, self._arranged.now.stage.ranks[0])
        checkpoint.save(Path(path), self.state.pieces(), told, self.world)

    def export(self, path: str | Path) -> None:
        """Writes the model's whole weights to one safetensors file, under its own names."""
        self._settle()
        save_safetensors(path, self.state.model_pieces(), self.world, self.model.aliases)

    def resume(self, path: str | Path) -> dict[str, Any]:
        """Continues from a checkpoint of any plan; returns what `save` was given as `extra`.

        CheckpointError, on all ranks, for one that is damaged or of another model; nothing has
        changed then.
        """
        told = checkpoint.read_extra(Path(path), self.world)
        keys = ("steps", "seed", "overlap", "optimizer", "scheduler", "cursors", "extra")
        if not isinstance(told, dict) or any(key not in told for key in keys):
            raise CheckpointError(
                f"{path}: is no checkpoint of a trainer: trainer.save writes them"
            )
        with self.state.undone_on_error():
            try:
                self.state.adopt_optimizer(told["optimizer"])
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{path}: does not fit: {error}") from None
            checkpoint.load(Path(path), self.state.pieces(), self.world)
        self.steps, self._seen_rows = int(told["steps"]), 0
        if (told.get("plan"), told.get("ranks")) == (str(self.plan), self.world.size):
            self._arranged.overlap.go_on(told["overlap"])
        self.options = replace(self.options, seed=int(told["seed"]))
        self._arranged.reseed(self.options.seed)
        if self.scheduler is not None and told["scheduler"] is not None:
            self.scheduler.load_state_dict(told["scheduler"])
        self._loaders.go_on(told["cursors"])
        if self.adapter is not None:
            self.adapter.restart()  # steps may have gone back
        return dict(told["extra"])

    def close(self) -> None:
        """Ends the groups; the model stays cut unless this is the only rank."""
        self._arranged.close()
        self.model.unblock()
        self.world.close()


def _unit(weighted: bool, targets: int, rows: int) -> float:
    """The global weight for which a gradient is not scaled: the one that is likely."""
    if weighted:
        return float(rows * targets) if targets else 1.0
    return float(rows)


def checked_plan(plan: Plan | str) -> Plan:
    """The plan of a text, or `auto`. ValueError where this version cannot execute it."""
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    faults = () if plan.automatic else plan.unsupported()
    if faults:
        raise ValueError(f"plan {str(plan)!r}: " + "; ".join(faults))
    return plan
