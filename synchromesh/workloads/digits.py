"""Handwritten digits (8 x 8, from scikit-learn, no download): two convolutional nets and a ViT."""

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

from synchromesh.values.extras import remedy
from synchromesh.workloads import image_nets
from synchromesh.workloads.images import ImageFormat, Images, SyntheticImages, loss, metric
from synchromesh.workloads.training import adamw, warm_up
from synchromesh.workloads.workload import MapDataset, Workload

FORMAT = ImageFormat(mean=(0.3053,), deviation=(0.3760,), size=8)


def _data(folder: Path | None, synthetic: bool) -> tuple[MapDataset, MapDataset]:
    if folder is not None:
        raise ValueError(
            f"digits come with scikit-learn and read no folder: leave --data {folder} out"
        )
    if synthetic:
        return SyntheticImages(FORMAT, 10), SyntheticImages(FORMAT, 10, seed=1)
    table = torch.from_numpy(np.loadtxt(_file(), np.uint8, delimiter=","))
    pixels, labels = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].to(torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    first, last = order[:1437], order[1437:]  # of 1797: the rest, one in five, validates
    return (
        Images(pixels[first], labels[first], FORMAT, scale=16.0),
        Images(pixels[last], labels[last], FORMAT, scale=16.0),
    )


def _file() -> Path:
    """Scikit-learn's own file of them, found without its import, which takes a second."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ValueError(f"digits come with scikit-learn: {remedy('sklearn')}")
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"


def _cnn(channels: int = 64, width: int = 128) -> nn.Module:
    features = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    classifier = nn.Sequential(nn.Linear(4 * channels, width), nn.ReLU(), nn.Linear(width, 10))
    return nn.Sequential(OrderedDict(features=features, classifier=classifier))


def cnn(folder: Path | None, synthetic: bool) -> Workload:
    """90 K parameters: three convolutions and two linear layers."""
    train, valid = _data(folder, synthetic)
    return Workload(
        model=_cnn, loss=loss, optimizer=adamw(2e-3), train_data=train, batch_size=64,
        valid_data=valid, metric=metric, epochs=10, name="digits/cnn",
    )  # fmt: skip


def wide(folder: Path | None, synthetic: bool) -> Workload:
    """2.3 M parameters: convolutions with few of them, and a layer of width 16,384 with most."""
    narrow = cnn(folder, synthetic)
    return replace(
        narrow, model=partial(_cnn, 32, 16_384), optimizer=adamw(1e-3), batch_size=360,
        name="digits/wide",
    )  # fmt: skip


def vit(folder: Path | None, synthetic: bool) -> Workload:
    """69 K parameters, 8 x 8 images in patches of 4."""
    net = partial(
        image_nets.vit, 8, 4, 64, 2, 4, 1, 10, intermediate_size=128, hidden_dropout_prob=0.1
    )
    train, valid = _data(folder, synthetic)
    return Workload(
        model=net, loss=loss, optimizer=adamw(2e-3, 0.05), train_data=train, batch_size=32,
        valid_data=valid, metric=metric, scheduler=warm_up(50, decay=1400), epochs=30,
        name="digits/vit",
    )  # fmt: skip
