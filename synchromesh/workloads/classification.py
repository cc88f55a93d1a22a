"""Image classification: every net of `ARCHITECTURES` on every set of `IMAGE_SETS`.

A name is `SET/NET`; the small form of a family of nets, which two CPU cores train, is
`SET/FAMILY_small`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from synchromesh.workloads.image_sets import IMAGE_SETS
from synchromesh.workloads.images import Architecture, loss, metric
from synchromesh.workloads.inception import inception_v3, small_inception
from synchromesh.workloads.resnet import resnet, small_resnet
from synchromesh.workloads.training import adamw, momentum
from synchromesh.workloads.vgg import SMALL, A, D, vgg
from synchromesh.workloads.vit import vit
from synchromesh.workloads.workload import Workload

# model, optimizer, batch size, updates of warm-up, epochs
ARCHITECTURES = {
    # without batch norm, as the paper has it
    "vgg11": Architecture(partial(vgg, A, hidden=4096, norm=False), momentum(0.01), 128, 1, 30),
    "vgg16": Architecture(partial(vgg, D), momentum(0.05), 128, 200, 30),
    "vgg_small": Architecture(partial(vgg, SMALL), momentum(0.05), 64, 50, 8),
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
        name, *rows, data.channels, data.classes, epochs, loss=loss, metric=metric
    )


WORKLOADS: dict[str, Callable[[Path | None, bool], Workload]] = {
    f"{images}/{net}": partial(_workload, images, net)
    for images in IMAGE_SETS
    for net in ARCHITECTURES
}
