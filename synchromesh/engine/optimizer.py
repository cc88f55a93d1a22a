"""The user's optimizer over shards of parameters: what it may be, global norms.

An optimizer whose update of an entry depends on that entry's own history alone (elementwise) may
run on shards (`values/optimizer.py`); per-parameter scalars (step counters, ASGD's coefficients)
depend on the number of steps alone and stay as they are."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from synchromesh.engine.groups import Group
from synchromesh.values.caution import caution
from synchromesh.values.optimizer import coupled, elementwise, kind_of, refuse_unusable


def settings(optimizer: Optimizer) -> list[list[str]]:
    """The numbers in the optimizer's groups, as text; none that reading would wait for (CUDA)."""

    def number(value: Any) -> bool:
        if isinstance(value, Tensor):
            return value.dim() == 0 and value.device.type == "cpu"
        return isinstance(value, (int, float)) or (
            isinstance(value, (tuple, list)) and all(map(number, value))
        )

    return [
        [f"{key}={value!r}" for key, value in group.items() if key != "params" and number(value)]
        for group in optimizer.param_groups
    ]


def check(optimizer: Optimizer, sharded: bool) -> None:
    """ValueError for optimizers that cannot run, a warning for unknown ones on shards."""
    refuse_unusable(optimizer)
    if not sharded:
        return
    if why := coupled(optimizer):
        raise ValueError(f"{why}; use the plan 'data', or AdamW")
    if not elementwise(optimizer):
        caution(
            f"it is not known whether the optimizer {kind_of(optimizer)} updates each entry "
            "by itself; if not, pieces of a parameter are updated otherwise than the whole "
            "(`synchromesh verify` shows it; the plan 'data' is exact)"
        )


def refuse_foreign(optimizer: Optimizer, known: Collection[Tensor]) -> None:
    """ValueError where it has parameters that are none of `known`, the model's."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    foreign = [tuple(p.shape) for p in params if p not in known]
    if foreign:
        raise ValueError(
            f"the optimizer has {len(foreign)} parameters (shapes {foreign[:3]}) that are not the "
            "model's: build it over model.parameters() of the model that is given to prepare, and "
            "make learnable parts of the loss part of the model"
        )


def norms(gradients: Iterable[Tensor]) -> list[Tensor]:
    """The 2-norm of each (0-d), in float32 at least."""
    dense = (g.coalesce().values() if g.is_sparse else g for g in gradients)
    exact = [g.float() if g.dtype.itemsize < 4 else g for g in dense]
    return [*torch._foreach_norm(exact)] if exact else []


def global_norm(copies: Iterable[tuple[nn.Parameter, float]], everyone: Group) -> Tensor:
    """The 2-norm of all gradients of the model, equal on all ranks (0-d, float64). copies: this
    rank's parameters, each with the number of ranks that have an equal shard."""
    total = torch.zeros((), dtype=torch.float64, device=everyone.world.device)
    gradients = [(p.grad, n) for p, n in copies if p.grad is not None]
    if gradients:
        squares = torch.stack([n.to(total) for n in norms(g for g, _ in gradients)]).square()
        total = (squares / torch.tensor([n for _, n in gradients]).to(total)).sum()
    everyone.all_reduce(total, counted=False)
    return total.sqrt()


def clip_norm(
    copies: Iterable[tuple[nn.Parameter, float]], everyone: Group, max_norm: float
) -> Tensor:
    """Scales gradients so that their global norm is at most `max_norm`; returns it as it was."""
    copies = list(copies)
    norm = global_norm(copies, everyone)
    nn.utils.clip_grads_with_norm_([p for p, _ in copies], max_norm, norm)
    return norm
