"""SegNet (Badrinarayanan et al. 2017, arXiv 1511.00561)."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

# (channels, convolutions) of each level of the encoder: VGG-16's; the decoder mirrors it
LEVELS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
SMALL = ((16, 1), (32, 1), (64, 2), (64, 2))


def convolutions(before: int, widths: Sequence[int]) -> nn.Sequential:
    """Convolutions of 3 x 3 with these numbers of output channels, each normalised."""
    layers: list[nn.Module] = []
    for width in widths:
        convolution = nn.Conv2d(before, width, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
        before = width
    return nn.Sequential(*layers)


class SegNet(nn.Module):
    """Scores (n, classes, height, width) of images whose edges are multiples of 2^levels.

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
