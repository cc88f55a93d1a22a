"""Contestants that are PyTorch's own: the plain training loop that their users write, metered.

The same seed draws the same weights as for ours, and the same loader the same order of samples."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from synchromesh.data.cursor import Cursor
from synchromesh.data.fetch import Loading
from synchromesh.data.loader import Batching, Loader
from synchromesh.data.reading import Ranges
from synchromesh.engine.world import World
from synchromesh.runs.memory import MemoryTracker
from synchromesh.runs.watches import interface_bytes
from synchromesh.study.cell import CellJob
from synchromesh.study.meter import Meter
from synchromesh.study.torch_parallelism import Pipelined, data_parallel, fully_sharded
from synchromesh.trace.capture.batch import row_count
from synchromesh.workloads.workload import Loss, Workload, is_stream


class Rival(Protocol):
    """One way of PyTorch's to train a model on the ranks of a run; all ranks call alike.

    parameters  of this rank, as its optimizer has them; buffers: of this rank
    drop_last   whether the last batch of an epoch is left out where it is short"""

    drop_last: bool
    parameters: list[nn.Parameter]
    buffers: list[Tensor]

    def own_rows(self, rows: int) -> Ranges:
        """[start, stop) of the rows of a global batch that this rank is given."""

    def backward(self, batch: Any) -> Tensor:
        """Forward and backward; this rank's summand of the global mean loss."""

    def weights(self) -> Mapping[str, Tensor]:
        """Parameters and buffers by the model's own names: on rank 0 all of them."""


class CarriedCalls:
    """`function(model, batch, carry) -> (result, carry)` as a function of model and batch, which
    hands the carry of this rank's rows on, detached. start: rows -> the carry at the beginning."""

    def __init__(
        self, function: Callable[..., tuple[Any, Any]], start: Callable[[int], Any],
        device: torch.device,
    ) -> None:  # fmt: skip
        self._function, self._start, self._device = function, start, device
        self._carry: Any = None

    def restart(self) -> None:
        """The next batch begins the streams anew."""
        self._carry = None

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if self._carry is None:
            self._carry = self._each(self._start(row_count(batch)), lambda x: x.to(self._device))
        result, carry = self._function(model, batch, self._carry)
        self._carry = self._each(carry, Tensor.detach)
        return result

    @staticmethod
    def _each(carry: Any, do: Callable[[Tensor], Tensor]) -> Any:
        return pytree.tree_map(lambda x: do(x) if isinstance(x, Tensor) else x, carry)


# (model, loss, example batch, world) -> Rival
BUILDERS: dict[str, Callable[[nn.Module, Loss, Any, World], Rival]] = {
    "ddp": data_parallel, "fsdp2": fully_sharded, "torch-pipeline": Pipelined,
}  # fmt: skip


def train(job: CellJob, meter: Meter) -> None:
    """Trains until the epochs are over or the study ends the run."""
    workload, seed = job.workload(), job.cell.seed
    world = World.open(None, timedelta(minutes=5))
    torch.manual_seed(seed)
    model = workload.build()
    example = workload.example(seed=seed)
    loss: Any = workload.loss
    if workload.carry is not None:
        if job.cell.strategy == "torch-pipeline":
            raise ValueError(
                "torch.distributed.pipelining has no state that goes from batch to batch, and "
                f"{workload.name} carries one"
            )
        loss = CarriedCalls(workload.loss, workload.carry, world.device)
    with torch.autocast(world.device.type, job.autocast, job.autocast is not None):
        rival = BUILDERS[job.cell.strategy](model.to(world.device), loss, example, world)
    _PlainLoop(job, workload, world, rival, meter, loss).run()
    world.close()


class _PlainLoop:
    READ_EVERY = 10  # steps between readings of the loss, as in `fit`

    def __init__(
        self, job: CellJob, workload: Workload, world: World, rival: Rival, meter: Meter,
        loss: Any,
    ) -> None:  # fmt: skip
        self.job, self.workload, self.world = job, workload, world
        self.rival, self.meter, self.loss = rival, meter, loss
        self.optimizer: Optimizer = workload.build_optimizer(rival.parameters)
        self.scheduler = workload.build_scheduler(self.optimizer)
        data = workload.train_data
        self.carries = workload.carry is not None
        shuffle = not (is_stream(data) or self.carries)
        batching = Batching(shuffle, rival.drop_last, workload.collate, self.carries)
        self.loader = Loader(
            data, job.cell.batch, rival.own_rows, Cursor(job.cell.seed), batching,
            Loading.of(dict(workload.loading)), world.everyone.all_gather_json, world.device,
        )  # fmt: skip
        self.steps = 0

    def run(self) -> None:
        """All epochs, or until the study ends it."""
        rival, optimizer = self.rival, self.optimizer
        self.meter.prepare(
            self.world.device, partial(interface_bytes, self.world.size),
            lambda: MemoryTracker(rival.parameters, rival.buffers, optimizer),
        )  # fmt: skip
        self.meter.begin()
        epoch = 0
        while not self.meter.over and (self.job.epochs is None or epoch < self.job.epochs):
            epoch += 1
            losses = self._epoch()
            if not self.meter.over and self.job.epochs is not None:
                loss, values = self._evaluated(losses)
                self.meter.epoch(epoch, self.steps, loss, values)
        self.meter.finish(None)

    def _epoch(self) -> list[Tensor]:
        losses: list[Tensor] = []
        if isinstance(self.loss, CarriedCalls):
            self.loss.restart()
        asked = time.perf_counter()
        for batch in self.loader:
            began = time.perf_counter()
            losses.append(self._step(batch))
            if len(losses) % self.READ_EVERY == 0:
                losses[-1].item()
            ended = time.perf_counter()
            self.steps += 1
            self.meter.step(ended - began, began - asked, self.loader.rows)
            if self.meter.over:
                break
            asked = time.perf_counter()
        return losses

    def _step(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        kind = self.world.device.type
        with torch.autocast(kind, self.job.autocast, self.job.autocast is not None):
            loss = self.rival.backward(batch)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        if kind == "cuda":
            torch.cuda.synchronize(self.world.device)
        return loss.detach()

    def _evaluated(self, losses: list[Tensor]) -> tuple[float, dict[str, float]]:
        """The epoch's mean loss, and metrics of a plain model, which rank 0 computes alone."""
        mean = torch.stack(losses).double().mean()
        self.world.everyone.all_reduce(mean, counted=False)
        weights, w = self.rival.weights(), self.workload
        values: dict[str, float] = {}
        if self.world.rank == 0 and w.valid_data is not None and w.metric is not None:
            values = _metrics(w, weights, self.world.device)
        metrics: dict[str, float] = self.world.everyone.broadcast_json(values)
        return float(mean), metrics


def _metrics(
    workload: Workload, weights: Mapping[str, Tensor], device: torch.device
) -> dict[str, float]:
    assert workload.metric is not None
    model = workload.build().to(device)
    model.load_state_dict(dict(weights))
    model.eval()
    metric: Any = workload.metric
    if workload.carry is not None:
        metric = CarriedCalls(metric, workload.carry, device)
    batching = Batching(False, False, workload.collate, workload.carry is not None)
    loader = Loader(
        workload.valid_data, workload.batch_size, lambda rows: ((0, rows),), batching=batching,
        device=device,
    )  # fmt: skip
    sums, rows = dict[str, float](), 0
    with torch.no_grad():
        for batch in loader:
            rows += loader.rows
            for name, value in metric(model, batch).items():
                sums[name] = sums.get(name, 0.0) + float(value)
    return {name: total / rows for name, total in sums.items()}
