"""Nets that classify images: VGG (Simonyan and Zisserman 2015, arXiv 1409.1556), residual nets (He
et al. 2015, arXiv 1512.03385) and vision transformers (Dosovitskiy et al. 2021, arXiv 2010.11929),
those that `transformers` has and small ones."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

POOL = "pool"
VGG: dict[str, tuple[int | str, ...]] = {
    "A": (64, POOL, 128, POOL, 256, 256, POOL, 512, 512, POOL, 512, 512, POOL),  # VGG-11
    "D": (
        64, 64, POOL, 128, 128, POOL, 256, 256, 256, POOL, 512, 512, 512, POOL, 512, 512, 512,
        POOL,
    ),  # VGG-16
    "small": (32, POOL, 64, POOL, 128, 128, POOL, 128, 128, POOL, 128, 128, POOL),  # A, narrower
}  # fmt: skip


def rectified(convolution: nn.Conv2d, eps: float = 1e-5) -> list[nn.Module]:
    """A convolution with weights drawn for ReLU, batch norm where it has no bias, and ReLU."""
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
    norm = [nn.BatchNorm2d(convolution.out_channels, eps)] if convolution.bias is None else []
    return [convolution, *norm, nn.ReLU()]


def vgg(
    widths: Sequence[int | str], channels: int, classes: int, hidden: int = 0, norm: bool = True
) -> nn.Module:
    """A VGG net: convolutions of 3 x 3 with these numbers of output channels, and a classifier. It
    takes images (n, channels, 32, 32), of which five poolings leave one pixel. hidden: neurons of
    the paper's two layers with dropout; 0: none, as with batch norm (`norm`) on CIFAR."""
    layers: list[nn.Module] = []
    width = channels
    for entry in widths:
        if isinstance(entry, str):
            layers.append(nn.MaxPool2d(2))
            continue
        layers += rectified(nn.Conv2d(width, entry, 3, padding=1, bias=not norm))
        width = entry
    features = nn.Sequential(*layers, nn.Flatten())
    classifier = nn.Sequential()
    if hidden:
        classifier.extend((nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(0.5)))
        classifier.extend((nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.5)))
    classifier.append(nn.Linear(hidden or width, classes))
    return nn.Sequential(OrderedDict(features=features, classifier=classifier))


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
    """Two convolutions of 3 x 3 and a shortcut, a convolution of 1 x 1 if the shape changes."""

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
    """In the manner of the paper's for CIFAR (section 4.2): a convolution of 3 x 3 to `widths[0]`
    channels, then for each further width `depth` blocks at half the height and width."""
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


def vit(
    size: int, patch: int, width: int, layers: int, heads: int, channels: int, classes: int,
    **options: Any,
) -> nn.Module:  # fmt: skip
    """For images (n, channels, size, size) in patches. options: further fields of `ViTConfig`; a
    block's perceptron has four times `width` hidden neurons unless they say otherwise."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=size, patch_size=patch, num_channels=channels, hidden_size=width,
        num_hidden_layers=layers, num_attention_heads=heads,
        **{"intermediate_size": 4 * width, **options},
    )  # fmt: skip
    config.num_labels = classes
    return ViTForImageClassification(config)
