"""Traces: the training step's, and those of metrics, other shapes of batches and numbers of rows.

A trace holds for a model as it was: which parameters are frozen, the modes of its modules, and the
content of buffers that were folded into it. Where any of these changes all traces are made anew.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor

from synchromesh.engine.groups import World
from synchromesh.engine.model import Model
from synchromesh.trace.capture.batch import take
from synchromesh.trace.capture.capture import signature
from synchromesh.trace.capture.capture import trace as capture
from synchromesh.trace.capture.carry import Carrying
from synchromesh.trace.capture.masks import digest
from synchromesh.trace.capture.modes import training_modes
from synchromesh.trace.step import Step
from synchromesh.training.active_plan import ActivePlan
from synchromesh.training.notices import Notices
from synchromesh.training.options import Loss, Options
from synchromesh.training.trust import Trust
from synchromesh.values.plan import Plan

EXAMPLE_ROWS = 6  # kept to trace with again: how rows weigh does not show in a single one


class Traces:
    """The traces of one model. `cuts`: where the chain of components was cut last.

    free_bytes: says what this rank may still use.
    """

    def __init__(
        self, model: Model, loss: Loss, example: Any, world: World, options: Options,
        notices: Notices, free_bytes: Callable[[], int],
    ) -> None:  # fmt: skip
        self.model, self.loss, self.world = model, loss, world
        self.options, self.notices = options, notices
        self.trust = Trust(model, loss, world, options, free_bytes)
        self.example = take(example, 0, EXAMPLE_ROWS)
        self.cuts: tuple[str, ...] = ()
        self._functions: dict[Hashable, Any] = {}  # losses and metrics by what they compute
        self._steps: dict[Hashable, list[Step]] = {}  # of other shapes, rows and metrics
        self._verified: dict[str, tuple[Tensor, int]] = {}  # folded buffers, versions seen equal
        self._note_model()

    def _note_model(self) -> None:
        self._trained = self.model.trained()
        self._modes = training_modes(self.model.modules)
        self.notices.mode(self.model.module)

    def training_step(
        self, plan: Plan, example: Any = None, buffers: Mapping[str, Tensor] | None = None
    ) -> Step:
        """The trace of the training step; one opaque component, with a warning, where it cannot
        be trusted. example: a batch, the first rows of the first one where none is given.
        buffers: complete ones, for ranks that hold shards or none.
        """
        self.cuts = plan.cuts(self.model.paths())
        batch = self.example if example is None else example
        with self.model.unsharded(self.world.device, buffers) as module:
            step = self._capture(module, self.loss, batch, training=True)
            step = self.trust.judged(module, batch, step)
        if step.opaque:
            self.notices.warn(f"the model runs whole on every device: {step.reason}")
        else:
            self.trust.compare_constants(step)
        return step

    def _capture(
        self, module: Any, function: Any, batch: Any, training: bool, rows: int | None = None
    ) -> Step:
        return capture(
            module, function, batch, training=training, cuts=self.cuts,
            autocast=self.options.autocast, rows=rows,
        )  # fmt: skip

    # Whether they hold

    def outdated(self, current: Step) -> bool:
        """Whether `current` or another trace is of a model as it was: parameters were frozen or
        released since, modules have other modes, or a buffer that was folded has other content."""
        self.notices.mode(self.model.module)
        if self.model.trained() != self._trained:
            return True
        if training_modes(self.model.modules) != self._modes:
            return True
        traces = [current, *(step for steps in self._steps.values() for step in steps)]
        return not all(self._holds(step) for step in traces)

    def _holds(self, step: Step) -> bool:
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
        """Drops all traces, for the model has changed; the next ones are of it as it is now."""
        self.model.describe_trained()
        self._note_model()
        self._steps, self._verified = {}, {}

    # Other shapes, rows and functions

    def canonical(self, function: Any) -> Any:
        """The first function seen that computes the same, as a lambda in a loop does anew."""
        return self._functions.setdefault(what_it_computes(function), function)

    def find(
        self, function: Any, shape: Hashable, batch: Any, total: int, active: ActivePlan
    ) -> Step:
        """The trace of `function` for batches of this shape with `total` rows over all ranks."""
        now = active.step
        if now.opaque:
            return now
        known = self._steps.setdefault((function, shape, self.cuts), [])
        if function is self.loss and shape == signature(self.example):
            known = [now, *known]
        known = [step for step in known if self._holds(step)]
        for step in known:
            if step.takes(total):
                return step
        step = known[0] if known else self._retrace(function, batch, None, active)
        if not step.takes(total):
            wanted = " and ".join(g.text for g in step.guards if not g.holds(total))
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
        self._steps[function, shape, self.cuts].append(step)
        return step

    def _retrace(self, function: Any, batch: Any, rows: int | None, active: ActivePlan) -> Step:
        """The trace for a metric, another shape or another case of `rows`; the user's function
        itself where every rank has the complete model.
        """
        training = function is self.loss
        with self.model.unsharded(self.world.device) as module:
            step = self._capture(module, function, batch, training, rows)
            if training and not step.opaque:
                step = self.trust.of_shape(module, batch, step, active.step)
        what = "this shape of batch" if training else "this metric"
        if step.opaque:
            shards = (p.sharded for p in active.partition.placements.values())
            apart = any(x.tensor > 1 for x in active.layouts.values()) if training else any(shards)
            if apart or active.plan.stage_count > 1:
                raise ValueError(
                    f"{what} could not be traced although the training step could: {step.reason}"
                )
            self.notices.warn(f"{what} could not be traced and runs as it is: {step.reason}")
        known, used = (
            {p.name for c in s.chain.components for p in c.parameters if p.trainable}
            for s in (active.step, step)
        )
        if training and not step.opaque and used - known:
            raise ValueError(
                f"{what} uses parameters that the example batch did not "
                f"({', '.join(sorted(used - known)[:3])}): give "
                "prepare an example batch that uses them all"
            )
        return step


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
