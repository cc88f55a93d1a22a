"""Traces that tests share, and what follows from them: made once a process, for all its ranks.

To trace a small model takes longer than all else that a rank does with it; then come comparing
the trace with its model, and the partition. Equal models of equal ranks have equal traces and
partitions (tests/trace/partition/test_partition.py), so `with shared(...)` makes them before
ranks are forked, and `prepare` takes them in place of its own. What it asks for with other
weights, rows or layouts is made when it asks.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from synchromesh.checkpoint.model_state import checksum
from synchromesh.trace.capture.batch import row_count
from synchromesh.trace.capture.capture import signature, trace
from synchromesh.trace.capture.comparison import compare
from synchromesh.trace.capture.export import Numbers
from synchromesh.trace.capture.readings import Identity, ReadValue, frozen, same
from synchromesh.trace.partition import partition as partitioning
from synchromesh.trace.partition.partition import Partition
from synchromesh.trace.step import Step
from synchromesh.training import active_plan, trace_check
from synchromesh.training import traces as making
from synchromesh.values.layout import Layout
from synchromesh.values.placement import Placement
from synchromesh.values.plan import Plan

# Beside each its function, whose id the key has, and the model whose attributes it has read.
_KNOWN: dict[Hashable, list[tuple[Any, nn.Module, Step]]] = {}
_FOLLOWING: dict[Hashable, Any] = {}  # comparisons and partitions: the keys have ids of graphs


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
    numbers: Numbers = (),
) -> Step:
    """`trace(...)` of the model that `name` stands for: not to be changed.

    Models of one name compute the same function of tensors of equal names, shapes and types.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    described = tuple((n, x.shape, x.dtype, x.device, x.requires_grad) for n, x in tensors)
    computes = making.what_it_computes(function)
    inputs = tuple(map(id, numbers))
    settings = (_modes(model), training, tuple(cuts), autocast, rows, inputs)
    key = (name, described, computes, signature(batch), settings)
    for _, known, step in _KNOWN.setdefault(key, []):
        read = read_of(model, known, step)
        fits = all(same(r.now(), r.value) for r in read)
        if fits and (not step.opaque or _numbers(model) == _numbers(known)):
            return step if known is model else replace(step, read=read)
    step = trace(
        model, function, batch, training=training, cuts=cuts, autocast=autocast, rows=rows,
        numbers=numbers,
    )  # fmt: skip
    _KNOWN[key].append((function, model, step))
    return step


def read_of(model: nn.Module, known: nn.Module, step: Step) -> tuple[ReadValue, ...]:
    """What a trace of `known` has read, as another model like it has it."""
    owners: dict[int, Any] = {}
    for theirs, ours in zip(known.modules(), model.modules(), strict=True):
        owners |= {id(x): vars(ours).get(key) for key, x in vars(theirs).items()}
        owners[id(theirs)] = ours
    found = []
    for read in step.read:
        ours = replace(read, owner=owners.get(id(read.owner), read.owner))
        now = ours.now()
        if isinstance(read.value, Identity) and isinstance(now, Identity):
            theirs, mine = read.value.content, now.content
            if isinstance(theirs, Tensor) and isinstance(mine, Tensor):
                alike = mine.equal(theirs)
            else:  # what is read of an object is noted apart
                alike = owners.get(id(theirs)) is mine
            if alike:
                ours = replace(ours, value=now)
        found.append(ours)
    return tuple(found)


def _numbers(model: nn.Module) -> list[dict[str, Any]]:
    """What a model that cannot be traced may have read."""
    tables = ({k: frozen(x) for k, x in vars(m).items()} for m in model.modules())
    return [{k: x for k, x in t.items() if not isinstance(x, Tensor)} for t in tables]


def _modes(model: nn.Module) -> tuple[bool, ...]:
    return tuple(module.training for module in model.modules())


def _once(step: Step, what: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` gives for a trace that is remembered and `what`."""
    known = (step for steps in _KNOWN.values() for *_, step in steps)
    if step.opaque or not any(step.graph is other.graph for other in known):
        return make()
    key = id(step.graph), what
    if key not in _FOLLOWING:
        _FOLLOWING[key] = make()
    return _FOLLOWING[key]


def _compared(
    model: nn.Module, function: Any, batch: Any, step: Step, autocast: torch.dtype | None
) -> Any:
    """What `compare` says of a model and its trace, once for equal weights, modes and rows."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    weights = tuple((n, x.is_meta, checksum(x)) for n, x in tensors)
    leaves = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
    rows = (signature(batch), row_count(batch), tuple(map(checksum, leaves)))
    computes = making.what_it_computes(function)
    what = (computes, weights, _modes(model), rows, autocast, step.guards)
    return _once(step, what, lambda: compare(model, function, batch, step, autocast))


def _partition(
    step: Step, layouts: Sequence[Layout], *, rows: int,
    pins: Mapping[tuple[str, Layout], Placement],
) -> Partition:  # fmt: skip
    what = (tuple(layouts), rows, frozenset(pins.items()))
    make = partitioning.partition
    return _once(step, what, lambda: make(step, layouts, rows=rows, pins=pins))  # type: ignore[no-any-return]


@contextmanager
def known(name: Hashable) -> Iterator[None]:
    """Inside, also in ranks that are forked, `prepare` of the model that `name` stands for takes
    what was made before, and keeps what it makes."""

    def capture(model: nn.Module, function: Any, batch: Any, **settings: Any) -> Step:
        return remembered(name, model, function, batch, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "capture", capture)
        patch.setattr(trace_check, "compare", _compared)
        patch.setattr(active_plan, "partition", _partition)
        yield


@contextmanager
def shared(
    name: Hashable,
    model: nn.Module,
    function: Any,
    example: Any,
    *plans: str,
    ranks: int = 1,
    autocast: torch.dtype | None = None,
) -> Iterator[None]:
    """`known(name)`, with the traces of the training step under `plans` made at once, and what
    follows from them for so many ranks."""
    paths = [path for path, _ in model.named_modules() if path]
    for plan in map(Plan.parse, plans):
        cuts = plan.cuts(paths)
        step = remembered(
            name, model, function, example, training=True, cuts=cuts, autocast=autocast
        )
        if step.opaque:
            continue
        with suppress(Exception):  # for a rank to say
            _compared(model, function, example, step, autocast)
        inside = {n: [p for p in paths if p.startswith(f"{n}.")] for n in step.chain.names}
        with suppress(ValueError):  # plans for other numbers of ranks, or left open
            layouts = step.undivided(plan.layouts(step.chain.names, ranks, inside))
            _partition(step, layouts, rows=row_count(example), pins={})
    with known(name):
        yield
