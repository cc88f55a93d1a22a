"""Traces: the training step's, and those of metrics, other shapes of batches and numbers of rows.

A trace holds for a model as it was: which parameters are frozen, the modes of its modules, and the
content of buffers that were folded into it. Where any of these changes all traces are made anew.
Where a value changes that it has read, another is made; a few are kept, and a number of which they
would be many becomes an input, where that can be."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from synchromesh.engine.batches import fingerprint
from synchromesh.engine.world import World
from synchromesh.programs.model import Model
from synchromesh.trace.capture.batch import take
from synchromesh.trace.capture.capture import signature
from synchromesh.trace.capture.capture import trace as capture
from synchromesh.trace.capture.carry import Carrying
from synchromesh.trace.capture.export import Numbers
from synchromesh.trace.capture.known_values import digest
from synchromesh.trace.capture.model_snapshot import training_modes
from synchromesh.trace.capture.readings import Readings
from synchromesh.trace.step import Step
from synchromesh.training.active_plan import ActivePlan, Options
from synchromesh.training.losses import LossTurn, NamedLosses
from synchromesh.training.notices import Notices
from synchromesh.training.trace_check import TraceCheck


@dataclass(frozen=True)
class RetraceTuning:
    """What is kept to trace again, and when a number that is read becomes an input; chosen.

    example_rows  of the example batch: how rows weigh does not show in a single one
    kept          traces of one function and shape, for other values that it reads
    often         traces made for other values of one number until it is to be an input"""

    example_rows: int = 6
    kept: int = 4
    often: int = 3


TUNING = RetraceTuning()


class Traces:
    """The traces of one model. `cuts`: where the chain was cut last. free_bytes: still usable."""

    def __init__(
        self, model: Model, losses: NamedLosses, example: Any, world: World, options: Options,
        notices: Notices, free_bytes: Callable[[], int],
    ) -> None:  # fmt: skip
        self.model, self.losses, self.world = model, losses, world
        self.options, self.notices = options, notices
        of_step = losses.of_step
        self.check = TraceCheck(model, of_step, example, world, options, free_bytes)
        self.example = take(example, 0, TUNING.example_rows)
        self._shape = signature(self.example)
        self.cuts: tuple[str, ...] = ()
        self.readings = Readings()
        self.numbers: Numbers = ()  # that change often, and are inputs
        self._kept: list[tuple[Hashable, Step]] = []  # of the training step, by what it is of
        self._changes: dict[Hashable, int] = {}  # traces made for other values of a place
        self._functions: dict[Hashable, Any] = {}  # losses and metrics by what they compute
        self._steps: dict[tuple[Any, ...], list[Step]] = {}  # of other shapes, rows and metrics
        self._verified: dict[str, tuple[Tensor, int]] = {}  # folded buffers, versions seen equal
        self._seen: Hashable = None  # parameters that are trained, modes, and their fingerprint
        self._mark = 0
        self._note_model()
        self._noted: tuple[int, tuple[Any, ...]] = self._mark, ()

    def _note_model(self) -> None:
        self._look()
        self._as = self._seen
        self.notices.mode(self.model.module)

    def training_step(
        self, cuts: tuple[str, ...], example: Any = None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Step:  # fmt: skip
        """The trace of the training step; one opaque component, with a warning, where it cannot
        be trusted. example: a batch, the first rows of the first one where none is given.
        buffers: complete ones, for ranks that hold shards or none."""
        self.cuts = cuts
        self.readings.look()
        of = self.cuts, self._as
        kept = (s for key, s in self._kept if key == of and self.readings.hold(s.read))
        step = next(kept, None)
        # a rank that has come lacks what others have kept, and makes it by itself
        alone = any(self.world.everyone.all_gather_json(step is not None))
        if step is None:
            with self.world.by_itself() if alone else nullcontext():
                step = self._made(of, self.example if example is None else example, buffers)
        self.check.latest = step
        return step

    def by_itself(self, cuts: Sequence[str]) -> Step:
        """The trace that is cut there, which others may have and need not call; the cuts stay."""
        before = self.cuts
        try:
            with self.world.by_itself():
                return self.training_step(tuple(cuts))
        finally:
            self.cuts = before

    def _made(self, of: Hashable, batch: Any, buffers: Mapping[str, Tensor] | None) -> Step:
        step = self._with_inputs(batch, buffers) or self._traced(self.check, batch, buffers)
        self.readings.look(step.read)
        if step.opaque:
            self.notices.warn(f"the model runs whole on every device: {step.reason}")
            return step
        self.check.compare_constants(step)
        if not step.assumed:
            self._kept = [(of, step), *self._kept][: TUNING.kept]
        return step

    def _traced(self, check: TraceCheck, batch: Any, buffers: Mapping[str, Tensor] | None) -> Step:
        with self.model.unsharded(self.world.device, buffers) as module:
            step = self._capture(module, self.losses.of_step, batch, training=True)
            return replace(check.checked(module, batch, step), cuts=self.cuts)

    def _with_inputs(self, batch: Any, buffers: Mapping[str, Tensor] | None) -> Step | None:
        """The trace with often changed numbers as inputs; None: it cannot or need not be."""
        last, traced = self.check.latest, None
        for read in () if last is None else last.read:
            if self.readings.hold((read,)):
                continue
            count = self._changes[read.place] = self._changes.get(read.place, 0) + 1
            if count == TUNING.often and type(value := read.now()) is float:
                before, check = self.numbers, copy(self.check)
                tensor = torch.tensor(value, dtype=torch.float64, device=self.world.device)
                self.numbers = (*before, (read, tensor))
                step = self._traced(check, batch, buffers)
                if step.opaque:
                    self.numbers = before
                else:
                    self.check, self._kept, self._steps, traced = check, [], {}, step
            elif count == TUNING.often + TUNING.kept:
                self.notices.once(
                    f"{read.name} has changed {count} times, and each other value takes another "
                    "trace, for it cannot be an input of one: change it rarely, or give it to the "
                    "model in the batch, as a 0-d tensor"
                )
        return traced

    def _capture(
        self, module: Any, function: Any, batch: Any, training: bool, rows: int | None = None
    ) -> Step:
        return capture(
            module, function, batch, training=training, cuts=self.cuts,
            autocast=self.options.autocast, rows=rows, numbers=self.numbers,
        )  # fmt: skip

    # Whether they hold

    def look(self) -> None:
        """Asks again for the model's state and what traces have read, and sets their inputs."""
        self._look()
        if self.readings.look():
            for read, tensor in self.numbers:
                tensor.fill_(read.now())

    def _look(self) -> None:
        seen = self.model.trained(), training_modes(self.model.modules)
        if seen != self._seen:
            self._seen, self._mark = seen, fingerprint(seen)

    @property
    def mark(self) -> Hashable:
        """Equal on ranks whose models were alike at the last look."""
        return self._mark, self.readings.mark

    def note(self, step: Step) -> None:
        """What the model is like when a run begins with `step`."""
        self._noted = fingerprint(self._as), step.read

    @property
    def changed(self) -> bool:
        """Whether it was another one at the last look than when the run began."""
        mark, read = self._noted
        return self._mark != mark or not self.readings.hold(read)

    def outdated(self, current: Step) -> bool:
        """Whether `current` or another trace is of a model as it was: of other frozen parameters,
        modes, contents of folded buffers or values that the step has read."""
        self.notices.mode(self.model.module)
        self.look()
        if self._seen != self._as:
            return True
        traces = [current, *(step for steps in self._steps.values() for step in steps)]
        return not (self.readings.hold(current.read) and all(map(self._as_folded, traces)))

    def _as_folded(self, step: Step) -> bool:
        """Whether the buffers that were folded into a trace have the content that they had."""
        for name, content in step.assumed.items():
            buffer = self.model.buffers[name]
            verified = self._verified.get(name)
            if verified is not None and verified[0] is buffer and verified[1] == buffer._version:
                continue
            complete = tuple(buffer.shape) == self.model.described[name].shape
            if complete and not buffer.is_meta:
                if digest(buffer) != content:
                    return False
                self._verified[name] = buffer, buffer._version
        return True

    def forget(self) -> None:
        """Drops traces that changes may have made wrong; the next are of the model as is."""
        before = self._as
        self.model.describe_trained()
        self._note_model()
        same = self._as == before
        kept = {k: [s for s in steps if not s.assumed] for k, steps in self._steps.items()}
        self._steps, self._verified = kept if same else {}, {}

    def forget_shapes(self) -> None:
        """Drops training steps of other shapes and rows, which ranks that come do not have: all
        compare the next ones."""
        turn_of = self.losses.turn_of
        self._steps = {key: s for key, s in self._steps.items() if turn_of(key[0]) is None}

    # Other shapes, rows and functions

    def canonical(self, function: Any) -> Any:
        """The first function seen that computes the same, as a lambda in a loop does anew."""
        return self._functions.setdefault(what_it_computes(function), function)

    def find(
        self, function: Any, shape: Hashable, batch: Any, total: int, active: ActivePlan
    ) -> Step:
        """The trace of `function` for batches of this shape with `total` rows over all ranks."""
        if active.step.opaque:
            return active.step
        made = self._steps.setdefault((function, shape, self.cuts), [])
        held = [s for s in made if self.readings.hold(s.read) and self._as_folded(s)]
        known = list(held)
        if function is self.losses.of_step and shape == self._shape:
            known = [active.step, *held]
        if (step := next((s for s in known if s.takes(total)), None)) is not None:
            return step
        step = known[0] if known else self._retrace(function, batch, None, active)
        if not step.takes(total):
            step = self._case(step, function, batch, total, active)
        other = [s for s in made if not self.readings.hold(s.read)]
        made[:] = [*other[-TUNING.kept :], *held, step]
        return step

    def _case(
        self, known: Step, function: Any, batch: Any, total: int, active: ActivePlan
    ) -> Step:
        wanted = " and ".join(g.text for g in known.guards if not g.holds(total))
        if total < 2:
            raise ValueError(
                f"a global batch of {total} row is another case for the model ({wanted} does "
                "not hold), which cannot be traced: leave it out, or train the model under a "
                "plan of which it need not be traced"
            )
        step = self._retrace(function, batch, total, active)
        if not step.takes(total):
            raise ValueError(
                f"the model depends on the number of rows: a global batch of {total} does not "
                f"meet {wanted}; make it independent of their number, or leave the batch out"
            )
        return step

    def _retrace(self, function: Any, batch: Any, rows: int | None, active: ActivePlan) -> Step:
        turn = self.losses.turn_of(function)
        training = turn is not None
        what = "this shape of batch" if training else "this metric"
        with self.model.unsharded(self.world.device) as module, _frozen(turn, module):
            step = self._capture(module, function, batch, training, rows)
            self.readings.look(step.read)
            if training and not step.opaque:
                step = self.check.of_shape(module, function, batch, step, active.step)
        if step.opaque:
            if active.divides_model(training):
                raise ValueError(
                    f"{what} is refused, though the training step was not: {step.reason}"
                )
            self.notices.warn(f"{what} could not be traced and runs as it is: {step.reason}")
        elif training and (further := _trained(step) - _trained(active.step)):
            raise ValueError(
                f"{what} uses parameters that the example batch did not "
                f"({', '.join(sorted(further)[:3])}): give prepare an example batch that uses "
                "them all"
            )
        return step


def _frozen(turn: LossTurn | None, module: Any) -> AbstractContextManager[None]:
    return nullcontext() if turn is None else turn.others_frozen(module.named_parameters())


def _trained(step: Step) -> set[str]:
    return {p.name for c in step.chain.components for p in c.parameters if p.trainable}


def what_it_computes(function: Any) -> Hashable:
    """Equal for a function that is defined anew over the same values, as a lambda in a loop is."""
    if isinstance(function, Carrying):
        return "carry", what_it_computes(function.function)
    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__self__", None) is not None:
        return id(function)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    return code, tuple(id(value) for value in (*cells, *defaults))
