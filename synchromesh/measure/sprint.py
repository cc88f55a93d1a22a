"""The sprint measured: how much more a device computes right after a pause than lastingly.

Small products are run for `SECONDS` after a pause. With n(t) those done by time t, a line
n = v (t + credit) fitted to all but the first `SETTLED` seconds has the lasting rate v and, where
it meets n = 0, the seconds of work done beyond it; speed = (n(h) / h) / v in the first moments h.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch

from synchromesh.engine.groups import World
from synchromesh.profile import Sprint

PAUSE, SECONDS, SETTLED, FIRST = 0.03, 0.25, 0.05, 0.002
FEW, RUNS = 2, 6  # runs that tell whether there is any, and in all where there is
LEAST = 10  # products from which a line is fitted
NOISE = 0.0015  # seconds of credit below which there is none
FASTER = 1.2  # a lesser speed is none either


def sprint(world: World) -> Sprint:
    """The mean over runs and ranks; all ranks measure at once."""
    if world.device.type == "cuda":
        return Sprint()  # its clock is the driver's business: nothing that a step would see
    x = torch.ones(96, 96, device=world.device)
    _run(x)
    taken = [_run(x) for _ in range(FEW)]
    if _mean(world, [speed for _, speed in taken]) <= FASTER:
        return Sprint()
    taken += [_run(x) for _ in range(RUNS - FEW)]
    credit, speed = (_mean(world, column) for column in zip(*taken, strict=True))
    return Sprint(speed, credit) if credit > NOISE and speed > FASTER else Sprint()


def _mean(world: World, numbers: Sequence[float]) -> float:
    total = torch.tensor(sum(numbers) / len(numbers), dtype=torch.float64)
    world.everyone.all_reduce(total, counted=False)
    return float(total) / world.size


def _run(x: torch.Tensor) -> tuple[float, float]:
    """(credit, speed) of one run after a pause."""
    time.sleep(PAUSE)
    began = time.perf_counter()
    times: list[float] = []
    while not times or times[-1] < SECONDS:
        torch.mm(x, x)
        times.append(time.perf_counter() - began)
    settled = np.array([(t, n) for n, t in enumerate(times, 1) if t > SETTLED])
    if len(settled) < LEAST:
        return 0.0, 1.0  # the machine is too busy to tell
    rate, offset = np.polyfit(settled[:, 0], settled[:, 1], 1)
    first = max(1, sum(t <= FIRST for t in times))
    return float(offset / rate), float(first / times[first - 1] / rate)
