"""An arrangement: a model under the plan in force, as trace, partition, groups, pieces and
programs."""

import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from synchromesh.engine import batches
from synchromesh.engine import optimizer as rebinding
from synchromesh.engine.batch_norm import BatchNormPolicy
from synchromesh.engine.batches import RowAgreement
from synchromesh.engine.collectives import Axis
from synchromesh.engine.gradients import GradientSync
from synchromesh.engine.groups import Group, World
from synchromesh.engine.model import Model
from synchromesh.engine.opaque import OpaqueProgram
from synchromesh.engine.overlap import Overlap
from synchromesh.engine.program import Program
from synchromesh.engine.random import Streams
from synchromesh.engine.stage import Stage
from synchromesh.holding import holdings
from synchromesh.layout import Layout
from synchromesh.plan import Plan
from synchromesh.state import checkpoint, manifest
from synchromesh.state.export import load_safetensors
from synchromesh.state.model_state import ModelState, checksum
from synchromesh.state.switch import Moved
from synchromesh.trace.capture import opaque, signature
from synchromesh.trace.capture import trace as capture
from synchromesh.trace.gradients import compare_gradients
from synchromesh.trace.partition import Partition, overlaps, partition
from synchromesh.trace.row_mean import uneven_rows
from synchromesh.trace.step import Step

Loss = Callable[[nn.Module, Any], Any]
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
    stage: Stage
    layouts: Mapping[str, Layout]  # of each component of the training step
    leaf_layout: Layout  # how the batch's rows lie over the stage
    agree: RowAgreement
    fingerprint: int


class Arrangement:
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
        self.streams = Streams(options.seed, world.device)
        self.example = batches.take_rows(example, 0, 1)
        self.rows = batches.row_count(example)  # of the global batches that are planned for
        self._known: dict[Hashable, Any] = {}  # losses and metrics by what they compute
        self._traces: dict[Hashable, Step] = {}  # of other shapes and metrics
        self.trained = model.trained()
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

    def trace(self, plan: Plan, example: Any) -> Step:
        """The training step's trace; one opaque component, with a warning, where it cannot be
        trusted.
        """
        self.cuts = plan.cuts(self.model.paths())
        with self.model.whole(self.world.device) as module:
            step = capture(
                module,
                self.loss,
                example,
                training=True,
                cuts=self.cuts,
                autocast=self.options.autocast,
            )
            fault: str | None = step.reason
            if not step.opaque and self.model.complete():
                fault = compare_gradients(module, self.loss, example, step, self.options.autocast)
            fault = self._anybodys(fault or "")
            if fault and not step.opaque:
                step = opaque(module, example, fault)
            if not step.opaque and self.model.complete():
                uneven = uneven_rows(module, self.loss, example, self.options.autocast)
                if uneven and self.world.size > 1:
                    self._warn(uneven)
        if step.opaque:
            self._warn(f"the model runs whole on every device: {step.reason}")
        else:
            self._compare_constants(step)
        return step

    def _anybodys(self, fault: str) -> str:
        """The first rank's fault of a trace, on all ranks: rounding may let the ranks, of which
        each has traced the weights that it was given, come to different answers.
        """
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
        layouts = plan.layouts(step.chain.names, self.world.size, inside)
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
        data = max(layout.data for layout in layouts)
        leaf_layout = Layout(data, len(ranks) // data)
        stage = Stage(self.world, ranks, (*layouts, leaf_layout))
        self.sync.close()
        moved = self.state.move(held, stage)
        if first:
            self._start()
        self.now = Current(
            plan, step, made, stage, dict(zip(step.chain.names, layouts, strict=True)),
            leaf_layout,
            RowAgreement(self.world.everyone, ranks, leaf_layout, plan, self.world.device), mark,
        )  # fmt: skip
        self.programs: dict[tuple[Any, Hashable], Program | OpaqueProgram | None] = {}
        self.sync = GradientSync(self._gradient_groups())
        self.overlap = Overlap(self.world.everyone, overlaps(step, made), plan.pieces)
        return moved

    def follow_frozen(self) -> None:
        """Traces and arranges anew after the user froze or released parameters."""
        self.model.describe_trained()
        self.trained = self.model.trained()
        self.adopt(self.now.plan, self.trace(self.now.plan, self.example))

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
                    held = self.state.held[described.name]
                    group = (
                        stage.whole
                        if held.home
                        else self._sum_group(held.placement.kind, held.layout)
                    )
                    found[described.name] = (self.model.parameters[described.name], group)
        return list(found.values())

    def _sum_group(self, kind: str, layout: Layout) -> Group:
        return self.now.stage.whole if kind == "r" else self.now.stage.data_group(layout)

    # Programs: one per function and shape of batch

    def program(self, batch: Any, function: Any) -> Program | OpaqueProgram | None:
        """What this rank runs for `function` (the loss in training, else a metric); None on an
        idle rank.
        """
        shape = signature(batch)
        function = self._known.setdefault(what_it_computes(function), function)
        key = (function, shape)
        if key not in self.programs:
            now = self.now
            known = function is self.loss and shape == signature(self.example)
            step = now.traced if known or now.traced.opaque else self._retrace(function, batch)
            made = now.partition if step is now.traced else self._partition_like(step)
            self.programs[key] = self._make_program(step, made, function)
            shapes = [s for f, s in self.programs if f is function]
            if len(shapes) == MANY_SHAPES:
                self._warn(
                    f"{MANY_SHAPES} shapes of batches were traced so far (the last two: "
                    f"{shapes[-2]}, {shapes[-1]}); "
                    "each costs seconds: pad to a few lengths"
                )
        return self.programs[key]

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
                norm(now.leaf_layout), self.options.autocast,
            )  # fmt: skip

        def axis(layout: Layout, streams: Streams) -> Axis:
            return Axis(stage.tensor_group(layout), streams, norm(layout))

        tensors = {**self.model.parameters, **self.model.buffers}
        return Program(step, made, stage, tensors, self.state.held, axis, self.streams)

    def _retrace(self, function: Any, batch: Any) -> Step:
        """The trace for a metric or another shape; the user's function itself where every rank has
        the whole model.
        """
        training = function is self.loss
        key = (function, signature(batch), self.cuts)
        if key in self._traces:
            return self._traces[key]
        with self.model.whole(self.world.device) as module:
            step = capture(
                module,
                function,
                self.filled(batch),
                training=training,
                cuts=self.cuts,
                autocast=self.options.autocast,
            )
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
        self._traces[key] = step
        return step

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

    def filled(self, batch: Any) -> Any:
        """The batch, with one row that weighs nothing where this rank has none."""
        return batch if batches.row_count(batch) else batches.placeholder_row(batch, self.example)

    def reseed(self, seed: int) -> None:
        """Streams of another seed, as of a checkpoint."""
        self.streams = Streams(seed, self.world.device)
        self.programs = {}

    def close(self) -> None:
        """Ends hooks and programs; the groups are the world's."""
        self.sync.close()
        self.programs = {}


def what_it_computes(function: Any) -> Hashable:
    """Equal for a function that is defined anew over the same values, as a lambda in a loop is."""
    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__self__", None) is not None:
        return id(function)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    return code, tuple(id(value) for value in (*cells, *defaults))
