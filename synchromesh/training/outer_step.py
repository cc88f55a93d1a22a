"""The outer step of `@synchronisation=diloco:H`: an optimizer that every worker has alike, whose
gradient is what the mean of their parameters has moved."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn


class OuterStep:
    """SGD with Nesterov momentum on the parameters of all workers (Douillard et al. 2023, "DiLoCo:
    Distributed Low-Communication Training of Language Models", algorithm 1 and section 3), which
    each worker does alike:

        d = a - 1/N sum_j p_j        m <- 0.9 m + d        a <- a - 0.7 (d + 0.9 m)        p_i <- a
    """

    RATE: ClassVar = 0.7
    MOMENTUM: ClassVar = 0.9

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], momentum: Mapping[str, Tensor]
    ) -> None:
        """momentum: as far as it is known; else 0."""
        self._begun = [(p, p.detach().clone()) for p in parameters.values()]
        self.momentum = {
            n: momentum[n] if n in momentum else torch.zeros_like(p.detach())
            for n, p in parameters.items()
        }

    @property
    def tensors(self) -> list[Tensor]:
        return [*(begun for _, begun in self._begun), *self.momentum.values()]

    @torch.no_grad()
    def step(self) -> None:
        """From means of the workers' parameters, in the place of which its result comes."""
        for (p, begun), momentum in zip(self._begun, self.momentum.values(), strict=True):
            moved = begun - p
            momentum.mul_(self.MOMENTUM).add_(moved)
            begun.sub_(moved.add_(momentum, alpha=self.MOMENTUM), alpha=self.RATE)
            p.copy_(begun)
