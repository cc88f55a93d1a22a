"""Figures that follow from others of a study: speedup, efficiency, dollars; several as one.

Of a run on N devices with global batch B, against runs of the same workload on one device, which
are those of `single` where there are any (Grama et al., Introduction to Parallel Computing, 5.2):

    strong scaling   speedup = step_1(B) / step_N(B)               the same batch on more devices
    weak scaling     speedup = samples/s_N(B) / samples/s_1(B/N)   the same rows for each device
    efficiency       speedup / N
    dollars          price per hour x instances x seconds / 3600   [`HourlyPrice.dollars`]

On one device those of the same seed count, else medians over the seeds. What ran on emulated
hosts is compared with what did alike, predictions with predictions, a cluster with itself."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import median
from typing import TypeVar

from synchromesh.catalogue.prices import HourlyPrice
from synchromesh.results.run import Reached, RunResult
from synchromesh.results.study import StudyResults, StudySettings

T = TypeVar("T")


def derive(results: StudyResults) -> StudyResults:
    """The document with `speedup`, `efficiency`, `dollars` and the dollars of each target of its
    runs worked out; None where something is not known. Without a price, dollars stay."""
    weak = results.settings.scaling == "weak"
    done = tuple(run for run in results.runs if run.status == "done")
    runs = (_priced(_compared(run, done, weak), results.price) for run in results.runs)
    return replace(results, runs=tuple(runs))


def throughput(run: RunResult) -> float | None:
    """Samples per second, end to end where that was measured, else by the median step."""
    if run.samples_per_second is not None:
        return run.samples_per_second
    return run.batch / run.step_seconds.median if _timed(run) and run.step_seconds else None


def _compared(run: RunResult, done: Sequence[RunResult], weak: bool) -> RunResult:
    speedup = None
    if run.status == "done":
        speedup = _weak(run, done) if weak else _strong(run, done)
    efficiency = None if speedup is None else speedup / run.devices
    return replace(run, speedup=speedup, efficiency=efficiency)


def _strong(run: RunResult, done: Sequence[RunResult]) -> float | None:
    one = [r.step_seconds.median for r in _on_one_device(run, run.batch, done) if r.step_seconds]
    if not one or not _timed(run) or run.step_seconds is None:
        return None
    return median(one) / run.step_seconds.median


def _weak(run: RunResult, done: Sequence[RunResult]) -> float | None:
    rows, rest = divmod(run.batch, run.devices)
    one = [throughput(r) for r in _on_one_device(run, rows, done)] if not rest else []
    of_one = [value for value in one if value]
    own = throughput(run)
    return None if not of_one or own is None else own / median(of_one)


def _on_one_device(run: RunResult, batch: int, done: Sequence[RunResult]) -> list[RunResult]:
    place = attrgetter("workload", "cluster", "emulated", "predicted")
    one = [r for r in done if (r.devices, r.batch) == (1, batch) and _timed(r)]
    alike = [r for r in one if place(r) == place(run)]
    base = [r for r in alike if r.strategy == "single"] or alike
    return [r for r in base if r.seed == run.seed] or base


def _timed(run: RunResult) -> bool:
    return run.step_seconds is not None and run.step_seconds.median > 0


def _priced(run: RunResult, price: HourlyPrice | None) -> RunResult:
    if price is None:
        return run

    def dollars(seconds: float | None) -> float | None:
        return None if seconds is None else price.dollars(seconds, run.devices)

    def reached(target: Reached) -> Reached:
        return replace(target, dollars=dollars(target.seconds))

    return replace(
        run, dollars=dollars(run.seconds), to_target=run.to_target and reached(run.to_target),
        further_targets=tuple(map(reached, run.further_targets)),
    )  # fmt: skip


def merged(studies: Sequence[StudyResults]) -> StudyResults:
    """The runs of all documents, in their order, with speedups anew.

    Runs of different machines get these in their cluster, so that they are not compared. Prices
    stay those of their documents. ValueError where scaling is not the same."""
    first, *others = studies
    if not others:
        return first
    if len({study.settings.scaling for study in studies}) > 1:
        raise ValueError(
            "strong and weak scaling are not compared on one page: report on each by itself"
        )
    return derive(
        replace(
            first, title=_joined(study.title for study in studies),
            created=max(study.created for study in studies),
            command=_joined((study.command for study in studies), "\n"),
            note=_joined((study.note for study in studies), "\n"),
            runs=tuple(run for study in _placed(studies) for run in derive(study).runs),
            settings=StudySettings(scaling=first.settings.scaling),
            cluster=_same([study.cluster for study in studies]),
            emulated=any(study.emulated for study in studies),
            versions=_versions([study.versions for study in studies]),
            price=_same([study.price for study in studies]),
        )
    )  # fmt: skip


def _same(values: Sequence[T]) -> T | None:
    """What all of them are; None where they differ."""
    return values[0] if all(value == values[0] for value in values) else None


def _placed(studies: Sequence[StudyResults]) -> Iterator[StudyResults]:
    machines = list(dict.fromkeys(study.machine for study in studies))
    if len(machines) == 1:
        yield from studies
        return
    for study in studies:
        machine = study.machine
        number = machines.index(machine) + 1
        where = f"machine {number}: {machine.processor} ({machine.cores} cores)"
        placed = (
            run if run.predicted else replace(run, cluster=_joined([where, run.cluster]))
            for run in study.runs
        )  # fmt: skip
        yield replace(study, runs=tuple(placed))


def _joined(texts: Iterable[str], between: str = ", ") -> str:
    return between.join(dict.fromkeys(text for text in texts if text))


def _versions(versions: Sequence[Mapping[str, str]]) -> dict[str, str]:
    names = dict.fromkeys(name for of_study in versions for name in of_study)
    return {n: _joined((v.get(n, "") for v in versions), " and ") for n in names}
