"""Modes: which modules of a model train, where single ones may be in evaluation mode."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter

from torch import nn

_TRAINING = attrgetter("training")


def training_modes(modules: Iterable[nn.Module]) -> tuple[bool, ...]:
    """The modes in which a training step runs the modules of a model, in their order.

    Those that the modules have: a frozen batch norm stays in evaluation mode. A model of which no
    module is in training mode (as loaders of pretrained weights leave it) is trained as `train()`
    would set it."""
    found = tuple(map(_TRAINING, modules))
    return found if any(found) else (True,) * len(found)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The modes of a training step (`training_modes`) or of evaluation; afterwards as before."""
    before = [(module, module.training) for module in model.modules()]
    if not training:
        model.eval()
    elif not any(mode for _, mode in before):
        model.train()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode
