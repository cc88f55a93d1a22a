"""An opaque program: the user's function itself on this rank's rows, where the model could not be
traced.

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

from synchromesh.engine.announced_collectives import AnnouncedCollectives
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
from synchromesh.trace.capture.outputs import carried, flat_outputs
from synchromesh.values.exchange import Border, Exchange
from synchromesh.values.layout import Layout
from synchromesh.values.schedule import Action
from synchromesh.values.sharding import Run


class OpaqueProgram:
    """`run` as of `Program`; every rank of a data block computes the same rows."""

    # as of `Program`: one stage, whose loss is what the user's function returns
    coupled, of, group = True, (0,), 0
    crossings: Mapping[tuple[int, int], tuple[Exchange, ...]] = MappingProxyType({})
    deliveries = ()  # every rank goes on with the rows that it has
    sharding = Sharding()  # nothing is sharded
    totals = None

    def __init__(
        self, function: Callable[..., Any], model: Model, layout: Layout, groups: PlanGroups,
        streams: RandomStreams, synchronise: bool, changed: Sequence[str],
        autocast: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """synchronise: batch norm's statistics. changed: names of what a step changes in the model
        without regard to rows."""
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
        """Of all of the model's parameters: the only stage and component."""
        return dict.fromkeys(self.model.parameters, (0, 0))

    def gathered(self, _: Action) -> Run:
        """As of `Program`: no sharded parameters."""
        return ()

    def run(
        self, micro_batches: Sequence[tuple[Any, GlobalRows]], step: int, first: int = 0,
        stage: int | None = None, arrived: Mapping[Border, Tensor] | None = None,
        of: tuple[int, int] = (0, 1),
    ) -> ForwardResult:  # fmt: skip
        """As `Program.run`; no results where this rank has no rows. Training mode where gradients
        are computed, evaluation mode elsewhere."""
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
        start, stop = rows.ranges(self.leaf_layout.data)[
            self.leaf_layout.data_index(self.position)
        ]
        if start == stop:
            if training and self.announced is not None:
                self.announced.follow()
            return []
        self.streams.begin(step, micro_batch)
        self.streams.at(0, self.leaf_layout.data_index(self.position), 0)
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
        self.model.adopt_assigned()
        if training and self.announced is not None:
            self.announced.end()
        if training and own is not None:
            refuse_foreign(outputs[0], (*self.model.parameters.values(), *own.leaves))
            self._checked = True
        covers = share(self.leaf_layout, self.position, rows)
        return [RankOutputs(names, list(outputs), *covers, carried(result))]

    def _refuse_absent(self, micro_batches: Sequence[tuple[Any, GlobalRows]]) -> None:
        """ValueError on every rank where one could not follow what the forward changes."""
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
        """Around every backward: activation checkpoints run parts of the forward again in it, in
        the modes of the first time."""
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
        """What a forward changed comes to the ranks that had no rows to run it on."""
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
    """Parameters, buffers and attributes of these names come from one rank of the group to others;
    all its ranks call."""
    state = _state(model)
    changed = {n: state[n] for n in names if n in state}
    others = {n: x for n, x in changed.items() if not isinstance(x, Tensor)}
    moving = [changed[n] for n in sorted(changed.keys() - others.keys())]
    _refuse_containers(others)
    with group.world.ledger.paused(), torch.no_grad():
        received = group.broadcast_json(others, source)
        if group.index == source:
            group.exchange([(p, x.contiguous()) for p in receivers for x in moving], [])
        elif group.index in receivers:
            _receive(moving, group, source)
            _assign(model, received)


def _state(model: Model) -> dict[str, Any]:
    attributes = {name: table[key] for name, table, key in attributes_of(model.module)}
    return {**attributes, **model.parameters}


def _assign(model: Model, attributes: Mapping[str, Any]) -> None:
    places = {name: (table, key) for name, table, key in attributes_of(model.module)}
    for name, value in attributes.items():
        table, key = places[name]
        table[key] = value


def _refuse_containers(attributes: Mapping[str, Any]) -> None:
    """ValueError for an attribute that no message could carry."""
    stuck = next((n for n, value in attributes.items() if isinstance(value, CONTAINERS)), None)
    if stuck is not None:
        raise ValueError(
            f"the forward changes {stuck}, a container that ranks which did not run it cannot "
            "take over from the others: keep such state in buffers"
        )


def _receive(tensors: Sequence[Tensor], group: Group, source: int) -> None:
    """Fills tensors of any strides with what the source sends of them."""
    whole = torch.contiguous_format
    landing = [torch.empty_like(x, memory_format=whole) for x in tensors]
    group.exchange([], [(source, x) for x in landing])
    for tensor, received in zip(tensors, landing, strict=True):
        tensor.copy_(received)


class _BatchNorm(TorchFunctionMode):
    """Batch norm in training mode goes by the policy, as in traced components."""

    def __init__(self, policy: BatchNormPolicy) -> None:
        super().__init__()
        self.policy = policy

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _batch_norm(
        self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
        weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
        momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        given = NormArguments(
            input, weight, bias, running_mean, running_var, training, momentum, eps
        )
        return self.policy.apply(given, real=True)
