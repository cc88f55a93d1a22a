"""A view of an image: where it is cropped from the padded image, and whether it is mirrored."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class View:
    """The augmentation of CIFAR (He et al. 2015, arXiv 1512.03385, section 4.2): pixels are padded
    on each side, and a crop of the old size is taken from the padded image or its mirror."""

    padding: int
    top: int
    left: int
    mirrored: bool

    @staticmethod
    def drawn(padding: int) -> "View":
        """One of all views, equally likely, by torch's own generator."""
        places = 2 * padding + 1
        number = int(torch.randint(2 * places**2, ()))
        place, mirrored = divmod(number, 2)
        return View(padding, *divmod(place, places), mirrored=bool(mirrored))

    def of(self, image: Tensor, fill: int = 0) -> Tensor:
        """The view of an image (..., height, width), with `fill` outside of it."""
        height, width = image.shape[-2:]
        padded = F.pad(image, (self.padding,) * 4, value=fill)
        seen = padded[..., self.top : self.top + height, self.left : self.left + width]
        return seen.flip(-1) if self.mirrored else seen
