"""The reference of a verification: the same model in a plain loop on one process, and how far
rounding alone moves what it computes.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh.trace.capture.batch import autocast_for, row_count
from synchromesh.training.random_rounding import RandomRounding
from synchromesh.workloads.workload import Loss, Workload

Tensors = dict[str, Tensor]
Floors = dict[str, float]


@dataclass(frozen=True)
class Computed:
    """What one process makes of a batch, by kind (loss, gradient, buffer) and name.

    floors: of each tensor, how far rounding alone moves its entries, at most.
    """

    values: dict[str, Tensors]
    floors: dict[str, Floors]


class NoiseFloor:
    """How far rounding moves tensors, from pairs of runs that differ by rounding alone.

    What is kept is relative to a tensor's largest entry, the most of all pairs. One pair may by
    chance agree in a tensor of few entries, so that no tensor's floor is below the median of the
    gradients'.
    """

    def __init__(self) -> None:
        self._relative: dict[tuple[str, str], float] = {}

    def add(
        self, values: Mapping[str, Tensors], moved: Mapping[str, Tensors]
    ) -> dict[str, Floors]:
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
        return {
            kind: {
                name: max(
                    noises[kind, name],
                    sizes[kind, name] * max(self._relative.get((kind, name), 0.0), least),
                )
                for name in tensors
            }
            for kind, tensors in values.items()
        }


class SingleProcess:
    """The model on one process; `moved` is a copy of it that runs under random rounding.

    AdamW divides gradients by their own size, and so makes of a gradient that is rounding and no
    more a step as large as any. Hence the optimizer here is given the plan's gradients: where
    these are right, parameters have to agree to the last places, and in the next step both
    compute gradients at the same point.
    """

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        device: torch.device,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._autocast = autocast
        self.model, self.moved = model, copy.deepcopy(model)
        self.parameters = dict(model.named_parameters())
        self.optimizer = workload.build_optimizer(model.parameters())
        self._loss = workload.loss
        self._rounding = RandomRounding(device)
        self._noise = NoiseFloor()

    def backward(self, *batches: Any) -> Computed:
        """Loss, gradients and buffers of a global batch, with their noise floors; of its
        micro-batches, where several are given."""
        with torch.no_grad():
            for name, p in self.moved.named_parameters():
                p.copy_(self.parameters[name])
                self._rounding.move_(p)
        values = computed(self.model, self._loss, batches, self._autocast)
        with self._rounding:
            moved = computed(self.moved, self._loss, batches, self._autocast)
        return Computed(values, self._noise.add(values, moved))

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """The optimizer's step with these gradients, where `backward` made one."""
        for name, p in self.parameters.items():
            if p.grad is not None:
                p.grad = gradients[name].reshape(p.shape)
        self.optimizer.step()

    def trained(self) -> Computed:
        """The parameters. Of the same gradients an elementwise update rounds once."""
        values = {name: p.detach() for name, p in self.parameters.items()}
        floors = {n: _largest(p) * torch.finfo(p.dtype).eps for n, p in values.items()}
        return Computed({"parameter": values}, {"parameter": floors})


def computed(
    model: nn.Module, loss: Loss, batches: Sequence[Any], autocast: torch.dtype | None = None
) -> dict[str, Tensors]:
    """Loss, gradients (zeros where a trained parameter has none) and buffers of a forward of each
    micro-batch and one backward, in this process.
    """
    for p in model.parameters():
        p.grad = None
    total = weight = torch.zeros(())
    for batch in batches:
        with autocast_for(batch, autocast):
            result = loss(model, batch)
        if not isinstance(result, tuple):
            rows = row_count(batch) if len(batches) > 1 else 1
            result = result * rows, torch.tensor(rows)
        total, weight = total + result[0], weight + result[1]
    value = total / weight
    value.backward()
    return {
        "loss": {"": value.detach()},
        "gradient": dict(_gradients(model)),
        "buffer": {name: b.detach().clone() for name, b in model.named_buffers()},
    }


def _gradients(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for name, p in model.named_parameters():
        if p.requires_grad:
            found = torch.zeros_like(p) if p.grad is None else p.grad
            yield name, (found.to_dense() if found.is_sparse else found).detach()


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """a - b in a type that has signs; 0 of equal infinities."""
    exact = torch.complex128 if b.is_complex() else torch.float64
    return torch.where(a == b, 0.0, a.to(exact) - b.to(exact))


def _largest(x: Tensor) -> float:
    """The largest absolute value of the finite entries; 0 where there are none."""
    size = (x if x.is_complex() else x.to(torch.float64)).abs()
    size = size[size.isfinite()]
    return float(size.max()) if size.numel() else 0.0
