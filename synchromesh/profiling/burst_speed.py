"""The pace of a device and its sprint: how it computes lastingly, and right after a pause.

Small products are run for `SECONDS` after a pause. With n(t) those done by time t, a line
n = v (t + credit) fitted to all but the first `SETTLED` seconds has the lasting rate v and, where
it meets n = 0, the seconds of work done beyond it; speed = (n(h) / h) / v in the first moments h.

    pace  =  seconds that pass / seconds of processor time, once settled

A quota of 40 % makes it 2.5, two processes on one core 2. Programs are timed by the processor's
clock, which stands still while a process is stopped, and last `pace` times as long.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from synchromesh.engine.groups import World
from synchromesh.profiling.clock import clock
from synchromesh.values.profile import Sprint

PAUSE, SECONDS, SETTLED, FIRST = 0.03, 0.25, 0.05, 0.002  # settled: two periods of a quota
FEW, RUNS = 2, 6  # runs that tell whether there is any, and in all where there is
LEAST = 10  # products from which a line is fitted
NOISE = 0.0015  # seconds of credit below which there is none
FASTER = 1.2  # a lesser speed is none either


@dataclass(frozen=True)
class Ease:
    """How the ranks compute: the mean of their sprints, the pace of each."""

    sprint: Sprint
    pace: tuple[float, ...]


@dataclass(frozen=True)
class _Run:
    credit: float
    speed: float
    pace: float


def ease(world: World, runs: int = RUNS) -> Ease:
    """All ranks measure at once. runs: at most so many, of `SECONDS` each, after one that does not
    count."""
    if world.device.type == "cuda":  # its clock is the driver's business: nothing a step would see
        return Ease(Sprint(), (1.0,) * world.size)
    x = torch.ones(96, 96, device=world.device)
    _run(x)
    taken = [_run(x) for _ in range(min(FEW, runs))]
    if _mean(world, [t.speed for t in taken]) > FASTER:
        taken += [_run(x) for _ in range(runs - len(taken))]
    credit, speed = (_mean(world, [getattr(t, k) for t in taken]) for k in ("credit", "speed"))
    found = Sprint(speed, credit) if credit > NOISE and speed > FASTER else Sprint()
    mine = median(t.pace for t in taken) if clock(world.device) else 1.0
    return Ease(found, tuple(float(p) for p in world.everyone.all_gather_json(mine)))


def _mean(world: World, numbers: Sequence[float]) -> float:
    total = torch.tensor(sum(numbers) / len(numbers), dtype=torch.float64)
    world.everyone.all_reduce(total, counted=False)
    return float(total) / world.size


def _run(x: torch.Tensor) -> _Run:
    """What one run after a pause tells."""
    time.sleep(PAUSE)
    began = time.perf_counter()
    times: list[float] = []
    settled_at = busy = 0.0
    while not times or times[-1] < SECONDS:
        torch.mm(x, x)
        times.append(time.perf_counter() - began)
        if not busy and times[-1] > SETTLED:
            settled_at, busy = times[-1], time.process_time()
    busy = time.process_time() - busy
    pace = max(1.0, (times[-1] - settled_at) / busy) if busy > 0.0 else 1.0
    settled = np.array([(t, n) for n, t in enumerate(times, 1) if t > SETTLED])
    if len(settled) < LEAST:
        return _Run(0.0, 1.0, pace)  # the machine is too busy to tell
    rate, offset = np.polyfit(settled[:, 0], settled[:, 1], 1)
    first = max(1, sum(t <= FIRST for t in times))
    return _Run(float(offset / rate), float(first / times[first - 1] / rate), pace)
