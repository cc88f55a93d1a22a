"""The reference of a verification: a plain loop on one process, and how far rounding moves it."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from synchromesh.engine.batches import to_device
from synchromesh.trace.capture.batch import autocast_for, row_count, take
from synchromesh.trace.capture.carry import Carrying, join, started, with_leaves
from synchromesh.trace.capture.outputs import WithCarry, named
from synchromesh.workloads.workload import Loss, Workload

Tensors = dict[str, Tensor]
Floors = dict[str, float]


@dataclass(frozen=True)
class Computed:
    """What one process makes of a batch, by kind (loss, gradient, buffer, carry) and name. floors:
    how far rounding alone moves a tensor's entries, at most."""

    values: dict[str, Tensors]
    floors: dict[str, Floors]


class NoiseFloor:
    """How far rounding moves tensors, from pairs of runs that differ by rounding alone.

    What is kept is relative to a tensor's largest entry, the most of all pairs. One pair may by
    chance agree in a tensor of few entries: no floor is below the median of the gradients'."""

    def __init__(self) -> None:
        self._relative: dict[tuple[str, str], float] = {}

    def add(self, values: dict[str, Tensors], moved: dict[str, Tensors]) -> dict[str, Floors]:
        """The floors of `values`, with `moved`, the same of another run, taken into account."""
        sizes, noises = {}, {}
        for kind, tensors in values.items():
            for name, x in tensors.items():
                key = kind, name
                sizes[key] = _largest(x)
                noises[key] = _largest(_difference(moved[kind][name], x))
                if sizes[key]:
                    relative = noises[key] / sizes[key]
                    self._relative[key] = max(self._relative.get(key, 0.0), relative)
        usual = [r for (kind, _), r in self._relative.items() if kind == "gradient"]
        least = median(usual) if usual else 0.0

        def floor(key: tuple[str, str]) -> float:
            return max(noises[key], sizes[key] * max(self._relative.get(key, 0.0), least))

        return {kind: {n: floor((kind, n)) for n in tensors} for kind, tensors in values.items()}


class SingleProcess:
    """The model on one process; `moved` is a copy of it that runs under random rounding.

    AdamW makes of a gradient that is rounding and no more a step as large as any. Hence the
    optimizer here is given the plan's gradients: where these are right, parameters agree to the
    last places, and the next step's gradients are computed at the same point."""

    def __init__(
        self, model: nn.Module, workload: Workload, device: torch.device,
        autocast: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """workload: of which the loss, the carry and the optimizer are used."""
        self._autocast = autocast
        self.model, self.moved = model, copy.deepcopy(model)
        self.parameters = dict(model.named_parameters())
        self.optimizer = workload.build_optimizer(model.parameters())
        self._loss, self._start = workload.loss, workload.carry
        if workload.carry is not None:
            self._loss = Carrying(workload.loss)
        self.forget_carry()
        self._device, self._rounding = device, RandomRounding(device)
        self._noise = NoiseFloor()

    def forget_carry(self) -> None:
        """The next batch begins new streams."""
        self._carry: Tensors = {}
        self._moved_carry: Tensors = {}

    def _joined(self, batches: Sequence[Any], leaves: Tensors) -> Sequence[Any]:
        """Micro-batches, each with its rows of the carry: of `leaves`, or at the beginning."""
        if self._start is None:
            return batches
        ends = [0, *accumulate(map(row_count, batches))]
        carry = to_device(started(self._start, ends[-1]), self._device)
        carry = with_leaves(carry, leaves) if leaves else carry
        parts = (take(carry, start, stop) for start, stop in pairwise(ends))
        return [join(batch, part) for batch, part in zip(batches, parts, strict=True)]

    def backward(self, *batches: Any) -> Computed:
        """Loss, gradients, buffers, carry of a global batch or its micro-batches, with floors."""
        with torch.no_grad():
            for name, p in self.moved.named_parameters():
                p.copy_(self.parameters[name])
                self._rounding.move_(p)
        joined = self._joined(batches, self._carry)
        values = computed(self.model, self._loss, joined, self._autocast)
        joined = self._joined(batches, self._moved_carry)
        with self._rounding:
            moved = computed(self.moved, self._loss, joined, self._autocast)
        self._carry, self._moved_carry = values["carry"], moved["carry"]
        return Computed(values, self._noise.add(values, moved))

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """The optimizer's step with these gradients, where `backward` made one."""
        for name, p in self.parameters.items():
            if p.grad is not None:
                own, made = gradients[name].reshape(p.shape), p.grad
                p.grad = own.sparse_mask(made.coalesce()) if made.is_sparse else own
        self.optimizer.step()

    def trained(self) -> Computed:
        """The parameters. Of the same gradients an elementwise update rounds once."""
        values = {name: p.detach() for name, p in self.parameters.items()}
        floors = {n: _largest(p) * torch.finfo(p.dtype).eps for n, p in values.items()}
        return Computed({"parameter": values}, {"parameter": floors})


def computed(
    model: nn.Module, loss: Loss, batches: Sequence[Any], autocast: torch.dtype | None = None
) -> dict[str, Tensors]:
    """Loss, gradients (zeros where a trained parameter has none), buffers and the next carry of a
    forward of each micro-batch and one backward, in this process."""
    for p in model.parameters():
        p.grad = None
    total = weight = torch.zeros(())
    count = 0.0
    carry: dict[str, list[Tensor]] = {}
    for batch in batches:
        with autocast_for(batch, autocast):
            result = loss(model, batch)
        if isinstance(result, WithCarry):
            for name, leaf in result.leaves.items():
                carry.setdefault(name, []).append(leaf)
        given, *of_pair = named(result).values()
        if not of_pair:
            rows = row_count(batch) if len(batches) > 1 else 1
            given, of_pair = given * rows, [torch.tensor(rows)]
            count += row_count(batch) - rows
        total, weight = total + given, weight + of_pair[0]
    value = total / weight
    value.backward()
    return {
        "loss": {"": value.detach()},
        "weight": {"": weight.detach() + count},
        "gradient": dict(_gradients(model)),
        "buffer": {name: b.detach().clone() for name, b in model.named_buffers()},
        "carry": {name: torch.cat(parts) for name, parts in carry.items()},
    }


def _gradients(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for name, p in model.named_parameters():
        if p.requires_grad:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            yield name, (gradient.to_dense() if gradient.is_sparse else gradient).detach()


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """a - b in a type that has signs; 0 of equal infinities."""
    exact = torch.complex128 if b.is_complex() else torch.float64
    return torch.where(a == b, 0.0, a.to(exact) - b.to(exact))


def _largest(x: Tensor) -> float:
    """The largest absolute value of the finite entries; 0 where there are none."""
    size = (x if x.is_complex() else x.to(torch.float64)).abs()
    size = size[size.isfinite()]
    return float(size.max()) if size.numel() else 0.0


# Results that are entries of their inputs, or whole numbers: nothing is rounded, and a model may
# compare them with what they were taken from, or count with them.
EXACT = frozenset({
    "abs", "adaptive_max_pool2d", "adaptive_max_pool3d", "amax", "amin", "cat", "ceil", "clamp",
    "clamp_max", "clamp_min", "clone", "constant_pad_nd", "copy", "copy_", "cummax", "cummin",
    "embedding", "fill", "fill_", "flip", "floor", "gather", "hardtanh", "hardtanh_", "index",
    "index_select", "kthvalue", "masked_fill", "masked_fill_", "max", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "maximum", "median", "min", "minimum", "neg", "relu", "relu_",
    "repeat", "roll", "round", "scatter", "sign", "sort", "stack", "take", "topk", "tril", "triu",
    "trunc", "where",
})  # fmt: skip

# Operators that add the values of a channel one after another, n of them: their order matters by
# far more than one rounding, about sqrt(n) of them. They run from the last value to the first:
# name -> which arguments, and which results, have the rows.
SEQUENTIAL = {"native_batch_norm": ((0,), 0), "native_batch_norm_backward": ((0, 1), 0)}


class RandomRounding(TorchDispatchMode):
    """Inside, results that depend on parameters become x (1 + e), e at random plus or minus the
    spacing of their type. Zeros stay, and what might overflow (masks).

    Another order of the same operations rounds otherwise. Monte Carlo arithmetic (Parker, Pierce
    and Eggert, "Monte Carlo Arithmetic", 2000) shows what that does without knowing the orders:
    each floating-point result is moved in its last place, in the type that it is computed in.

    What no parameter reaches (masks, positions, buckets of distances) is every order's own and
    stays as it is. Reproducible: the numbers depend on `seed` and the operators alone."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator(device).manual_seed(seed)

    def move_(self, x: Tensor) -> None:
        """Moves entries by their spacing, up or down; those stay that might overflow."""
        kind = torch.finfo(x.dtype)
        factor = torch.empty_like(x, dtype=x.real.dtype if x.is_complex() else x.dtype)
        factor.bernoulli_(0.5, generator=self._generator).mul_(2 * kind.eps).add_(1 - kind.eps)
        x.mul_(factor.masked_fill_(x.abs() > kind.max / 2, 1.0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = _reversed(func, args, kwargs or {})
        # in backward, where autograd calls, inputs do not say what they depend on
        moves = torch._C._current_graph_task_id() != -1 or (
            func._overloadpacket.__name__ not in EXACT
            and any(x.requires_grad for x in _tensors((args, kwargs)))
        )
        if _is_view(func) or not moves:
            return made
        for x in _tensors(made):
            if (x.is_floating_point() or x.is_complex()) and x.layout is torch.strided:
                self.move_(x)
        return made


def _reversed(func: Any, args: Any, kwargs: Any) -> Any:
    """The results of an operator, in the other order of its sums where they are sequential."""
    name = func._overloadpacket.__name__
    if name not in SEQUENTIAL:
        return func(*args, **kwargs)
    given, result = SEQUENTIAL[name]
    rows = [d for d in range(args[0].dim()) if d != 1]
    made = [*func(*(x.flip(rows) if i in given else x for i, x in enumerate(args)), **kwargs)]
    if made[result] is not None:  # a gradient that nobody asks for
        made[result] = made[result].flip(rows)
    return tuple(made)


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def _is_view(func: Any) -> bool:
    aliases = (r.alias_info for r in func._schema.returns)
    return any(alias is not None and not alias.is_write for alias in aliases)
