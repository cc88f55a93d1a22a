"""The sums of gradients under the plan in force, one `GradientSync` for each optimizer; and what
compressed ones owe, from one plan to the next and in checkpoints.

The ranks of a sum owe parts of their own, of which the sum alone counts: it lies as the parameter
does, moves as that does, and each rank of the sum to come takes an equal share of it. So nothing
is lost where both plans compress; what compresses begins anew (a warm start). A plan that sends a
parameter's gradient whole forgets what is owed to it."""

from collections.abc import Container, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from synchromesh.checkpoint.local_tensor import LocalTensor
from synchromesh.checkpoint.model_state import ModelState, Sides
from synchromesh.checkpoint.switch import redistribute
from synchromesh.engine.gradient_buckets import CompressedBucket, Summed
from synchromesh.engine.gradients import GradientSync
from synchromesh.engine.late_sums import LateSync
from synchromesh.trace.partition.local import users_of
from synchromesh.training.active_plan import ActivePlan
from synchromesh.training.losses import NamedLosses
from synchromesh.values.boxes import local_shape
from synchromesh.values.optimizer import takes_sparse


class GradientSums:
    """Of a model's losses. All ranks call alike, idle ones too."""

    def __init__(self, state: ModelState, losses: NamedLosses, synchronised: bool) -> None:
        """synchronised: whether batch norm is."""
        self._state, self._losses, self._synchronised = state, losses, synchronised
        self._syncs: dict[Optimizer, GradientSync] = {}
        self._leaves: Mapping[str, nn.Parameter] = {}
        self._owed: dict[str, Tensor] = {}  # between two plans
        self._owing: dict[str, Sides] = {}  # where that lies

    @property
    def now(self) -> GradientSync:
        """Of the gradients of the loss whose turn it is."""
        return self._syncs[self.optimizer]

    @property
    def optimizer(self) -> Optimizer:
        """That steps by them."""
        return self._losses.now.optimizer

    def leave(self) -> None:
        """The plan in force ends; tensors are still where they lie under it."""
        state = self._state
        held = state.holdings if self._syncs else {}  # else what is owed is lost
        owing = ((n, h) for n, h in held.items() if h.compressor and h.summed)
        self._owing = {n: state.sides(h, state.ranks) for n, h in owing}
        self._owed = self._total() if self._owing else {}
        self.close()

    def adopt(
        self, active: ActivePlan, whole: Mapping[str, nn.Parameter],
        leaves: Mapping[str, nn.Parameter],
    ) -> None:  # fmt: skip
        """Another plan is in force, and tensors lie as it says. whole: what is computed with where
        this rank keeps a part. leaves: what has gradients."""
        self._leaves = leaves
        trained = {turn.optimizer: turn.trained for turn in self._losses.turns}
        self._syncs = {o: self._sync(o, active, names, whole) for o, names in trained.items()}
        world, described = self._state.world, self._state.model.described
        owed, self._owed = self._owed, {}
        for name, have in self._owing.items():
            new, shape = active.holdings[name], described[name].shape
            if new.compressor and new.summed:
                size = local_shape(have[world.rank], len(shape))
                local = owed[name] if name in owed else self._zeros(name, size)
                want = self._state.sides(new, active.groups.ranks)
                owed[name] = redistribute(local.view(size), have, want, shape, world.everyone)
        self._owing = {}
        self._share(owed)

    def late(self) -> Iterator[None]:
        """Gradients become, one after the other, the sums that are to come yet; behind each the
        optimizer steps. Those of an accumulation stay."""
        kept = {p: p.grad for p in self._leaves.values()}
        for optimizer, sync in self._syncs.items():
            while sync.take():
                yield
                optimizer.step()
        for p, gradient in kept.items():
            p.grad = gradient

    def flush(self) -> None:
        """No sums are under way any more. All ranks call alike."""
        for _ in self.late():
            pass

    def forget(self) -> None:
        """Nothing that is under way comes any more; what was owed is lost."""
        self.close()
        self._syncs = {}

    def close(self) -> None:
        for sync in self._syncs.values():
            sync.close()

    def residuals(self, new: bool = False) -> dict[str, LocalTensor]:
        """What is owed, as a checkpoint has it; collective. new: zeros that one is read to."""
        of = {n: torch.zeros_like(x) for n, x in self._own.items()} if new else self._total()
        return {
            key: self._state.local(key, n, x) for n, x in of.items() for key in (f"residual/{n}",)
        }

    def resume(self, read: Mapping[str, LocalTensor]) -> None:
        self._share({n: read[f"residual/{n}"].tensor for n in self._own})

    def _buckets(self) -> Iterator[CompressedBucket]:
        for sync in self._syncs.values():
            yield from sync.compressed

    def _parts(self, bucket: CompressedBucket, x: Tensor) -> dict[str, Tensor]:
        """x: numbers by place in a bucket -> those of each parameter, by name"""
        names = {p: n for n, p in self._state.model.parameters.items()}
        parameters = [item.parameter for item in bucket.items]
        parts = x.split([p.numel() for p in parameters])
        return {names[p]: x.view(p.shape) for p, x in zip(parameters, parts, strict=True)}

    @property
    def _own(self) -> dict[str, Tensor]:
        """This rank's part of what is owed."""
        return {
            n: x
            for bucket in self._buckets()
            for n, x in self._parts(bucket, bucket.compressor.owed()).items()
        }

    def _total(self) -> dict[str, Tensor]:
        """What all ranks owe together of the parameters that are here."""
        owed: dict[str, Tensor] = {}
        for bucket in self._buckets():
            total = bucket.compressor.owed()
            bucket.group.all_reduce(total, counted=False)
            owed |= self._parts(bucket, total)
        return owed

    def _share(self, owed: Mapping[str, Tensor]) -> None:
        """Each rank owes an equal part; of what is not in `owed` nothing."""
        for bucket in self._buckets():
            parts = self._parts(bucket, torch.zeros_like(bucket.compressor.owed()))
            for name, part in parts.items():
                if name in owed:
                    part.copy_(owed[name].view(part.shape)).div_(bucket.group.size)
            bucket.compressor.owe(torch.cat([part.reshape(-1) for part in parts.values()]))
        self._state.residuals = [x for b in self._buckets() for x in b.compressor.kept]

    def _zeros(self, name: str, shape: tuple[int, ...]) -> Tensor:
        dtype = torch.promote_types(self._state.model.parameters[name].dtype, torch.float32)
        return torch.zeros(shape, dtype=dtype, device=self._state.world.device)

    def _sync(
        self, optimizer: Optimizer, active: ActivePlan, trained: Container[str] | None,
        whole: Mapping[str, nn.Parameter],
    ) -> GradientSync:  # fmt: skip
        # batch norms of a model that runs as it is come in no order that buckets could keep
        late = active.step.opaque and self._synchronised
        # a gradient that stages share: another stage's last backward may wait for this one's
        late = late or (self._state.world.blocking and active.plan.stage_count > 1)
        summed = []
        for name, stages in users_of(active.partition.components).items():
            holding = active.holdings[name]
            here = active.groups.position in holding.positions
            if not here or (trained is not None and name not in trained):
                continue
            leaf, group = self._leaves[name], active.groups.sum_group(holding)
            summed.append(Summed.of(holding, leaf, whole.get(name), group, stages))
        if steps := active.plan.sync.late:
            return LateSync(summed, steps, late=late)
        return GradientSync(summed, late=late, sparse=takes_sparse(optimizer))
