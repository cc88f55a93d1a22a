"""Hybrid parallelism against DDP on four emulated hosts: `sudo python -m benchmarks.hybrid`.

Three convolutions (32, 64, 64 channels) and linear layers 1024-1024-1024-100 on 32x32x3 images,
global batch 256, SGD, float32; four hosts with 200 Mbit/s links and 40 % of a core each.
Convolutions `data`, linear layers `tensor` should take at most 0.50 of the step time of
DistributedDataParallel (the faster of its default and gradient_as_bucket_view). Strategies
alternate in the same processes, in ABBA order.
"""

import argparse
import json
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.by_hand import ByHand
from benchmarks.machine import machine
from synchromesh.lab import HostFailed, Lab

HOSTS, MBIT, CPU = 4, 200.0, 0.4
ROWS, RATE = 256, 0.05
PLAN = "data; classifier*=tensor"
SETTLE = 14  # steps of each strategy before the first alternation
GOAL = 0.50
DDP = ("ddp", "ddp-bucket-view")
Batch = tuple[Tensor, Tensor]


def build_model() -> nn.Module:
    """Every layer has a module path of its own, so that a plan can name it."""
    torch.manual_seed(0)
    features: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (inputs, outputs) in enumerate(((3, 32), (32, 64), (64, 64)), start=1):
        features[f"conv{i}"] = nn.Conv2d(inputs, outputs, 3, padding=1)
        features[f"relu{i}"] = nn.ReLU()
        features[f"pool{i}"] = nn.MaxPool2d(2)
    features["flatten"] = nn.Flatten()  # 64 channels x 4 x 4 = 1024
    classifier: OrderedDict[str, nn.Module] = OrderedDict(
        linear1=nn.Linear(1024, 1024),
        relu1=nn.ReLU(),
        linear2=nn.Linear(1024, 1024),
        relu2=nn.ReLU(),
        linear3=nn.Linear(1024, 100),
    )
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        features=nn.Sequential(features), classifier=nn.Sequential(classifier)
    )
    return nn.Sequential(parts)


def build_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(ROWS, 3, 32, 32, generator=generator)
    return images, torch.randint(0, 100, (ROWS,), generator=generator)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Local:
    """PyTorch alone on this rank's rows: pure compute, or DDP where `wrap` makes it so."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        self.model = wrap(build_model())
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE)

    def step(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        value = loss(self.model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return value.detach() / dist.get_world_size()


class Meshed:
    """Synchromesh under the plan; its loss is already the global one."""

    def __init__(self, example: Batch) -> None:
        import synchromesh as sm

        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        self.trainer = sm.prepare(model, optimizer, loss, example, plan=PLAN)
        self.batch = self.trainer.shard(example)

    def step(self, batch: Batch) -> Tensor:
        value: Tensor = self.trainer.step(self.batch)
        return value / dist.get_world_size()


def build(name: str, example: Batch) -> Any:
    parallel = nn.parallel.DistributedDataParallel
    makers: dict[str, Callable[[], Any]] = {
        "compute": Local,
        "ddp": lambda: Local(parallel),
        "ddp-bucket-view": lambda: Local(lambda m: parallel(m, gradient_as_bucket_view=True)),
        "synchromesh": lambda: Meshed(example),
        "by-hand": lambda: ByHand(build_model(), RATE),
        "by-hand-4-pieces": lambda: ByHand(build_model(), RATE, pieces=4),
    }
    if name not in makers:
        raise SystemExit(f"no strategy {name!r}: choose of {', '.join(makers)}")
    return makers[name]()


def measure(names: list[str], rounds: int, warmup: int, steps: int) -> dict[str, Any]:
    """Seconds a step by strategy and round (of the slowest rank), and the last loss."""
    example = build_batch()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = (example[0].chunk(ranks)[rank].clone(), example[1].chunk(ranks)[rank].clone())
    strategies = {name: build(name, example) for name in names}
    seconds: dict[str, list[list[float]]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for strategy in strategies.values():  # buckets are rebuilt, ways of overlapping are tried
        for _ in range(SETTLE):
            strategy.step(own)
    for round_ in range(rounds):
        for name in names if round_ % 2 == 0 else reversed(names):
            dist.barrier()
            taken = []
            for _ in range(warmup + steps):
                start = time.perf_counter()
                last = strategies[name].step(own)
                taken.append(time.perf_counter() - start)
            slowest = torch.tensor(taken[warmup:], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            seconds[name].append(slowest.tolist())
            whole = last.clone()
            dist.all_reduce(whole)
            losses[name] = whole.item()
    for strategy in strategies.values():
        if isinstance(strategy, Meshed):
            strategy.trainer.close()
    return {"seconds": seconds, "losses": losses}


def report(measured: dict[str, Any]) -> dict[str, Any]:
    """Medians, spread, and the ratio to the faster DDP: over all steps, by alternation."""
    table = {
        name: {
            "seconds": statistics.median(t for block in blocks for t in block),
            "fastest": min(t for block in blocks for t in block),
            "slowest": max(t for block in blocks for t in block),
            "loss": measured["losses"][name],
        }
        for name, blocks in measured["seconds"].items()
    }
    base = min((name for name in DDP if name in table), key=lambda name: table[name]["seconds"])
    for name, row in table.items():
        row["ratio"] = row["seconds"] / table[base]["seconds"]
        row["ratios"] = [
            statistics.median(block) / statistics.median(other)
            for block, other in zip(
                measured["seconds"][name], measured["seconds"][base], strict=True
            )
        ]
    document = {
        "hosts": HOSTS,
        "mbit": MBIT,
        "cpu": CPU,
        "rows": ROWS,
        "plan": PLAN,
        "emulated": True,
        "machine": machine(),
        "base": base,
        "strategies": table,
    }
    if "synchromesh" in table:
        document.update(ratio=table["synchromesh"]["ratio"], goal=GOAL)
        document["passed"] = table["synchromesh"]["ratio"] <= GOAL
    return document


def show(document: dict[str, Any]) -> None:
    print(
        f"{HOSTS} emulated hosts, {MBIT:g} Mbit/s and {CPU:.0%} of a core each; {ROWS} rows\n"
        f"{document['machine']}\n\n"
        f"{'strategy':20} {'median':>8} {'fastest':>8} {'slowest':>8} {'of DDP':>7}"
        "  each alternation",
    )
    for name, row in document["strategies"].items():
        times = " ".join(f"{row[key] * 1e3:5.0f} ms" for key in ("seconds", "fastest", "slowest"))
        each = " ".join(f"{ratio:.2f}" for ratio in row["ratios"])
        print(f"{name:20} {times} {row['ratio']:7.3f}  {each}")
    if "passed" in document:
        verdict = "reached" if document["passed"] else "missed"
        print(
            f"\nsynchromesh/{document['base']} = {document['ratio']:.3f}, "
            f"goal {GOAL:.2f}: {verdict}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--rounds", type=int, default=4, help="alternations (default 4, at least 3)"
    )
    parser.add_argument(
        "--warmup", type=int, default=2, help="steps before each block that do not count"
    )
    parser.add_argument("--steps", type=int, default=6, help="steps of each block that count")
    parser.add_argument(
        "--strategies",
        default="compute,ddp,ddp-bucket-view,synchromesh,by-hand,by-hand-4-pieces",
    )
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.strategies.split(",")
    if options.rank:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        measured = measure(names, options.rounds, options.warmup, options.steps)
        if dist.get_rank() == 0:
            print(json.dumps(measured))
        dist.destroy_process_group()
        return 0
    if not set(DDP) & set(names) or options.rounds < 3:
        parser.error(
            f"a comparison needs one of {DDP} and 3 rounds, not {names} and {options.rounds}"
        )
    command = [sys.executable, "-m", "benchmarks.hybrid", "--rank", *sys.argv[1:]]
    try:
        with Lab(HOSTS, f"{MBIT:g}mbit", CPU) as lab:
            print(f"{len(names)} strategies, {options.rounds} alternations ...", file=sys.stderr)
            each = options.rounds * (options.warmup + options.steps) + SETTLE
            timeout = 60 + 2.0 * len(names) * each
            results = lab.run(command, timeout=timeout, cwd=Path(__file__).parents[1])
    except (ValueError, HostFailed) as error:
        print(error, file=sys.stderr)
        return 1
    document = report(json.loads(results[0].output.splitlines()[-1]))
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        show(document)
    return 0 if document.get("passed", True) else 1


if __name__ == "__main__":
    raise SystemExit(main())
