"""The optimizer's step by each sum as soon as it has come, while others are under way: of some
parameters, or of one range of a parameter's entries after the other. The update is elementwise."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from synchromesh.engine.gradient_buckets import SummedSlice
from synchromesh.engine.gradients import Ahead
from synchromesh.values.optimizer import elementwise, hooked, parts_of, with_groups


class EarlySteps:
    """Of one step after the other."""

    def __init__(self) -> None:
        # nobody changes gradients before the update, nor parameters before the next step
        self.allowed = False
        self._stepped = set[nn.Parameter]()  # in this step
        self._begun: dict[nn.Parameter, DividedStep] = {}  # in part

    def begin(self) -> None:
        """The next step."""
        self._stepped.clear()
        self._begun.clear()

    def end(self, optimizer: Optimizer, leaves: Collection[nn.Parameter]) -> None:
        """All others of `leaves` step, too."""
        if self._stepped:
            step_some(optimizer, {*leaves} - self._stepped)
        else:
            optimizer.step()

    def following(self, optimizer: Optimizer, fetch: Ahead) -> Ahead | None:
        """What steps by sums as they come, and tells what is stepped to `fetch`; None where they
        are to wait for each other."""
        if not self.allowed or not elementwise(optimizer) or hooked(optimizer):
            return None

        def step(came: Sequence[SummedSlice]) -> None:
            stepped = [each for each in came if self._step_part(optimizer, each)]
            entire = {each.parameter for each in came if each.last} - self._stepped
            if entire:
                step_some(optimizer, entire)
                self._stepped |= entire
            fetch([*stepped, *map(SummedSlice.of_all, entire)])

        return step

    def _step_part(self, optimizer: Optimizer, came: SummedSlice) -> bool:
        """Whether it may be sent now; else its parameter steps as a whole, with its last part."""
        p = came.parameter
        if came.whole or not p.is_contiguous():
            return False
        if not p.numel():  # others have it
            return not came.last
        if p.grad is not None:  # else no rank has any
            if p not in self._begun:
                self._begun[p] = DividedStep(optimizer, p)
            self._begun[p].step(came.start, came.stop, came.last)
        if came.last:
            self._stepped.add(p)
        return True


class DividedStep:
    """The optimizer's step of one parameter, one range of its entries after the other. The update
    is to be elementwise, the parameter contiguous."""

    def __init__(self, optimizer: Optimizer, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._part, group = next(
            (part, group)
            for part in parts_of(optimizer)
            for group in part.param_groups
            if any(p is parameter for p in group["params"])
        )
        self._group = {**group}
        self._state: dict[str, Any] = self._part.state.get(parameter, {})
        self._given: list[dict[str, Any]] = []  # states of each range, views of those that lie so
        self._made: list[dict[str, Any]] = []  # the same behind its step

    def step(self, start: int, stop: int, last: bool) -> None:
        """By these entries of the gradient. last: with them the step is done."""
        p, gradient = self._parameter, self._parameter.grad
        assert gradient is not None
        piece = nn.Parameter(p.detach().view(-1)[start:stop])
        piece.grad = gradient.view(-1)[start:stop]
        given = {key: self._of(value, start, stop) for key, value in self._state.items()}
        stepping = with_groups(self._part, [{**self._group, "params": [piece]}])
        stepping.state = defaultdict(dict, {piece: {**given}} if given else {})
        stepping.step()
        self._given.append(given)
        self._made.append(stepping.state[piece])
        if last:
            self._end(piece.shape)

    def _of(self, value: Any, start: int, stop: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        along = value.shape == self._parameter.shape
        return value.reshape(-1)[start:stop] if along else value.clone()

    def _end(self, shape: torch.Size) -> None:
        """States of the ranges become those of the parameter. shape: of the last range."""
        state = self._part.state[self._parameter]
        for key, value in self._made[-1].items():
            if not isinstance(value, Tensor) or value.shape != shape:
                state[key] = value
                continue
            whole = self._state.get(key)
            if whole is None or not whole.is_contiguous() or self._replaced(key):
                made = torch.cat([each[key] for each in self._made])
                state[key] = made.view(self._parameter.shape)

    def _replaced(self, key: str) -> bool:
        """Whether a step has put another tensor there, where most change the one that is."""
        pairs = zip(self._given, self._made, strict=True)
        return any(given.get(key) is not made[key] for given, made in pairs)


def step_some(optimizer: Optimizer, parameters: Collection[nn.Parameter]) -> None:
    """Steps these as if no other parameter had a gradient. The update is to be elementwise."""
    of = (p for group in optimizer.param_groups for p in group["params"])
    others = [(p, p.grad) for p in of if p.grad is not None and p not in parameters]
    for p, _ in others:
        p.grad = None
    try:
        optimizer.step()
    finally:
        for p, gradient in others:
            p.grad = gradient
