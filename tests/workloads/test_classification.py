"""Tests of image classification: the sets as their users have them, the nets' sizes, and what
every small form keeps to."""

from pathlib import Path

import pytest
import torch
from torch import nn

from synchromesh.workloads.classification import ARCHITECTURES, WORKLOADS
from synchromesh.workloads.inception import inception_v3
from synchromesh.workloads.target import load
from tests.real_data import data


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_large_models_have_their_published_sizes() -> None:
    sizes = {"cifar100/vit_b16": 86e6, "cifar100/resnet50": 23.7e6, "cifar100/vit_tiny": 5.4e6,
             "mnist/vgg11": 28.1e6, "cifar10/vgg16": 14.7e6}  # fmt: skip
    for name, size in sizes.items():
        with torch.device("meta"):
            model = load(name, synthetic=True).model()
        assert parameters(model) == pytest.approx(size, rel=0.02)
    with torch.device("meta"):  # torchvision's 27,161,264 less the auxiliary classifier
        assert parameters(inception_v3(3, 1000)) == 23_834_568


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name.endswith("_small")])
def test_small_forms_have_at_most_a_million_parameters(name: str) -> None:
    found = load(name, synthetic=True)
    images, labels = found.example(4)
    model = found.model()
    assert parameters(model) <= 1e6
    found.loss(model, (images, labels)).backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        assert 0 <= float(found.metric(model.eval(), (images, labels))["accuracy"]) <= 4


def test_every_family_has_a_small_form_on_every_set() -> None:
    families = {name.rstrip("0123456789").partition("_")[0] for name in ARCHITECTURES}
    for images in ("mnist", "cifar10", "cifar100"):
        assert {f"{images}/{family}_small" for family in families} <= set(WORKLOADS)


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
