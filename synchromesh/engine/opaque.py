"""An opaque program: the user's function itself on this rank's rows, where the model could not be
traced.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from synchromesh.engine.batch_norm import BatchNormPolicy
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.model import Model
from synchromesh.engine.program import Result, share
from synchromesh.engine.random import Streams
from synchromesh.engine.stage import Stage
from synchromesh.layout import Layout
from synchromesh.trace.export import flat_outputs
from synchromesh.trace.gradients import refuse_foreign


class OpaqueProgram:
    """`run` as of `Program`; every rank of a data block computes the same rows."""

    def __init__(
        self,
        function: Callable[..., Any],
        model: Model,
        layout: Layout,
        stage: Stage,
        streams: Streams,
        policy: BatchNormPolicy,
        autocast: torch.dtype | None = None,
    ) -> None:
        assert stage.position is not None, "an idle rank runs no program"
        self.function, self.model, self.layout = function, model, layout
        self.streams, self.policy, self.autocast = streams, policy, autocast
        self.position, self.device = stage.position, stage.world.device
        self._checked = False  # whether the loss reaches nothing but the model's parameters

    def run(
        self, pieces: Sequence[tuple[Any, GlobalRows]], step: int, turn: int = 0
    ) -> list[Result]:
        """As `Program.run`. Training mode where gradients are computed, evaluation mode
        elsewhere.
        """
        return [self._run(batch, rows, step, turn + i) for i, (batch, rows) in enumerate(pieces)]

    def _run(self, batch: Any, rows: GlobalRows, step: int, turn: int) -> Result:
        self.streams.begin(step, turn)
        start, stop = rows.ranges(self.layout.data)[self.layout.data_index(self.position)]
        self.streams.at(0, self.layout.data_index(self.position), 0)
        self.streams.seed(0, False)
        enabled = self.autocast is not None
        with (
            self._mode(torch.is_grad_enabled()),
            _BatchNorm(self.policy, stop > start),
            torch.autocast(self.device.type, self.autocast, enabled),
        ):
            names, outputs = flat_outputs(self.function(self.model.module, batch))
        if torch.is_grad_enabled() and not self._checked:
            refuse_foreign(outputs[0], self.model.parameters.values())
            self._checked = True
        return Result(names, list(outputs), *share(self.layout, self.position, rows))

    @contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        with self.model.open() as module:
            modes = {part: part.training for part in module.modules()}
            module.train(training)
            try:
                yield
            finally:
                for part, mode in modes.items():
                    part.training = mode


class _BatchNorm(TorchFunctionMode):
    """Batch norm in training mode goes by the policy, as in traced components."""

    def __init__(self, policy: BatchNormPolicy, real: bool) -> None:
        super().__init__()
        self.policy, self.real = policy, real

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _batch_norm(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if not training:
            return F.batch_norm(
                input, running_mean, running_var, weight, bias, False, momentum, eps
            )
        return self.policy.apply(
            input, weight, bias, running_mean, running_var, momentum, eps, self.real
        )
