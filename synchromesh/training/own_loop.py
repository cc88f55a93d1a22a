"""A loop of the user's own in an elastic run: what a call of the trainer does where ranks are lost
in it. `fit` does that itself (training/epoch_parts.py), and can do more: its ranks know where they
are, so that others can come, and go back to copies of some steps before.

Each rank's script goes on by itself, so loaders stay where they are. What it holds of a batch that
was handed out before the loss are rows of the ranks that there were then: these are read again."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from synchromesh.data.loader import Loader
from synchromesh.data.loaders import Loaders
from synchromesh.launcher.generation import Regrouped
from synchromesh.training.execution import Execution
from synchromesh.training.recovery import Recovering, Survival

P = ParamSpec("P")
T = TypeVar("T")

ROWS = (
    "a batch is neither as `trainer.loader` or `trainer.shard` has handed it out nor the last one "
    "or two of these, so that the rows which a lost rank had are not known"
)
STREAM = "its data are a stream, of which a lost rank has read a part"
TURN = "ranks were agreeing on the next batch"
OTHER = "what it evaluates is no `trainer.loader`, and may have the rows of ranks before"
PARTS = (
    "its steps are made of `backward` and `update`; those of `trainer.step` alone are made again"
)


class OwnTrainer(Recovering, Protocol):
    """The trainer whose calls they are."""

    def recover(self, error: Exception) -> Regrouped: ...


@dataclass(frozen=True)
class _Handed:
    """A batch that a script has got. leaves: its tensors, and which version; generation: of ranks
    whose rows they are; place: in the data."""

    leaves: tuple[tuple[Callable[[], Tensor | None], int], ...]
    generation: int
    again: Callable[[], Any] | None
    place: str

    @property
    def held(self) -> bool:
        return any(leaf() is not None for leaf, _ in self.leaves)

    def are(self, tensors: list[Tensor]) -> bool:
        """Whether it is these, unchanged."""
        own = [(leaf(), version) for leaf, version in self.leaves]
        return len(own) == len(tensors) and all(
            a is b and version == _version(b) for (a, version), b in zip(own, tensors, strict=True)
        )


class OwnLoop:
    """All ranks make the same calls. Where they go on without some, one may be a call ahead: it
    makes that call again, and the others end theirs, of which it knows the result."""

    KNOWN: ClassVar = 4  # batches, as a script that prefetches has several; chosen

    def __init__(self, survival: Survival, execution: Execution, loaders: Loaders) -> None:
        self._survival, self._execution, self._loaders = survival, execution, loaders
        self._calls = 0  # that have ended
        self._result: Any = None  # of the last one
        self._loss: Tensor | None = None  # of the step that goes on, once it is known
        self._inside = False  # a call goes on that can be made again
        self._handed: list[_Handed] = []  # batches
        self._foreign = self._lost = False  # a batch was none of them; a rank was lost
        loaders.handed, loaders.guard = self.handed, partial(self.once, why=TURN)

    # Batches

    def handed(self, batch: T, again: Callable[[], Any] | None) -> T:
        """Notes a batch that the script gets; again: what reads it with the rows of now."""
        own = self._execution.world.member
        if own is not None and self._survival.own_loop:
            leaves = tuple((ref(x), _version(x)) for x in _tensors(batch))
            known = [batch for batch in self._handed if batch.held][1 - self.KNOWN :]
            new = _Handed(leaves, own.number, again, self._loaders.place)
            self._handed = [*known, new]
        return batch

    def current(self, batch: Any) -> Any:
        """It, or its rows of now where it was handed out before ranks were lost."""
        own = self._execution.world.member
        if own is None or not self._survival.own_loop:
            return batch
        self._survival.require_there()
        tensors = _tensors(batch)
        known = next((x for x in reversed(self._handed) if x.are(tensors)), None)
        if known is None:
            self._foreign = True
            if self._lost:
                raise self._end(ROWS)
            return batch
        self._loaders.place = known.place  # also where a later batch was taken
        if known.generation == own.number:
            return batch
        if known.again is None:
            raise self._end(STREAM)
        return known.again()

    # Calls

    def step(self, trainer: OwnTrainer, batch: Any, step: Callable[[Any], Tensor]) -> Tensor:
        """The loss of `step(batch)`, of this rank's rows; behind a loss of ranks of those that it
        then has of the same global batch."""
        while True:
            batch = self.current(batch)
            before, self._loss = trainer.steps, None
            known = self._tried(trainer, lambda rows=batch: step(rows))  # type: ignore[misc]
            if not isinstance(known, list):
                return known
            if trainer.steps > before:  # it is complete
                return self._ended(self._loss_among(known))

    def same(self, trainer: OwnTrainer, call: Callable[[], T]) -> T:
        """Of a call that changes nothing, and gives JSON that is no list."""
        while True:
            known = self._tried(trainer, call)
            if not isinstance(known, list):
                return known
            for calls, result, _ in known:
                if calls > self._calls:
                    return self._ended(cast(T, result))

    def once(self, call: Callable[[], T], why: str) -> T:
        """Of a call that cannot be made again, but in another one, for a reason."""
        try:
            return call()
        except Exception as error:
            if not self._inside and self._survival.ends(error):
                raise self._end(why) from error
            raise

    def note(self, loss: Tensor) -> None:
        """The loss of a step that is to be completed."""
        if self._survival.own_loop:
            self._loss = loss.detach()

    def _tried(self, trainer: OwnTrainer, call: Callable[[], T]) -> T | list[Any]:
        """Its result, or what `_go_on` knows."""
        self._inside = True
        try:
            return self._ended(call())
        except Exception as error:
            return self._go_on(trainer, error)
        finally:
            self._inside = False

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
        before, own = trainer.steps, [self._calls, _plain(self._result), _plain(self._loss)]
        while True:
            self._execution.options.say(str(trainer.recover(error)))
            self._lost = True
            if trainer.steps < before:
                why = f"it has made {before} steps, and would go on behind {trainer.steps}"
                raise self._end(why)
            if self._foreign or self._loaders.streams:
                raise self._end(ROWS if self._foreign else STREAM)
            try:
                return self._execution.world.everyone.all_gather_json(own)
            except Exception as another:  # of another loss
                error = another

    def _end(self, why: str) -> RuntimeError:
        why = f"this loop is the script's own, and {why}: go on with a checkpoint, `resume`"
        if (own := self._execution.world.member) is not None:
            own.refuse(why)
        return RuntimeError(f"ranks are lost; {why}")


def _tensors(batch: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def again(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Of a trainer, one that changes nothing, and gives JSON: made again of a loader or a path."""

    @wraps(method)
    def called(trainer: Any, /, *args: P.args, **named: P.kwargs) -> T:
        loop: OwnLoop = trainer.own_loop
        if isinstance(next(iter((*args, *named.values())), None), Loader | Path | str):
            return loop.same(trainer, lambda: method(trainer, *args, **named))
        return loop.once(lambda: method(trainer, *args, **named), OTHER)

    return called


def part(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Of a trainer, a part of a step."""

    @wraps(method)
    def called(trainer: Any, /, *args: P.args, **named: P.kwargs) -> T:
        loop: OwnLoop = trainer.own_loop
        return loop.once(lambda: method(trainer, *args, **named), PARTS)

    return called
