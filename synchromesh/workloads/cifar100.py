"""CIFAR-100 with ResNets and ViTs from `transformers`, random weights; small forms for CPUs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from synchromesh.workloads import cifar_files
from synchromesh.workloads.images import ImageFormat, Images, SyntheticImages, loss, metric
from synchromesh.workloads.training import adamw, momentum, warm_up
from synchromesh.workloads.workload import MapDataset, Workload

MEAN, DEVIATION = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
SMALL, LARGE = ImageFormat(MEAN, DEVIATION, size=32), ImageFormat(MEAN, DEVIATION, size=224)
CLASSES = 100


def _workload(
    name: str, model: Callable[[], nn.Module], form: ImageFormat,
    folder: Path | None, synthetic: bool, **options: Any,
) -> Workload:  # fmt: skip
    """A workload of this model; `options` are further fields of `Workload`."""
    train: MapDataset
    valid: MapDataset
    if synthetic:
        train, valid = SyntheticImages(form, CLASSES), SyntheticImages(form, CLASSES, seed=1)
    elif folder is None:
        raise ValueError(
            f"{name} reads its data from a folder: name one that holds {cifar_files.LAYOUTS} "
            "with --data DIR"
        )
    else:
        train, valid = (Images(*cifar_files.read(folder, s), form) for s in ("train", "test"))
    return Workload(
        model=model, loss=loss, metric=metric, train_data=train, valid_data=valid, name=name,
        **options,
    )  # fmt: skip


def _resnet(
    depths: tuple[int, ...], sizes: tuple[int, ...], layer: str
) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from transformers import ResNetConfig, ResNetForImageClassification

        config = ResNetConfig(hidden_sizes=list(sizes), depths=list(depths), layer_type=layer)
        config.num_labels = CLASSES
        return ResNetForImageClassification(config)

    return build


def _vit(
    form: ImageFormat, patch: int, width: int, layers: int, heads: int
) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            image_size=form.size, patch_size=patch, hidden_size=width, intermediate_size=4 * width,
            num_hidden_layers=layers, num_attention_heads=heads,
        )  # fmt: skip
        config.num_labels = CLASSES
        return ViTForImageClassification(config)

    return build


def resnet18(folder: Path | None, synthetic: bool) -> Workload:
    """11 M parameters."""
    model = _resnet((2, 2, 2, 2), (64, 128, 256, 512), "basic")
    return _workload(
        "cifar100/resnet18", model, SMALL, folder, synthetic,
        optimizer=momentum(0.05), scheduler=warm_up(100), batch_size=128, epochs=10,
    )  # fmt: skip


def resnet50(folder: Path | None, synthetic: bool) -> Workload:
    """24 M parameters."""
    model = _resnet((3, 4, 6, 3), (256, 512, 1024, 2048), "bottleneck")
    return _workload(
        "cifar100/resnet50", model, SMALL, folder, synthetic,
        optimizer=momentum(0.05), scheduler=warm_up(200), batch_size=256, epochs=30,
    )  # fmt: skip


def vit_tiny(folder: Path | None, synthetic: bool) -> Workload:
    """5 M parameters, 32 x 32 images in patches of 4."""
    return _workload(
        "cifar100/vit_tiny", _vit(SMALL, 4, 192, 12, 3), SMALL, folder, synthetic,
        optimizer=adamw(5e-4, 0.05), scheduler=warm_up(200), batch_size=128, epochs=20,
    )  # fmt: skip


def vit_b16(folder: Path | None, synthetic: bool) -> Workload:
    """86 M parameters, images resized to 224 x 224 in patches of 16 (arXiv 2010.11929)."""
    return _workload(
        "cifar100/vit_b16", _vit(LARGE, 16, 768, 12, 12), LARGE, folder, synthetic,
        optimizer=adamw(1e-4, 0.05), scheduler=warm_up(500), batch_size=256, epochs=30,
    )  # fmt: skip
