"""Versions of weights, kept by one process: what a pipeline without a flush computes, one
micro-batch after the other (values/weight_versions.py has the equations).

The pipeline is drained behind the first step, so that what it sends is that step's, and in the
end; in between it stays filled."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from synchromesh.engine.batches import row_count, to_device
from synchromesh.trace.capture.batch import take
from synchromesh.trace.partition.local import users_of
from synchromesh.training.trainer import Trainer
from synchromesh.verify.deviation import Deviations
from synchromesh.verify.reference import Computed, SingleProcess, Tensors
from synchromesh.verify.workers import joint_loss
from synchromesh.workloads.workload import Workload


class VersionReplay:
    """A plan whose pipeline is not flushed, and a process on rank 0 that plays all stages. All
    ranks call alike."""

    def __init__(
        self, trainer: Trainer, reference: nn.Module, workload: Workload, deviations: Deviations
    ) -> None:  # fmt: skip
        kept, filled = trainer.plan.kept, trainer.workers.filled
        assert kept is not None and filled is not None
        self.trainer, self.deviations, self._kept = trainer, deviations, kept
        users = users_of(trainer.partition.components)
        self._behind = {name: kept.behind(stage) for name, (stage,) in users.items()}
        self._noted: list[Tensors] = []  # gradients of each update on this rank
        filled.noted = self._note
        device, autocast = trainer.world.device, trainer.options.autocast
        self._process = SingleProcess(reference.to(device), workload, device, autocast)
        self._made: Computed | None = None  # of the last micro-batch

    def _note(self) -> None:
        its = self.trainer.gradients()
        self._noted.append({n: g.clone() for n, g in its.items() if n in self._behind})

    def train(self, batches: Iterable[Any]) -> list[int]:
        """Trains both and compares them; the bytes that each rank sent in the first step."""
        trainer, ledger = self.trainer, self.trainer.world.ledger
        sent: list[int] = []
        step, since, losses, given = 0, 1, list[Tensor](), list[Any]()
        ledger.reset()
        for step, batch in enumerate(batches, 1):
            losses.append(trainer.step(trainer.shard(batch)))
            given.append(to_device(batch, trainer.world.device))
            if step == 1:
                buffers = trainer.buffers()  # which drains it
                sent = trainer.gather_numbers(ledger.sent)
                self._compare(given, losses, since)
                since, losses, given = 2, [], []
        buffers = trainer.buffers()
        self._compare(given, losses, since)
        self.deviations.shards("buffer", buffers, self._made, step)
        own = self._process.trained() if trainer.rank == 0 else None
        self.deviations.shards("parameter", trainer.parameters(), own, step)
        return sent

    def _compare(self, batches: Sequence[Any], losses: Sequence[Tensor], first: int) -> None:
        """Of batches between two moments at which the pipeline is empty."""
        noted, self._noted = iter(self._noted), []
        versions = [self._parameters()]
        for step, (batch, loss) in enumerate(zip(batches, losses, strict=True), first):
            made: list[Computed] = []
            for parts in self._updates(batch):
                if self.trainer.rank == 0:
                    made += self._backward(batch, parts, versions)
                self._update(next(noted), made[-len(parts) :], parts, step)
                versions.append(self._parameters())
            self.deviations.loss(loss, joint_loss(made), step)
        assert next(noted, None) is None, "an update of no micro-batch"

    def _updates(self, batch: Any) -> Iterator[Sequence[tuple[int, int]]]:
        """The rows of the micro-batches of each update."""
        parts = self.trainer.plan.micro_rows(row_count(batch))
        yield from [parts] if self._kept.of_step else [[part] for part in parts]

    def _parameters(self) -> Tensors:
        return {n: p.detach().clone() for n, p in self._process.parameters.items()}

    def _lay(self, versions: Sequence[Tensors], update: int) -> None:
        """Each parameter becomes what micro-batches of that update compute with."""
        for name, p in self._process.parameters.items():
            p.data.copy_(versions[max(0, update - self._behind.get(name, 0))][name])

    def _backward(
        self, batch: Any, parts: Sequence[tuple[int, int]], versions: Sequence[Tensors]
    ) -> list[Computed]:
        newest = len(versions) - 1
        self._lay(versions, newest)
        made = [self._process.backward(take(batch, *part)) for part in parts]
        for name, p in self._process.parameters.items():
            p.data.copy_(versions[newest][name])
        self._made = made[-1]
        return made

    def _update(
        self, noted: Tensors, made: Sequence[Computed], parts: Sequence[tuple[int, int]], step: int
    ) -> None:
        """Compares gradients, and steps by the plan's."""
        shares = [(stop - start) / (parts[-1][1] - parts[0][0]) for start, stop in parts]
        mean = _mean(made, shares) if made else None
        self.deviations.shards("gradient", noted, mean, step)
        complete = {n: g.clone() for n, g in self.trainer.state.gathered(noted, root=0)}
        if made:
            self._process.update(complete)


def _mean(made: Sequence[Computed], shares: Sequence[float]) -> Computed:
    """Of gradients of micro-batches."""
    values, floors = Tensors(), dict[str, float]()
    for of, share in zip(made, shares, strict=True):
        for name, gradient in of.values["gradient"].items():
            own = share * gradient
            values[name] = values[name] + own if name in values else own
            floors[name] = floors.get(name, 0.0) + share * of.floors["gradient"][name]
    return Computed({"gradient": values}, {"gradient": floors})
