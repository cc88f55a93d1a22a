"""The user's optimizer over shards of parameters: what it may be, global norms.

An optimizer whose update of an entry depends on that entry's own history alone (elementwise) may
run on shards (`values/optimizer.py`); per-parameter scalars (step counters, ASGD's coefficients)
depend on the number of steps alone and stay as they are."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from synchromesh.engine.groups import Group
from synchromesh.values.caution import caution
from synchromesh.values.optimizer import (
    coupled,
    elementwise,
    kind_of,
    parts_of,
    refuse_unusable,
    with_groups,
)


def settings(optimizer: Optimizer) -> list[list[str]]:
    """The numbers in the optimizer's groups, as text; none that reading would wait for (CUDA)."""

    def number(value: Any) -> bool:
        if isinstance(value, Tensor):
            return value.dim() == 0 and value.device.type == "cpu"
        return isinstance(value, (int, float)) or (
            isinstance(value, (tuple, list)) and all(map(number, value))
        )

    return [
        [f"{key}={value!r}" for key, value in group.items() if key != "params" and number(value)]
        for group in optimizer.param_groups
    ]


def check(optimizer: Optimizer, sharded: bool) -> None:
    """ValueError for optimizers that cannot run, a warning for unknown ones on shards."""
    refuse_unusable(optimizer)
    if not sharded:
        return
    if why := coupled(optimizer):
        raise ValueError(f"{why}; use the plan 'data', or AdamW")
    if not elementwise(optimizer):
        caution(
            f"it is not known whether the optimizer {kind_of(optimizer)} updates each entry "
            "by itself; if not, pieces of a parameter are updated otherwise than the whole "
            "(`synchromesh verify` shows it; the plan 'data' is exact)"
        )


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


def refuse_foreign(optimizer: Optimizer, known: Collection[Tensor]) -> None:
    """ValueError where it has parameters that are none of `known`, the model's."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    foreign = [tuple(p.shape) for p in params if p not in known]
    if foreign:
        raise ValueError(
            f"the optimizer has {len(foreign)} parameters (shapes {foreign[:3]}) that are not the "
            "model's: build it over model.parameters() of the model that is given to prepare, and "
            "make learnable parts of the loss part of the model"
        )


def norms(gradients: Iterable[Tensor]) -> list[Tensor]:
    """The 2-norm of each (0-d), in float32 at least."""
    dense = (g.coalesce().values() if g.is_sparse else g for g in gradients)
    exact = [g.float() if g.dtype.itemsize < 4 else g for g in dense]
    return [*torch._foreach_norm(exact)] if exact else []


def global_norm(copies: Iterable[tuple[nn.Parameter, float]], everyone: Group) -> Tensor:
    """The 2-norm of all gradients of the model, equal on all ranks (0-d, float64). copies: this
    rank's parameters, each with the number of ranks that have an equal shard."""
    total = torch.zeros((), dtype=torch.float64, device=everyone.world.device)
    gradients = [(p.grad, n) for p, n in copies if p.grad is not None]
    if gradients:
        squares = torch.stack([n.to(total) for n in norms(g for g, _ in gradients)]).square()
        total = (squares / torch.tensor([n for _, n in gradients]).to(total)).sum()
    everyone.all_reduce(total, counted=False)
    return total.sqrt()


def clip_norm(
    copies: Iterable[tuple[nn.Parameter, float]], everyone: Group, max_norm: float
) -> Tensor:
    """Scales gradients so that their global norm is at most `max_norm`; returns it as it was."""
    copies = list(copies)
    norm = global_norm(copies, everyone)
    nn.utils.clip_grads_with_norm_([p for p, _ in copies], max_norm, norm)
    return norm
