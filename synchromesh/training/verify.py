"""Verification: a workload under a plan against one process with the same batches, weights and
dtype.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from synchromesh.engine.batches import to_device
from synchromesh.trace.capture.batch import autocast_for
from synchromesh.trace.partition.explain import explain
from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from synchromesh.workloads.workload import Workload

DTYPES = {"float64": torch.float64, "float32": torch.float32}
COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}
TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
# Under autocast a plan may deviate by twice of what autocast itself changes on one process, which
# is rounding (Alone.rounding), or by what a trace may (trace/capture/gradients.py). Measured in
# bfloat16, 3 steps, 2026-11-22, largest deviation of plans (own rounding): cnn 0.003 (0.013),
# bert 0.006 (0.004), resnet 0.28 (0.52: norms over few rows enlarge it).
AUTOCAST, OWN_ROUNDINGS = 2e-2, 2.0
FLOAT32_INSIDE = (
    1e-6  # a float64 model that computes in float32 itself, as the norms of Llama and T5 do
)


@dataclass
class Deviation:
    """The largest absolute difference over all tensors, and the largest reference value it is
    divided by.
    """

    difference: float = 0.0
    reference: float = 0.0

    def add(self, value: Tensor, reference: Tensor) -> None:
        """Compares one more tensor with its reference."""
        if reference.numel():
            exact = torch.complex128 if reference.is_complex() else torch.float64
            difference = float((value.to(exact) - reference.to(exact)).abs().max())
            # max() would drop a NaN; a NaN is the worst deviation there is
            self.difference = (
                difference if difference != difference else max(self.difference, difference)
            )
            self.reference = max(self.reference, float(reference.to(exact).abs().max()))

    @property
    def relative(self) -> float:
        """The difference over the reference; as it is where that is 0."""
        return self.difference / self.reference if self.reference else self.difference


def without_dropout(model: nn.Module) -> int:
    """Sets every dropout probability of the model to zero; returns how many were not."""
    changed = 0
    for module in model.modules():
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        for key, value in list(vars(module).items()):
            named = "drop" in key.lower() or (is_dropout and key == "p")
            if named and isinstance(value, float) and value > 0.0:
                setattr(module, key, 0.0)
                changed += 1
    return changed


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating point tensors in `dtype`, complex ones of such parts."""
    return pytree.tree_map(lambda x: _as(x, dtype) if isinstance(x, Tensor) else x, batch)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_complex():
        return x.to(COMPLEX[dtype])
    return x.to(dtype) if x.is_floating_point() else x


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in `dtype`. `Module.to` would take the imaginary part from complex tensors."""
    model._apply(lambda x: _as(x, dtype))
    return model


def global_batches(workload: Workload, steps: int, dtype: torch.dtype) -> Iterator[Any]:
    """Seeded global batches; the last one is short (half of the rows and one more, where there are
    several).
    """
    for index in range(steps):
        rows = workload.batch_size
        if index == steps - 1 and steps > 1:
            rows = max(1, rows // 2 - 1)
        yield cast(workload.example(rows, seed=index + 1), dtype)


def verify(
    workload: Workload,
    plan: str,
    steps: int = 5,
    dtype: str | None = None,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
    autocast: torch.dtype | None = None,
) -> dict[str, Any]:
    """Trains `steps` steps under `plan` and, on rank 0, alone; the document of `synchromesh
    verify`.

    Dropout is set to zero and batch norm synchronised, so that both compute the same function.
    dtype: of both; float64, or with autocast float32. say: receives what is measured where `plan`
    is `auto`. autocast: e.g. torch.bfloat16, in both.
    """
    dtype = dtype or ("float64" if autocast is None else "float32")
    assert autocast is None or dtype != "float64", "autocast leaves float64 as it is"
    kind = DTYPES[dtype]
    torch.manual_seed(seed)
    model = cast_model(workload.model(), kind)
    dropped = without_dropout(model)
    reference = copy.deepcopy(model)
    optimizer = workload.optimizer(model.parameters())
    example = cast(workload.example(workload.batch_size, seed=0), kind)
    trainer = prepare(
        model, optimizer, workload.loss, example, plan=plan, seed=seed, sync_batch_norm=True,
        autocast=autocast, say=say,
    )  # fmt: skip
    try:
        # CUDA convolutions would round float32 to 10 bits, more than what is allowed here
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
            return _compare(trainer, reference, workload, steps, dtype, dropped)
    finally:
        trainer.close()


def _compare(
    trainer: Trainer, reference: nn.Module, workload: Workload, steps: int, dtype: str,
    dropped: int,
) -> dict[str, Any]:  # fmt: skip
    device = trainer.world.device
    autocast = trainer.options.autocast
    alone = exact = None
    if trainer.rank == 0:
        if autocast is not None:
            exact = Alone(copy.deepcopy(reference).to(device), workload)
        alone = Alone(reference.to(device), workload, autocast, exact)
    deviations, sent = _train(trainer, alone, workload, steps, DTYPES[dtype])
    parameter_bytes = trainer.gather_numbers(trainer.parameter_bytes())
    tolerance = TOLERANCE[dtype]
    if autocast is not None:
        own = 0.0 if alone is None else alone.rounding()
        tolerance = max(AUTOCAST, OWN_ROUNDINGS * own)
    single = (torch.float32, torch.complex64)
    if dtype == "float64" and any(trainer.computes_in(t) for t in single):
        tolerance = FLOAT32_INSIDE
    explained = explain(
        trainer.traced, trainer.partition, trainer.plan, trainer.world.size, workload.batch_size,
        trainer.options.sync_batch_norm,
    )  # fmt: skip
    compared = _exactly_explained(trainer, workload.batch_size)
    document = {
        "plan": str(trainer.plan),
        "ranks": trainer.world.size,
        "steps": steps,
        "dtype": dtype,
        "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
        "max_loss_deviation": deviations[0],
        "max_gradient_deviation": deviations[1],
        "max_parameter_deviation": deviations[2],
        "tolerance": tolerance,
        "parameter_bytes_per_rank": parameter_bytes,
        "sent_bytes_per_step": sent,
        "explained_parameter_bytes_per_rank": list(explained.parameter_bytes_per_rank),
        "explained_sent_bytes_per_step": list(explained.sent_bytes_per_step),
        "sent_bytes_compared": compared,
        "dropout_set_to_zero": dropped,
        "batch_norm": "synchronised",
        "passed": all(d <= tolerance for d in deviations)
        and parameter_bytes == list(explained.parameter_bytes_per_rank)
        and (not compared or sent == list(explained.sent_bytes_per_step)),
    }
    everyone: dict[str, Any] = trainer.world.everyone.broadcast_json(document)
    return everyone  # rank 0 alone has compared


def _train(
    trainer: Trainer, alone: "Alone | None", workload: Workload, steps: int, dtype: torch.dtype
) -> tuple[list[float], list[int]]:
    """Trains both. The largest relative deviations of losses, of the first step's gradients and of
    the parameters in the end; the bytes that each rank sent in the first step."""
    gradient, parameter = Deviation(), Deviation()
    worst_loss = 0.0
    sent: list[int] = []
    for index, batch in enumerate(global_batches(workload, steps, dtype)):
        trainer.world.ledger.reset()
        value = trainer.backward(trainer.shard(batch))
        if index == 0:
            sent = trainer.gather_numbers(trainer.world.ledger.sent)
            for name, complete in trainer.gathered(trainer.gradients()):
                if alone is not None:
                    alone.want_gradient[name] = complete
        trainer.update()
        if alone is not None:
            rows = to_device(batch, trainer.world.device)
            loss = Deviation()
            loss.add(value, alone.step(rows, gradient if index == 0 else None))
            relative = loss.relative  # a NaN is the worst deviation there is
            worst_loss = relative if relative != relative else max(worst_loss, relative)
    for name, complete in trainer.gathered(trainer.parameters()):
        if alone is not None:
            parameter.add(complete, alone.parameters[name].detach())
    deviations = (worst_loss, gradient.relative, parameter.relative)
    return [_number(d) for d in deviations], sent


def _exactly_explained(trainer: Trainer, rows: int) -> bool:
    """Whether `explain` knows the bytes of each rank: on edges between layouts that do not divide
    the rows evenly it knows their mean.
    """
    layouts = {c.layout for c in trainer.partition.components}
    shares = trainer.plan.rows is None and all(rows % layout.data == 0 for layout in layouts)
    return shares or len({layout.tensor for layout in layouts}) == 1


def _number(deviation: float) -> float:
    """JSON has neither NaN nor infinity."""
    return deviation if deviation < sys.float_info.max else sys.float_info.max


class Alone:
    """The reference: the same model in a plain loop on one process."""

    def __init__(
        self, model: nn.Module, workload: Workload, autocast: torch.dtype | None = None,
        exact: "Alone | None" = None,
    ) -> None:  # fmt: skip
        """exact: the same without autocast, which `rounding` compares with."""
        self.model, self.autocast, self.exact = model.train(), autocast, exact
        self._losses, self._gradient = 0.0, Deviation()
        self.loss = workload.loss
        self.parameters = dict(model.named_parameters())
        self.optimizer = workload.optimizer(model.parameters())
        self.want_gradient: dict[str, Tensor] = {}

    def step(self, batch: Any, gradient: Deviation | None) -> Tensor:
        """One step; returns its loss. gradient: compares `want_gradient` with the gradients."""
        with autocast_for(batch, self.autocast):
            result = self.loss(self.model, batch)
        value = result[0] / result[1] if isinstance(result, tuple) else result
        self.optimizer.zero_grad()
        value.backward()
        if gradient is not None:
            for name, p in self.parameters.items():
                if p.requires_grad:
                    expected = torch.zeros_like(p) if p.grad is None else p.grad
                    gradient.add(self.want_gradient.get(name, torch.zeros_like(p)), expected)
                    if self.exact is not None:
                        self.exact.want_gradient[name] = expected.clone()
        self.optimizer.step()
        if self.exact is not None:
            loss = Deviation()
            loss.add(
                value.detach(),
                self.exact.step(batch, None if gradient is None else self._gradient),
            )
            self._losses = max(self._losses, loss.relative)
        return value.detach()

    def rounding(self) -> float:
        """The largest relative deviation from what there is without autocast: of losses, of the
        first gradients, of parameters."""
        assert self.exact is not None, "there is nothing to compare with"
        parameter = Deviation()
        for name, p in self.parameters.items():
            parameter.add(p.detach(), self.exact.parameters[name].detach())
        return max(self._losses, self._gradient.relative, parameter.relative)
