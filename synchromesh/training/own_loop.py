"""A loop of the user's own in an elastic run: what a call of the trainer does where ranks are lost
in it. `fit` does that itself (training/epoch_parts.py), and can do more: its ranks know where they
are, so that others can come, and go back to copies of some steps before."""

import math
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from synchromesh.data.loaders import Loaders
from synchromesh.training.execution import Execution
from synchromesh.training.recovery import Recovering, Regrouped, Survival

P = ParamSpec("P")
T = TypeVar("T")

ROWS = (
    "its batches come neither from `trainer.loader`, one by one, nor through `trainer.shard`, so "
    "that the rows which a lost rank had are not known"
)
PARTS = (
    "its steps are made of `backward` and `update`; those of `trainer.step` alone are made again"
)


class OwnTrainer(Recovering, Protocol):
    """The trainer whose calls they are."""

    def recover(self, error: Exception) -> Regrouped: ...


class OwnLoop:
    """All ranks make the same calls. Where they go on without some, one may be a call ahead: it
    makes that call again, and the others end theirs, of which it knows the result."""

    def __init__(self, survival: Survival, execution: Execution, loaders: Loaders) -> None:
        self._survival, self._execution, self._loaders = survival, execution, loaders
        self._calls = 0  # that have ended
        self._result: Any = None  # of the last one
        self._loss: Tensor | None = None  # of the step that goes on, once it is known
        self._steps = False  # one goes on
        # a batch that the script holds since before a loss of ranks, of rows of other ranks
        self._taken: Callable[[], Any] | None = None

    def step(self, trainer: OwnTrainer, batch: Any, step: Callable[[Any], Tensor]) -> Tensor:
        """The loss of `step(batch)`, of this rank's rows; behind a loss of ranks of those that it
        then has of the same global batch."""
        if self._taken is not None:
            batch, self._taken = self._taken(), None
        again = self._loaders.again if self._loaders.gave == 1 else None
        while True:
            before, self._loss, self._steps = trainer.steps, None, True
            try:
                return self._ended(step(batch))
            except Exception as error:
                known = self._go_on(trainer, error)
            finally:
                self._steps = False
            if trainer.steps > before:  # it is complete
                return self._ended(self._loss_among(known))
            if again is None:
                raise self._end(ROWS)
            batch = again()

    def note(self, loss: Tensor) -> None:
        """The loss of a step that is to be completed."""
        if self._survival.own_loop:
            self._loss = loss.detach()

    def same(self, trainer: OwnTrainer, call: Callable[[], T]) -> T:
        """Of a call that changes nothing, and gives JSON."""
        taken, again = self._loaders.gave, self._loaders.again
        while True:
            try:
                return self._ended(call())
            except Exception as error:
                known = self._go_on(trainer, error)
            if again is None or taken > 1:
                raise self._end(ROWS)
            self._taken = again if taken else None
            for calls, result, _ in known:
                if calls > self._calls:
                    return self._ended(cast(T, result))

    def once(self, call: Callable[[], T], why: str) -> T:
        """Of a call that cannot be made again, but in a step, for a reason."""
        try:
            return call()
        except Exception as error:
            if not self._steps and self._survival.ends(error):
                raise self._end(why) from error
            raise

    def _ended(self, result: T) -> T:
        self._calls, self._result = self._calls + 1, result
        return result

    def _loss_among(self, known: list[Any]) -> Tensor:
        """Of the step that others know the loss of; not a number where none does."""
        by_calls = {calls: loss for calls, _, loss in known if loss is not None}
        by_calls |= {calls - 1: result for calls, result, _ in known if calls > self._calls}
        return torch.tensor(by_calls.get(self._calls, math.nan), dtype=torch.float64)

    def _go_on(self, trainer: OwnTrainer, error: Exception) -> list[Any]:
        """Without ranks that are lost. Of each how many calls have ended, the last one's result,
        and the loss of its step. Raises `error` where it is of something else."""
        if not self._survival.own_loop:
            raise error
        before = trainer.steps
        self._execution.options.say(str(trainer.recover(error)))
        if trainer.steps < before:
            raise self._end(f"it has made {before} steps, and would go on behind {trainer.steps}")
        own = [self._calls, _plain(self._result), _plain(self._loss)]
        return self._execution.world.everyone.all_gather_json(own)

    def _end(self, why: str) -> RuntimeError:
        why = f"this loop is the script's own, and {why}: go on with a checkpoint, `resume`"
        if (own := self._execution.world.member) is not None:
            own.refuse(why)
        return RuntimeError(f"ranks are lost; {why}")


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def again(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Of a trainer, one that changes nothing, and gives JSON."""

    @wraps(method)
    def called(trainer: Any, /, *args: P.args, **named: P.kwargs) -> T:
        loop: OwnLoop = trainer.own_loop
        if any(isinstance(x, Iterator) for x in (*args, *named.values())):
            why = "what it evaluates can be read once: give `trainer.loader(...)` itself"
            return loop.once(lambda: method(trainer, *args, **named), why)
        return loop.same(trainer, lambda: method(trainer, *args, **named))

    return called


def part(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Of a trainer, a part of a step."""

    @wraps(method)
    def called(trainer: Any, /, *args: P.args, **named: P.kwargs) -> T:
        loop: OwnLoop = trainer.own_loop
        return loop.once(lambda: method(trainer, *args, **named), PARTS)

    return called
