"""Sets of labelled images that the field compares on: what they hold, and how they are read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from synchromesh.workloads import mnist_files, packed
from synchromesh.workloads.cifar_files import CIFAR10, CIFAR100
from synchromesh.workloads.images import ImageFormat, Images, SyntheticImages
from synchromesh.workloads.workload import MapDataset


@dataclass(frozen=True)
class ImageSet:
    """A data set of square images with one label each.

    mean, deviation   per channel, of the training images' values from 0 to 1
    files             what its folder holds, for messages
    read              (folder, train or test) -> pixels uint8 (n, c, h, w), labels int64 (n)
    padding           of the views that are drawn of training images; None: no augmentation
    most_epochs       after which nothing is left to learn"""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    classes: int
    files: str
    read: Callable[[Path, str], tuple[Tensor, Tensor]]
    padding: int | None
    most_epochs: int

    @property
    def channels(self) -> int:
        return len(self.mean)

    def rows(
        self, size: int, folder: Path | None, synthetic: bool, name: str
    ) -> tuple[MapDataset, MapDataset]:
        """Training and validation data at edge length `size`; `name` is the workload's, for
        messages."""
        form = ImageFormat(self.mean, self.deviation, size)
        if synthetic:
            return SyntheticImages(form, self.classes), SyntheticImages(form, self.classes, seed=1)
        folder = packed.needed(folder, name, self.files)
        return (
            Images(*self.read(folder, "train"), form, padding=self.padding),
            Images(*self.read(folder, "test"), form),
        )


IMAGE_SETS = {
    "mnist": ImageSet(
        mean=(0.1307,), deviation=(0.3081,), classes=mnist_files.CLASSES,
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
