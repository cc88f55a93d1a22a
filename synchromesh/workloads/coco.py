"""COCO's instance annotations as masks of 13 classes, with U-Nets and SegNets.

Classes are COCO's twelve supercategories and the background: all 80 categories count, and each
class is frequent enough to be learnt from a part of the data."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from synchromesh.workloads import coco_files, data_files
from synchromesh.workloads.coco_files import CLASSES, AnnotatedImage, CocoFiles
from synchromesh.workloads.images import Architecture, ImageFormat, SyntheticImages, View
from synchromesh.workloads.segmentation import SegNet, UNet, loss, metric
from synchromesh.workloads.training import IGNORED, adamw, momentum
from synchromesh.workloads.workload import MapDataset, Workload


class Masks:
    """A data set of images and the class of each of their pixels, both resized to `form`."""

    KEPT: ClassVar[int] = 256 * 2**20  # bytes: smaller data sets are decoded once; chosen
    PADDING: ClassVar[int] = 8  # edge over padding of the views of training images; chosen

    def __init__(
        self,
        source: CocoFiles,
        images: Sequence[AnnotatedImage],
        form: ImageFormat,
        augmented: bool,
    ) -> None:
        self.source, self.images, self.form, self.augmented = source, images, form, augmented
        self._decoded: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels, labels = self._decoded.get(index) or self._decode(index)
        if self.augmented:
            view = View.drawn(self.form.size // self.PADDING)
            pixels, labels = view.of(pixels), view.of(labels, fill=IGNORED.pixel)
        return self.form.normalise(pixels, 255.0), labels.to(torch.int64)

    def _decode(self, index: int) -> tuple[Tensor, Tensor]:
        """Pixels uint8 (3, size, size) and labels uint8 (size, size)."""
        from PIL import Image

        one, size = self.images[index], (self.form.size, self.form.size)
        place = self.source.place(one.name)
        try:
            with Image.open(BytesIO(self.source.content(one.name))) as image:
                dimensions, pixels = image.size, image.convert("RGB")
                pixels = pixels.resize(size, Image.Resampling.BILINEAR)
        except Exception as error:  # damaged images raise almost anything
            raise ValueError(
                f"{place} cannot be read ({type(error).__name__}: {error}): fetch it again"
            ) from error
        if dimensions != (one.width, one.height):
            raise ValueError(
                f"{place} has {dimensions[0]} x {dimensions[1]} pixels where the annotations say "
                f"{one.width} x {one.height}: the files do not belong together, fetch both again"
            )
        mask = Image.fromarray(one.mask()).resize(size, Image.Resampling.NEAREST)
        decoded = (
            torch.from_numpy(np.array(pixels)).permute(2, 0, 1).contiguous(),
            torch.from_numpy(np.array(mask)),
        )
        if len(self) * sum(x.numel() for x in decoded) <= self.KEPT:
            self._decoded[index] = decoded
        return decoded


# means and deviations are ImageNet's, as is usual
FORM = partial(ImageFormat, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def masks(folder: Path, size: int, held_out: int = 5) -> tuple[Masks, Masks]:
    """Training and validation data: train2017 and val2017, or, where only one of them is there,
    all of its images but one of `held_out`, and those."""
    source, form = coco_files.find(folder), FORM(size)
    splits = [s for s in ("train2017", "val2017") if coco_files.annotations(s) in source]
    images = [coco_files.read(source, split) for split in splits or ["val2017"]]
    if len(images) == 2:
        train, valid = images
    else:
        train = [image for n, image in enumerate(images[0]) if n % held_out]
        valid = images[0][::held_out]
    return Masks(source, train, form, augmented=True), Masks(source, valid, form, augmented=False)


# model, optimizer, batch size, updates of warm-up, epochs, edge length
NETS = {
    "unet": Architecture(  # figure 1
        partial(UNet, (64, 128, 256, 512, 1024)), adamw(3e-4), 16, 500, 30, 256
    ),
    "unet_small": Architecture(partial(UNet, (16, 32, 64, 128)), adamw(3e-3), 4, 5, 10, 64),
    "segnet": Architecture(  # the encoder is VGG-16's
        partial(SegNet, ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))),
        momentum(0.1), 16, 500, 30, 256,
    ),
    "segnet_small": Architecture(
        partial(SegNet, ((16, 1), (32, 1), (64, 2), (64, 2))), adamw(3e-3), 4, 5, 10, 64
    ),
}  # fmt: skip


def _workload(name: str, folder: Path | None, synthetic: bool) -> Workload:
    net = NETS[name]
    data: tuple[MapDataset, MapDataset]
    if synthetic:
        rows = SyntheticImages(FORM(net.size), len(CLASSES), per_pixel=True)
        data = rows, replace(rows, seed=1)
    else:
        folder = data_files.needed(folder, f"coco/{name}", coco_files.LAYOUTS)
        data = masks(folder, net.size)
    train, valid = data
    return net.workload(
        f"coco/{name}", train, valid, 3, len(CLASSES), net.epochs, loss=loss, metric=metric
    )


WORKLOADS: dict[str, Callable[[Path | None, bool], Workload]] = {
    f"coco/{name}": partial(_workload, name) for name in NETS
}
