"""Data parallelism of PyTorch's own: DistributedDataParallel, and FSDP2's fully_shard."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from synchromesh.data.reading import Ranges
from synchromesh.engine.groups import World
from synchromesh.workloads.workload import Loss


def local_mean(loss: Loss, model: nn.Module, batch: Any) -> Tensor:
    """The mean loss over this rank's rows."""
    value = loss(model, batch)
    return value if isinstance(value, Tensor) else value[0] / value[1]


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
        found: dict[str, Any] = get_model_state_dict(model, options=options)
        return found

    return Replicated(model, loss, world, weights)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the longest list of modules (ModuleList, Sequential) that have parameters;
    none where there is no list of two."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    longest = max(lists, key=len, default=nn.Sequential())
    found = [m for m in longest if any(True for _ in m.parameters())]
    return found if len(found) > 1 else []
