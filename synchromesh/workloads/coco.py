"""COCO's instance annotations as masks of 13 classes, with U-Nets and SegNets.

Classes are COCO's twelve supercategories and the background: all 80 categories count, and each
class is frequent enough to be learnt from a part of the data."""

from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from synchromesh.workloads import coco_files, packed, segnet, unet
from synchromesh.workloads.coco_files import CLASSES, IGNORED, AnnotatedImage, CocoFiles
from synchromesh.workloads.images import Architecture, ImageFormat, SyntheticImages
from synchromesh.workloads.segmentation import loss, metric
from synchromesh.workloads.training import adamw, momentum
from synchromesh.workloads.view import View
from synchromesh.workloads.workload import MapDataset, Workload

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as is usual
KEPT = 256 * 2**20  # bytes: images that are smaller together are decoded once; chosen
HELD_OUT = 5  # one image of so many validates where there is no other split
PADDING = 8  # the edge over the padding of the views that are drawn of training images; chosen


class Masks:
    """A data set of images and the class of each of their pixels, both resized to `form`."""

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
            view = View.drawn(self.form.size // PADDING)
            pixels, labels = view.of(pixels), view.of(labels, fill=IGNORED)
        return self.form.normalise(pixels, 255.0), labels.to(torch.int64)

    def _decode(self, index: int) -> tuple[Tensor, Tensor]:
        """Pixels uint8 (3, size, size) and labels uint8 (size, size)."""
        from PIL import Image

        one, size = self.images[index], (self.form.size, self.form.size)
        place = self.source.place(one.name)
        try:
            with Image.open(BytesIO(self.source.content(one.name))) as image:
                found, pixels = image.size, image.convert("RGB")
                pixels = pixels.resize(size, Image.Resampling.BILINEAR)
        except Exception as error:  # damaged images raise almost anything
            raise ValueError(
                f"{place} cannot be read ({type(error).__name__}: {error}): fetch it again"
            ) from error
        if found != (one.width, one.height):
            raise ValueError(
                f"{place} has {found[0]} x {found[1]} pixels where the annotations say "
                f"{one.width} x {one.height}: the files do not belong together, fetch both again"
            )
        mask = Image.fromarray(one.mask()).resize(size, Image.Resampling.NEAREST)
        decoded = (
            torch.from_numpy(np.array(pixels)).permute(2, 0, 1).contiguous(),
            torch.from_numpy(np.array(mask)),
        )
        if len(self) * sum(x.numel() for x in decoded) <= KEPT:
            self._decoded[index] = decoded
        return decoded


def masks(folder: Path, size: int) -> tuple[Masks, Masks]:
    """Training and validation data: train2017 and val2017, or, where only one of them is there,
    four and one of five of its images."""
    source = coco_files.find(folder)
    form = ImageFormat(MEAN, DEVIATION, size)
    splits = [s for s in ("train2017", "val2017") if coco_files.annotations(s) in source]
    images = [coco_files.read(source, split) for split in splits or ["val2017"]]
    if len(images) == 2:
        train, valid = images
    else:
        train = [image for n, image in enumerate(images[0]) if n % HELD_OUT]
        valid = images[0][::HELD_OUT]
    return Masks(source, train, form, augmented=True), Masks(source, valid, form, augmented=False)


# model, optimizer, batch size, updates of warm-up, epochs, edge length
NETS = {
    "unet": Architecture(partial(unet.UNet, unet.WIDTHS), adamw(3e-4), 16, 500, 30, 256),
    "unet_small": Architecture(partial(unet.UNet, (16, 32, 64, 128)), adamw(3e-3), 4, 5, 10, 64),
    "segnet": Architecture(partial(segnet.SegNet, segnet.LEVELS), momentum(0.1), 16, 500, 30, 256),
    "segnet_small": Architecture(partial(segnet.SegNet, segnet.SMALL), adamw(3e-3), 4, 5, 10, 64),
}


def _workload(name: str, folder: Path | None, synthetic: bool) -> Workload:
    net = NETS[name]
    train: MapDataset
    valid: MapDataset
    if synthetic:
        form = ImageFormat(MEAN, DEVIATION, net.size)
        train, valid = (
            SyntheticImages(form, len(CLASSES), seed=seed, per_pixel=True) for seed in (0, 1)
        )
    else:
        train, valid = masks(packed.needed(folder, f"coco/{name}", coco_files.LAYOUTS), net.size)
    return net.workload(
        f"coco/{name}", train, valid, len(MEAN), len(CLASSES), net.epochs, loss=loss, metric=metric
    )


WORKLOADS: dict[str, Callable[[Path | None, bool], Workload]] = {
    f"coco/{name}": partial(_workload, name) for name in NETS
}
