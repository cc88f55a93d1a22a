"""VGG nets (Simonyan and Zisserman 2015, arXiv 1409.1556)."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

POOL = 0
A = (64, POOL, 128, POOL, 256, 256, POOL, 512, 512, POOL, 512, 512, POOL)  # VGG-11
D = (
    64, 64, POOL, 128, 128, POOL, 256, 256, 256, POOL, 512, 512, 512, POOL, 512, 512, 512, POOL,
)  # VGG-16  # fmt: skip
SMALL = (32, POOL, 64, POOL, 128, 128, POOL, 128, 128, POOL, 128, 128, POOL)  # A, narrower


def vgg(
    widths: Sequence[int], channels: int, classes: int, hidden: int = 0, norm: bool = True
) -> nn.Module:
    """Convolutions of 3 x 3 with these numbers of output channels, and a classifier.

    It takes images (n, channels, 32, 32), of which five poolings leave one pixel. hidden: neurons
    of the paper's two hidden layers with dropout; 0: none, as with batch norm (`norm`) on CIFAR.
    """
    layers: list[nn.Module] = []
    width = channels
    for entry in widths:
        if entry == POOL:
            layers.append(nn.MaxPool2d(2))
            continue
        convolution = nn.Conv2d(width, entry, 3, padding=1, bias=not norm)
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        layers += [convolution, *([nn.BatchNorm2d(entry)] if norm else []), nn.ReLU()]
        width = entry
    features = nn.Sequential(*layers, nn.Flatten())
    classifier = nn.Sequential()
    if hidden:
        classifier.extend((nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(0.5)))
        classifier.extend((nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.5)))
    classifier.append(nn.Linear(hidden or width, classes))
    return nn.Sequential(OrderedDict(features=features, classifier=classifier))
