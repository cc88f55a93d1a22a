"""Images with labels, kept as bytes, seen in views, normalised one by one; loss and metric."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.workloads.training import logits_of, right_rows, warm_up
from synchromesh.workloads.workload import MapDataset, Parameters, Workload


@dataclass(frozen=True)
class ImageFormat:
    """What a model expects: mean and deviation per channel (of values 0 to 1), edge length."""

    MOST_PADDING: ClassVar[int] = 8  # rows that are padded (28 to 32), where more lack: resized
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    size: int

    def normalise(self, image: Tensor, scale: float) -> Tensor:
        """A float image (channel, size, size) of a square uint8 one with values 0 to `scale`."""
        values = image.to(torch.float32) / scale
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        values = (values - mean) / torch.tensor(self.deviation).view(-1, 1, 1)
        height = values.shape[-1]
        if 0 < self.size - height <= self.MOST_PADDING:
            margin = (self.size - height) // 2
            return F.pad(values, (margin, self.size - height - margin) * 2)
        if height != self.size:
            values = F.interpolate(
                values[None], size=(self.size, self.size), mode="bilinear", align_corners=False
            )[0]
        return values


class ImageModel(Protocol):
    """Builds a model for images of so many channels, with scores for so many classes."""

    def __call__(self, *, channels: int, classes: int) -> nn.Module: ...


@dataclass(frozen=True)
class Architecture:
    """A net for images and how it is trained."""

    model: ImageModel  # for images (n, channels, size, size)
    optimizer: Callable[[Parameters], torch.optim.Optimizer]
    batch_size: int
    warm_up: int  # updates in which the learning rate rises
    epochs: int  # unless its data set needs fewer
    size: int = 32  # edge length of its images; others are padded (28 to 32) or resized

    def workload(
        self, name: str, train: MapDataset, valid: MapDataset, channels: int, classes: int,
        epochs: int, **functions: Any,
    ) -> Workload:  # fmt: skip
        """The workload of training it on these rows; `functions` are its loss and metric."""
        updates = epochs * -(-len(train) // self.batch_size)
        return Workload(
            model=partial(self.model, channels=channels, classes=classes),
            optimizer=self.optimizer, train_data=train, valid_data=valid, epochs=epochs,
            batch_size=self.batch_size, scheduler=warm_up(self.warm_up, decay=updates), name=name,
            **functions,
        )  # fmt: skip


@dataclass(frozen=True)
class View:
    """The augmentation of CIFAR (He et al. 2015, arXiv 1512.03385, section 4.2): pixels are padded
    on each side, and a crop of the old size is taken from the padded image or its mirror."""

    padding: int
    top: int
    left: int
    mirrored: bool

    @staticmethod
    def drawn(padding: int) -> "View":
        """One of all views, equally likely, by torch's own generator."""
        places = 2 * padding + 1
        number = int(torch.randint(2 * places**2, ()))
        place, mirrored = divmod(number, 2)
        return View(padding, *divmod(place, places), mirrored=bool(mirrored))

    def of(self, image: Tensor, fill: int = 0) -> Tensor:
        """The view of an image (..., height, width), with `fill` outside of it."""
        height, width = image.shape[-2:]
        padded = F.pad(image, (self.padding,) * 4, value=fill)
        seen = padded[..., self.top : self.top + height, self.left : self.left + width]
        return seen.flip(-1) if self.mirrored else seen


class Images:
    """`pixels` uint8 (n, channel, height, width), `labels` int64 (n). padding: of views drawn."""

    def __init__(
        self, pixels: Tensor, labels: Tensor, form: ImageFormat, scale: float = 255.0,
        padding: int | None = None,
    ) -> None:  # fmt: skip
        assert pixels.dtype == torch.uint8 and len(pixels) == len(labels)
        self.pixels, self.labels, self.form, self.scale = pixels, labels, form, scale
        self.padding = padding

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.pixels[index]
        if self.padding is not None:
            image = View.drawn(self.padding).of(image)
        return self.form.normalise(image, self.scale), self.labels[index]


@dataclass(frozen=True)
class SyntheticImages:
    """Seeded rows of a real set's shapes; per_pixel: with a label for every pixel, else one."""

    form: ImageFormat
    classes: int
    rows: int = 4096
    seed: int = 0
    per_pixel: bool = False

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        shape = (len(self.form.mean), self.form.size, self.form.size)
        image = torch.randn(shape, generator=generator)
        labelled = shape[1:] if self.per_pixel else ()
        return image, torch.randint(self.classes, labelled, generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy, the mean over the rows."""
    images, labels = batch
    return F.cross_entropy(logits_of(model(images)), labels)


def metric(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Rows whose best score is at their label."""
    images, labels = batch
    return right_rows(logits_of(model(images)), labels)
