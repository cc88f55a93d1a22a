"""A trace check: how far a trace agrees with its model, with one answer on all ranks.

A rank that has the complete model runs it and its trace on the same rows and compares. Rounding
may let ranks come to different answers, so the first rank's fault counts on all of them. A rank
whose model is cut cannot compare: what was found before holds. Where no rank ever could (meta
device, too little memory for gradients), the trace is taken as it is, and that is said."""

from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any, ClassVar

from torch import nn

from synchromesh.checkpoint.model_state import checksum
from synchromesh.engine.agreement import refuse_first
from synchromesh.engine.world import World
from synchromesh.programs.model import Model
from synchromesh.trace.capture.capture import opaque
from synchromesh.trace.capture.comparison import changes, compare, failure
from synchromesh.trace.step import Report, Step, at_least
from synchromesh.training.active_plan import Loss, Options
from synchromesh.values.size import readable


class TraceCheck:
    """Compares traces with the model they are of; `latest` is the training step so checked."""

    # Times the bytes of its trained parameters that a comparison needs besides them: gradients of
    # two steps and of the trace's one, and as much as one more for activations and what the heap
    # loses between blocks. With three, a model of 100 M parameters was killed at 2 GiB.
    PARAMETER_BYTES: ClassVar = 4

    def __init__(
        self, model: Model, loss: Loss, example: Any, world: World, options: Options,
        free_bytes: Callable[[], int],
    ) -> None:  # fmt: skip
        self.model, self.loss, self.world = model, loss, world
        self._given = example  # until the first check
        self.autocast, self.say, self.free_bytes = options.autocast, options.say, free_bytes
        self.latest: Step | None = None
        self._mismatch = ""  # why a trace of the model once did not agree with it

    def checked(self, module: nn.Module, example: Any, step: Step) -> Step:
        """The training step as far as it agrees with its model, with what it does to rows; the
        same on all ranks, each of which has traced the weights that it was given."""
        obstacle = self._obstacle(step)
        somewhere = any(self.world.everyone.all_gather_json(not obstacle))
        if not somewhere and self.latest is None and not step.opaque:
            self.say(
                f"the trace was not compared with the model, neither losses nor gradients: "
                f"{self._first(obstacle)}; `synchromesh verify` compares a plan with one process "
                "where there is memory for the entire model"
            )
        fault, least = self._compared(module, example, step, not obstacle)
        if fault and not step.opaque:
            step = opaque(module, example, fault)
        if least > 1:
            step = replace(step, guards=(*step.guards, at_least(least)), least=(at_least(least),))
        if not somewhere:
            step = self._as_before(step)
        else:
            self._mismatch = fault or self._mismatch
            if step.opaque:
                step = self._with_changes(module, example, step, not obstacle)
        self.latest, self._given = step, None
        return step

    def _compared(self, module: nn.Module, batch: Any, step: Step, here: bool) -> tuple[str, int]:
        """The first rank's fault, the trace's least rows. here: this rank can run the model."""
        fault, least = step.reason, 1
        if here and not step.opaque:
            comparison = compare(module, self.loss, batch, step, self.autocast)
            fault, least = comparison.fault or "", comparison.least
        return self._first(fault), max(self.world.everyone.all_gather_json(least))

    def _with_changes(self, module: nn.Module, example: Any, step: Step, here: bool) -> Step:
        """A step that is not traced, with what its forward changes, which one rank has seen."""
        seen, error = None, None
        if here:
            made = astuple(changes(module, self.loss, example, self.autocast))
            norms = self.model.statistics
            seen = [[n for n in names if n not in norms] for names in made]
            if not seen[-1] and self._given is not None:
                error = failure(module, self.loss, self._given, self.autocast)
        told = error and f"the loss raises {type(error).__name__}: {error}"
        answers = self.world.everyone.all_gather_json([seen, told])
        if error is not None:
            raise error  # the user's own, not that the trace has met it too
        refuse_first([text or "" for _, text in answers])
        free, fed, names, outputs = next(filter(None, (made for made, _ in answers)))
        doubt = "" if len(outputs) == 2 else step.doubt
        reports = tuple(map(Report, names))
        return replace(step, changed=tuple(free), fed=tuple(fed), doubt=doubt, reports=reports)

    def _obstacle(self, step: Step) -> str:
        """Why this rank cannot run the model beside its trace; empty where it can. An idle rank
        has not all of it, nor has any while the model is cut."""
        parameters = self.model.parameters.values()
        if not self.model.complete():
            meta = any(p.is_meta for p in parameters)
            return "it is on the meta device" if meta else "it is cut over the ranks"
        trained = sum(p.nbytes for p in parameters if p.requires_grad)
        needed, free = self.PARAMETER_BYTES * trained, self.free_bytes()
        if step.opaque or needed <= free:
            return ""
        return (
            f"that takes about {readable(needed)} besides the parameters, and this rank has "
            f"{readable(free)} left"
        )

    def _as_before(self, step: Step) -> Step:
        if self._mismatch and not step.opaque:
            raise ValueError(
                "the model's frozen parameters, modes or masks have changed, and its new trace "
                "cannot be compared with it while it is cut over the ranks; an earlier one did "
                f"not agree ({self._mismatch}): switch to the plan 'data' before such a change"
            )
        before = self.latest
        if before is None:
            return step
        return replace(
            step, guards=tuple(dict.fromkeys((*step.guards, *before.least))), least=before.least,
            doubt=before.doubt if step.opaque else step.doubt,
        )  # fmt: skip

    def of_shape(
        self, module: nn.Module, loss: Loss, batch: Any, step: Step, training: Step
    ) -> Step:  # fmt: skip
        """A trace of a loss for other batches than `training`, as far as it agrees."""
        fault = ""
        if not self._obstacle(step):
            fault = compare(module, loss, batch, step, self.autocast).fault or ""
        fault = self._first(fault)
        if fault:
            return opaque(module, batch, fault)
        return replace(step, guards=tuple(dict.fromkeys((*step.guards, *training.least))))

    def _first(self, fault: str) -> str:
        return next((f for f in self.world.everyone.all_gather_json(fault) if f), "")

    def compare_constants(self, step: Step) -> None:
        """ValueError where constants differ between ranks: nothing would ever make them equal."""
        sums = {name: checksum(tensor) for name, tensor in sorted(step.constants.items())}
        first, *others = self.world.everyone.all_gather_json(sums)
        for rank, theirs in enumerate(others, 1):
            odd = [n for n in first.keys() | theirs.keys() if first.get(n) != theirs.get(n)]
            if odd:
                raise ValueError(
                    f"ranks 0 and {rank} have different values of {len(odd)} tensors that the "
                    f"model or the loss use and that are no parameters or buffers ({min(odd)}): "
                    "register_buffer them, or make them alike with torch.manual_seed"
                )
