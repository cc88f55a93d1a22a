"""Runs that belong together: those of several seeds, and those that may be compared.

Of seeds: times are medians, their quartiles medians of quartiles, metrics a mean and the sample
standard deviation s = sqrt(sum (x_i - mean)^2 / (n - 1)). Two groups differ beyond noise where
neither their quartiles nor the medians of their seeds overlap."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property
from statistics import fmean, median, stdev

from synchromesh.results.run import Epoch, Quartiles, RunResult
from synchromesh.results.study import StudyResults


@dataclass(frozen=True)
class Spread:
    """A metric over seeds: the mean, the sample standard deviation (0 of one), how many."""

    mean: float
    deviation: float
    count: int


@dataclass(frozen=True)
class MetricPoint:
    """A metric at the end of an epoch; seconds of training until then, as a median of seeds."""

    epoch: int
    seconds: float
    spread: Spread


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seed alone, at least one."""

    runs: tuple[RunResult, ...]

    @property
    def first(self) -> RunResult:
        """The first of its runs, for what is the same of all."""
        return self.runs[0]

    @cached_property
    def done(self) -> tuple[RunResult, ...]:
        return tuple(run for run in self.runs if run.status == "done")

    def median(self, of: Callable[[RunResult], float | None]) -> float | None:
        values = [value for run in self.done if (value := of(run)) is not None]
        return median(values) if values else None

    @cached_property
    def step_seconds(self) -> Quartiles | None:
        return _quartiles([run.step_seconds for run in self.done])

    @cached_property
    def epoch_seconds(self) -> Quartiles | None:
        """Of an epoch: measured, or the quartiles of a step times the steps of an epoch."""
        measured = _quartiles([run.epoch_seconds for run in self.done])
        epoch, step = self.median(lambda run: run.seconds_per_epoch), self.step_seconds
        if measured or epoch is None:
            return measured
        if step is None or not step.median:
            return Quartiles(epoch, epoch, epoch)
        return Quartiles(epoch, epoch * step.q1 / step.median, epoch * step.q3 / step.median)

    def ends(self, metric: str) -> Spread | None:
        last = [run.metrics[-1].values.get(metric) for run in self.done if run.metrics]
        return _spread([value for value in last if value is not None])

    def curve(self, metric: str) -> tuple[MetricPoint, ...]:
        ends: dict[int, list[Epoch]] = defaultdict(list)
        for end in (e for run in self.done for e in run.metrics if metric in e.values):
            ends[end.epoch].append(end)
        return tuple(
            MetricPoint(number, median(e.seconds for e in of_seeds), spread)
            for number, of_seeds in sorted(ends.items())
            if (spread := _spread([e.values[metric] for e in of_seeds])) is not None
        )

    def within_noise_of(self, other: "RunGroup") -> bool:
        """Whether the quartiles of step times overlap, or the medians of seeds do."""
        ours, theirs = self.step_seconds, other.step_seconds
        if ours is None or theirs is None:
            return False
        quartiles = ours.q1 <= theirs.q3 and theirs.q1 <= ours.q3
        a, b = (
            [run.step_seconds.median for run in group.done if run.step_seconds]
            for group in (self, other)
        )
        return quartiles or (min(a) <= max(b) and min(b) <= max(a))


@dataclass(frozen=True)
class RunComparison:
    """Groups that may be compared: of one workload on one cluster, with the same `rows` of the
    global batch (strong scaling) or of a device (weak)."""

    workload: str
    cluster: str
    rows: Fraction
    weak: bool
    emulated: bool
    predicted: bool
    groups: tuple[RunGroup, ...]

    @cached_property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({group.first.devices for group in self.groups}))

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        ends = (e for group in self.groups for run in group.done for e in run.metrics)
        return tuple(dict.fromkeys(name for end in ends for name in end.values))

    @cached_property
    def one_device(self) -> RunGroup | None:
        """What others are compared with: `single` on one device, else what else ran on one."""
        ran = [g for g in self.on(1) if g.step_seconds is not None]
        return next((g for g in ran if g.first.strategy == "single"), ran[0] if ran else None)

    def on(self, devices: int) -> tuple[RunGroup, ...]:
        return tuple(g for g in self.groups if g.first.devices == devices)

    def most_devices(self, has: Callable[[RunGroup], object]) -> int | None:
        """The number of devices on which most groups have something; of equals the largest."""
        counts = {n: sum(bool(has(g)) for g in self.on(n)) for n in self.devices}
        best = max(counts, key=lambda n: (counts[n], n), default=None)
        return best if best is not None and counts[best] else None


def comparisons(results: StudyResults) -> tuple[RunComparison, ...]:
    """The runs of a study, brought together; in the order of the document."""
    weak = results.settings.scaling == "weak"
    alike: dict[tuple[str, str, Fraction, bool, bool], list[RunResult]] = {}
    for run in results.runs:
        rows = Fraction(run.batch, run.devices) if weak else Fraction(run.batch)
        key = run.workload, run.cluster, rows, run.emulated, run.predicted
        alike.setdefault(key, []).append(run)
    return tuple(
        RunComparison(workload, cluster, rows, weak, emulated, predicted, _groups(runs))
        for (workload, cluster, rows, emulated, predicted), runs in alike.items()
    )


def _groups(runs: Iterable[RunResult]) -> tuple[RunGroup, ...]:
    alike: dict[tuple[str, int], list[RunResult]] = {}
    for run in runs:
        alike.setdefault((run.strategy, run.devices), []).append(run)
    return tuple(RunGroup(tuple(sorted(g, key=lambda run: run.seed))) for g in alike.values())


def _quartiles(of: Sequence[Quartiles | None]) -> Quartiles | None:
    known = [q for q in of if q is not None]
    if not known:
        return None
    return Quartiles(*(median(getattr(q, f.name) for q in known) for f in fields(Quartiles)))


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    return Spread(fmean(values), stdev(values) if len(values) > 1 else 0.0, len(values))
