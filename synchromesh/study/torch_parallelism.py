"""Parallelism of PyTorch's own: DistributedDataParallel, FSDP2's fully_shard, and
torch.distributed.pipelining, the model cut by its tracer into a stage on each rank, 1F1B."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from synchromesh.data.reading import Ranges
from synchromesh.engine.world import World
from synchromesh.trace.capture.batch import row_count, take
from synchromesh.trace.capture.outputs import named
from synchromesh.workloads.workload import Loss

LISTS = (nn.ModuleList, nn.Sequential)


def local_mean(loss: Loss, model: nn.Module, batch: Any) -> Tensor:
    """The mean loss over this rank's rows."""
    value, *weight = named(loss(model, batch)).values()
    mean: Tensor = value / weight[0] if weight else value
    return mean


class Replicated:
    """The model wrapped, on this rank's rows; gradients are means over the ranks of local means,
    as such loops have it, whatever rows or weights the ranks have."""

    drop_last = False

    def __init__(
        self, wrapped: nn.Module, loss: Loss, world: World,
        weights: Callable[[], Mapping[str, Tensor]],
    ) -> None:  # fmt: skip
        self._wrapped, self._loss, self._world = wrapped, loss, world
        self.weights = weights
        self.parameters, self.buffers = list(wrapped.parameters()), list(wrapped.buffers())

    def own_rows(self, rows: int) -> Ranges:
        ranks, rank = self._world.size, self._world.rank
        if rows < ranks:
            raise ValueError(
                f"a batch of {rows} rows leaves some of {ranks} ranks without any, and such a "
                "loop needs rows on each: choose a batch size whose last batch has more"
            )
        return ((rows * rank // ranks, rows * (rank + 1) // ranks),)

    def backward(self, batch: Any) -> Tensor:
        value = local_mean(self._loss, self._wrapped, batch)
        value.backward()
        return value / self._world.size


def data_parallel(model: nn.Module, loss: Loss, example: Any, world: World) -> Replicated:
    """DistributedDataParallel with gradients as views of its buckets."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Replicated(wrapped, loss, world, wrapped.module.state_dict)


def fully_sharded(model: nn.Module, loss: Loss, example: Any, world: World) -> Replicated:
    """fully_shard of the whole model and of each block of its longest list of blocks. The blocks
    are gathered anew in backward, which is its default."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def weights() -> Mapping[str, Tensor]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = get_model_state_dict(model, options=options)
        return state

    return Replicated(model, loss, world, weights)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The members with parameters of the longest list of modules; none of a list below two."""
    lists = [m for m in model.modules() if isinstance(m, LISTS)]
    longest = max(lists, key=len, default=nn.Sequential())
    members = [m for m in longest if any(True for _ in m.parameters())]
    return members if len(members) > 1 else []


class Pipelined:
    """Every rank is given the whole batch; the first reads the model's inputs from it, the last
    the loss's. All batches have the same size: what the last one of an epoch lacks is left out."""

    drop_last = True

    def __init__(self, model: nn.Module, loss: Loss, example: Any, world: World) -> None:
        from torch.distributed.pipelining import SplitPoint, pipeline
        from torch.distributed.pipelining.schedules import Schedule1F1B

        self._loss, self._world = loss, world
        self.micro_batches = _micro_batches(row_count(example), world.size)
        call = Call.of(model, loss, take(example, 0, row_count(example) // self.micro_batches))
        spec = {name: SplitPoint.BEGINNING for name in cuts(model, world.size)}
        try:
            piped: Any = pipeline(model, call.args, call.kwargs, split_spec=spec)
        except Exception as error:
            raise RuntimeError(
                "torch.distributed.pipelining cannot trace this model or cut it there"
            ) from error
        _send_contiguous(piped, world.size)
        stage = piped.build_stage(world.rank, world.device)
        self._model, self._module = model, stage.submod
        self._schedule = Schedule1F1B(stage, self.micro_batches, loss_fn=self._of_output)
        self._targets: list[Any] = []
        self.parameters = list(self._module.parameters())
        self.buffers = list(self._module.buffers())

    def own_rows(self, rows: int) -> Ranges:
        return ((0, rows),)

    def backward(self, batch: Any) -> Tensor:
        rows = row_count(batch) // self.micro_batches
        self._targets = [take(batch, i * rows, (i + 1) * rows) for i in range(self.micro_batches)]
        losses: list[Tensor] = []
        index = torch.arange(self.micro_batches)
        first, last = self._world.rank == 0, self._world.rank == self._world.size - 1
        call = Call.of(self._model, self._loss, batch) if first else Call((), {})
        wanted: dict[str, Any] = {"target": index, "losses": losses} if last else {}
        self._schedule.step(*call.args, **call.kwargs, **wanted, return_outputs=False)
        return torch.stack(losses).mean() if losses else torch.zeros(())

    def _of_output(self, output: Any, index: Tensor) -> Tensor:
        return local_mean(self._loss, Answer(output), self._targets[int(index)])

    def weights(self) -> Mapping[str, Tensor]:
        parts: list[Any] = [None] * self._world.size if self._world.rank == 0 else []
        mine = {name: value.cpu() for name, value in self._module.state_dict().items()}
        dist.gather_object(mine, parts if self._world.rank == 0 else None)
        return {name: value for part in parts for name, value in part.items()}


def _send_contiguous(piped: Any, stages: int) -> None:
    """What one stage sends to the next becomes contiguous, as its users write it into the model:
    messages need it, and the tracer keeps strides as they come."""
    for index in range(stages):
        module = piped.get_stage_module(index)
        for node in list(module.graph.nodes):
            if node.op == "placeholder" and index:
                node.meta["val"] = node.meta["val"].contiguous()
            elif node.op == "output" and index < stages - 1:
                with module.graph.inserting_before(node):
                    node.args = torch.fx.map_arg(node.args, partial(_contiguous, module.graph))
        module.recompile()


def _contiguous(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    made = graph.call_method("contiguous", (node,))
    made.meta["val"] = node.meta["val"].contiguous()
    return made


def _micro_batches(rows: int, stages: int, per_stage: int = 2) -> int:
    """As many as divide a batch into equal ones, which torch.distributed.pipelining needs.

    per_stage: at most; two leave (p-1)/(3p-1) of a step idle, below a third."""
    for count in range(per_stage * stages, 1, -1):
        if rows % count == 0:
            return count
    raise ValueError(
        f"torch.distributed.pipelining needs equal micro-batches, and no number from 2 to "
        f"{per_stage * stages} divides a batch of {rows} rows: choose another batch size"
    )


class _Reached(Exception):
    pass


class Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, loss: Loss, batch: Any) -> "Call":
        calls: list[Call] = []

        class Listening(nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                calls.append(cls(args, kwargs))
                raise _Reached

        try:
            loss(Listening(), batch)
        except _Reached:
            return calls[0]
        raise ValueError(
            "torch.distributed.pipelining needs a loss that calls the model once, as "
            "model(inputs): this one does not call it"
        )


class Answer(nn.Module):
    """Stands for the model in the loss: its output is there already."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output, self._calls = output, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._calls > 1:
            raise ValueError(
                "torch.distributed.pipelining needs a loss that calls the model once, as "
                "model(inputs): this one calls it again"
            )
        return self._output


def cuts(model: nn.Module, stages: int) -> list[str]:
    """The modules that begin the second and later stages: of the longest list of modules, cut
    into runs of as equally many as can be. ValueError where it has too few."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, LISTS)]
    name, longest = max(lists, key=lambda item: len(item[1]), default=("", nn.Sequential()))
    if len(longest) < stages:
        raise ValueError(
            f"torch.distributed.pipelining is cut here between the members of the model's longest "
            f"list of modules, and {len(longest)} of them are too few for {stages} stages"
        )
    prefix = f"{name}." if name else ""
    members = [member for member, _ in longest.named_children()]
    return [prefix + members[len(members) * s // stages] for s in range(1, stages)]
