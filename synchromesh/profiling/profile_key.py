"""The circumstances of a profile: what its numbers depend on, as far as it is known unmeasured.

A profile is of use again where all of it is equal: the model (its programs and how they hang
together), rows of a batch, the optimizer, versions, and every rank's device, cores, threads and
neighbours. How fast links and devices are today is no part of it: that is sampled.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from synchromesh.engine.groups import World
from synchromesh.profiling.facts import Subject
from synchromesh.profiling.machine import LAB, cores, place, processor
from synchromesh.trace.partition.local import Partition
from synchromesh.version import VERSION

FREE = ("params", "lr", "initial_lr")  # settings that no cost of an optimizer depends on


def circumstances(
    world: World, ranks: Sequence[int], subject: Subject, whole: Partition
) -> dict[str, Any]:
    """Those of a profile that is measured on `ranks`, as JSON has them; all ranks call alike.

    whole: a partition of the step in which nothing is sharded.
    """
    table = world.everyone.all_gather_json(of_rank(world.device))
    return {**of_ranks(table, ranks), "backend": world.backend, **of_subject(subject, whole)}


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


def of_subject(subject: Subject, whole: Partition) -> dict[str, Any]:
    """The model, its batch and its optimizer."""
    programs = [whole.program(local) for local in whole.components]
    wiring = repr((programs, subject.step.chain))
    batch = [x for x in pytree.tree_leaves(subject.example) if isinstance(x, Tensor)]
    return {
        "model": blake2b(wiring.encode(), digest_size=16).hexdigest(),
        "rows": subject.rows,
        "strides": [_strided(subject.tensors.values()), _strided(batch)],
        "optimizer": of_optimizer(subject.optimizer),
    }


def of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """What `profiling/optimizer.py` goes by: class and settings of the first group; of numbers
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
