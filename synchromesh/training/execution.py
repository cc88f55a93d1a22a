"""An arrangement: a model under the plan in force, as trace, partition, groups, pieces and
programs."""

import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from synchromesh.engine import batches
from synchromesh.engine import optimizer as rebinding
from synchromesh.engine.batch_norm import BatchNormPolicy
from synchromesh.engine.batches import GlobalRows, RowAgreement
from synchromesh.engine.collectives import TensorAxis
from synchromesh.engine.gradients import GradientSync
from synchromesh.engine.groups import Group, World
from synchromesh.engine.interleaving import Interleaving
from synchromesh.engine.model import Model
from synchromesh.engine.opaque import OpaqueProgram, hand_over
from synchromesh.engine.program import Program
from synchromesh.engine.random import RandomStreams
from synchromesh.engine.stage import StageGroups
from synchromesh.state import checkpoint, manifest
from synchromesh.state.export import load_safetensors
from synchromesh.state.model_state import ModelState, checksum
from synchromesh.state.switch import Moved
from synchromesh.trace.capture.batch import take
from synchromesh.trace.capture.capture import opaque, signature
from synchromesh.trace.capture.capture import trace as capture
from synchromesh.trace.capture.comparison import compare
from synchromesh.trace.capture.masks import digest
from synchromesh.trace.capture.modes import training_modes
from synchromesh.trace.capture.row_mean import uneven_rows
from synchromesh.trace.capture.state_changes import changes
from synchromesh.trace.guards import at_least
from synchromesh.trace.partition.partition import Partition, overlaps, partition
from synchromesh.trace.step import Step
from synchromesh.values.holding import holdings
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan

Loss = Callable[[nn.Module, Any], Any]
EXAMPLE_ROWS = 6  # that are kept to trace with again: one tells nothing of how rows weigh
MANY_SHAPES = 8  # shapes of batches that were traced before the user is told


@dataclass(frozen=True)
class Options:
    """What a user may choose besides the plan."""

    seed: int = 0
    sync_batch_norm: bool = False
    autocast: torch.dtype | None = None
    weights: Path | None = None  # a checkpoint, or safetensors, to begin with
    say: Callable[[str], None] = lambda _: None  # is told what is measured


@dataclass(frozen=True)
class Current:
    """The plan in force and what follows from it."""

    plan: Plan
    traced: Step
    partition: Partition
    stage: StageGroups
    layouts: Mapping[str, Layout]  # of each component of the training step
    leaf_layout: Layout  # how the batch's rows lie over the stage
    agree: RowAgreement
    fingerprint: int


class Execution:
    """What every rank makes alike of a plan; `now` is the plan in force and what follows from
    it."""

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        loss: Loss,
        example: Any,
        plan: Plan,
        world: World,
        options: Options,
        decide: Callable[[Step], Plan] | None = None,
    ) -> None:
        """decide: finds the plan where `plan` is `auto`."""
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.world, self.options = world, options
        self.streams = RandomStreams(options.seed, world.device)
        self.example = take(example, 0, EXAMPLE_ROWS)
        self.rows = batches.row_count(example)  # of the global batches that are planned for
        self._distrusted = ""  # why a trace of the model once did not agree with it
        self.before: Step | None = None  # the training step as it was traced last
        self._told: set[str] = set()  # warnings that need no second time
        self._known: dict[Hashable, Any] = {}  # losses and metrics by what they compute
        self._traces: dict[Hashable, list[Step]] = {}  # of other shapes, rows and metrics
        self._unchanged: dict[str, tuple[Tensor, int]] = {}  # buffers as traces have them folded
        self.trained, self.modes = model.trained(), training_modes(model.module)
        self._tell_mode()
        self.sync = GradientSync([])
        self.state = ModelState(model, optimizer, world)
        step = self.trace(plan, example)
        if options.weights is None:
            self.state.compare_first()
        if plan.automatic:
            assert decide is not None, "somebody must find the plan"
            plan = decide(step)
            self.cuts = plan.cuts(self.model.paths())  # names of components: it is cut there
        self.adopt(plan, step, first=True)

    def _start(self) -> None:
        """Gives tensors of the meta device their values, and all of them those of given
        weights.
        """
        path = self.options.weights
        if path is None:
            self.state.start(self.options.seed)
            return
        self.state.start(self.options.seed, self.model.persistent)
        if path.is_dir() and (path / manifest.NAME).exists():
            wanted = {f"model/{n}": h for n, h in self.state.model_pieces("model/").items()}
            checkpoint.load(path, wanted, self.world, allow=("optimizer/*",))
            return
        load_safetensors(path, self.state.model_pieces(), self.model.aliases, cast=True)

    def trace(self, plan: Plan, example: Any, buffers: Mapping[str, Tensor] | None = None) -> Step:
        """The training step's trace; one opaque component, with a warning, where it cannot be
        trusted. buffers: whole ones, for ranks that hold pieces or none.
        """
        self.cuts = plan.cuts(self.model.paths())
        with self.model.unsharded(self.world.device, buffers) as module:
            step = capture(
                module,
                self.loss,
                example,
                training=True,
                cuts=self.cuts,
                autocast=self.options.autocast,
            )
            step = self.before = self._trusted(module, example, step)
        if step.opaque:
            self._warn(f"the model runs whole on every device: {step.reason}")
        else:
            self._compare_constants(step)
        return step

    def _trusted(self, module: nn.Module, example: Any, step: Step) -> Step:
        """The step as far as it agrees with its model, and what it does to rows; the same on all
        ranks, of which each has traced the weights that it was given."""
        autocast, everyone = self.options.autocast, self.world.everyone
        mine = self.model.complete()  # of an idle rank, or while the model is cut, it is not
        anybody = any(everyone.all_gather_json(mine))
        fault, least = step.reason, 1
        if mine and not step.opaque:
            found = compare(module, self.loss, example, step, autocast)
            fault, least = found.fault or "", found.least
        fault, least = self._anybodys(fault), max(everyone.all_gather_json(least))
        if fault and not step.opaque:
            step = opaque(module, example, fault)
        if least > 1:
            known = (at_least(least),)
            step = replace(step, guards=(*step.guards, *known), least=known)
        told = uneven_rows(module, self.loss, example, step, autocast) if mine else None
        tried = [one for one in everyone.all_gather_json(told) if one is not None]
        odd = step.uneven or next(filter(None, tried), "") or ("" if tried else step.coupled)
        uneven = self._anybodys(odd or doubted(step))
        step = replace(step, uneven=uneven, coupled=self._anybodys(step.coupled or uneven))
        if not anybody:
            return self._as_before(step)
        self._distrusted = fault or self._distrusted
        if step.opaque:
            made = changes(module, self.loss, example, autocast) if mine else None
            norms = self.model.statistics
            kinds = made and [[n for n in k if n not in norms] for k in (made.free, made.fed)]
            free, fed = next(filter(None, everyone.all_gather_json(kinds)))
            step = replace(step, changed=tuple(free), fed=tuple(fed))
        return step

    def _as_before(self, step: Step) -> Step:
        """The step with what was found when every rank had the whole model."""
        if self._distrusted and not step.opaque:
            raise ValueError(
                "the model's frozen parameters, modes or masks have changed, and its new trace "
                "cannot be compared with it while it is cut over the ranks; an earlier one did "
                f"not agree ({self._distrusted}): switch to the plan 'data' before such a change"
            )
        before = self.before
        if before is None:
            return step
        return replace(
            step,
            guards=tuple(dict.fromkeys((*step.guards, *before.least))),
            least=before.least,
            coupled=step.coupled or before.coupled,
            uneven=step.uneven or before.uneven,
        )

    def _anybodys(self, fault: str) -> str:
        """The first rank's sentence, on all ranks: rounding may let them come to different
        answers."""
        return next((f for f in self.world.everyone.all_gather_json(fault) if f), "")

    def _compare_constants(self, step: Step) -> None:
        """ValueError where tensors that are neither parameters nor buffers differ between ranks:
        nothing would ever make them equal.
        """
        mine = {name: checksum(tensor) for name, tensor in sorted(step.constants.items())}
        told = self.world.everyone.all_gather_json(mine)
        for rank, theirs in enumerate(told):
            odd = [n for n in told[0].keys() | theirs.keys() if told[0].get(n) != theirs.get(n)]
            if odd:
                raise ValueError(
                    f"ranks 0 and {rank} have different values of {len(odd)} tensors that the "
                    f"model or the loss use and that are no parameters or buffers ({min(odd)}): "
                    "register_buffer them, or make them alike with torch.manual_seed"
                )

    def _tell_mode(self) -> None:
        if not any(module.training for module in self.model.module.modules()):
            self._tell_once(
                "the model is in evaluation mode and is trained in training mode, as "
                "model.train() sets it; to train with some modules in evaluation mode call "
                "model.train() and then eval() on these"
            )

    def _tell_once(self, text: str) -> None:
        if text and text not in self._told:
            self._told.add(text)
            self._warn(text)

    def _warn(self, text: str) -> None:
        if self.world.rank == 0:
            warnings.warn(text, stacklevel=5)

    def adopt(
        self, plan: Plan, step: Step, first: bool = False, made: Partition | None = None
    ) -> Moved:
        """Makes `plan` the current one; tensors move to their new places.

        made: the partition of `step` under `plan`, where it is known.
        """
        ranks = plan.devices(self.world.size)
        inside = self.model.inside(step.chain.names)
        try:
            layouts = plan.layouts(step.chain.names, self.world.size, inside)
        except ValueError as error:
            why = step.merged or step.reason
            raise ValueError(f"{error} ({why})" if why else str(error)) from None
        made = made or partition(step, layouts, rows=self.rows)
        held = holdings(self.model.described.values(), made.placements, len(ranks))
        rebinding.check(self.optimizer, any(h.placement.sharded for h in held.values()))
        order = [(c.name, [p.name for p in c.parameters]) for c in step.chain.components]
        lies = sorted((n, str(h)) for n, h in held.items())
        mark = batches.fingerprint((str(plan), step.opaque, order, lies))
        if len(set(self.world.everyone.all_gather_json(mark))) > 1:
            raise ValueError(
                f"ranks came to different partitions of the model under {str(plan)!r}: start "
                "every rank with the same "
                "script, arguments and versions of torch and synchromesh"
            )
        self._tell_whole(plan, made)
        self._tell_fed(plan, made, step)
        if any(layout.data > 1 for layout in layouts):
            self._tell_once(step.uneven)
        if step.coupled and (plan.pieces or 1) > 1:
            self._tell_once(
                f"@pieces={plan.pieces} is left aside, for pieces would part rows that belong "
                f"together: {step.coupled}"
            )
        data = max(layout.data for layout in layouts)
        leaf_layout = Layout(data, len(ranks) // data)
        stage = StageGroups(self.world, ranks, (*layouts, leaf_layout))
        self.sync.close()
        moved = self.state.move(held, stage)
        if first:
            self._start()
        self.now = Current(
            plan, step, made, stage, dict(zip(step.chain.names, layouts, strict=True)),
            leaf_layout,
            RowAgreement(self.world.everyone, ranks, leaf_layout, plan, self.world.device), mark,
        )  # fmt: skip
        self.programs: dict[tuple[Any, Hashable, int], Program | OpaqueProgram | None] = {}
        # batch norms of a model that runs as it is come in no order that buckets could keep
        late = step.opaque and self.options.sync_batch_norm
        self.sync = GradientSync(self._gradient_groups(), late=late)
        self.interleaving = Interleaving(self.world.everyone, overlaps(step, made), plan.pieces)
        return moved

    def outdated(self) -> bool:
        """Whether the trace is of the model as it was: parameters were frozen or released since,
        modules have other modes, or a buffer that was folded into it has another content."""
        self._tell_mode()
        if self.model.trained() != self.trained:
            return True
        if training_modes(self.model.module) != self.modes:
            return True
        traces = [self.now.traced, *(step for known in self._traces.values() for step in known)]
        return not all(self._holds(step) for step in traces)

    def _holds(self, step: Step) -> bool:
        """Whether the buffers that were folded into a trace have the content that they had."""
        for name, content in step.assumed.items():
            buffer = self.model.buffers[name]
            whole = tuple(buffer.shape) == self.model.described[name].shape
            known = self._unchanged.get(name)
            if known is not None and known[0] is buffer and known[1] == buffer._version:
                continue
            if whole and not buffer.is_meta:
                if digest(buffer) != content:
                    return False
                self._unchanged[name] = buffer, buffer._version
        return True

    def follow_changes(self) -> None:
        """Traces and arranges anew what is `outdated`."""
        self.model.describe_trained()
        self.trained, self.modes = self.model.trained(), training_modes(self.model.module)
        self._traces, self._unchanged = {}, {}
        # all ranks fold the same masks, idle ones too, which hold none
        known = {n: b.detach() for n, b in self.model.buffers.items() if not b.is_meta}
        buffers = dict(self.state.gathered(known))
        self.adopt(self.now.plan, self.trace(self.now.plan, self.example, buffers))

    def share_attributes(self) -> None:
        """What the forward of a model that runs as it is keeps in attributes comes to idle ranks,
        which have run nothing: the next plan may want them."""
        step, idle = self.now.traced, set(range(self.world.size)) - set(self.now.stage.ranks)
        if not step.opaque or not idle:
            return
        held = {*self.model.parameters, *self.model.buffers}  # these move with the state
        names = [n for n in (*step.changed, *step.fed) if n not in held]
        giver = self.now.stage.ranks[0]
        hand_over(self.model, names, self.world.everyone, giver, sorted(idle))

    def shift(self, plan: Plan, made: Partition | None = None) -> Moved:
        """Makes another plan the current one; nothing has moved where it does not fit
        (ValueError). made: the partition of the current step under it, where it is known."""
        cuts, step = self.cuts, self.now.traced
        try:
            if made is None and plan.cuts(self.model.paths()) != cuts:
                step = self.trace(plan, self.example)
            return self.adopt(plan, step, made=made)
        except ValueError:
            self.cuts = cuts
            raise

    def _tell_whole(self, plan: Plan, made: Partition) -> None:
        """One warning that names the components of which nothing could be sharded although the
        plan says so.
        """
        whole = {}
        for local in made.components:
            placements = [made.placements[n, local.layout] for n in local.parameters]
            if local.layout.tensor > 1 and placements and not any(p.sharded for p in placements):
                whole[local.component.name] = next(iter(local.unsharded.values()), "")
        if whole and not any(c.component.opaque for c in made.components):
            name, reason = next(iter(whole.items()))
            self._warn(
                f"nothing of {', '.join(whole)} is sharded under {str(plan)!r}: each rank "
                "computes it whole "
                f"({name}: {reason or 'it would cost more than it saves'})"
            )

    def _tell_fed(self, plan: Plan, made: Partition, step: Step) -> None:
        """What rows do to buffers differs between data ranks: a warning that names them.

        ValueError where they change parameters: no rule could make these equal again.
        """
        fed = set(step.fed)
        own: set[str] = set()
        for local in made.components:
            component = local.component
            if local.layout.data > 1:
                held = [t.name for t in (*component.parameters, *component.buffers)]
                own |= fed if component.opaque else fed & set(held)
        learned = sorted(own & self.model.parameters.keys())
        if learned:
            raise ValueError(
                f"the forward changes {learned[0]} by the rows that it is given (as an embedding "
                f"with max_norm does), so that the data ranks of {str(plan)!r} would hold other "
                "values of it: use a plan without data parallelism (tensor, single), or change "
                "the parameter outside of the forward"
            )
        if own:
            self._tell_once(
                f"{', '.join(sorted(own))}: computed from the rows of a batch, of which each data "
                f"rank has others under {str(plan)!r}. They are averaged over the ranks when the "
                "trainer evaluates, saves or switches (whole numbers: rank 0's count), which need "
                "not be what one process computes; a plan whose data degree is 1 there is exact"
            )

    def _gradient_groups(self) -> list[tuple[nn.Parameter, Group]]:
        """Trained parameters of this rank in the order of the chain, each with the ranks that sum
        its gradient.
        """
        stage = self.now.stage
        if stage.position is None:
            return []
        found: dict[str, tuple[nn.Parameter, Group]] = {}
        for component in self.now.traced.chain.components:
            for described in component.parameters:
                if described.trainable and described.name not in found:
                    group = stage.data_group(self.state.held[described.name].gradient_layout)
                    found[described.name] = (self.model.parameters[described.name], group)
        return list(found.values())

    # Programs: one per function and shape of batch

    def program(
        self, batch: Any, function: Any, rows: GlobalRows
    ) -> Program | OpaqueProgram | None:
        """What this rank runs for `function` (the loss in training, else a metric) on a global
        batch of `rows`; None on an idle rank.

        batch: this rank's rows, one at least (`filled`).
        """
        shape = signature(batch)
        function = self._known.setdefault(what_it_computes(function), function)
        step = self._step(function, shape, batch, rows.total)
        self._check_blocks(step, rows)
        key = (function, shape, id(step))
        if key not in self.programs:
            made = self.now.partition if step is self.now.traced else self._partition_like(step)
            self.programs[key] = self._make_program(step, made, function)
            shapes = [s for f, s, _ in self.programs if f is function]
            if len(shapes) == MANY_SHAPES:
                self._warn(
                    f"{MANY_SHAPES} shapes of batches were traced so far (the last two: "
                    f"{shapes[-2]}, {shapes[-1]}); "
                    "each costs seconds: pad to a few lengths"
                )
        return self.programs[key]

    def _step(self, function: Any, shape: Hashable, batch: Any, total: int) -> Step:
        """The trace of `function` for batches of this shape with `total` rows over all ranks."""
        now = self.now.traced
        if now.opaque:
            return now
        known = self._traces.setdefault((function, shape, self.cuts), [])
        if function is self.loss and shape == signature(self.example):
            known = [now, *known]
        known = [step for step in known if self._holds(step)]
        for step in known:
            if step.takes(total):
                return step
        step = known[0] if known else self._retrace(function, batch, None)
        if not step.takes(total):
            wanted = " and ".join(g.text for g in step.guards if not g.holds(total))
            if total < 2:
                raise ValueError(
                    f"a global batch of {total} row is another case for the model ({wanted} does "
                    "not hold), which cannot be traced: leave it out, or train the model under a "
                    "plan of which it need not be traced"
                )
            step = self._retrace(function, batch, total)
            if not step.takes(total):
                raise ValueError(
                    f"the model depends on the number of rows: a global batch of {total} does not "
                    f"meet {wanted}; make it independent of their number, or leave the batch out"
                )
        self._traces[function, shape, self.cuts].append(step)
        return step

    def _check_blocks(self, step: Step, rows: GlobalRows) -> None:
        """ValueError on every rank where rows that belong together would come to other ranks."""
        guards = [guard for guard in step.guards if guard.of_blocks]
        if not guards:
            return
        for layout in set(self.now.layouts.values()):
            for start, stop in rows.ranges(layout.data):
                for guard in guards:
                    if stop > start and not guard.holds(stop - start):
                        raise ValueError(
                            f"the model needs {guard.text} of the rows of each data rank, but one "
                            f"has {stop - start} of {rows.total} under {layout}: choose a batch "
                            "size that gives every rank such a number, or a plan with fewer data "
                            "ranks"
                        )

    def _make_program(
        self, step: Step, made: Partition, function: Any
    ) -> Program | OpaqueProgram | None:
        now = self.now
        stage = now.stage
        if stage.position is None:
            return None

        def norm(layout: Layout) -> BatchNormPolicy:
            return BatchNormPolicy(
                stage.data_group(layout) if self.options.sync_batch_norm else None
            )

        if step.opaque:
            return OpaqueProgram(
                function, self.model, now.leaf_layout, stage, self.streams,
                self.options.sync_batch_norm, now.traced.changed, self.options.autocast,
            )  # fmt: skip

        def axis(layout: Layout, streams: RandomStreams) -> TensorAxis:
            return TensorAxis(stage.tensor_group(layout), streams, norm(layout))

        tensors = {**self.model.parameters, **self.model.buffers}
        return Program(step, made, stage, tensors, self.state.held, axis, self.streams)

    def _retrace(self, function: Any, batch: Any, rows: int | None) -> Step:
        """The trace for a metric, another shape or another case of `rows`; the user's function
        itself where every rank has the whole model.
        """
        training = function is self.loss
        with self.model.unsharded(self.world.device) as module:
            step = capture(
                module,
                function,
                batch,
                training=training,
                cuts=self.cuts,
                autocast=self.options.autocast,
                rows=rows,
            )
            if training and not step.opaque:
                step = self._compared(module, batch, step)
        what = "this shape of batch" if training else "this metric"
        if step.opaque:
            if any(layout.tensor > 1 for layout in self.now.layouts.values()):
                raise ValueError(
                    f"{what} could not be traced although the training step could: {step.reason}"
                )
            self._warn(f"{what} could not be traced and runs as it is: {step.reason}")
        known = {
            p.name for c in self.now.traced.chain.components for p in c.parameters if p.trainable
        }
        used = {p.name for c in step.chain.components for p in c.parameters if p.trainable}
        if training and not step.opaque and used - known:
            raise ValueError(
                f"{what} uses parameters that the example batch did not "
                f"({', '.join(sorted(used - known)[:3])}): give "
                "prepare an example batch that uses them all"
            )
        return step

    def _compared(self, module: nn.Module, batch: Any, step: Step) -> Step:
        """The trace of another shape or case, as far as it agrees with the model."""
        fault = ""
        if self.model.complete():
            fault = compare(module, self.loss, batch, step, self.options.autocast).fault or ""
        fault = self._anybodys(fault)
        if fault:
            return opaque(module, batch, fault)
        guards = tuple(dict.fromkeys((*step.guards, *self.now.traced.least)))
        return replace(step, guards=guards)

    def _partition_like(self, step: Step) -> Partition:
        """The partition of another trace of the same model, with its tensors where they are."""
        if step.opaque:  # all layouts are of tensor degree 1
            return self.now.partition
        known = self.now.layouts
        default = next(iter(known.values()))
        layouts = []
        for name in step.chain.names:
            default = known.get(name, known.get(name.partition("@")[0], default))
            layouts.append(default)
        pins = {(n, h.layout): h.placement for n, h in self.state.held.items() if not h.home}
        made = partition(step, layouts, rows=self.rows, pins=pins)
        for (name, layout), placement in made.placements.items():
            held = self.state.held[name]
            if not held.home and (held.layout, held.placement) != (layout, placement):
                raise ValueError(
                    f"{name} lies as {held.placement} on {held.layout}, but another trace of the "
                    "model uses it as "
                    f"{placement} on {layout}: give the components that use it equal layouts"
                )
        return made

    def filled(self, batch: Any, rows: GlobalRows) -> Any:
        """The batch; where this rank has no rows, one that is another rank's.

        All ranks of the stage call. Such a row is there for its program to run on: nothing that
        is computed from it leaves the rank (engine/absent.py). An idle rank's is zeros, which it
        traces with and never runs on.
        """
        stage = self.now.stage
        if stage.position is None:
            return batches.one_row(batch)
        if self.now.traced.opaque:
            return batch
        return batches.with_stand_in(
            batch, rows, self.now.leaf_layout, stage.position, stage.everyone
        )

    def reseed(self, seed: int) -> None:
        """Streams of another seed, as of a checkpoint."""
        self.streams = RandomStreams(seed, self.world.device)
        self.programs = {}

    def close(self) -> None:
        """Ends hooks and programs; the groups are the world's."""
        self.sync.close()
        self.programs = {}


def doubted(step: Step) -> str:
    """A sentence about a loss whose graph does not show that it treats rows apart."""
    if not step.doubt:
        return ""
    return (
        f"the loss is not seen to be a mean over rows ({step.doubt}): where rows weigh "
        "differently (ignored targets, masks) or depend on each other it will differ between "
        "plans that divide rows; return (sum, weight), or train under a plan without data "
        "parallelism"
    )


def what_it_computes(function: Any) -> Hashable:
    """Equal for a function that is defined anew over the same values, as a lambda in a loop is."""
    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__self__", None) is not None:
        return id(function)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    return code, tuple(id(value) for value in (*cells, *defaults))
