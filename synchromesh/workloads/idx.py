"""Arrays in the IDX format of MNIST, raw or gzip-compressed.

bytes 0, 1   zero          byte 2   0x08: unsigned bytes       byte 3   number of dimensions
then one big-endian 32-bit size per dimension, then the values"""

from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from synchromesh.workloads import packed


def read(folder: Path, name: str, dimensions: int) -> Tensor:
    """The uint8 tensor in `folder/name` or `folder/name.gz`; ValueError where there is none."""
    path, content = packed.read(folder, name, "the data set's four IDX files")
    return parse(content, path, dimensions)


def parse(content: bytes, path: Path, dimensions: int) -> Tensor:
    """The tensor in an IDX file's bytes; `path` is for messages."""
    magic = bytes([0, 0, 8, dimensions])
    if content[:4] != magic:
        raise ValueError(
            f"{path} is not an IDX file of unsigned bytes in {dimensions} dimensions (it begins "
            f"with {content[:4].hex() or 'nothing'}, not {magic.hex()}): fetch it again"
        )
    start = 4 + 4 * dimensions
    shape = tuple(int(n) for n in np.frombuffer(content[4:start], ">u4"))
    if len(shape) != dimensions or len(content) != start + prod(shape):
        raise ValueError(
            f"{path} holds {len(content) - start} values where its header {shape} promises "
            f"{prod(shape)}: fetch it again"
        )
    values = np.frombuffer(content, np.uint8, offset=start).reshape(shape)
    return torch.from_numpy(values.copy())
