"""Traces that tests share: a model of a test is traced once a process, and once for all its ranks.

To trace a small model takes longer than all else that a rank does with it. Equal models of equal
ranks have equal traces (tests/trace/partition/test_partition.py), so `with shared(...)`
makes them before ranks are forked, and `prepare` takes them in place of its own. It still compares
each with the gradients of its rank's model.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from synchromesh.trace.capture.capture import signature, trace
from synchromesh.trace.step import Step
from synchromesh.training import traces as making
from synchromesh.values.plan import Plan

_KNOWN: dict[Hashable, tuple[Any, Step]] = {}  # beside each its function: the key has its id


def remembered(
    name: Hashable,
    model: nn.Module,
    function: Any,
    batch: Any,
    *,
    training: bool,
    cuts: Sequence[str] = (),
    autocast: torch.dtype | None = None,
    rows: int | None = None,
) -> Step:
    """`trace(...)` of the model that `name` stands for: not to be changed.

    Models of one name compute the same function of tensors of equal names, shapes and types.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    described = tuple((n, x.shape, x.dtype, x.device, x.requires_grad) for n, x in tensors)
    computes = making.what_it_computes(function)
    modes = tuple(module.training for module in model.modules())
    settings = (modes, training, tuple(cuts), autocast, rows)
    key = (name, described, computes, signature(batch), settings)
    if key not in _KNOWN:
        step = trace(
            model, function, batch, training=training, cuts=cuts, autocast=autocast, rows=rows
        )
        _KNOWN[key] = function, step
    return _KNOWN[key][1]


@contextmanager
def known(name: Hashable) -> Iterator[None]:
    """Inside, also in ranks that are forked, `prepare` of the model that `name` stands for takes
    traces that were made before, and keeps those that it makes."""

    def capture(model: nn.Module, function: Any, batch: Any, **settings: Any) -> Step:
        return remembered(name, model, function, batch, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "capture", capture)
        yield


@contextmanager
def shared(
    name: Hashable,
    model: nn.Module,
    function: Any,
    example: Any,
    *plans: str,
    autocast: torch.dtype | None = None,
) -> Iterator[None]:
    """`known(name)`, with the traces of the training step under `plans` made at once."""
    paths = [path for path, _ in model.named_modules() if path]
    for cuts in dict.fromkeys(Plan.parse(plan).cuts(paths) for plan in plans):
        remembered(name, model, function, example, training=True, cuts=cuts, autocast=autocast)
    with known(name):
        yield
