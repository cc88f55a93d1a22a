"""The tables of docs/study/README.md: who is first, accuracy, published figures beside ours.

    python -m benchmarks.study_tables docs/study/results.json --published ../shared/published
    python -m benchmarks.study_tables --full ../shared/data/cifar100    full forms, predicted

Absolute times of other devices and models say nothing; what can be set side by side are ratios:
speedup over one device, the share of time in communication, memory over that of one device.
"""

import argparse
import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from synchromesh.results.groups import comparisons
from synchromesh.results.run import RunResult
from synchromesh.results.study import StudyResults, StudySettings
from synchromesh.study.prediction import predicted
from synchromesh.study.strategy import OURS
from synchromesh.workloads.target import load

ROOT = Path(__file__).parents[1]
NONE = "–"
# the published model -> ours, the published strategy -> ours
MODELS = {"ResNet-50": "cifar100/resnet_small", "ViT-B/16": "cifar100/vit_small"}
STRATEGIES = {
    "single": ("single",),
    "dp": ("data",),
    "mp": ("tensor", "pipeline"),
    "hybrid": ("hybrid",),
    "adaptive": ("auto",),
}
ROWS = 64  # of a global batch, in the rows that are set beside published ones
Row = dict[str, str]


def rows(path: Path) -> list[Row]:
    """Of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def firsts(results: StudyResults) -> Iterator[list[str]]:
    """`auto` beside the quickest strategy on as many devices, and beside one device alone, for
    each model and number of devices."""
    yield [
        "model", "rows", "devices", "one device", "DDP", "first", "auto", "auto over the first",
        "auto over one device", "plan",
    ]  # fmt: skip
    timed = [r for r in results.runs if r.step_seconds and r.emulated]
    for auto in (r for r in timed if r.strategy == "auto"):
        alike = [
            r
            for r in timed
            if (r.workload, r.batch, r.cluster) == (auto.workload, auto.batch, auto.cluster)
            and r.devices in (1, auto.devices)
        ]
        first = min((r for r in alike if r.devices == auto.devices), key=seconds)
        by_name = {r.strategy: seconds(r) for r in alike}
        alone = by_name.get("single")
        yield [
            auto.workload, str(auto.batch), str(auto.devices), milliseconds(alone),
            milliseconds(by_name.get("ddp")), f"{first.strategy}, {milliseconds(seconds(first))}",
            milliseconds(seconds(auto)), f"{seconds(auto) / seconds(first):.3f}",
            NONE if alone is None else f"{seconds(auto) / alone:.3f}", f"`{auto.plan}`",
        ]  # fmt: skip


def accuracies(results: StudyResults) -> Iterator[list[str]]:
    """The first metric after the last epoch: mean and sample standard deviation over seeds."""
    yield ["model", "strategy", "devices", "metric", "mean", "deviation", "seeds", "off the mean"]
    for comparison in comparisons(results):
        for name in comparison.metrics[:1]:
            ends = [(g.first, end) for g in comparison.groups if (end := g.ends(name))]
            middle = fmean(end.mean for _, end in ends)
            for run, end in ends:
                yield [
                    run.workload, run.strategy, str(run.devices), name, f"{end.mean:.4f}",
                    f"{end.deviation:.4f}", str(end.count), f"{end.mean - middle:+.4f}",
                ]  # fmt: skip


def seconds(run: RunResult) -> float:
    """The median of a step."""
    assert run.step_seconds is not None
    return run.step_seconds.median


def milliseconds(value: float | None) -> str:
    """Of seconds."""
    return NONE if value is None else f"{1e3 * value:.0f} ms"


def speedups(results: StudyResults, published: Sequence[Row]) -> Iterator[list[str]]:
    """`seed000_table1.csv` beside emulated and predicted rows on as many devices."""
    yield [
        "model", "strategy", "devices", "speedup: published", "10 Gbit, emulated",
        "NVLink, predicted", "in communication: published", "10 Gbit", "memory: published",
        "10 Gbit",
    ]  # fmt: skip
    alone = {row["model"]: float(row["peak_mem_gb"]) for row in published if row["gpus"] == "1"}
    for row in published:
        for strategy in STRATEGIES[row["strategy"]]:
            devices = int(row["gpus"])
            ours, of = MODELS[row["model"]], (strategy, devices)
            run, one = found(results, ours, *of), found(results, ours, "single", 1)
            fast = found(results, ours, *of, predicted=True)
            yield [
                row["model"], f"{row['strategy']}: {strategy}", row["gpus"],
                f"{float(row['derived_speedup_vs_single']):.2f}",
                figure(run, lambda r: r.speedup), figure(fast, lambda r: r.speedup),
                f"{float(row['comm_pct']):.0f} %", percent(figure_of(run, exposed)),
                f"{float(row['peak_mem_gb']) / alone[row['model']]:.2f}",
                ratio(figure_of(run, memory), figure_of(one, memory)),
            ]  # fmt: skip


def throughputs(results: StudyResults, published: Sequence[Row]) -> Iterator[list[str]]:
    """`seed002_results.csv` beside one and two processes of this machine."""
    yield [
        "setting", "samples/s over one device's: published", "ours", "utilisation: published",
        "ours", "memory of a device over one device's: published", "ours",
    ]  # fmt: skip
    names = {"naive-128": "single", "dataparallel-256": "data"}
    alone = published[0]
    ours = [r for r in results.runs if not (r.emulated or r.predicted)]
    ours = [r for r in ours if r.workload == MODELS["ResNet-50"]]
    one = next((r for r in ours if r.strategy == "single" and r.batch == 128), None)
    for row in published:
        batch = int(row["global_batch"])
        run = next(
            (
                r
                for r in ours
                if r.batch == batch
                and r.strategy.startswith(names.get(row["config"], "pipeline:"))
            ),
            None,
        )
        most = max(float(part) for part in row["mem_gb"].split("+"))
        yield [
            row["config"],
            f"{float(row['samples_per_s']) / float(alone['samples_per_s']):.2f}",
            ratio(figure_of(run, rate), figure_of(one, rate)),
            f"{row['gpu_util_pct']} %", percent(figure_of(run, lambda r: r.utilisation)),
            f"{most / float(alone['mem_gb']):.2f}",
            ratio(figure_of(run, memory), figure_of(one, memory)),
        ]  # fmt: skip


def found(
    results: StudyResults, workload: str, strategy: str, devices: int, predicted: bool = False
) -> RunResult | None:
    """The emulated run, or the prediction; on one device that of the lab with eight hosts."""
    alike = [
        r
        for r in results.runs
        if (r.workload, r.batch, r.strategy, r.devices) == (workload, ROWS, strategy, devices)
        and (r.predicted if predicted else r.emulated)
    ]
    return alike[-1] if alike else None


def exposed(run: RunResult) -> float | None:
    """The share of a step in which nothing is computed for communication."""
    share = run.communication_share
    return None if share is None else share.exposed


def memory(run: RunResult) -> float | None:
    """Bytes of the device that needs most."""
    return max((of.total for of in run.peak_memory_bytes), default=None)


def rate(run: RunResult) -> float | None:
    """Samples a second."""
    return run.samples_per_second


def figure_of(run: RunResult | None, of: Callable[[RunResult], float | None]) -> float | None:
    """Of a run that has ended."""
    return None if run is None or run.status == "failed" else of(run)


def figure(run: RunResult | None, of: Callable[[RunResult], float | None]) -> str:
    """With two decimals."""
    value = figure_of(run, of)
    return NONE if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    """Of a share."""
    return NONE if value is None else f"{value:.0%}".replace("%", " %")


def ratio(value: float | None, base: float | None) -> str:
    """Of two figures."""
    return NONE if value is None or not base else f"{value / base:.2f}"


def full_forms(data: Path) -> Iterator[list[str]]:
    """ResNet-50 (images of 32 x 32) and ViT-B/16 (of 224 x 224), 128 rows, on V100s with NVLink,
    predicted."""
    yield ["model", "strategy", "devices", "images/s", "plan or reason"]
    settings = StudySettings(OURS, (8,), (128,), (0,))
    for target in ("cifar100/resnet50", "cifar100/vit_b16"):
        workload = replace(load(target, str(data)), batch_size=128)
        for run in predicted(workload, settings, ["v100"]):
            speed = NONE if run.step_seconds is None else f"{run.batch / seconds(run):,.0f}"
            why = f"`{run.plan}`" if run.plan else run.reason
            yield [target, run.strategy, str(run.devices), speed, why]


def markdown(table: Sequence[Sequence[str]]) -> str:
    """The first row is the head."""
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?", default=ROOT / "docs/study/results.json")
    parser.add_argument("--full", type=Path, help="the folder of CIFAR-100, for their shapes")
    parser.add_argument("--published", type=Path, default=ROOT / "../shared/published")
    options = parser.parse_args()
    if options.full:
        print(markdown([*full_forms(options.full)]))
        return 0
    results = StudyResults.load(options.results)
    print(markdown([*firsts(results)]), end="\n\n")
    print(markdown([*accuracies(results)]), end="\n\n")
    print(markdown([*speedups(results, rows(options.published / "seed000_table1.csv"))]))
    print()
    print(markdown([*throughputs(results, rows(options.published / "seed002_results.csv"))]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
