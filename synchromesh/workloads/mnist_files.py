"""MNIST's files, and those of data sets in its format: four IDX files."""

from pathlib import Path

import torch
from torch import Tensor

from synchromesh.workloads import idx

CLASSES = 10
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
LAYOUTS = f"{FILES['train'][0]} and the other three files of MNIST (raw or .gz)"


def read(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Pixels uint8 (n, 1, 28, 28) and labels int64 (n) of `split`, train or test."""
    images, labels = FILES[split]
    pixels = idx.read(folder, images, dimensions=3)
    classes = idx.read(folder, labels, dimensions=1)
    if len(pixels) != len(classes):
        raise ValueError(
            f"{folder}: {images} holds {len(pixels)} images but {labels} {len(classes)} labels: "
            "the files do not belong together, fetch both again"
        )
    if len(classes) and int(classes.max()) >= CLASSES:
        raise ValueError(
            f"{folder}/{labels} has a label {int(classes.max())}: ten classes (0 to 9) are "
            "expected"
        )
    return pixels[:, None], classes.to(torch.int64)
