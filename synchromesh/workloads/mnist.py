"""MNIST and data sets of its format, with VGG-11 (arXiv 1409.1556, configuration A)."""

from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

from synchromesh.workloads import idx
from synchromesh.workloads.images import ImageFormat, Images, SyntheticImages, loss, metric
from synchromesh.workloads.training import momentum
from synchromesh.workloads.workload import MapDataset, Workload

FORMAT = ImageFormat(mean=(0.1307,), deviation=(0.3081,), size=32)  # 28 x 28, padded
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def _split(folder: Path, split: str) -> Images:
    images, labels = FILES[split]
    pixels = idx.read(folder, images, dimensions=3)
    classes = idx.read(folder, labels, dimensions=1)
    if len(pixels) != len(classes):
        raise ValueError(
            f"{folder}: {images} holds {len(pixels)} images but {labels} {len(classes)} labels: "
            "the files do not belong together, fetch both again"
        )
    if len(classes) and int(classes.max()) > 9:
        raise ValueError(
            f"{folder}/{labels} has a label {int(classes.max())}: ten classes (0 to 9) are "
            "expected"
        )
    return Images(pixels[:, None], classes.to(torch.int64), FORMAT)


def _data(folder: Path | None, synthetic: bool) -> tuple[MapDataset, MapDataset]:
    if synthetic:
        return SyntheticImages(FORMAT, 10), SyntheticImages(FORMAT, 10, seed=1)
    if folder is None:
        raise ValueError(
            f"mnist/vgg11 reads its data from a folder: name one that holds {FILES['train'][0]} "
            "and the other three files of MNIST (raw or .gz) with --data DIR"
        )
    return _split(folder, "train"), _split(folder, "test")


def _vgg11(classes: int = 10, width: int = 4096) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 1
    for entry in (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool"):
        if isinstance(entry, int):
            convolution = nn.Conv2d(channels, entry, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            layers += [convolution, nn.ReLU()]
            channels = entry
        else:
            layers.append(nn.MaxPool2d(2))
    classifier = nn.Sequential(
        nn.Linear(512, width), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(width, classes),
    )  # fmt: skip
    features = nn.Sequential(*layers, nn.Flatten())
    return nn.Sequential(OrderedDict(features=features, classifier=classifier))


def vgg11(folder: Path | None, synthetic: bool) -> Workload:
    """28 M parameters."""
    train, valid = _data(folder, synthetic)
    return Workload(
        model=_vgg11, loss=loss, optimizer=momentum(0.01), train_data=train, batch_size=128,
        valid_data=valid, metric=metric, epochs=2, name="mnist/vgg11",
    )  # fmt: skip
