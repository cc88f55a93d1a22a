"""Failures of hosts over days of training: how much of the time is useful, and what is lost.

A host in use fails at the rate r, so that N of them go on for 1 / (N r) seconds on average. Steps
run for an interval dt, then a checkpoint is written for w seconds, and so on. A failure loses what
has run since the last whole checkpoint, unless the hosts that are left have all of the state; then
nothing runs for detection and recovery. A failure in that time begins it anew.

    useful share  =  seconds of steps that were not lost, as of all hosts / all seconds

Where all hosts are replaced at once (`restart`), with M = 1 / (N r) and down time R:

    E[share]  =  dt / (M exp(R / M) (exp((dt + w) / M) - 1))          Daly 2006, equation 13
    best dt:     (1 - dt / M) exp((dt + w) / M) = 1                   near sqrt(2 M w), Young 1974

Other recoveries are walked from event to event: a host fails, comes back repaired, or is taken
and given by a market (`Presence`)."""

import csv
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, expm1, inf, isfinite
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from scipy.optimize import brentq

DAY = 86_400.0
RecoveryKind = Literal["restart", "spares", "continue"]


def failures_a_second(per_1000_host_days: float) -> float:
    """r, of one host. ValueError for what is no rate."""
    if not (isfinite(per_1000_host_days) and per_1000_host_days >= 0.0):
        raise ValueError(
            f"{per_1000_host_days} failures per 1,000 host-days: a rate is a number from 0"
        )
    return per_1000_host_days / (1000.0 * DAY)


@dataclass(frozen=True)
class Recovery:
    """What follows a failure, in seconds.

    restart: another host is there at once. spares: so many hosts wait; each failure takes one
    until a host is repaired, and without one training waits. continue: training goes on with the
    hosts that are left, and with those that come back.
    detection: until it is noticed. seconds: from then on until steps run. repair: until a host
    that failed is there again. keeps: the hosts that are left have all of the state."""

    kind: RecoveryKind = "restart"
    spares: int = 0
    detection: float = 60.0
    seconds: float = 300.0
    repair: float = DAY
    keeps: bool = False

    @classmethod
    def parse(cls, text: str) -> tuple[RecoveryKind, int]:
        """`restart`, `spares:2`, `continue`. ValueError for anything else."""
        kind, _, count = text.partition(":")
        if kind not in get_args(RecoveryKind) or (kind == "spares") != count.isdecimal():
            raise ValueError(f"{text!r} is no recovery: restart, spares:COUNT or continue")
        return kind, int(count or 0)  # type: ignore[return-value]

    @property
    def down(self) -> float:
        """R: seconds from a failure until steps run."""
        return self.detection + self.seconds


@dataclass(frozen=True)
class Checkpoints:
    """interval: seconds of steps between two. writing: seconds that steps wait for one."""

    interval: float
    writing: float


@dataclass(frozen=True)
class Presence:
    """How many hosts are there from a moment on: seconds from 0, counts."""

    seconds: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def mean_between(self) -> float:
        """Seconds between moments at which hosts are taken."""
        taken = sum(after < before for before, after in pairwise(self.counts))
        return self.seconds[-1] / taken if taken else inf

    @classmethod
    def load(cls, path: Path) -> "Presence":
        """From a CSV file of `seconds,instances`. ValueError names the line at fault."""
        try:
            rows = list(csv.reader(path.read_text("utf-8").splitlines()))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read as a record of instances: {error}") from error
        if not rows or [x.strip() for x in rows[0]] != ["seconds", "instances"]:
            raise ValueError(f"{path}: line 1 should read `seconds,instances`")
        if len(rows) == 1:
            raise ValueError(f"{path}: line 2: there is nothing behind the heading")
        read = [_instances(row, f"{path}: line {n}") for n, row in enumerate(rows[1:], 2)]
        for number, (before, after) in enumerate(pairwise([(0.0, 0), *read]), 2):
            if after[0] < before[0]:
                raise ValueError(f"{path}: line {number}: seconds ascend from 0")
        return cls(*map(tuple, zip(*read, strict=True)))


def _instances(row: Sequence[str], at: str) -> tuple[float, int]:
    """Of a line of a record."""
    try:
        when, count = row
        found = float(when), int(count)
    except ValueError:
        found = -1.0, -1
    if not isfinite(found[0]) or min(found) < 0:
        raise ValueError(f"{at} should be `seconds,instances`, both from 0")
    return found


@dataclass(frozen=True)
class FailureOutcome:
    """Seconds of a training, and what they went into; how often it began anew."""

    seconds: float
    useful: float  # of steps that were not lost, as of all hosts
    lost: float  # of steps that ran in vain
    writing: float
    down: float  # detection and recovery
    waiting: float  # for hosts
    restarts: int

    @property
    def useful_share(self) -> float:
        return self.useful / self.seconds


def expected_share(mean_between: float, down: float, checkpoints: Checkpoints) -> float:
    """E[share] of the recovery `restart`."""
    m, dt, w = mean_between, checkpoints.interval, checkpoints.writing
    if m == inf:
        return dt / (dt + w)
    try:
        return dt / (m * exp(down / m) * expm1((dt + w) / m))
    except OverflowError:
        return 0.0


def best_interval(mean_between: float, writing: float) -> float:
    """Seconds of steps between two checkpoints for which the expected share is highest."""
    m, w = mean_between, writing
    if m == inf or w <= 0.0:
        return inf if m == inf else 0.0
    # with x = dt / M the equation is (1 - x) exp(x + w / M) = 1
    return m * float(brentq(lambda x: (1.0 - x) * exp(x + w / m) - 1.0, 0.0, 1.0))


@dataclass(frozen=True)
class Training:
    """A training whose hosts fail.

    hosts: that it is planned for. rate: r. speed: steps a second with so many of them, as a share
    of that with all (default: in proportion); 0: they cannot run it. presence: how many are there,
    in place of repairs."""

    hosts: int
    rate: float
    checkpoints: Checkpoints
    recovery: Recovery = Recovery()
    speed: Callable[[int], float] | None = None
    presence: Presence | None = None

    @property
    def mean_between(self) -> float:
        """M: seconds between failures of any of the hosts."""
        return 1.0 / (self.hosts * self.rate) if self.rate else inf

    def share(self, hosts: int) -> float:
        """Steps a second with so many hosts, as a share of that with all."""
        return self.speed(hosts) if self.speed else hosts / self.hosts

    def usable(self, present: int) -> int:
        """Of the hosts that are there, those that train."""
        used = min(present, self.hosts)
        if used < self.hosts and self.recovery.kind != "continue":
            return 0
        return used if used and self.share(used) > 0.0 else 0

    def run(self, seconds: float, seed: int) -> FailureOutcome:
        """What comes of so many seconds. Same seed, same numbers."""
        return _Walk(self, seconds, np.random.default_rng(seed)).outcome()


class _Walk:
    """From event to event."""

    def __init__(self, training: Training, end: float, draw: np.random.Generator) -> None:
        self.training, self.end, self._draw = training, end, draw
        self.now = self.useful = self.lost = self.writing = self.down = self.waiting = 0.0
        self.restarts = 0
        self._present = training.hosts + training.recovery.spares
        self._used = 0  # by the training that runs, or will once it is no longer down
        self._left = 0.0  # seconds that it is down
        self._into = self._unsaved = 0.0  # seconds, and useful ones, since the last checkpoint
        self._returns: list[float] = []
        record = training.presence
        self._changes = zip(record.seconds, record.counts, strict=True) if record else iter(())
        self._change = next(self._changes, (inf, 0))

    def outcome(self) -> FailureOutcome:
        recovery = self.training.recovery
        while self.now < self.end:
            usable = self.training.usable(self._present)
            if usable > self._used:
                if self._used:
                    self._left = max(self._left, recovery.seconds)
                self._used = usable
            failure = self.now + self._until_failure()
            returned = self._returns[0] if self._returns else inf
            until = min(failure, returned, self._change[0], self.end)
            self._pass(until - self.now)
            self.now = until
            if until == self._change[0]:
                self._counted()
            elif until == returned:
                heapq.heappop(self._returns)
                self._present += 1
            elif until == failure:
                self._fail()
                if recovery.kind != "restart" and not self.training.presence:
                    self._present -= 1
                    heapq.heappush(self._returns, self.now + recovery.repair)
        return FailureOutcome(
            self.end, self.useful + self._unsaved, self.lost, self.writing, self.down,
            self.waiting, self.restarts,
        )  # fmt: skip

    def _until_failure(self) -> float:
        rate = self._used * self.training.rate
        return float(self._draw.exponential(1.0 / rate)) if rate else inf

    def _counted(self) -> None:
        """A record says how many hosts are there from now on."""
        _, self._present = self._change
        self._change = next(self._changes, (inf, 0))
        if self._present < self._used:
            self._fail()

    def _fail(self) -> None:
        self.restarts += 1
        if not self.training.recovery.keeps:
            self.lost += self._unsaved
            self._into = self._unsaved = 0.0
        self._used, self._left = 0, self.training.recovery.down

    def _pass(self, seconds: float) -> None:
        if not self._used:
            self.waiting += seconds
            return
        down = min(seconds, self._left)
        self._left -= down
        self.down += down
        self._run(seconds - down)

    def _run(self, seconds: float) -> None:
        """Steps and checkpoints take turns."""
        interval, speed = self.training.checkpoints.interval, self.training.share(self._used)
        before, total = self._into, self._into + seconds
        whole, self._into = divmod(total, interval + self.training.checkpoints.writing)
        ran = (whole * interval if whole else 0.0) + min(self._into, interval)
        ran -= min(before, interval)
        self.writing += seconds - ran
        if whole:
            self.useful += self._unsaved + speed * (whole * interval - min(before, interval))
            self._unsaved = speed * min(self._into, interval)
        else:
            self._unsaved += speed * ran
