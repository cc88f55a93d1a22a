"""Segmentation: a class for every pixel; nets, loss and metric."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.workloads.image_nets import rectified
from synchromesh.workloads.training import IGNORED, summed_loss

Batch = tuple[Tensor, Tensor]  # images (n, channel, height, width), labels (n, height, width)


def convolutions(before: int, widths: Sequence[int]) -> nn.Sequential:
    """Convolutions of 3 x 3 with these numbers of output channels, each normalised."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += rectified(nn.Conv2d(before, width, 3, padding=1, bias=False))
        before = width
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015, arXiv 1505.04597): scores (n, classes, height, width) of
    images whose edges are multiples of 2^(levels - 1). Unlike in the paper convolutions are
    padded, so that every pixel gets scores, and batch norm follows them, as most users of the net
    have it."""

    def __init__(self, widths: Sequence[int], channels: int, classes: int) -> None:
        super().__init__()
        pairs = [*pairwise(widths)]
        self.first = convolutions(channels, (widths[0],) * 2)
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), convolutions(upper, (lower, lower)))
            for upper, lower in pairs
        )
        self.widen = nn.ModuleList(
            nn.ConvTranspose2d(lower, upper, 2, stride=2) for upper, lower in reversed(pairs)
        )
        decoded = (convolutions(2 * upper, (upper, upper)) for upper, _ in reversed(pairs))
        self.up = nn.ModuleList(decoded)
        self.classifier = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        levels = [self.first(images)]
        for down in self.down:
            levels.append(down(levels[-1]))
        x = levels.pop()
        for widen, up in zip(self.widen, self.up, strict=True):
            x = up(torch.cat([levels.pop(), widen(x)], dim=1))
        scores: Tensor = self.classifier(x)
        return scores


class SegNet(nn.Module):
    """SegNet (Badrinarayanan et al. 2017, arXiv 1511.00561): scores (n, classes, height, width) of
    images whose edges are multiples of 2^levels.

    levels: (channels, convolutions) of each level of the encoder, which the decoder mirrors.

    Each pooling of the encoder keeps where its maxima were, and its counterpart in the decoder
    puts values back there."""

    def __init__(self, levels: Sequence[tuple[int, int]], channels: int, classes: int) -> None:
        super().__init__()
        before = [channels, *(width for width, _ in levels)]
        self.encoder = nn.ModuleList(
            convolutions(start, [width] * count)
            for start, (width, count) in zip(before, levels, strict=False)
        )
        self.decoder = nn.ModuleList(
            convolutions(levels[n][0], [levels[n][0]] * (levels[n][1] - 1) + [levels[n - 1][0]])
            for n in range(len(levels) - 1, 0, -1)
        )
        width, count = levels[0]
        self.decoder.append(convolutions(width, [width] * (count - 1)))
        self.classifier = nn.Conv2d(width, classes, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        x, places = images, []
        for encode in self.encoder:
            x, place = F.max_pool2d(encode(x), 2, return_indices=True)
            places.append(place)
        for decode in self.decoder:
            x = decode(F.max_unpool2d(x, places.pop(), (2, 2)))
        scores: Tensor = self.classifier(x)
        return scores


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy as (sum over the pixels that are not ignored, their number)."""
    images, labels = batch
    return summed_loss(model(images), labels, IGNORED.pixel)


def metric(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Per image, then summed over the images: the mean over classes of intersection over union,
    and the part of the pixels whose best score is at their label. The mean is over the classes
    that are in an image's labels or among its predictions, so unlike the benchmark's mean over a
    whole data set it weighs all images equally. Ignored pixels count nowhere."""
    images, labels = batch
    scores = model(images)
    counted = labels != IGNORED.pixel
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
