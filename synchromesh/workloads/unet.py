"""U-Net (Ronneberger et al. 2015, arXiv 1505.04597)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

WIDTHS = (64, 128, 256, 512, 1024)  # figure 1


def double(before: int, after: int) -> nn.Module:
    """Two convolutions of 3 x 3."""
    layers: list[nn.Module] = []
    for width in (before, after):
        convolution = nn.Conv2d(width, after, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Scores (n, classes, height, width) of images whose edges are multiples of 2^(levels - 1).

    Unlike in the paper convolutions are padded, so that every pixel gets scores, and batch norm
    follows them, as most users of the net have it."""

    def __init__(self, widths: Sequence[int], channels: int, classes: int) -> None:
        super().__init__()
        pairs = [*pairwise(widths)]
        self.first = double(channels, widths[0])
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), double(upper, lower)) for upper, lower in pairs
        )
        self.widen = nn.ModuleList(
            nn.ConvTranspose2d(lower, upper, 2, stride=2) for upper, lower in reversed(pairs)
        )
        self.up = nn.ModuleList(double(2 * upper, upper) for upper, _ in reversed(pairs))
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
