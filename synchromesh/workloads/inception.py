"""Inception-V3 (Szegedy et al. 2016, arXiv 1512.00567, table 1), without its auxiliary classifier.

Where the paper leaves widths open they are those of its authors' release (TensorFlow's
`slim/nets/inception_v3.py`). Grids of 35, 17 and 8 in the comments are those of images of 299."""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from synchromesh.workloads.image_nets import rectified

Size = int | tuple[int, int]
Width = Callable[[int], int]  # from a layer's published output channels to those it has


class Branches(nn.Module):
    """Branches that read the same value; their channels are concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def convolution(
    before: int, after: int, kernel: Size, stride: int = 1, pad: bool = True
) -> nn.Module:
    """Convolution, batch norm, ReLU; pad: the grid keeps its size where the stride is 1."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (height // 2, width // 2) if pad else 0
    convolution = nn.Conv2d(before, after, (height, width), stride, padding, bias=False)
    return nn.Sequential(*rectified(convolution, eps=1e-3))


def chain(before: int, *layers: tuple[int, Size]) -> nn.Sequential:
    """Convolutions one after another, given as (channels, kernel)."""
    made = []
    for after, kernel in layers:
        made.append(convolution(before, after, kernel))
        before = after
    return nn.Sequential(*made)


def stem(channels: int, w: Width) -> nn.Module:
    """From images to the grid of 35 with 192 channels."""
    return nn.Sequential(
        convolution(channels, w(32), 3, 2, pad=False), convolution(w(32), w(32), 3, pad=False),
        convolution(w(32), w(64), 3), nn.MaxPool2d(3, 2),
        convolution(w(64), w(80), 1, pad=False), convolution(w(80), w(192), 3, pad=False),
        nn.MaxPool2d(3, 2),
    )  # fmt: skip


def pooled(before: int, after: int) -> nn.Module:
    """The branch that averages 3 x 3 neighbours."""
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), convolution(before, after, 1))


def block35(before: int, pool: int, w: Width) -> nn.Module:
    """Figure 5: 5 x 5 convolutions, and in another branch as two of 3 x 3; 224 + pool channels."""
    return Branches(
        chain(before, (w(64), 1)),
        chain(before, (w(48), 1), (w(64), 5)),
        chain(before, (w(64), 1), (w(96), 3), (w(96), 3)),
        pooled(before, w(pool)),
    )


def to17(before: int, w: Width) -> nn.Module:
    """Figure 10: half the grid, 480 more channels."""
    reduced = chain(before, (w(64), 1), (w(96), 3))
    reduced.append(convolution(w(96), w(96), 3, 2, pad=False))
    return Branches(convolution(before, w(384), 3, 2, pad=False), reduced, nn.MaxPool2d(3, 2))


def block17(before: int, inner: int, w: Width) -> nn.Module:
    """Figure 6 with n = 7: 7 x 7 convolutions as 1 x 7 and 7 x 1; 768 channels."""
    n, out = w(inner), w(192)
    return Branches(
        chain(before, (out, 1)),
        chain(before, (n, 1), (n, (1, 7)), (out, (7, 1))),
        chain(before, (n, 1), (n, (7, 1)), (n, (1, 7)), (n, (7, 1)), (out, (1, 7))),
        pooled(before, out),
    )


def to8(before: int, w: Width) -> nn.Module:
    """Half the grid, 512 more channels."""
    n = w(192)
    straight = chain(before, (n, 1))
    straight.append(convolution(n, w(320), 3, 2, pad=False))
    factorised = chain(before, (n, 1), (n, (1, 7)), (n, (7, 1)))
    factorised.append(convolution(n, n, 3, 2, pad=False))
    return Branches(straight, factorised, nn.MaxPool2d(3, 2))


def block8(before: int, w: Width) -> nn.Module:
    """Figure 7: banks of 1 x 3 and 3 x 1 side by side; 2048 channels."""
    n = w(384)

    def bank() -> nn.Module:
        return Branches(convolution(n, n, (1, 3)), convolution(n, n, (3, 1)))

    return Branches(
        chain(before, (w(320), 1)),
        chain(before, (n, 1)).append(bank()),
        chain(before, (w(448), 1), (n, 3)).append(bank()),
        pooled(before, w(192)),
    )


def inception_v3(channels: int, classes: int) -> nn.Module:
    """For images (n, channels, 299, 299): 3, 4 and 2 blocks on grids of 35, 17 and 8."""
    # int: all channels that are published
    return _assembled(stem(channels, int), (32, 64, 64), (128, 160, 160, 192), 2, classes, int)


def small_inception(channels: int, classes: int) -> nn.Module:
    """For images (n, channels, 32, 32): one block of each kind, a quarter of the channels."""
    start = nn.Sequential(
        convolution(channels, _quarter(64), 3), nn.MaxPool2d(2),
        convolution(_quarter(64), _quarter(192), 3),
    )  # fmt: skip
    return _assembled(start, (64,), (192,), 1, classes, _quarter)


def _quarter(published: int) -> int:
    return published // 4


def _assembled(
    start: nn.Module, pools: tuple[int, ...], inner: tuple[int, ...], last: int, classes: int,
    w: Width,
) -> nn.Module:  # fmt: skip
    """pools: channels of each block of 35; inner: of each block of 17; last: blocks of 8."""
    layers = OrderedDict[str, nn.Module](stem=start)
    width = w(192)
    for number, pool in enumerate(pools):
        layers[f"block35_{number}"] = block35(width, pool, w)
        width = w(64) + w(64) + w(96) + w(pool)
    layers["to17"] = to17(width, w)
    width += w(384) + w(96)
    for number, n in enumerate(inner):
        layers[f"block17_{number}"] = block17(width, n, w)
        width = 4 * w(192)
    layers["to8"] = to8(width, w)
    width += w(320) + w(192)
    for number in range(last):
        layers[f"block8_{number}"] = block8(width, w)
        width = w(320) + 4 * w(384) + w(192)
    layers["classifier"] = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(width, classes)
    )
    return nn.Sequential(layers)
