"""Figures that follow from others of a study: speedup, efficiency, dollars.

Of a run on N devices with global batch B, against runs of the same workload on one device, which
are those of `single` where there are any (Grama et al., Introduction to Parallel Computing, 5.2):

    strong scaling   speedup = step_1(B) / step_N(B)               the same batch on more devices
    weak scaling     speedup = samples/s_N(B) / samples/s_1(B/N)   the same rows for each device
    efficiency       speedup / N
    dollars          price per hour x instances x seconds / 3600   [`HourlyPrice.dollars`]

Of several runs on one device those of the same seed count, which took turns with the run; where
there is none step_1 and samples/s_1 are medians over the seeds. What ran on emulated
hosts is compared with what did alike, predictions with predictions, a cluster with itself."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from synchromesh.catalogue.prices import HourlyPrice
from synchromesh.results.run import Reached, RunResult
from synchromesh.results.study import StudyResults


def derive(results: StudyResults) -> StudyResults:
    """The document with `speedup`, `efficiency`, `dollars` and the dollars of each target of its
    runs worked out; None where something that they follow from is not known. Without a price,
    dollars stay as they are."""
    weak = results.settings.scaling == "weak"
    done = tuple(run for run in results.runs if run.status == "done")
    return replace(
        results,
        runs=tuple(_priced(_compared(run, done, weak), results.price) for run in results.runs),
    )


def throughput(run: RunResult) -> float | None:
    """Samples per second, end to end where that was measured, else by the median step."""
    if run.samples_per_second is not None:
        return run.samples_per_second
    return run.batch / run.step_seconds.median if _timed(run) and run.step_seconds else None


def _compared(run: RunResult, done: Sequence[RunResult], weak: bool) -> RunResult:
    speedup = None
    if run.status == "done":
        speedup = _weak(run, done) if weak else _strong(run, done)
    return replace(
        run, speedup=speedup, efficiency=None if speedup is None else speedup / run.devices
    )


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
    wanted = (1, batch, run.workload, run.cluster, run.emulated, run.predicted)
    alike = [
        r
        for r in done
        if (r.devices, r.batch, r.workload, r.cluster, r.emulated, r.predicted) == wanted
        and _timed(r)
    ]
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
        run,
        dollars=dollars(run.seconds),
        to_target=run.to_target and reached(run.to_target),
        further_targets=tuple(map(reached, run.further_targets)),
    )
