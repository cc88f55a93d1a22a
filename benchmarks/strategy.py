"""Ways to train the deep model on the ranks of this run: ours under a plan, and PyTorch's own.

    ddp                 DistributedDataParallel, gradients as views of its buckets
    ddp:zero            the same with ZeroRedundancyOptimizer: states sharded (ZeRO 1)
    fsdp2               fully_shard of every layer; gathered parameters stay until backward, which
                        saves their second gathering (the model fits each host)
    fsdp2:again         the same as it is by default: parameters are gathered again in backward
    torch:1f1b:2:8      torch.distributed.pipelining: 2 groups of layers, 8 micro-batches
    anything else       the text of a plan of Synchromesh; ours:1f1b:2:8 is short for the plan that
                        has the cuts, micro-batches and schedule of torch:1f1b:2:8

`step` takes the global batch, updates, and returns this rank's part of the global mean loss.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import deep
from benchmarks.deep import Shape
from synchromesh.cost.planned_step import PlannedStep

TENSOR = "tensor; @pieces=1"
# how often a rank comes in the chain
VISITS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}
ALONE = ("zero-bubble",)  # of ours: torch has none for one stage a rank
# of ours as well; of these a step ends before it is done, so that they are timed apart (filled.py)
UNFLUSHED = {"pipedream": 1, "pipedream-2bw": 1}


class Strategy(Protocol):
    """One way to train; all ranks call alike."""

    def step(self) -> Tensor: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Pipeline:
    """Stages of equally many blocks on single ranks, of which each comes again in turn."""

    schedule: str
    ranks: int
    micro_batches: int

    @classmethod
    def parse(cls, text: str) -> "Pipeline":
        """From `1f1b:2:8`."""
        schedule, ranks, micro_batches = text.split(":")
        return cls(schedule, int(ranks), int(micro_batches))

    @property
    def stages(self) -> int:
        """Of all ranks."""
        return self.ranks * (VISITS | UNFLUSHED)[self.schedule]

    def plan(self, shape: Shape) -> str:
        """The same as a plan of Synchromesh."""
        firsts = deep.cuts(shape, self.stages)
        stages = "/".join(f"{s % self.ranks}:{first}" for s, first in enumerate(firsts))
        return f"data; @stages={stages}; @micro_batches={self.micro_batches}; " + (
            f"@schedule={self.schedule}"
        )

    def bubble(self) -> float:
        """The part of a step in which a rank of p waits, of m micro-batches and v visits:
        (p-1) / (v m + p-1) (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). Zero bubble
        waits a third as long as 1F1B where forward, inputs' and weights' gradients take equally
        long: (p-1) / (3 m + p-1) (Qi et al. 2023, arXiv:2401.10241, table 2)."""
        empty = self.ranks - 1
        divided = 3 if self.schedule == "zero-bubble" else VISITS[self.schedule]
        return empty / (divided * self.micro_batches + empty)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, deep.RATE)


def zero_adamw(parameters: Any) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    kind: Any = torch.optim.AdamW
    return ZeroRedundancyOptimizer(parameters, kind, lr=deep.RATE)


class Replicated:
    """PyTorch on this rank's rows, the model wrapped by `wrap`."""

    def __init__(
        self,
        shape: Shape,
        wrap: Callable[[nn.Sequential], nn.Module],
        optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    ) -> None:
        self.model = wrap(deep.build(shape))
        self.optimizer = optimizer(self.model.parameters())
        rank, self.ranks = dist.get_rank(), dist.get_world_size()
        tokens, target = (x.chunk(self.ranks)[rank].clone() for x in deep.build_batch(shape))
        self.batch = (tokens, target)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        value = deep.loss(self.model, self.batch)
        value.backward()
        self.optimizer.step()
        return value.detach() / self.ranks

    def close(self) -> None:
        pass


def replicated(model: nn.Sequential) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def sharded(model: nn.Sequential, again: bool = False) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # the last layer returns a view, and nothing writes into it
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, reshard_after_forward=again)
    return model


class Piped:
    """torch.distributed.pipelining; gradients are divided by the number of micro-batches, whose
    losses are means over equally many rows."""

    def __init__(self, shape: Shape, pipeline: Pipeline) -> None:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import (
            Schedule1F1B,
            ScheduleGPipe,
            ScheduleInterleaved1F1B,
        )

        layers = list(deep.build(shape).named_children())
        starts = [[n for n, _ in layers].index(f) for f in deep.cuts(shape, pipeline.stages)]
        ends = [*starts[1:], len(layers)]
        parts = [
            nn.Sequential(*(layer for _, layer in layers[start:end]))
            for start, end in zip(starts, ends, strict=True)
        ]
        rank = dist.get_rank()
        mine = [*range(rank, pipeline.stages, pipeline.ranks)]
        cpu = torch.device("cpu")
        stages: Any = [PipelineStage(parts[s], s, pipeline.stages, cpu) for s in mine]
        kinds: dict[str, Any] = {
            "gpipe": ScheduleGPipe,
            "1f1b": Schedule1F1B,
            "interleaved": ScheduleInterleaved1F1B,
        }
        self.schedule = kinds[pipeline.schedule](
            stages if pipeline.schedule == "interleaved" else stages[0],
            pipeline.micro_batches,
            loss_fn=deep.next_byte,
        )
        weights = [p for s in mine for p in parts[s].parameters()]
        self.optimizer = torch.optim.AdamW(weights, deep.RATE)
        self.first, self.last = rank == 0, rank == pipeline.ranks - 1
        self.tokens, self.target = deep.build_batch(shape)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (self.tokens,) if self.first else ()
        wanted = {"target": self.target, "losses": losses} if self.last else {}
        self.schedule.step(*given, **wanted, return_outputs=False)
        self.optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    def close(self) -> None:
        pass


class Ours:
    """Synchromesh under a plan; its loss is the global one on every rank, of which the first gives
    it: where others are still computing it, nobody else has to wait."""

    def __init__(self, shape: Shape, plan: str) -> None:
        import synchromesh as sm

        model = deep.build(shape)
        optimizer = torch.optim.AdamW(model.parameters(), deep.RATE)
        example = deep.build_batch(shape)
        self.trainer = sm.prepare(model, optimizer, deep.loss, example, plan=plan)
        self.batch = self.trainer.shard(example)

    def step(self) -> Tensor:
        value: Tensor = self.trainer.step(self.batch)
        return torch.zeros((), dtype=torch.float64) if self.trainer.rank else value

    @property
    def stashed(self) -> tuple[int, int]:
        """Bytes of older weights on this rank, and as predicted."""
        t = self.trainer
        filled, rows = t.workers.filled, len(self.batch[0])
        planned = PlannedStep(t.partition, t.state.holdings, t.plan, t.world.size, rows)
        place = planned.ranks.index(t.rank)
        return filled.stash.most_bytes if filled else 0, planned.stashed_bytes(place)

    def close(self) -> None:
        self.trainer.close()


def build(name: str, shape: Shape) -> Strategy:
    """The strategy of that name; ValueError where it is none."""
    kind, _, rest = name.partition(":")
    match kind:
        case "ddp":
            return Replicated(shape, replicated, zero_adamw if rest == "zero" else adamw)
        case "fsdp2":
            return Replicated(shape, partial(sharded, again=rest == "again"))
        case "torch":
            return Piped(shape, Pipeline.parse(rest))
        case "ours":
            return Ours(shape, Pipeline.parse(rest).plan(shape))
        case _:
            return Ours(shape, name)
