"""An opaque program: the user's function on this rank's rows, of a model that was not traced.

A rank without rows runs nothing, so that no row but its own reaches parameters, buffers or
branches. What the others' forward changes without regard to rows (a teacher that follows its
student, counters) it takes over from one of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from synchromesh.engine import control_channel
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.groups import Group
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.engine.program import Completing, ForwardResult, RankOutputs, share
from synchromesh.engine.sharding import Sharding
from synchromesh.programs.batch_norm import BatchNormPolicy, NormArguments
from synchromesh.programs.model import Model
from synchromesh.programs.random import RandomStreams
from synchromesh.trace.capture.gradients import OwnLeaves, refuse_foreign
from synchromesh.trace.capture.model_snapshot import CONTAINERS, attributes_of, in_mode
from synchromesh.trace.capture.outputs import carried, flat_outputs, of_loss, refuse_loss, reported
from synchromesh.values.exchange import Border, Exchange
from synchromesh.values.layout import Layout
from synchromesh.values.schedule import Action
from synchromesh.values.sharding import Run

FOLLOW, GATHER, REDUCE, END = range(4)
NAMES = {GATHER: "gathers statistics", REDUCE: "sums gradients", END: "is done"}
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class AnnouncedCollectives:
    """`all_gather` and `all_reduce` of a group; `end` after a pass, `follow` in its place.

    A model that runs as it is may take another branch on every rank, and a rank without rows does
    not run it at all. Each collective is preceded by a small all-gather of what comes:

        rank 0    gather 17   gather 17   end
        rank 1    gather 17   end                    ->  an error on all ranks, no wait for ever
        rank 2    (no rows)   (no rows)              takes part with zeros"""

    def __init__(self, group: Group) -> None:
        self.group, self.size = group, group.size

    def all_gather(self, x: Tensor) -> Tensor:
        self._announce(GATHER, x)
        return self.group.all_gather(x)

    def all_reduce(self, x: Tensor) -> None:
        self._announce(REDUCE, x)
        self.group.all_reduce(x)

    def end(self) -> None:
        self._announce(END, None)

    def follow(self) -> None:
        """Takes part with zeros in all that the others do until they end."""
        while True:
            kind, numbers, place = self._next([FOLLOW, 0, 0])
            if kind == END:
                return
            zeros = torch.zeros(numbers, dtype=TYPES[place], device=self.group.world.device)
            if kind == GATHER:
                self.group.all_gather(zeros)
            else:
                self.group.all_reduce(zeros)

    def _announce(self, kind: int, x: Tensor | None) -> None:
        self._next([kind, 0, 0] if x is None else [kind, x.numel(), TYPES.index(x.dtype)])

    def _next(self, announced: list[int]) -> tuple[int, ...]:
        """What the ranks with rows do next; ValueError on all where they do not agree."""
        table = control_channel.all_gather_numbers(self.group, announced)
        acting = [(rank, row) for rank, row in zip(self.group.ranks, table, strict=True) if row[0]]
        first, wanted = acting[0]
        for rank, row in acting:
            if row != wanted:
                raise ValueError(
                    "ranks took different branches of a model that runs as it is, so that its "
                    f"batch norms cannot be synchronised (rank {first} {NAMES[wanted[0]]} of "
                    f"{wanted[1]} numbers, rank {rank} {NAMES[row[0]]} of {row[1]}): train with "
                    "sync_batch_norm=False, or write the model without branches on values and "
                    "random numbers"
                )
        return wanted


class OpaqueProgram:
    """`run` as of `Program`; every rank of a data block computes the same rows."""

    # as of `Program`: one stage, whose loss is what the user's function returns
    coupled, of, group = True, (0,), 0
    crossings: Mapping[tuple[int, int], tuple[Exchange, ...]] = MappingProxyType({})
    deliveries = ()  # every rank goes on with the rows that it has
    sharding = Sharding()  # nothing is sharded
    totals = None
    weights: Mapping[int, Tensor] = MappingProxyType({})  # a flush is before every step

    def __init__(
        self, function: Callable[..., Any], model: Model, layout: Layout, groups: PlanGroups,
        streams: RandomStreams, synchronise: bool, changed: Sequence[str],
        autocast: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """synchronise: batch norm's statistics. changed: what a step changes whatever its rows."""
        assert groups.position is not None, "an idle rank runs no program"
        self.function, self.model, self.leaf_layout = function, model, layout
        self.streams, self.autocast = streams, autocast
        self.groups, self.position, self.device = groups, groups.position, groups.world.device
        equal = set(model.statistics) - set(model.never_synchronised) if synchronise else set()
        self.changed = [*changed, *sorted(equal)]
        kinds = {n: type(t[k]) for n, t, k in attributes_of(model.module)}
        self.fixed = [n for n in changed if issubclass(kinds.get(n, Tensor), CONTAINERS)]
        data = groups.data_group(layout)
        self.announced = AnnouncedCollectives(data) if synchronise and data.size > 1 else None
        self.policy = BatchNormPolicy(self.announced)
        self.completing: Completing = {}
        self._checked = False  # whether the loss reaches nothing but the model's parameters

    @property
    def first_users(self) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(self.model.parameters, (0, 0))

    def gathered(self, _: Action) -> Run:
        return ()

    def run(
        self, micro_batches: Sequence[tuple[Any, GlobalRows]], step: int, first: int = 0,
        stage: int | None = None, arrived: Mapping[Border, Tensor] | None = None,
        of: tuple[int, int] = (0, 1), divides: bool = False,
    ) -> ForwardResult:  # fmt: skip
        """As `Program.run`; no results where this rank has no rows. Training mode where gradients
        are computed, evaluation mode elsewhere."""
        assert not divides, "one stage waits for no other"
        if torch.is_grad_enabled() and self.fixed:
            self._refuse_absent(micro_batches)
        results = []
        for index, (batch, rows) in enumerate(micro_batches):
            results += self._run(batch, rows, step, first + index)
            if torch.is_grad_enabled() and not all(rows.counts):
                self._broadcast_changed(rows)
        return ForwardResult(results, {}, {}, [])

    def end(self, forward: ForwardResult) -> None:
        """Nothing is to be freed."""

    def _run(self, batch: Any, rows: GlobalRows, step: int, micro_batch: int) -> list[RankOutputs]:
        training = torch.is_grad_enabled()
        index = self.leaf_layout.data_index(self.position)
        start, stop = rows.ranges(self.leaf_layout.data)[index]
        if start == stop:
            if training and self.announced is not None:
                self.announced.follow()
            return []
        self.streams.begin(step, micro_batch)
        self.streams.at(0, index, 0)
        self.streams.seed(0, False)
        enabled = self.autocast is not None
        with (
            self._mode(training),
            _BatchNorm(self.policy),
            torch.autocast(self.device.type, self.autocast, enabled),
            nullcontext() if self._checked else OwnLeaves() as own,
        ):
            result = self.function(self.model.module, batch)
            names, outputs = flat_outputs(result)
            refuse_loss(not training and of_loss(result))
        self.model.adopt_assigned()
        if training and self.announced is not None:
            self.announced.end()
        if training and own is not None:
            refuse_foreign(outputs[0], (*self.model.parameters.values(), *own.leaves))
            self._checked = True
        covers = share(self.leaf_layout, self.position, rows)
        beside = reported(result) if covers[1] else {}
        reports = [((name, 0), x, covers[0]) for name, x in beside.items()]
        return [RankOutputs(names, list(outputs), *covers, reports, carried(result))]

    def _refuse_absent(self, micro_batches: Sequence[tuple[Any, GlobalRows]]) -> None:
        for _, rows in micro_batches:
            if not all(rows.counts):
                raise ValueError(
                    f"a batch of {rows.total} rows leaves some of {len(rows.counts)} data ranks "
                    f"without any, and the forward changes {self.fixed[0]}, a container that they "
                    "cannot take over from the others: choose batches that give every rank a row "
                    "(drop_last=True leaves the short one out), or keep such state in buffers"
                )

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around every backward: activation checkpoints run the forward again, in its modes."""
        with self._mode(True):
            yield

    def after_backward(self, ran: bool) -> None:
        """To be called after every backward; ran: whether this rank had rows."""
        if self.announced is not None:
            if ran:
                self.announced.end()
            else:
                self.announced.follow()

    def _broadcast_changed(self, rows: GlobalRows) -> None:
        indices = [self.leaf_layout.data_index(p) for p in range(self.leaf_layout.devices)]
        source = next(p for p, i in enumerate(indices) if rows.counts[i])
        receivers = [p for p, i in enumerate(indices) if not rows.counts[i]]
        broadcast_state(self.model, self.changed, self.groups.everyone, source, receivers)

    @contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        with self.model.open() as module, in_mode(module, training):
            yield


def broadcast_state(
    model: Model, names: Sequence[str], group: Group, source: int, receivers: Sequence[int]
) -> None:
    """Tensors and attributes of these names come from one rank to others; all its ranks call."""
    places = {name: (table, key) for name, table, key in attributes_of(model.module)}
    state = {name: table[key] for name, (table, key) in places.items()} | model.parameters
    changed = {n: state[n] for n in names if n in state}
    others = {n: x for n, x in changed.items() if not isinstance(x, Tensor)}
    moving = [changed[n] for n in sorted(changed.keys() - others.keys())]
    if stuck := [n for n, value in others.items() if isinstance(value, CONTAINERS)]:
        raise ValueError(
            f"the forward changes {stuck[0]}, a container that ranks which did not run it cannot "
            "take over from the others: keep such state in buffers"
        )
    with group.world.ledger.paused(), torch.no_grad():
        received = group.broadcast_json(others, source)
        if group.index == source:
            group.exchange([(p, x.contiguous()) for p in receivers for x in moving], [])
        elif group.index in receivers:
            _receive(moving, group, source)
            for name, value in received.items():
                table, key = places[name]
                table[key] = value


def _receive(tensors: Sequence[Tensor], group: Group, source: int) -> None:
    whole = torch.contiguous_format
    buffers = [torch.empty_like(x, memory_format=whole) for x in tensors]
    group.exchange([], [(source, x) for x in buffers])
    for tensor, buffer in zip(tensors, buffers, strict=True):
        tensor.copy_(buffer)


class _BatchNorm(TorchFunctionMode):
    """Batch norm in training mode goes by the policy, as in traced components."""

    def __init__(self, policy: BatchNormPolicy) -> None:
        super().__init__()
        self.policy = policy

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return (self._batch_norm if func is F.batch_norm else func)(*args, **kwargs)

    def _batch_norm(
        self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
        weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
        momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        running = running_mean, running_var
        given = NormArguments(input, weight, bias, *running, training, momentum, eps)
        return self.policy.apply(given, real=True)
