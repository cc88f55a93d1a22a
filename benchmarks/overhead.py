"""What Synchromesh costs beside plain PyTorch: `python -m benchmarks.overhead [--json]`.

ViT-tiny and ResNet-18 on CIFAR-100 shapes, float32, one thread per rank. One process against a
plain loop, and `data` on two gloo processes against DistributedDataParallel. Both sides live in
the same processes, start from the same weights and take the same batches; five rounds of 15 steps
a side, the order turning every round (ABBA). A round's ratio is baseline seconds / Synchromesh
seconds, so 1 is equal throughput; goals hold for the median.

--device cuda: one process on a GPU, there also GPT-2 small under bfloat16 autocast, each model
with many rows and with so few that launching kernels is what takes the time.
"""

import argparse
import copy
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.machine import machine
from synchromesh.workloads.target import load
from synchromesh.workloads.workload import Workload

ROWS = {  # per rank, by device
    "cpu": {
        "cifar100/vit_tiny": [8],
        "cifar100/resnet18": [32],
    },  # 0.2 to 0.5 s a step on one core
    "cuda": {
        "cifar100/vit_tiny": [8, 256],
        "cifar100/resnet18": [32, 512],
        "shakespeare/gpt2": [1, 16],
    },
}
MIXED = ["shakespeare/gpt2"]  # under bfloat16 autocast
GOALS = {1: 0.98, 2: 0.97}  # by number of processes


class Baseline:
    """The loop of PyTorch's tutorials, with DDP around the model on several ranks."""

    def __init__(self, workload: Workload, model: nn.Module, autocast: Any = nullcontext) -> None:
        self.model, self.loss, self.autocast = model, workload.loss, autocast
        if dist.get_world_size() > 1:
            self.model = nn.parallel.DistributedDataParallel(model)
        self.optimizer = workload.optimizer(self.model.parameters())

    def step(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        with self.autocast():
            value = self.loss(self.model, batch)
        mean: Tensor = value if isinstance(value, Tensor) else value[0] / value[1]
        mean.backward()
        self.optimizer.step()
        return mean.detach()


def measure(
    target: str, device: str, rows: int, rounds: int, warmup: int, steps: int
) -> dict[str, Any]:
    """On every rank: seconds of each step by side and round, and the last losses.

    On a GPU, which a step does not wait for, the mean of each round in place of its steps.
    """
    import synchromesh as sm

    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    workload = load(target, synthetic=True)
    mixed = torch.bfloat16 if target in MIXED else None
    examples = [workload.example(rows * ranks, seed=seed) for seed in range(4)]
    batches = [_parts(batch, lambda x: x.to(device)) for batch in examples]
    model = workload.model().to(device)
    autocast = (lambda: torch.autocast(device, mixed)) if mixed else nullcontext
    baseline = Baseline(workload, copy.deepcopy(model), autocast)
    optimizer = workload.optimizer(model.parameters())
    trainer = sm.prepare(
        model, optimizer, workload.loss, batches[0], plan="data", device=device, autocast=mixed
    )
    own = [_parts(batch, lambda x: x.chunk(ranks)[rank]) for batch in batches]
    wait: Any = torch.cuda.synchronize if device == "cuda" else nullcontext
    sides: dict[str, tuple[Any, list[Any]]] = {
        "baseline": (baseline, own),
        "synchromesh": (trainer, [trainer.shard(batch) for batch in batches]),
    }
    seconds: dict[str, list[list[float]]] = {name: [] for name in sides}
    losses: dict[str, float] = {}
    for round_ in range(rounds):
        for name in sides if round_ % 2 == 0 else reversed(sides):
            side, shards = sides[name]
            taken = []
            for i in range(warmup + steps):
                if i == warmup:
                    wait()
                    dist.barrier()
                    begun = time.perf_counter()
                start = time.perf_counter()
                last = side.step(shards[i % len(shards)])
                taken.append(time.perf_counter() - start)
            wait()
            mean = (time.perf_counter() - begun) / steps
            seconds[name].append(taken[warmup:] if device == "cpu" else [mean])
            total = last.cpu()
            dist.all_reduce(total)
            losses[name] = total.item() / ranks
    trainer.close()
    return {"seconds": seconds, "losses": losses}


def _parts(batch: Any, apply: Callable[[Tensor], Tensor]) -> Any:
    """A batch that is a tensor, a tuple or a dict, with `apply` done to each tensor."""
    if isinstance(batch, dict):
        return {name: apply(part) for name, part in batch.items()}
    return apply(batch) if isinstance(batch, Tensor) else tuple(apply(part) for part in batch)


def summary(target: str, rows: int, ranks: int, measured: dict[str, Any]) -> dict[str, Any]:
    """Ratios of the rounds by total time, by the median step beside them, and the verdict."""
    pairs = list(
        zip(measured["seconds"]["baseline"], measured["seconds"]["synchromesh"], strict=True)
    )
    ratios = [sum(a) / sum(b) for a, b in pairs]
    return {
        "target": target,
        "rows": rows,
        "ranks": ranks,
        "baseline": "PyTorch loop" if ranks == 1 else "DDP",
        "baseline_seconds": statistics.median(t for a, _ in pairs for t in a),
        "synchromesh_seconds": statistics.median(t for _, b in pairs for t in b),
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "ratio_of_medians": statistics.median(
            statistics.median(a) / statistics.median(b) for a, b in pairs
        ),
        "losses": measured["losses"],
        "goal": GOALS[ranks],
        "passed": statistics.median(ratios) >= GOALS[ranks],
    }


def start(ranks: int, target: str, device: str, rows: int, how: list[int]) -> dict[str, Any]:
    """Run `measure` on that many local processes; what rank 0 measured."""
    rounds, warmup, steps = how
    given = [f"--target={target}", f"--device={device}", f"--rows={rows}"]
    given += [f"--rounds={rounds}", f"--warmup={warmup}", f"--steps={steps}", "--rank"]
    return launch("benchmarks.overhead", ranks, given, 120 + 4 * rounds * (warmup + steps))


def launch(module: str, ranks: int, arguments: list[str], seconds: float) -> dict[str, Any]:
    """The document that rank 0 of so many local processes prints, within so many seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", **{k: str(v) for k, v in settings.items()}}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        output, _ = processes[0].communicate(timeout=seconds)
        codes = [process.wait(timeout=30) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        called = " ".join(arguments)
        raise SystemExit(f"{module} {called} on {ranks} ranks ended with codes {codes}")
    document: dict[str, Any] = json.loads(output.splitlines()[-1])
    return document


def show(rows: list[dict[str, Any]]) -> None:
    print(machine())
    print(
        f"\n{'target':20} {'rows':>4} {'ranks':>5}  {'baseline':>20} {'synchromesh':>12}"
        f"  {'ratio':>6}  each round"
    )
    for row in rows:
        each = " ".join(f"{ratio:.3f}" for ratio in row["ratios"])
        verdict = "reached" if row["passed"] else "missed"
        print(
            f"{row['target']:20} {row['rows']:4} {row['ranks']:5}  {row['baseline']:>13} "
            f"{row['baseline_seconds']:6.4f}s {row['synchromesh_seconds']:10.4f}s  "
            f"{row['ratio']:6.3f}  {each}  "
            f"(goal {row['goal']:.2f}: {verdict})"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--warmup", type=int, default=2, help="steps before each block that do not count"
    )
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--target", help="only this model")
    parser.add_argument("--device", choices=tuple(ROWS), default="cpu")
    parser.add_argument(
        "--ranks", type=int, choices=tuple(GOALS), help="only this number of processes"
    )
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    how = [options.rounds, options.warmup, options.steps]
    if options.rank:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        measured = measure(options.target, options.device, options.rows, *how)
        if dist.get_rank() == 0:
            print(json.dumps(measured), flush=True)
        dist.destroy_process_group()
        return 0
    found = []
    counts = [options.ranks] if options.ranks else GOALS if options.device == "cpu" else [1]
    for ranks, (target, sizes) in product(counts, ROWS[options.device].items()):
        for rows in sizes if options.target in (None, target) else []:
            print(f"{target} on {ranks} process{'es'[: 2 * (ranks - 1)]} ...", file=sys.stderr)
            measured = start(ranks, target, options.device, rows, how)
            found.append(summary(target, rows, ranks, measured))
    passed = all(row["passed"] for row in found)
    if options.json:
        print(json.dumps({"machine": machine(), "rows": found, "passed": passed}, indent=2))
    else:
        show(found)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
