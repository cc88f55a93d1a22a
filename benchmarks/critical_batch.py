"""Epochs to a target over batch sizes: `python -m benchmarks.critical_batch [--data DIR]
[--published FILE] [-o FILE.json] [--csv DIR] [--runs DIR] [--only SWEEP]`.

Bundled workloads are trained to an accuracy on validation data with 8 batch sizes and at least 3
seeds of each. E(B) = E_min (1 + B / B_crit) is fitted to the mean epochs of each batch size, and
each is left out once (McCandlish et al. 2018, arXiv 1812.06162). Beside B_crit stand the gradient
noise scale tr S / |G|^2 of the same runs and published figures of the task: a critical batch and a
noise scale are two things, published ones lie 1.5 to 20 times apart.

    rows      in a seeded order, epoch after epoch, in batches that are all full: epochs are rows
              over the rows of the training data, and need not be whole
    target    accuracy is evaluated whenever rows have grown by `growth`, so that all batch sizes
              have the same relative resolution; it is averaged over `window` evaluations, and the
              target is reached where the straight line between two averages crosses it
    rates     constant, without the workload's schedule, which counts in epochs and so would end
              while large batches train: those of the rule (`sqrt`: AdamW) times a power of 2,
              the best for each batch size, of runs whose seeds count for nothing else
    start     noise scale of the first ten steps, of which each is measured
    average   ... of those measured after them, at even distances to the target. Quotients of the
              moments' means over steps and seeds, with the workload's own batch size

Goals: left-out errors of 8 % in the mean and 15 % at most. Epochs depend on seeds alone, averages
of the noise scale also on how often a step is timed to afford being measured."""

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

import synchromesh as sm
from benchmarks.machine import machine
from benchmarks.published import read
from synchromesh.cost.efficiency import HEADING, EpochFit
from synchromesh.engine.noise_averages import MEASURING, NoiseScale
from synchromesh.training.learning_rate import scaled
from synchromesh.training.trainer import Trainer
from synchromesh.values.document import write
from synchromesh.workloads.target import load
from synchromesh.workloads.workload import Workload
from tests.real_data import DATA

GOALS = {"mean": 0.08, "largest": 0.15}  # left-out errors
PLAN = "single; @micro_batches=2"  # two blocks, whose gradients tell the noise scale

Batch = tuple[Tensor, Tensor]
Curve = Sequence[tuple[int, float]]  # rows that were trained, accuracy


@dataclass(frozen=True)
class Sweep:
    """accuracy: the target, one that all batch sizes reach. task: of the published figures.
    validated: rows of the validation data, in a seeded order. first, most: rows that are trained
    before the first evaluation, and at most. tuning: seeds that learning rates are chosen with;
    seeds: those of which epochs are measured."""

    workload: str
    accuracy: float
    validated: int
    first: int
    most: int
    task: str = ""
    tuning: tuple[int, ...] = (0,)
    seeds: tuple[int, ...] = (1, 2, 3)
    batches: tuple[int, ...] = tuple(2**k for k in range(3, 11))


# Of vit_small one core computes 600 to 700 rows a second, fewer of small batches, so that the
# target and the largest batch are what two cores reach in about half an hour.
SWEEPS: Mapping[str, Sweep] = {
    "digits": Sweep(
        "digits/cnn", 0.98, 360, 512, 200_000, tuning=(101, 102, 103), seeds=tuple(range(1, 13))
    ),
    "mnist": Sweep(
        "mnist/vit_small", 0.8, 500, 4_096, 250_000, "MNIST",
        batches=tuple(2**k for k in range(2, 10)),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """How epochs are measured; all of it was chosen, alike for all batch sizes."""

    rule: str = "sqrt"  # of learning rates; both workloads train with AdamW
    factor: float = 2.0  # between two learning rates that are tried
    growth: float = 1.08  # of rows, from one evaluation to the next
    window: int = 5  # evaluations that are averaged, the middle one's rows counting


METHOD = Method()


@dataclass(frozen=True)
class Job:
    """A workload with its data as two batches; epochs are those of `train`. kept: a folder of the
    runs that have ended."""

    sweep: Sweep
    workload: Workload
    train: Batch
    valid: Batch
    kept: Path | None = None

    @property
    def rows(self) -> int:
        return len(self.train[1])

    def accuracy(self, trainer: Trainer) -> float:
        assert self.workload.metric is not None
        return trainer.evaluate([self.valid], self.workload.metric)["accuracy"]


@dataclass(frozen=True)
class Run:
    """epochs: to the target; infinite: not reached. curve: what was evaluated. start, end: the
    noise scale after the steps that are measured one by one, and at the end."""

    epochs: float
    curve: Curve = ()
    start: NoiseScale = field(default_factory=NoiseScale)
    end: NoiseScale = field(default_factory=NoiseScale)

    @classmethod
    def load(cls, path: Path) -> "Run":
        told = json.loads(path.read_text())
        scales = (NoiseScale(**told[moment]) for moment in ("start", "end"))
        return cls(told["epochs"], told["curve"], *scales)


@cache
def job(name: str, folder: Path, kept: Path | None = None) -> Job:
    """Of a sweep. folder: that of all data sets. kept: that of runs."""
    sweep = SWEEPS[name]
    data = folder / "mnist" if sweep.workload.startswith("mnist/") else None
    workload = replace(load(sweep.workload, data), scheduler=None)
    train: Any = workload.train_data
    valid: Any = workload.valid_data
    order = torch.randperm(len(valid), generator=torch.Generator().manual_seed(0))
    some = [valid[i] for i in order[: sweep.validated].tolist()]
    every = default_collate([train[i] for i in range(len(train))])
    return Job(sweep, workload, tuple(every), tuple(default_collate(some)), kept)


def batches(rows: int, size: int, seed: int) -> Iterator[Tensor]:
    """Numbers of rows, without end: seeded orders of all rows behind each other, cut into batches
    of `size`."""
    generator, left = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
    while True:
        while len(left) < size:
            left = torch.cat([left, torch.randperm(rows, generator=generator)])
        yield left[:size]
        left = left[size:]


def crossing(curve: Curve, target: float, window: int = METHOD.window) -> float:
    """Rows at which accuracy, averaged over `window` evaluations, first comes to the target."""
    around, before = window // 2, (0.0, 0.0)
    for at in range(around, len(curve) - around):
        value = mean(a for _, a in curve[at - around : at + around + 1])
        rows = float(curve[at][0])
        if value >= target:
            share = (target - before[1]) / (value - before[1]) if before[0] else 1.0
            return before[0] + share * (rows - before[0])
        before = rows, value
    return math.inf


def best_factor(
    epochs: Callable[[float, float], float], by: float = METHOD.factor
) -> dict[float, float]:
    """The epochs of each factor of learning rates that was tried, from 1 on in the direction in
    which they become fewer, until they do not. epochs: of a factor, infinite beyond a limit."""
    tried = {1.0: epochs(1.0, math.inf)}
    for direction in (1.0 / by, by):
        factor, best = direction, min(tried.values())
        while (found := epochs(factor, best)) < best:
            tried[factor] = best = found
            factor *= direction
        tried[factor] = found
        if direction in tried and tried[direction] < tried[1.0]:
            break
    return tried


def trained(job: Job, batch: int, factor: float, seed: int, most: float = math.inf) -> Run:
    """The run until the target is reached, or what was kept of it. factor: of learning rates,
    beside the rule. most: epochs after which it does not matter any more."""
    if job.kept is None:
        return _trained(job, batch, factor, seed, most)
    name = f"{job.workload.name}-{job.sweep.accuracy}".replace("/", "-")
    path = job.kept / f"{name}-{batch}-{factor:g}-{seed}-{most:.6g}.json"
    if not path.exists():
        job.kept.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(asdict(_trained(job, batch, factor, seed, most))))
    return Run.load(path)


def _trained(job: Job, batch: int, factor: float, seed: int, most: float) -> Run:
    base, sweep = job.workload.batch_size, job.sweep
    ruled, _ = scaled(replace(job.workload, batch_size=batch), METHOD.rule, base)
    torch.manual_seed(seed)
    model = ruled.build()
    optimizer = ruled.build_optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] *= factor
    trainer = sm.prepare(
        model, optimizer, ruled.loss, tuple(part[:batch] for part in job.train), PLAN,
        scheduler=ruled.build_scheduler(optimizer), seed=seed, noise_scale=True,
    )  # fmt: skip
    try:
        return _to_target(job, trainer, batch, seed, min(most * job.rows, sweep.most))
    finally:
        trainer.close()


def _to_target(job: Job, trainer: Trainer, batch: int, seed: int, most: float) -> Run:
    rows, due, start = 0, job.sweep.first, NoiseScale()
    curve, reached = list[tuple[int, float]](), math.inf
    for chosen in batches(job.rows, batch, seed):
        trainer.step(tuple(part[chosen] for part in job.train))
        rows += batch
        if start.steps < MEASURING.least:
            start = trainer.noise_scale or start
        if rows < due:
            continue
        due = math.ceil(rows * METHOD.growth)
        curve.append((rows, job.accuracy(trainer)))
        reached = crossing(curve, job.sweep.accuracy)
        if reached < math.inf or rows > most * METHOD.growth:
            break
    return Run(reached / job.rows, curve, start, trainer.noise_scale or start)


def mean_epochs(job: Job, batch: int, factor: float, most: float) -> float:
    """Of the seeds that learning rates are chosen with; infinite beyond `most`."""
    seeds, total = job.sweep.tuning, 0.0
    for seed in seeds:
        if total >= most * len(seeds):
            return math.inf
        total += trained(job, batch, factor, seed, most * len(seeds) - total).epochs
    return total / len(seeds)


def measured(name: str, batch: int, folder: Path, kept: Path | None) -> dict[str, Any]:
    """One batch size: learning rates, then the epochs of each seed, as plain numbers."""
    torch.set_num_threads(1)
    began, of = time.perf_counter(), job(name, folder, kept)
    tried = best_factor(partial(mean_epochs, of, batch))
    factor = min(tried, key=lambda f: tried[f])
    runs = [trained(of, batch, factor, seed) for seed in of.sweep.seeds]
    return {
        "batch": batch, "factor": factor, "seconds": time.perf_counter() - began,
        "tried": {f"{f:g}": finite(e) for f, e in sorted(tried.items())},
        "epochs": [finite(run.epochs) for run in runs],
        "start": noise([run.start for run in runs]),
        "average": noise([run.end for run in runs], [run.start for run in runs]),
        "runs": [{**asdict(run), "epochs": finite(run.epochs)} for run in runs],
    }  # fmt: skip


def finite(epochs: float) -> float | None:
    """None: not reached."""
    return None if epochs == math.inf else epochs


def noise(found: Sequence[NoiseScale], without: Sequence[NoiseScale] = ()) -> float | None:
    """tr S / |G|^2 of all steps that `found` have measured, but for those of `without`; None where
    the gradient cannot be told from noise."""
    every = [(n.steps, n) for n in found] + [(-n.steps, n) for n in without]
    trace = sum(steps * (n.trace or 0.0) for steps, n in every)
    squared = sum(steps * (n.squared_gradient or 0.0) for steps, n in every)
    return trace / squared if trace > 0.0 and squared > 0.0 else None


def result(name: str, base: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fit of the batch sizes that reach the target with each seed, beside the noise scale.
    base: the workload's own batch."""
    reached = [row for row in rows if None not in row["epochs"]]
    fit = EpochFit(tuple((row["batch"], mean(row["epochs"])) for row in reached)).to_dict()
    own = next(row for row in rows if row["batch"] == base)
    within = all(fit[f"left_out_{kind}_error"] <= goal for kind, goal in GOALS.items())
    return {
        "sweep": name, **asdict(SWEEPS[name]), "base": base, "rows": rows, "fit": fit,
        "noise_scale": {kind: own[kind] for kind in ("start", "average")},
        "passed": within and len(reached) == len(rows),
    }  # fmt: skip


def swept(
    names: Sequence[str], folder: Path, kept: Path | None, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Of each sweep, its batch sizes on as many processes as there are cores."""
    context = multiprocessing.get_context("spawn")  # a fork of a torch that has run may hang
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        # the largest take longest
        asked = {
            (name, batch): pool.submit(measured, name, batch, folder, kept)
            for name in reversed(names)
            for batch in sorted(SWEEPS[name].batches, reverse=True)
        }
        for (name, batch), answer in asked.items():
            epochs = ", ".join("-" if e is None else f"{e:.3g}" for e in answer.result()["epochs"])
            say(f"{name}, {batch} rows: {epochs} epochs, {answer.result()['seconds']:.0f} s")
    return [
        result(
            name, load(SWEEPS[name].workload, None, True).batch_size,
            [asked[name, batch].result() for batch in SWEEPS[name].batches],
        )
        for name in names
    ]  # fmt: skip


def table(one: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown."""
    yield f"\n{one['workload']} to an accuracy of {one['accuracy']}, {len(one['seeds'])} seeds:\n"
    yield "| batch | rate | epochs | of the seeds | fitted | error | left out | noise scale |"
    yield "|---|---|---|---|---|---|---|---|"
    fitted = {point["batch"]: point for point in one["fit"]["points"]}
    for row in one["rows"]:
        cells = [f"{row['batch']:,}", f"{row['factor']:g}", "not reached"]
        if at := fitted.get(row["batch"]):
            ends = f"{min(row['epochs']):.2f} to {max(row['epochs']):.2f}"
            cells[2:] = [f"{at['epochs']:.2f}", ends, f"{at['fitted']:.2f}"]
            cells += [f"{at[key]:.1%}" for key in ("error", "left_out")]
            cells.append(f"{_rows(row['start'])}, then {_rows(row['average'])}")
        yield f"| {' | '.join(cells)} |"
    errors = (f"{one['fit'][f'left_out_{k}_error']:.1%} (goal {GOALS[k]:.0%})" for k in GOALS)
    yield "\nleft out: {} in the mean, {} at most".format(*errors)


def beside(one: Mapping[str, Any], published: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """What was measured, and published figures of the task, a line of Markdown each."""
    scale, row = one["noise_scale"], published.get(one["task"], {})
    name = f"| {one['workload']} "
    yield f"{name}| critical batch | {_rows(one['fit']['critical_batch'])} |"
    for kind in ("start", "average"):
        yield f"{name}| noise scale, {kind}, batches of {one['base']} | {_rows(scale[kind])} |"
    for key in ("critical_batch", "simple_noise_scale") if row else ():
        start, average = (row[f"{key}_{kind}"] for kind in ("start", "average"))
        yield f"| {one['task']}, published | {key.replace('_', ' ')} | {start} to {average} |"


def _rows(value: float | None) -> str:
    return "not known" if value is None else f"{value:,.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="of all data sets")
    parser.add_argument("--published", type=Path, metavar="FILE", help="noise_scale.csv")
    parser.add_argument("--only", choices=SWEEPS)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="all numbers as JSON")
    parser.add_argument("--csv", type=Path, metavar="DIR", help="of files for `efficiency`")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keeps runs, and goes on there")
    parser.add_argument("--json", action="store_true", help="all numbers on standard output")
    args = parser.parse_args()
    began, say = time.perf_counter(), lambda text: print(text, file=sys.stderr, flush=True)
    found = swept([args.only] if args.only else [*SWEEPS], args.data, args.runs, say)
    published = {row["task"]: row for row in (read(args.published) if args.published else ())}
    told = {"machine": machine(), "seconds": time.perf_counter() - began, "goals": GOALS,
            "method": asdict(METHOD), "sweeps": found}  # fmt: skip
    if args.output:
        write(args.output, json.dumps(told, indent=1) + "\n")
    for one in found if args.csv else ():
        args.csv.mkdir(parents=True, exist_ok=True)
        points = [f"{point['batch']},{point['epochs']:.4f}" for point in one["fit"]["points"]]
        write(args.csv / f"{one['sweep']}.csv", "\n".join([HEADING, *points]) + "\n")
    if args.json:
        print(json.dumps(told))
    else:
        show(found, published)
        print(f"\n{told['seconds']:.0f} s; {told['machine']}")
    return 0 if all(one["passed"] for one in found) else 1


def show(found: Sequence[Mapping[str, Any]], published: Mapping[str, Mapping[str, str]]) -> None:
    """The tables."""
    for one in found:
        print("\n".join(table(one)))
    print("\n| of | what | rows |\n|---|---|---|")
    for one in found:
        print("\n".join(beside(one, published)))


if __name__ == "__main__":
    sys.exit(main())
