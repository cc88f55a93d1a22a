"""An agreement: what all ranks must have alike before they train; where they do not, the error
says so on all."""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from torch.optim import Optimizer

from synchromesh.engine import batches
from synchromesh.engine.groups import Group
from synchromesh.programs.model import Model
from synchromesh.trace.capture.capture import signature
from synchromesh.values.plan import Plan


def compare_ranks(
    everyone: Group, model: Model, plan: Plan, optimizer: Optimizer, seed: int, example: Any
) -> None:
    """ValueError on every rank where ranks have other models, plans, optimizers, seeds or batches.

    Names are compared, for equal shapes alone do not tell models apart. A fault of one rank's own
    is an error on all: none is left waiting for it."""
    fault = ""
    described: dict[str, Any] = {}
    try:
        described = _described(model, plan, optimizer, seed, example)
    except ValueError as error:
        fault = str(error)
    gathered = everyone.all_gather_json([fault, batches.fingerprint(repr(described))])
    rank, text = next(((r, t) for r, (t, _) in enumerate(gathered) if t), (0, ""))
    if text:
        raise ValueError(text if everyone.size == 1 else f"rank {rank}: {text}")
    if len({mark for _, mark in gathered}) == 1:
        return
    require_alike(everyone, described)


def require_alike(everyone: Group, described: Mapping[str, Any]) -> None:
    """ValueError on every rank, with the first difference, where ranks describe something
    differently."""
    descriptions = everyone.all_gather_json(dict(described))
    for rank, other in enumerate(descriptions):
        for key, value in descriptions[0].items():
            if other[key] != value:
                raise ValueError(
                    f"ranks disagree about {key}: {_difference(value, other[key], rank)}; start "
                    "every rank with the same script and arguments"
                )


def _described(
    model: Model, plan: Plan, optimizer: Optimizer, seed: int, example: Any
) -> dict[str, Any]:
    known = {p: n for n, p in model.parameters.items()}
    foreign = [
        tuple(p.shape) for g in optimizer.param_groups for p in g["params"] if p not in known
    ]
    if foreign:
        raise ValueError(
            f"the optimizer has {len(foreign)} parameters (shapes {foreign[:3]}) that are not the "
            "model's: build it over model.parameters() of the model that is given to prepare, and "
            "make learnable parts of the loss part of the model"
        )
    return {
        "the plan": str(plan),
        "the seed": seed,
        "the model's tensors": [
            [d.name, list(d.shape), d.dtype, d.trainable] for d in model.described.values()
        ],
        "the optimizer": type(optimizer).__name__,
        "the optimizer's groups": [
            [known[p] for p in group["params"]] for group in optimizer.param_groups
        ],
        "the optimizer's settings": [
            [f"{key}={value!r}" for key, value in group.items() if key != "params"]
            for group in optimizer.param_groups
        ],
        "the example batch": [batches.row_count(example), repr(signature(example))],
    }


def _difference(first: Any, other: Any, rank: int) -> str:
    """The first entry in which a rank's value differs from that of rank 0."""
    if isinstance(first, list) and isinstance(other, list):
        pairs = zip_longest(first, other)
        return next(_difference(a, b, rank) for a, b in pairs if a != b)
    return f"{first!r} on rank 0, {other!r} on rank {rank}"
