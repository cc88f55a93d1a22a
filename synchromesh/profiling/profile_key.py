"""The key of a profile: what its numbers depend on, as far as it is known unmeasured.

A profile is of use again where all of it is equal: the model (its programs and how they hang
together), rows of a batch, the optimizer, versions, and every rank's device, cores, threads and
neighbours. How fast links and devices are today is no part of it: that is sampled."""

import os
import platform
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from synchromesh.launch.machine import LAB, cores, place, processor
from synchromesh.profiling.live_facts import LiveFacts
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.plan import Plan
from synchromesh.values.version import VERSION

ProfileKey = dict[str, Any]
FREE = ("params", "lr", "initial_lr")  # settings that no cost of an optimizer depends on


def profile_key(facts: LiveFacts, ranks: Sequence[int]) -> ProfileKey:
    """That of a profile that is measured on `ranks`, as JSON has it; all ranks call alike."""
    world = facts.world
    table = world.everyone.all_gather_json(of_rank(world.device))
    return {**of_ranks(table, ranks), "backend": world.backend, **of_problem(facts)}


def of_rank(device: torch.device) -> dict[str, Any]:
    """What is this process's own."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "synchromesh": VERSION,
        "emulated": bool(os.environ.get(LAB)),
        "place": place(),
    }


def of_ranks(table: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> dict[str, Any]:
    """What all ranks of the run have, and which share a host: numbers of hosts, not their names,
    since another night's machines may be as good."""
    places = list(dict.fromkeys(row["place"] for row in table))
    return {
        "ranks": [{k: v for k, v in row.items() if k != "place"} for row in table],
        "hosts": [places.index(row["place"]) for row in table],
        "taking_part": list(ranks),
    }


def of_problem(facts: LiveFacts) -> dict[str, Any]:
    """The model, its batch and its optimizer."""
    unsharded = facts.partitions.partition(Plan(LayoutSpec("data")))
    programs = [local.program for local in unsharded.components]
    wiring = repr((programs, facts.problem.step.chain))
    batch = [x for x in pytree.tree_leaves(facts.example) if isinstance(x, Tensor)]
    return {
        "model": blake2b(wiring.encode(), digest_size=16).hexdigest(),
        "rows": facts.problem.rows,
        "strides": [_strided(facts.tensors.values()), _strided(batch)],
        "optimizer": of_optimizer(facts.optimizer),
    }


def of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """What `programs/optimizer.py` goes by: class and settings of the first group; of numbers
    only whether they are zero, which leaves out operators."""
    group = optimizer.param_groups[0]
    kind = type(optimizer)
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "dtype": str(group["params"][0].dtype),
        "settings": {k: _setting(v) for k, v in sorted(group.items()) if k not in FREE},
    }


def _setting(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    return value != 0 if isinstance(value, int | float) else type(value).__name__


def _strided(tensors: Any) -> bool:
    """Whether some lie otherwise than row after row, as in `channels_last`."""
    return any(not x.is_contiguous() for x in tensors)
