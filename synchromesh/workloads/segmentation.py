"""Segmentation: a class for every pixel; its loss and its metric."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.workloads.coco_files import IGNORED

Batch = tuple[Tensor, Tensor]  # images (n, channel, height, width), labels (n, height, width)


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy as (sum over the pixels that are not ignored, their number)."""
    images, labels = batch
    total = F.cross_entropy(model(images), labels, ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def metric(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Per image, then summed over the images: the mean over classes of intersection over union,
    and the part of the pixels whose best score is at their label.

    The mean is over the classes that are in an image's labels or among its predictions, so unlike
    the benchmark's mean over a whole data set it weighs all images equally. Ignored pixels count
    nowhere."""
    images, labels = batch
    scores = model(images)
    counted = labels != IGNORED
    predicted = scores.argmax(1)
    right = ((predicted == labels) & counted).flatten(1).sum(1)
    accuracy = right / counted.flatten(1).sum(1).clamp(min=1)
    classes = torch.arange(scores.shape[1], device=labels.device).view(1, -1, 1, 1)
    theirs = labels[:, None] == classes
    ours = (predicted[:, None] == classes) & counted[:, None]
    both = (theirs & ours).flatten(2).sum(2)
    either = (theirs | ours).flatten(2).sum(2)
    ratios = both / either.clamp(min=1)
    means = ratios.sum(1) / (either > 0).sum(1).clamp(min=1)
    return {"mean_iou": means.sum(), "pixel_accuracy": accuracy.sum()}
