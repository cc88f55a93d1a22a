"""Parameters in one memory that several processes of a host write without locks (Recht et al.
2011, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NIPS).

    rank 0    p [ ========================== ]   a file in memory, of which no name is left
    rank 1    p [ the same bytes             ]

Each rank steps what it computes with, by an optimizer state of its own."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from synchromesh.engine.groups import Group


class SharedMemory:
    """Of the ranks of a group. All of them call alike."""

    ALIGNED: ClassVar = 64  # bytes, a line of the cache
    FOLDER: ClassVar = Path("/dev/shm")  # of files in memory, where there is one

    def __init__(self, tensors: Mapping[str, Tensor], group: Group) -> None:
        """The values are those of the group's first rank."""
        offsets, total = dict[str, int](), 0
        for name, x in tensors.items():
            offsets[name] = total
            total += -(-x.nbytes // self.ALIGNED) * self.ALIGNED
        own = self._made(total) if group.index == 0 else None
        try:
            path = group.broadcast_json(own)
            storage: Any = torch.UntypedStorage.from_file(path, True, max(1, total))
            self.tensors = {
                name: x.new_empty(0).set_(
                    storage, offsets[name] // x.element_size(), x.shape, _strides(x)
                )
                for name, x in tensors.items()
            }
            if own is not None:
                for name, x in tensors.items():
                    self.tensors[name].copy_(x)
            group.barrier()
        finally:  # also where another rank has failed
            if own is not None:
                os.unlink(own)

    def _made(self, size: int) -> str:
        folder = self.FOLDER if self.FOLDER.is_dir() else None
        descriptor, path = tempfile.mkstemp(prefix="synchromesh-", dir=folder)
        os.ftruncate(descriptor, max(1, size))
        os.close(descriptor)
        return path


def _strides(x: Tensor) -> tuple[int, ...]:
    return torch.empty(x.shape, device="meta").stride()
