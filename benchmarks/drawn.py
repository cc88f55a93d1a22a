"""Models that the cost model was not made with: of docs/models.md, drawn by a seed and widened.

    width    1, 2, 3, 4, 6, 8 ... times that of the page, until a step of one process takes 300 ms
             on a host with 40 % of a core, 120 ms of a core of its own: then a plan on four takes
             at least the 150 ms that count, unless it is more than twice as quick

A drawn model is named `opt*8`: the architecture, times its width. `zoo.make` makes it.
"""

import random
import sys
import time
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from benchmarks.architectures import CONFIGURATIONS, NARROW, configured
from benchmarks.zoo import Made

COUNT = 8  # models that are drawn
ROWS = 32  # of a global batch
STEP = 0.300  # seconds of a step of one process on a host,
SHARE = 0.4  # which has so much of a core
TIMES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # as wide as on the page
PLANS = ("auto", "data", "tensor", "hybrid:tensor=2", "pipeline:stages=2,microbatches=4")
LAB = "4x200"


def names(seed: int) -> list[str]:
    """The architectures that `seed` draws."""
    return random.Random(seed).sample(sorted(set(CONFIGURATIONS) - set(NARROW)), COUNT)


def make(name: str) -> Made:
    """What `zoo.make` says, of `ARCHITECTURE*TIMES`."""
    architecture, _, times = name.partition("*")

    def build() -> nn.Module:
        torch.manual_seed(0)
        return configured(architecture, int(times))[0]

    _, loss, batches = configured(architecture)

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, 1e-3)

    return build, loss, batches(ROWS), optimizer


def seconds(name: str) -> float:
    """Of processor, for a step of plain PyTorch in this process: the least of a few."""
    build, loss, batch, optimizer = make(name)
    model = build()
    updates = optimizer(model.parameters())
    taken = []
    for _ in range(4):
        began = time.process_time()
        updates.zero_grad()
        loss(model, batch).backward()
        updates.step()
        taken.append(time.process_time() - began)
    return min(taken)


def widened(seed: int) -> Iterator[str]:
    """The models that `seed` draws, as wide as their steps ask for."""
    torch.set_num_threads(1)
    for name in names(seed):
        for times in TIMES:
            step = seconds(f"{name}*{times}")
            if step >= SHARE * STEP:
                break
        print(f"{name}, {times} times as wide: {step * 1e3:.0f} ms", file=sys.stderr, flush=True)
        yield f"{name}*{times}"
