"""Losses that take turns over one model, each with the optimizer of the parameters that it trains.

    {"d": discriminator's, "g": generator's}     step(batch, loss="d"), step(batch, loss="g"), ...

One plan serves all of them. It is made for a step of each, one after the other, so that it places
all parameters, and what it is predicted to take is a turn of each. In its turn a loss sees the
other parameters frozen: no gradient of theirs is computed or sent."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from synchromesh.programs.model import Model
from synchromesh.trace.capture.outputs import named, refuse_metrics
from synchromesh.training.active_plan import Loss
from synchromesh.values.optimizer import JoinedOptimizer


@dataclass(frozen=True)
class LossTurn:
    """A loss and its optimizer, which updates the parameters `trained`; None: there is no other,
    and the model's own flags say what is trained."""

    name: str
    loss: Loss
    optimizer: Optimizer
    trained: frozenset[str] | None = None

    @contextmanager
    def others_frozen(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[None]:
        """Inside, `parameters` by name need no gradient where this turn does not train them."""
        trained = self.trained
        frozen = [] if trained is None else [
            p for n, p in parameters if n not in trained and p.requires_grad
        ]  # fmt: skip
        try:
            for p in frozen:
                p.requires_grad_(False)
            yield
        finally:
            for p in frozen:
                p.requires_grad_(True)


class NamedLosses:
    """The turns of a trainer, and the one that is taken now. All ranks take the same.

    of_step: the loss of a step as it is planned: of all turns, one after the other."""

    def __init__(self, losses: Mapping[str, Loss], optimizer: Optimizer, model: Model) -> None:
        """losses: by name; one alone, which trains what the model's flags say, by ""."""
        own = dict.fromkeys(losses, optimizer)
        if isinstance(optimizer, JoinedOptimizer):
            own = optimizer.named
        self.turns = tuple(
            LossTurn(n, loss, own[n], frozenset(_parameters(own[n], model)) if n else None)
            for n, loss in losses.items()
        )
        self.now, *more = self.turns
        self.of_step = OneAfterTheOther(tuple(losses.values())) if more else self.now.loss

    @property
    def several(self) -> bool:
        return len(self.turns) > 1

    def take(self, name: str | None) -> None:
        """The turn of this loss. ValueError where it has no such name, or several need one."""
        if name is None and not self.several:
            return
        names = {turn.name: turn for turn in self.turns}
        if name not in names:
            raise ValueError(
                f"loss={name!r} names none of the losses that take turns "
                f"({', '.join(filter(None, names)) or 'there is one alone'}): step and backward "
                "compute the one that is named"
            )
        self.now = names[name]

    def turn_of(self, function: Any) -> LossTurn | None:
        """The turn whose loss this is; None: it is none, but the loss of the step, or a metric."""
        return next((turn for turn in self.turns if turn.loss is function), None)


@dataclass(frozen=True)
class OneAfterTheOther:
    """The sum of several losses, as the loss of a step that computes them all; of a pair its sum
    over the number of rows, for by the weight nothing is placed."""

    losses: tuple[Loss, ...]

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        rows = next(x.shape[0] for x in pytree.tree_leaves(batch) if x.dim())
        total: Any = 0
        for loss in self.losses:
            values = named(loss(model, batch))
            refuse_metrics(tuple(values))
            value, *weight = values.values()
            total = total + (value / rows if weight else value)
        return total


def _parameters(optimizer: Optimizer, model: Model) -> Iterator[str]:
    names = {p: n for n, p in model.parameters.items()}
    return (names[p] for group in optimizer.param_groups for p in group["params"])
