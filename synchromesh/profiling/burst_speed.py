"""The device model, measured: how a device computes lastingly, and right after a pause.

Small products are run for `seconds` after a pause. With n(t) those done by time t, a line
n = v (t + credit) fitted to all but the first `settled` seconds has the lasting rate v and, where
it meets n = 0, the seconds of work done beyond it; speed = (n(h) / h) / v in the first moments h.

    slowdown  =  seconds that pass / seconds of processor time, once settled

A quota of 40 % makes it 2.5, two processes on one core 2. Programs are timed by the processor's
clock, which stands still while a process is stopped, and last `slowdown` times as long."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
import torch

from synchromesh.engine.world import World
from synchromesh.programs.clock import clock, mean_and_error, settled
from synchromesh.values.compute import BurstSpeed, DeviceModel


@dataclass(frozen=True)
class BurstTuning:
    """How bursts are measured, in seconds; chosen, not measured, where nothing else is said."""

    pause: float = 0.03  # before a run, to earn credit
    seconds: float = 0.25  # of a run
    settled: float = 0.05  # after which speed is lasting: two periods of a quota
    first: float = 0.002  # moments in which the first speed shows
    few: int = 2  # runs that tell whether there is any burst
    runs: int = 6  # in all, at most, where there is
    points: int = 10  # products from which a line is fitted, at least
    noise: float = 0.0015  # seconds of credit below which there is none
    faster: float = 1.2  # times the lasting speed; a lesser one is no burst either


TUNING = BurstTuning()


@dataclass(frozen=True)
class _Run:
    credit: float
    speed: float
    slowdown: float


def measure_device_model(world: World, runs: int | None = None) -> DeviceModel:
    """The mean of the ranks' bursts, each slowdown; all measure at once. runs: at most so many."""
    if world.device.type == "cuda":  # its clock is the driver's business: nothing a step would see
        return DeviceModel(BurstSpeed(), (1.0,) * world.size)
    most = TUNING.runs if runs is None else runs
    x = torch.ones(96, 96, device=world.device)
    _run(x)
    taken = [_run(x) for _ in range(min(TUNING.few, most))]
    if _mean(world, [t.speed for t in taken]) > TUNING.faster:
        while len(taken) < most and not _known(world, taken):
            taken.append(_run(x))
    credit, speed = (_mean(world, [getattr(t, k) for t in taken]) for k in ("credit", "speed"))
    is_burst = credit > TUNING.noise and speed > TUNING.faster
    burst = BurstSpeed(speed, credit) if is_burst else BurstSpeed()
    slowdown = median(t.slowdown for t in taken) if clock(world.device) else 1.0
    return DeviceModel(burst, tuple(float(s) for s in world.everyone.all_gather_json(slowdown)))


def _known(world: World, taken: Sequence[_Run]) -> bool:
    """Whether the mean credit of all ranks is known, or cannot be told from none."""
    credits = world.everyone.all_gather_json([t.credit for t in taken])
    mean, error = mean_and_error(credits)
    return mean <= error or settled(credits)


def _mean(world: World, numbers: Sequence[float]) -> float:
    return fmean(world.everyone.all_gather_json(fmean(numbers)))


def _run(x: torch.Tensor) -> _Run:
    time.sleep(TUNING.pause)
    began = time.perf_counter()
    times: list[float] = []
    settled_at = busy = 0.0
    while not times or times[-1] < TUNING.seconds:
        torch.mm(x, x)
        times.append(time.perf_counter() - began)
        if not busy and times[-1] > TUNING.settled:
            settled_at, busy = times[-1], time.process_time()
    busy = time.process_time() - busy
    slowdown = max(1.0, (times[-1] - settled_at) / busy) if busy > 0.0 else 1.0
    settled = np.array([(t, n) for n, t in enumerate(times, 1) if t > TUNING.settled])
    if len(settled) < TUNING.points:
        return _Run(0.0, 1.0, slowdown)  # the machine is too busy to tell
    rate, offset = np.polyfit(settled[:, 0], settled[:, 1], 1)
    first = max(1, sum(t <= TUNING.first for t in times))
    return _Run(float(offset / rate), float(first / times[first - 1] / rate), slowdown)
