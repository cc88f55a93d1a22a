"""The monitor: what every step really took on every rank, and whether that is what was expected.

With the rows of each step every rank sends what the step before cost it, computing and waiting; so
all ranks see the same table and come to the same conclusion at the same step, without a message
of their own. After the `settle` steps behind a switch there is always something to expect:

    predicted    between what the plan is predicted to take, and that times what the plan before it
                 took over its own prediction
    usual        the median of n steps under this plan and these conditions, those of an earlier
                 trial of it among them; not the last `window` of them, which are compared with it

More than half of the last `window` steps (of at least `fewest`) that take more than t times what
is expected, or below a t-th, at `confirm` steps in a row, are a drift; three outliers are none.

    predicted    t  =  1 + error                    until what is usual is known from `base` steps
    usual        t  =  max(1 + least, e^(z se))     least: `error` before `base` steps
                 se  =  1.25 s sqrt(1/window + 1/n)           of the difference of two medians
                 s   =  1.48 median |log step - log median|   of steps on either side

A rank's computing that has changed by more than `device` of it and `least` of the step is a drift
too: a host that is quick again shortens no step where its rows are few. Of the difference

    explained  =  (slowest rank's computing now - usual) / (step now - usual)

is the devices', the rest the links'; each is measured again where it is more than `part`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import median, median_high, median_low
from typing import Literal


@dataclass(frozen=True)
class DriftLimits:
    """When steps count as changed. tests/adapt/test_simulation.py has what these were chosen by:
    changes of 1.5 times are noticed within 12 steps wherever they come, and quiet runs of 3 % and
    of 10 % noise raise no alarm in 10,000 steps."""

    settle: int = 3  # steps after a switch that are not counted
    window: int = 8  # the last steps, which are compared with what is expected
    fewest: int = 4  # of them, while there are no more
    confirm: int = 3  # steps in a row at which they must be beyond the tolerance
    measured: int = 5  # of them after which it is known what steps take since a switch
    earlier: int = 3  # steps before them at least, that say what is usual
    base: int = 16  # steps that say it without a prediction
    most: int = 64  # steps that are kept for it: what creeps is compared with the oldest ones
    least: float = 0.15  # of the usual step; smaller changes are not worth measuring for
    z: float = 5.0  # standard errors
    # of a prediction: plans of steps above 100 ms erred by up to 28 %, shorter ones by 35 %
    # (benchmarks/README.md)
    error: float = 0.35
    # by which the first and the last steps of a trial may differ. Chosen: twice what medians of
    # two and three steps do where steps vary by 10 %
    halves: float = 0.2
    device: float = 0.3  # of a rank's usual computing
    part: float = 0.2  # of the difference, that devices or links must explain to be measured again


LIMITS = DriftLimits()
Cost = tuple[float, float]  # seconds computing, seconds waiting
Table = Sequence[Cost]  # of a step, by rank that takes part
Source = Literal["usual", "predicted"]


@dataclass(frozen=True)
class Expectation:
    """What a step should take, and whence: seconds, bounds, each rank's computing if known."""

    step: float
    source: Source
    low: float
    high: float
    computing: tuple[float, ...] = ()


@dataclass(frozen=True)
class Drift:
    """A change: seconds of a step expected and now; what is to be measured again; what was
    noticed; by what it was expected (None: steps do not show the change)."""

    expected: float
    now: float
    devices: bool
    links: bool
    noticed: str
    source: Source | None = None

    def __str__(self) -> str:
        return self.noticed

    def joined(self, earlier: "Drift | None") -> "Drift":
        """This one, with what is still to be measured again for an earlier one."""
        if earlier is None:
            return self
        devices, links = self.devices or earlier.devices, self.links or earlier.links
        return replace(self, devices=devices, links=links)


class Monitor:
    """`follow` another plan, `record` every step; a Drift where steps are not as expected."""

    def __init__(self) -> None:
        self.follow()

    def follow(self, predicted: Sequence[float] = (), known: Sequence[Table] = ()) -> None:
        """Another plan is in force. predicted: seconds of a step, the best guess last. known:
        steps of it under present conditions."""
        self.predicted = tuple(predicted)
        self._uncounted = LIMITS.settle
        self._learn(list(known))
        self.counted: list[Table] = []  # since then, as far as they may be in the window
        self._first: list[Table] = []  # since then
        self._off = 0  # steps in a row at which the recent ones were beyond the tolerance

    def accept(self) -> None:
        """What steps take now is usual from now on."""
        self._learn(self.counted[-LIMITS.fewest :])
        self.counted, self._first, self.predicted, self._off = [], [], (), 0

    def _learn(self, earlier: list[Table]) -> None:
        """earlier: steps that say what is usual."""
        self._earlier = earlier
        self._usual: Expectation | None = None  # where it need not be worked out anew

    @property
    def _window(self) -> list[Table]:
        return self.counted[-LIMITS.window :]

    @property
    def usual(self) -> Expectation | None:
        """What steps of this plan have taken; None where too few of them are known."""
        few = len(self._earlier) < LIMITS.base
        if len(self._earlier) < LIMITS.earlier:
            return None
        if self._usual is None or few:
            self._usual = _usual(self._earlier, self._window if few else ())
        return self._usual

    @property
    def expectations(self) -> list[Expectation]:
        """All that steps are compared with."""
        expected = [] if self.usual is None else [self.usual]
        if self.predicted and len(self._earlier) < LIMITS.base:
            times, guesses = 1 + LIMITS.error, self.predicted
            low, high = min(guesses) / times, max(guesses) * times
            expected.append(Expectation(guesses[-1], "predicted", low, high))
        return expected

    @property
    def measured(self) -> float | None:
        """What a step takes now, once that is known and as expected."""
        known = len(self.counted) >= LIMITS.measured and not self._off
        return median(_steps(self._window)) if known else None

    @property
    def latest(self) -> float:
        return step_seconds(self.counted[-1]) if self.counted else 0.0

    @property
    def steady(self) -> bool:
        """Whether steps are as expected, and the last ones like the first since the switch."""
        if self._off or len(self._earlier) >= LIMITS.base or not self.counted:
            return not self._off
        first, last = median(_steps(self._first)), median(_steps(self.counted[-LIMITS.confirm :]))
        return abs(first - last) <= LIMITS.halves * min(first, last)

    def record(self, table: Table, ranks: Sequence[int] = ()) -> Drift | None:
        """table: what the last step cost each of `ranks` (none: 0, 1, 2, ...)."""
        if self._uncounted:
            self._uncounted -= 1
            return None
        self.counted.append(table)
        if len(self._first) < LIMITS.earlier:
            self._first.append(table)
        recent = self._window
        if len(recent) < LIMITS.fewest:
            return None
        off = next((e for e in self.expectations if _off(e, recent)), None)
        self._off = 0 if off is None else self._off + 1
        while off is None and len(self.counted) > LIMITS.window:
            following = self.counted.pop(0)
            if len(self._earlier) < LIMITS.most:
                self._learn([*self._earlier, following])
        if off is None or self._off < LIMITS.confirm:
            return None
        beyond = [t for t in recent if not off.low <= step_seconds(t) <= off.high]
        enough = beyond if len(beyond) > len(recent) / 2 else recent[-LIMITS.fewest :]
        return _drift(off, enough, ranks or range(len(table)))


def _usual(earlier: Sequence[Table], recent: Sequence[Table]) -> Expectation:
    steps, n = sorted(_steps(earlier)), len(earlier)
    middle, few = median(steps), n < LIMITS.base
    sides = [(part, median(part)) for part in (steps, _steps(recent)) if part]
    spread = 1.48 * median(abs(log(s / around)) for part, around in sides for s in part)
    chance = exp(LIMITS.z * 1.25 * spread * sqrt(1 / LIMITS.window + 1 / n))
    times = max(1 + (LIMITS.error if few else LIMITS.least), chance)
    quick = steps[n // 4] if few else middle  # of few, those that stand out are slow
    return Expectation(middle, "usual", quick / times, middle * times, tuple(_computing(earlier)))


def _off(expected: Expectation, recent: Sequence[Table]) -> bool:
    """Whether most recent steps are beyond the tolerance on one side, or a rank's computing is."""
    steps = _steps(recent)
    if median_low(steps) > expected.high or median_high(steps) < expected.low:
        return True
    if not expected.computing:
        return False
    tolerance = expected.high - expected.step
    limits = (
        max(LIMITS.device * before, LIMITS.least * expected.step, tolerance)
        for before in expected.computing
    )
    changes = zip(_computing(recent), expected.computing, limits, strict=True)
    return any(abs(now - before) > limit for now, before, limit in changes)


def step_seconds(table: Table) -> float:
    """Seconds of a step: of the rank that it took longest."""
    return max(computing + waiting for computing, waiting in table)


def _steps(tables: Sequence[Table]) -> list[float]:
    return [step_seconds(table) for table in tables]


def _drift(expected: Expectation, tables: Sequence[Table], ranks: Sequence[int]) -> Drift:
    now = median(_steps(tables))
    was = "were usual" if expected.source == "usual" else "were expected"
    what = f"steps take {now * 1e3:.0f} ms, {expected.step * 1e3:.0f} ms {was}"
    if not expected.computing:
        return Drift(expected.step, now, True, True, what, expected.source)
    computing, difference = _computing(tables), now - expected.step
    explained = 1.0  # steps are what they were: a device is not
    if abs(difference) > LIMITS.least * expected.step:
        explained = (max(computing) - max(expected.computing)) / difference
    if explained > 0.5:
        ratios = [n / max(1e-9, b) for n, b in zip(computing, expected.computing, strict=True)]
        factor, rank = max(zip(ratios, ranks, strict=True), key=lambda x: abs(x[0] - 1))
        why = f"rank {rank} computes {factor:.1f} times as long"
    else:
        why = f"waiting for traffic explains {min(1.0, 1.0 - explained):.0%} of it"
    devices, links = explained > LIMITS.part, explained < 1.0 - LIMITS.part
    return Drift(expected.step, now, devices, links, f"{what}; {why}", expected.source)


def _computing(tables: Sequence[Table]) -> list[float]:
    return [median(c for c, _ in column) for column in zip(*tables, strict=True)]
