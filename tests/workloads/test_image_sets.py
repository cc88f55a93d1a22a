"""Tests of image sets: MNIST and CIFAR as their users have them."""

from pathlib import Path

import pytest

from synchromesh.workloads.target import load
from tests.real_data import data


def test_mnist() -> None:
    found = load("mnist/vgg11", data("mnist"))
    assert (len(found.train_data), len(found.valid_data)) == (60000, 10000)
    image, label = found.train_data[0]
    assert image.shape == (1, 32, 32) and int(label) == 5
    assert found.train_data.padding is None


def test_a_folder_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mnist/vgg11 reads its data from a folder"):
        load("mnist/vgg11")
    with pytest.raises(ValueError, match="there is no such folder"):
        load("mnist/vgg11", tmp_path / "none")


def test_cifar100_pieces() -> None:
    found = load("cifar100/resnet18", data("cifar100"))
    assert (len(found.train_data), len(found.valid_data)) == (10000, 2000)
    assert found.valid_data.labels[:2].tolist() == [0, 1]
    assert found.train_data[5][0].shape == (3, 32, 32)
    assert (found.train_data.padding, found.valid_data.padding) == (4, None)
