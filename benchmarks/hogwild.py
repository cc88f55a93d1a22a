"""Processes that write one set of parameters without locks, `@synchronisation=hogwild`: `python -m
benchmarks.hogwild [--seeds N] [--only MODEL] [--json]`.

Two processes, each with rows of its own and the workload's batch size, with one process, in turns:
samples a second and the accuracy in the end, after equal samples. Batches are cut from tensors in
memory, so that nothing but the steps takes time; each process has one thread.

    bags      bags of embeddings on SST-2 with sparse gradients      1.6 times; within 1 point
    dense     the same with dense gradients, of all words            no promise
    cnn       the convolutional net of digits, AdamW                 no promise

The folder of SST-2 is $SYNCHROMESH_DATA/sst2."""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

import torch

import synchromesh as sm
from benchmarks.machine import machine
from synchromesh.training.trainer import Trainer
from synchromesh.workloads.target import load
from synchromesh.workloads.workload import Workload
from tests.ranks import run
from tests.real_data import DATA

GOALS = {"times": 1.6, "points": 1.0}  # samples a second; accuracy that may be lost
MODELS = {"bags": "sst2/bags", "dense": "sst2/bags", "cnn": "digits/cnn"}
PLANS = {1: "single", 2: "data; @synchronisation=hogwild"}  # by processes


@dataclass(frozen=True)
class Run:
    """Of some processes. rates: samples a second of each epoch; free: what they would be, did no
    process wait for a core, by the processor seconds of the first."""

    rates: tuple[float, ...]
    free: tuple[float, ...]
    accuracy: float


@dataclass
class Row:
    """Of a model. times: by seed, samples a second of two processes over those of one."""

    model: str
    one: list[Run] = field(default_factory=list)
    two: list[Run] = field(default_factory=list)

    @property
    def times(self) -> list[float]:
        pairs = zip(self.one, self.two, strict=True)
        return [median(b.rates) / median(a.rates) for a, b in pairs]

    @property
    def free(self) -> float:
        """The same by processor seconds, which what else runs here changes less."""
        pairs = zip(self.one, self.two, strict=True)
        return median(median(b.free) / median(a.free) for a, b in pairs)

    @property
    def lost(self) -> float:
        """Points of accuracy, in the mean of the seeds."""
        return 100 * (mean(r.accuracy for r in self.one) - mean(r.accuracy for r in self.two))

    @property
    def passed(self) -> bool:
        kept = self.lost <= GOALS["points"]
        return self.model != "bags" or (median(self.times) >= GOALS["times"] and kept)


def built(name: str) -> tuple[Workload, torch.nn.Module]:
    target = MODELS[name]
    workload = load(target, DATA / "sst2" if target.startswith("sst2/") else None)
    model = workload.build()
    if name == "dense":
        model.embeddings.sparse = False
    return workload, model


def tensors(data: Any) -> tuple[torch.Tensor, ...]:
    items = [data[i] for i in range(len(data))]
    return tuple(
        torch.stack([torch.as_tensor(x) for x in column]) for column in zip(*items, strict=True)
    )


def batches(
    trainer: Trainer, data: tuple[torch.Tensor, ...], rows: int, seed: int
) -> Iterator[Any]:
    """This rank's rows of one epoch; what fills no batch is left out."""
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed))
    for numbers in order.split(rows)[: len(order) // rows]:
        own = trainer.shard((numbers,))[0]
        yield tuple(x[own] for x in data)


def trained(name: str, seed: int) -> Run:
    """On every rank."""
    warnings.simplefilter("ignore")  # torch's, of sparse tensors
    torch.manual_seed(seed)
    workload, model = built(name)
    size = torch.distributed.get_world_size()
    rows, optimizer = size * workload.batch_size, workload.build_optimizer(model.parameters())
    trainer = sm.prepare(model, optimizer, workload.loss, workload.example(rows), PLANS[size])
    data, valid = tensors(workload.train_data), tensors(workload.valid_data)
    assert workload.metric is not None
    rates, free, everyone = list[float](), list[float](), trainer.world.everyone
    for epoch in range(workload.epochs):
        everyone.barrier()
        began, worked, steps = time.perf_counter(), time.process_time(), 0
        for batch in batches(trainer, data, rows, 1000 * seed + epoch):
            trainer.step(batch)
            steps += 1
        free.append(steps * rows / (time.process_time() - worked))
        everyone.barrier()
        rates.append(steps * rows / (time.perf_counter() - began))
    accuracy = trainer.evaluate([trainer.shard(valid)], workload.metric)["accuracy"]
    trainer.close()
    return Run(tuple(rates), tuple(free), accuracy)


def measured(name: str, seeds: int) -> Row:
    row = Row(name)
    for seed in range(seeds):
        for size in (1, 2) if seed % 2 == 0 else (2, 1):
            found = run(size, trained, name, seed, timeout=600)[0]
            (row.one if size == 1 else row.two).append(found)
            rate = f"{median(found.rates):,.0f} samples/s"
            print(f"{name}, {size}: {rate}, {found.accuracy:.3f}", file=sys.stderr, flush=True)
    return row


def table(rows: list[Row]) -> str:
    lines = [
        "| model | samples/s, one process | two | times | least, most | by processor time "
        "| accuracy, one | two |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        of = [median(median(r.rates) for r in runs) for runs in (row.one, row.two)]
        accuracy = [mean(r.accuracy for r in runs) for runs in (row.one, row.two)]
        lines.append(
            f"| {row.model} | {of[0]:,.0f} | {of[1]:,.0f} | {median(row.times):.2f} | "
            f"{min(row.times):.2f}, {max(row.times):.2f} | {row.free:.2f} | "
            f"{accuracy[0]:.3f} | {accuracy[1]:.3f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=[*MODELS], action="append")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    names = asked.only or [*MODELS]
    if not (DATA / "sst2").is_dir() and {"bags", "dense"} & {*names}:
        print(f"hogwild: no SST-2 in {DATA / 'sst2'}: set SYNCHROMESH_DATA", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    rows = [measured(name, asked.seeds) for name in names]
    if asked.json:
        told = [
            asdict(r) | {"times": r.times, "free": r.free, "lost": r.lost, "passed": r.passed}
            for r in rows
        ]
        print(json.dumps({"machine": machine(), "goals": GOALS, "rows": told}))
    else:
        print(f"{machine()}\n\n{table(rows)}")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
