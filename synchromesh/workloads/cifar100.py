"""CIFAR-100 with ResNets and ViTs from `transformers`, random weights; small forms for CPUs."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from synchromesh.workloads import cifar_files
from synchromesh.workloads.images import ImageFormat, Images, SyntheticImages, loss, metric
from synchromesh.workloads.training import adamw, momentum, warm_up
from synchromesh.workloads.workload import MapDataset, Workload

MEAN, DEVIATION = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
SMALL, LARGE = ImageFormat(MEAN, DEVIATION, size=32), ImageFormat(MEAN, DEVIATION, size=224)
CLASSES = 100


def _data(
    name: str, form: ImageFormat, folder: Path | None, synthetic: bool
) -> tuple[MapDataset, MapDataset]:
    if synthetic:
        return SyntheticImages(form, CLASSES), SyntheticImages(form, CLASSES, seed=1)
    if folder is None:
        raise ValueError(
            f"{name} reads its data from a folder: name one that holds {cifar_files.LAYOUTS} "
            "with --data DIR"
        )
    pixels, labels = cifar_files.read(folder, "train")
    valid_pixels, valid_labels = cifar_files.read(folder, "test")
    return Images(pixels, labels, form), Images(valid_pixels, valid_labels, form)


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
    name = "cifar100/resnet18"
    train, valid = _data(name, SMALL, folder, synthetic)
    return Workload(
        model=_resnet((2, 2, 2, 2), (64, 128, 256, 512), "basic"), loss=loss,
        optimizer=momentum(0.05), train_data=train, batch_size=128, valid_data=valid,
        metric=metric, scheduler=warm_up(100), epochs=10, name=name,
    )  # fmt: skip


def resnet50(folder: Path | None, synthetic: bool) -> Workload:
    """24 M parameters."""
    name = "cifar100/resnet50"
    train, valid = _data(name, SMALL, folder, synthetic)
    return Workload(
        model=_resnet((3, 4, 6, 3), (256, 512, 1024, 2048), "bottleneck"), loss=loss,
        optimizer=momentum(0.05), train_data=train, batch_size=256, valid_data=valid,
        metric=metric, scheduler=warm_up(200), epochs=30, name=name,
    )  # fmt: skip


def vit_tiny(folder: Path | None, synthetic: bool) -> Workload:
    """5 M parameters, 32 x 32 images in patches of 4."""
    name = "cifar100/vit_tiny"
    train, valid = _data(name, SMALL, folder, synthetic)
    return Workload(
        model=_vit(SMALL, 4, 192, 12, 3), loss=loss, optimizer=adamw(5e-4, 0.05),
        train_data=train, batch_size=128, valid_data=valid, metric=metric,
        scheduler=warm_up(200), epochs=20, name=name,
    )  # fmt: skip


def vit_b16(folder: Path | None, synthetic: bool) -> Workload:
    """86 M parameters, images resized to 224 x 224 in patches of 16 (arXiv 2010.11929)."""
    name = "cifar100/vit_b16"
    train, valid = _data(name, LARGE, folder, synthetic)
    return Workload(
        model=_vit(LARGE, 16, 768, 12, 12), loss=loss, optimizer=adamw(1e-4, 0.05),
        train_data=train, batch_size=256, valid_data=valid, metric=metric,
        scheduler=warm_up(500), epochs=30, name=name,
    )  # fmt: skip
