"""Accuracy of what computes less exact mathematics: `python -m benchmarks.accuracy_of_words
[--results FILE] [--only PATTERN] [--published FILE] [--table]`.

Each word of `@synchronisation` and `@compression` after as many samples as `every-step` has had,
by mean accuracy of three seeds at the best of three learning rates (times the workload's), which a
fourth seed has chosen; the three are the same for all words. Compressors are also run without
error feedback: what they owe is forgotten behind each step.

    digits      digits/cnn, AdamW; 4 workers, 10 epochs
    cifar100    three convolutions and two layers on CIFAR-100, AdamW; 4 workers, 5 epochs
    stages      digits/cnn, and digits/vit: pipelines without a flush, four stages; 10 epochs
    gpt2        shakespeare/gpt2_small; 4 workers, 2 epochs: loss of validation text, and bytes
    slow        digits/cnn on 8 workers, of which one takes ten times as long: each takes the next
                rows of one order when it has done a step. Under SHAT with a = 0 workers are models
                alone, of which the mean of probabilities counts (an ensemble, as published)

Goals: points below every-step, as `GOALS` says, and each compressor without feedback below itself
with it; of gpt2 a loss of at most 1.03 times, with at most 1/45 of the bytes. A run is appended to
the file as it ends, and one that stands there is not run again. Data are in $SYNCHROMESH_DATA."""

import argparse
import fnmatch
import json
import math
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call  # type: ignore[attr-defined]

import synchromesh as sm
from benchmarks.hogwild import batches, tensors
from benchmarks.machine import machine
from benchmarks.published import read
from synchromesh.engine import asynchronous
from synchromesh.training import execution
from synchromesh.training.trainer import Trainer
from synchromesh.values import buckets
from synchromesh.values.buckets import BucketSizes
from synchromesh.workloads.target import load
from synchromesh.workloads.training import adamw, warm_up
from synchromesh.workloads.workload import Workload
from tests.ranks import run
from tests.real_data import DATA

RATES = (0.3, 1.0, 3.0)  # times the workload's learning rate
TUNING, SEEDS = 100, (0, 1, 2)
BASE = "every-step"
FORGETFUL = ", no feedback"
GOALS = {  # points of accuracy
    "local:8": 1.0, "ssp": 1.0, "downpour": 1.0, "shat": 1.0, "powersgd:4": 0.5, "int8": 0.5,
    "topk:0.01": 1.0, "onebit": 1.0, "pipedream": 1.0, "pipedream-2bw": 1.0,
}  # fmt: skip
LOSS, BYTES = 1.03, 1 / 45  # of diloco:50, over every-step's
COMPRESSED = ("powersgd:4", "int8", "topk:0.01", "onebit")
ENDS = {"shat, a = 0": 0.0, "shat, a = 1": 1.0}
UNFLUSHED = ("pipedream", "pipedream-2bw")
SLOWER = 10  # times as long as others the slow worker takes
PLANS = {
    BASE: "data", "local:8": "data; @synchronisation=local:8",
    "ssp": "data; @synchronisation=ssp:2,stale=3",
    "downpour": "data; @synchronisation=downpour:2", "shat": "data; @synchronisation=shat:2",
    "diloco:50": "data; @synchronisation=diloco:50",
    **{word: f"data; @compression={word}" for word in COMPRESSED},
    **{word + FORGETFUL: f"data; @compression={word}" for word in COMPRESSED},
    **dict.fromkeys(ENDS, "data; @synchronisation=shat:2"),
    **{word: f"hybrid:stages=4; @micro_batches=4; @schedule={word}" for word in UNFLUSHED},
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """What is trained how. score: the name of a metric; less: whether less of it is better."""

    workload: str
    words: tuple[str, ...]
    epochs: int
    workers: int = 4
    data: str = ""  # its folder
    score: str = "accuracy"
    less: bool = False
    limit: float = 120.0  # seconds of a run on two idle cores, at most


WORDS = (
    BASE, *(word for word in GOALS if word not in UNFLUSHED),
    *(word + FORGETFUL for word in COMPRESSED),
)  # fmt: skip
MODELS: Mapping[str, Model] = {
    "digits": Model("digits/cnn", WORDS, 10),
    "stages-cnn": Model("digits/cnn", (BASE, *UNFLUSHED), 10),
    "stages-vit": Model("digits/vit", (BASE, *UNFLUSHED), 10),
    "slow": Model("digits/cnn", (BASE, "downpour", "ssp", "shat", *ENDS), 10, workers=8),
    "cifar100": Model("cifar100/vgg_small", WORDS, 5, data="cifar100"),
    "gpt2": Model(
        "shakespeare/gpt2_small", (BASE, "diloco:50"), 2, data="tinyshakespeare", score="nll",
        less=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One run."""

    model: str
    word: str
    rate: float
    seed: int


Known = dict[Cell, dict[str, Any]]  # what came of runs


def small_net() -> nn.Module:
    """For images of 3 x 32 x 32 of 100 classes; 201 K parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(),
        nn.Linear(128, 100),
    )  # fmt: skip


@cache
def job(name: str) -> tuple[Workload, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A model's workload, with its data as tensors; ValueError where they are not here."""
    of = MODELS[name]
    workload = load(of.workload, DATA / of.data if of.data else None)
    if name == "cifar100":
        steps = of.epochs * len(workload.train_data) // 128  # type: ignore[arg-type]
        workload = replace(
            workload, model=small_net, optimizer=adamw(1e-3), batch_size=128,
            scheduler=warm_up(50, decay=steps),
        )  # fmt: skip
        workload.train_data.padding = None  # type: ignore[union-attr]
    return workload, tensors(workload.train_data), tensors(workload.valid_data)


def trained(cell: Cell, taken: Any) -> dict[str, Any]:
    """On every rank. taken: batches that slow and quick workers have taken, together."""
    warnings.simplefilter("ignore")
    buckets.SIZES = BucketSizes()  # not those of tests
    of, (workload, data, valid) = MODELS[cell.model], job(cell.model)
    if cell.word in ENDS:
        asynchronous.share = lambda others, workers: ENDS[cell.word]
    torch.manual_seed(cell.seed)
    model = workload.build()
    optimizer = workload.build_optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] *= cell.rate
    trainer = sm.prepare(
        model, optimizer, workload.loss, tuple(x[: workload.batch_size] for x in data),
        PLANS[cell.word], scheduler=workload.build_scheduler(optimizer), seed=cell.seed,
    )  # fmt: skip
    trainer.world.ledger.reset()
    began = time.perf_counter()
    if cell.model == "slow" and cell.word != BASE:
        take_turns(trainer, data, workload.batch_size // of.workers, cell.seed, taken)
    else:
        for epoch in range(of.epochs):
            order = 1000 * cell.seed + epoch
            for batch in batches(trainer, data, workload.batch_size, order):
                trainer.step(batch)
                if cell.word.endswith(FORGETFUL):
                    forget(trainer)
    alone = apart(trainer, workload, valid) if ENDS.get(cell.word) == 0.0 else {}
    trainer.workers.take_means()  # what ends a run is sent, too
    seconds, sent = time.perf_counter() - began, trainer.gather_numbers(trainer.world.ledger.sent)
    assert workload.metric is not None
    parts = zip(*(x.split(256) for x in valid), strict=True)
    found = trainer.evaluate((trainer.shard(part) for part in parts), workload.metric)
    told = {
        "score": found[of.score], "sent": sum(sent) / len(sent), "seconds": seconds,
        "staleness": trainer.workers.staleness(), "updates": trainer.workers.updates(), **alone,
    }  # fmt: skip
    trainer.close()
    return told


def take_turns(
    trainer: Trainer, data: tuple[Tensor, ...], rows: int, seed: int, taken: Any
) -> None:
    """Each worker takes the next rows when it has done a step; the last one rests in between."""
    execution.LOOKED_AT = 1 << 60  # nobody waits for others to compare settings, but at first
    epochs = MODELS["slow"].epochs
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(data[0]), generator=generator) for _ in range(epochs)])
    groups = order.split(rows)[: len(order) // rows]
    slow = trainer.rank == trainer.world.size - 1
    while True:
        with taken.get_lock():
            number = taken.value
            taken.value += 1
        if number >= len(groups):
            break
        began = time.perf_counter()
        trainer.step(tuple(x[groups[number]] for x in data))
        if slow:
            time.sleep((SLOWER - 1) * (time.perf_counter() - began))
    trainer.steps = len(groups) // trainer.world.size  # equal, as all ranks go on together now


def apart(trainer: Trainer, workload: Workload, valid: tuple[Tensor, ...]) -> dict[str, float]:
    """Of models that have trained alone: the accuracy of their mean probabilities, and the mean of
    their accuracies."""
    whole = {n: p.detach() for n, p in trainer.workers.whole.items()}
    with torch.no_grad():
        scores = functional_call(workload.build(), whole, (valid[0],)).softmax(1)
    right = torch.stack([(scores.argmax(1) == valid[1]).float().mean()])
    for x in (scores, right):
        dist.all_reduce(x)
    accuracy = (scores.argmax(1) == valid[1]).float().mean()
    return {"ensemble": float(accuracy), "own": float(right) / dist.get_world_size()}


def forget(trainer: Trainer) -> None:
    """Nothing is owed to the steps to come."""
    for bucket in trainer.sums.now.compressed:
        bucket.compressor.owe(torch.zeros_like(bucket.compressor.owed()))


# Runs, and the file of them


def known_of(path: Path) -> Known:
    """What stands in the file; a last line that was cut short is none."""
    known: Known = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            told = json.loads(line)
        except json.JSONDecodeError:
            continue
        known[Cell(told["model"], told["word"], told["rate"], told["seed"])] = told
    return known


def score(told: Mapping[str, Any]) -> float:
    value = float(told.get("ensemble", told["score"]))
    return value if math.isfinite(value) else math.inf


def best_rate(known: Known, model: str, word: str) -> float | None:
    """None: not all three are known."""
    tried = {r: known.get(Cell(model, word, r, TUNING)) for r in RATES}
    found = {r: score(told) for r, told in tried.items() if told is not None}
    if len(found) < len(RATES):
        return None
    worst = {r: value if MODELS[model].less else -value for r, value in found.items()}
    return min(worst, key=lambda r: (math.isinf(found[r]), worst[r]))


def missing(known: Known, model: str, word: str) -> Iterator[Cell]:
    """The runs to come; the best rate is known when its turn is."""
    yield from (Cell(model, word, rate, TUNING) for rate in RATES)
    best = best_rate(known, model, word)
    assert best is not None
    yield from (Cell(model, word, best, seed) for seed in SEEDS)


def measure(path: Path, only: str) -> None:
    known = known_of(path)
    for model, of in MODELS.items():
        for word in of.words:
            if not fnmatch.fnmatch(f"{model}/{word}", only):
                continue
            for cell in missing(known, model, word):
                if cell not in known:
                    known[cell] = ran(cell)
                    append(path, json.dumps(known[cell]))


def append(path: Path, line: str) -> None:
    """A line of its own, also behind one that was cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text() if path.exists() else ""
    with path.open("a") as file:
        file.write(("\n" if before and not before.endswith("\n") else "") + line + "\n")


def ran(cell: Cell) -> dict[str, Any]:
    of, began = MODELS[cell.model], time.perf_counter()
    job(cell.model)  # of which forks have copies
    taken = multiprocessing.get_context("fork").Value("q", 0)
    # cores may be shared by several others
    told = run(of.workers, trained, cell, taken, timeout=10 * of.limit)[0]
    whole = time.perf_counter() - began
    print(f"{cell}: {score(told):.4f}, {whole:.0f} s", file=sys.stderr, flush=True)
    return {**asdict(cell), **told, "whole": whole, "machine": machine()}


# The table


@dataclass(frozen=True)
class Row:
    """A word's three runs. lost: points below every-step, or of a loss its ratio; None: that is
    not known. bytes: over every-step's."""

    word: str
    rate: float
    scores: tuple[float, ...]
    lost: float | None
    bytes: float | None
    told: tuple[Mapping[str, Any], ...]

    @property
    def mean(self) -> float:
        return mean(self.scores)


def rows_of(known: Known, model: str) -> list[Row]:
    """Of the words whose runs have all ended."""
    rows: dict[str, Row] = {}
    for word in MODELS[model].words:
        rate = best_rate(known, model, word)
        told = [known.get(Cell(model, word, rate or 0.0, seed)) for seed in SEEDS]
        ended = tuple(each for each in told if each is not None)
        if rate is None or len(ended) < len(SEEDS):
            continue
        scores = tuple(map(score, ended))
        base = ended if word == BASE else rows[BASE].told if BASE in rows else ()
        lost = sent = None
        if base:
            usual = mean(map(score, base))
            lost = mean(scores) / usual if MODELS[model].less else 100 * (usual - mean(scores))
            sent = mean(t["sent"] for t in ended) / mean(t["sent"] for t in base)
        rows[word] = Row(word, rate, scores, lost, sent, ended)
    return [*rows.values()]


def faults(model: str, rows: list[Row]) -> Iterator[str]:
    """What misses its goal, of what is known."""
    by_word = {row.word: row for row in rows}
    for word, row in by_word.items():
        with_it = by_word.get(word.removesuffix(FORGETFUL))
        if model == "gpt2" and word != BASE and row.lost is not None and row.bytes is not None:
            if row.lost > LOSS or row.bytes > BYTES:
                yield f"{model}, {word}: {row.lost:.3f} of the loss, {row.bytes:.4f} of the bytes"
        elif model != "slow" and row.lost is not None and row.lost > GOALS.get(word, math.inf):
            yield f"{model}, {word}: {row.lost:.2f} points lost, {GOALS[word]} are allowed"
        if word.endswith(FORGETFUL) and with_it is not None and row.mean >= with_it.mean:
            yield f"{model}, {word}: no lower than with feedback"


def table(model: str, rows: list[Row]) -> str:
    less = MODELS[model].less
    lines = [
        f"| {model} | rate | {MODELS[model].score}, {len(SEEDS)} seeds | "
        f"{'ratio' if less else 'points lost'} | goal | bytes | age, mean and most |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        stale = [t["staleness"] for t in row.told if t.get("staleness")]
        means, most = [s["mean"] for s in stale], [s["max"] for s in stale]
        age = f"{mean(means):.1f}, {max(most)}" if stale else ""
        goal = GOALS.get(row.word, "") if model != "slow" else ""
        lost = "" if row.lost is None or row.word == BASE else f"{row.lost:.3f}"
        part = "" if row.bytes is None else f"{row.bytes:.4f}"
        lines.append(
            f"| {row.word} | {row.rate:g} | {row.mean:.4f} +- {stdev(row.scores):.4f} | {lost} | "
            f"{goal} | {part} | {age} |"
        )
    return "\n".join(lines)


def published(path: Path) -> str:
    """What stands beside `slow`: rows of as many workers, without compression."""
    wanted = ("BSP", "ASP", "SSP", "SHAT", "ensemble")
    rows = [
        row for row in read(path)
        if row["workers"] == str(MODELS["slow"].workers) and row["compression"] == "none"
        and row["algorithm"].startswith(wanted)
    ]  # fmt: skip
    lines = [f"| published ({path.name}), 8 workers | data | algorithm | accuracy |"]
    lines += ["|---|---|---|---|"]
    for row in rows:
        algorithm = f"{row['algorithm']} {row['setting']}".strip()
        accuracy = row["top1_accuracy"]
        lines.append(f"| {row['model']} | {row['data']} | {algorithm} | {accuracy} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("accuracy_of_words.jsonl"))
    parser.add_argument("--only", default="*", metavar="PATTERN", help="MODEL/WORD, as digits/*")
    parser.add_argument("--published", type=Path, metavar="FILE",
                        help="asynchronous_accuracy.csv")  # fmt: skip
    parser.add_argument("--table", action="store_true", help="of what is there; runs nothing")
    asked = parser.parse_args()
    absent = [
        DATA / of.data for name, of in MODELS.items() if not (DATA / of.data).is_dir()
        and of.data and any(fnmatch.fnmatch(f"{name}/{word}", asked.only) for word in of.words)
    ]  # fmt: skip
    if absent and not asked.table:
        print(f"accuracy_of_words: no data in {absent[0]}: set SYNCHROMESH_DATA", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    if not asked.table:
        measure(asked.results, asked.only)
    known, found = known_of(asked.results), list[str]()
    print(machine())
    for model in MODELS:
        rows = rows_of(known, model)
        if rows:
            print(f"\n{table(model, rows)}")
            found += faults(model, rows)
    if asked.published is not None:
        print(f"\n{published(asked.published)}")
    print("\n" + "\n".join(found or ["no goal is missed by what is known"]))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
