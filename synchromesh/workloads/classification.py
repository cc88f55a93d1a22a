"""Image classification: `SET/NET` is a net of `ARCHITECTURES` on a set of `IMAGE_SETS`; the small
form of a family of nets, `SET/FAMILY_small`, trains on two CPU cores."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from synchromesh.workloads import data_files, mnist_files
from synchromesh.workloads.cifar_files import CIFAR10, CIFAR100
from synchromesh.workloads.image_nets import VGG, resnet, small_resnet, vgg, vit
from synchromesh.workloads.images import (
    Architecture,
    ImageFormat,
    Images,
    SyntheticImages,
    loss,
    metric,
)
from synchromesh.workloads.inception import inception_v3, small_inception
from synchromesh.workloads.training import adamw, momentum
from synchromesh.workloads.workload import MapDataset, Workload


@dataclass(frozen=True)
class ImageSet:
    """A data set of square images with one label each."""

    mean: tuple[float, ...]  # per channel, of the training images' values from 0 to 1
    deviation: tuple[float, ...]
    classes: int
    files: str  # what its folder holds, for messages
    # (folder, train or test) -> pixels uint8 (n, c, h, w), labels int64 (n)
    read: Callable[[Path, str], tuple[Tensor, Tensor]]
    padding: int | None  # of the views that are drawn of training images; None: no augmentation
    most_epochs: int  # after which nothing is left to learn

    def rows(
        self, size: int, folder: Path | None, synthetic: bool, name: str
    ) -> tuple[MapDataset, MapDataset]:
        """Training and validation data at edge length `size`; `name` is for messages."""
        form = ImageFormat(self.mean, self.deviation, size)
        if synthetic:
            return SyntheticImages(form, self.classes), SyntheticImages(form, self.classes, seed=1)
        folder = data_files.needed(folder, name, self.files)
        return (
            Images(*self.read(folder, "train"), form, padding=self.padding),
            Images(*self.read(folder, "test"), form),
        )


IMAGE_SETS = {
    "mnist": ImageSet(
        mean=(0.1307,), deviation=(0.3081,), classes=10,
        files=mnist_files.LAYOUTS, read=mnist_files.read, padding=None, most_epochs=2,
    ),
    "cifar10": ImageSet(
        mean=(0.4914, 0.4822, 0.4465), deviation=(0.2470, 0.2435, 0.2616),
        classes=CIFAR10.classes, files=CIFAR10.layouts, read=CIFAR10.read, padding=4,
        most_epochs=200,
    ),
    "cifar100": ImageSet(
        mean=(0.5071, 0.4865, 0.4409), deviation=(0.2673, 0.2564, 0.2762),
        classes=CIFAR100.classes, files=CIFAR100.layouts, read=CIFAR100.read, padding=4,
        most_epochs=200,
    ),
}  # fmt: skip

# model, optimizer, batch size, updates of warm-up, epochs
ARCHITECTURES = {
    # without batch norm, as the paper has it
    "vgg11": Architecture(
        partial(vgg, VGG["A"], hidden=4096, norm=False), momentum(0.01), 128, 1, 30
    ),
    "vgg16": Architecture(partial(vgg, VGG["D"]), momentum(0.05), 128, 200, 30),
    "vgg_small": Architecture(partial(vgg, VGG["small"]), momentum(0.05), 64, 50, 8),
    "resnet18": Architecture(
        partial(resnet, (2, 2, 2, 2), (64, 128, 256, 512), "basic"), momentum(0.05), 128, 100, 10
    ),
    "resnet50": Architecture(
        partial(resnet, (3, 4, 6, 3), (256, 512, 1024, 2048), "bottleneck"),
        momentum(0.05), 256, 200, 30,
    ),
    "resnet_small": Architecture(
        partial(small_resnet, (16, 48, 96, 192)), momentum(0.05), 64, 100, 8
    ),
    "vit_tiny": Architecture(partial(vit, 32, 4, 192, 12, 3), adamw(5e-4, 0.05), 128, 200, 20),
    "vit_b16": Architecture(
        partial(vit, 224, 16, 768, 12, 12), adamw(1e-4, 0.05), 256, 500, 30, size=224
    ),
    "vit_small": Architecture(partial(vit, 32, 8, 128, 4, 4), adamw(1e-3, 0.05), 64, 100, 8),
    "inception_v3": Architecture(inception_v3, momentum(0.045), 128, 500, 30, size=299),
    "inception_small": Architecture(small_inception, momentum(0.05), 64, 50, 8),
}  # fmt: skip


def _workload(images: str, net: str, folder: Path | None, synthetic: bool) -> Workload:
    name, data, architecture = f"{images}/{net}", IMAGE_SETS[images], ARCHITECTURES[net]
    rows = data.rows(architecture.size, folder, synthetic, name)
    epochs = min(architecture.epochs, data.most_epochs)
    return architecture.workload(
        name, *rows, len(data.mean), data.classes, epochs, loss=loss, metric=metric
    )


WORKLOADS: dict[str, Callable[[Path | None, bool], Workload]] = {
    f"{images}/{net}": partial(_workload, images, net)
    for images in IMAGE_SETS
    for net in ARCHITECTURES
}
