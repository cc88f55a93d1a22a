"""Residual nets (He et al. 2015, arXiv 1512.03385): those of `transformers`, and small ones."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


def resnet(
    depths: Sequence[int], widths: Sequence[int], layer: str, channels: int, classes: int
) -> nn.Module:
    """The paper's net for ImageNet; `layer` is `basic` or `bottleneck`."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=channels, hidden_sizes=list(widths), depths=list(depths), layer_type=layer
    )
    config.num_labels = classes
    return ResNetForImageClassification(config)


class Residual(nn.Module):
    """Two convolutions of 3 x 3 and the shortcut beside them, which is a convolution of 1 x 1
    where the shape changes."""

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.convolutions(x) + self.shortcut(x)
        return y.relu()


def small_resnet(widths: Sequence[int], channels: int, classes: int, depth: int = 1) -> nn.Module:
    """A net in the manner of the paper's for CIFAR (section 4.2), with fewer blocks.

    A convolution of 3 x 3 to `widths[0]` channels, then for each further width a group of `depth`
    blocks at half the height and width of what is before it."""
    stem = nn.Sequential(
        nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
    )
    groups = OrderedDict[str, nn.Module](stem=stem)
    for number, (before, width) in enumerate(pairwise(widths), start=1):
        blocks = [Residual(before, width, stride=2)]
        blocks += [Residual(width, width) for _ in range(depth - 1)]
        groups[f"group{number}"] = nn.Sequential(*blocks)
    groups["classifier"] = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)
    )
    return nn.Sequential(groups)
