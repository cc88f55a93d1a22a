"""MNIST's files, and those of data sets in its format: four IDX files, raw or gzip-compressed.

bytes 0, 1   zero          byte 2   0x08: unsigned bytes       byte 3   number of dimensions
then one big-endian 32-bit size per dimension, then the values"""

from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from synchromesh.workloads import data_files

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
LAYOUTS = f"{FILES['train'][0]} and the other three files of MNIST (raw or .gz)"


def read(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Pixels uint8 (n, 1, 28, 28) and labels int64 (n) of `split`, train or test."""
    images, labels = FILES[split]
    pixels = read_idx(folder, images, dimensions=3)
    classes = read_idx(folder, labels, dimensions=1)
    if len(pixels) != len(classes):
        raise ValueError(
            f"{folder}: {images} holds {len(pixels)} images but {labels} {len(classes)} labels: "
            "the files do not belong together, fetch both again"
        )
    if len(classes) and int(classes.max()) >= 10:
        raise ValueError(
            f"{folder}/{labels} has a label {int(classes.max())}: ten classes (0 to 9) are "
            "expected"
        )
    return pixels[:, None], classes.to(torch.int64)


def read_idx(folder: Path, name: str, dimensions: int) -> Tensor:
    """The uint8 tensor in `folder/name` or `folder/name.gz`; ValueError where there is none."""
    path, content = data_files.read(folder, name, "the data set's four IDX files")
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
