"""Steps of milliseconds on two local processes: `python -m benchmarks.short [--json]`.

The small nets of `digits`, with as many rows as make a step of DistributedDataParallel take about
5, 10 and 20 ms. In the same two processes, from the same weights, in turns:

    ddp       DistributedDataParallel
    waiting   the same while gloo's thread waits for cores, as it does in `data` (engine/gloo.py)
    data      the plan `data`                                goal: 0.97 of the throughput of ddp
    alone     `single` in a world of rank 0, which trains while rank 1 sleeps
    single    the plan `single`: rank 0 trains, rank 1 is idle      goal: 0.99 of that of alone
    auto      what `auto` has chosen, and tries as it trains  goal: 0.97 of the best of both plans

Rounds of some 0.3 s a side, the order turning every round (ABBA). A round's ratio is that of
median steps of rank 0; goals hold for the median of the rounds.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.machine import machine
from benchmarks.overhead import Baseline, launch
from synchromesh.engine import gloo
from synchromesh.engine.world import World
from synchromesh.workloads.target import load

TARGETS = ("digits/cnn", "digits/vit")
MILLISECONDS = (5, 10, 20)  # of a step of ddp
ROUND = 0.3  # seconds of a side's turn
WARMUP = 5  # steps of a turn that do not count
GOALS = {"data": 0.97, "single": 0.99, "auto": 0.97}


def measure(target: str, wanted: float, rounds: int) -> dict[str, Any]:
    """On every rank: rows of a step, and milliseconds of the median step by side and round."""
    import synchromesh as sm

    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    workload = load(target, synthetic=True)
    model = workload.model()

    def baseline(model: nn.Module) -> Baseline:
        return Baseline(workload, copy.deepcopy(model))

    ddp = baseline(model)
    rows = _rows(ddp, workload, wanted, ranks)
    batch = workload.example(rows)

    def trainer(plan: str) -> tuple[Any, Any]:
        copied = copy.deepcopy(model)
        optimizer = workload.optimizer(copied.parameters())
        made = sm.prepare(copied, optimizer, workload.loss, batch, plan=plan)
        return made, made.shard(batch)

    own = tuple(part.chunk(ranks)[rank].clone() for part in batch)
    sides: dict[str, tuple[Any, Any]] = {"ddp": (ddp, own), "waiting": (ddp, own)}
    sides["data"] = trainer("data")
    sides["single"], sides["auto"] = trainer("single"), trainer("auto")
    sides["auto"][0].adapt()
    if rank == 0:
        with mock.patch.object(World, "open", lambda device, timeout: _alone(timeout)):
            sides["alone"] = trainer("single")
    names = [*GOALS, "ddp", "waiting", "alone"]
    for _ in range(200):  # trials of auto come to their end
        sides["auto"][0].step(sides["auto"][0].shard(batch))
    steps = WARMUP + max(20, round(ROUND / wanted))
    found: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds):
        for name in names if round_ % 2 == 0 else reversed(names):
            dist.barrier()
            if name == "alone" and rank:
                continue
            _gloo_waits(name != "ddp")
            side, part = sides[name]
            if name == "auto":
                part = side.shard(batch)
            taken = []
            for _ in range(steps):
                start = time.perf_counter()
                side.step(part)
                taken.append(time.perf_counter() - start)
            found[name].append(1e3 * statistics.median(taken[WARMUP:]))
    plan = str(sides["auto"][0].plan)
    for name in ("auto", "single", "data"):
        sides[name][0].close()
    return {"rows": rows, "milliseconds": found, "plan": plan}


def _alone(timeout: Any) -> World:
    return World(0, 1, torch.device("cpu"), timeout, owner=False)


def _gloo_waits(waits: bool) -> None:
    policy = os.SCHED_BATCH if waits else os.SCHED_OTHER
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == gloo.LOOP:
            os.sched_setscheduler(int(task.name), policy, os.sched_param(0))


def _rows(ddp: Baseline, workload: Any, wanted: float, ranks: int) -> int:
    """Of a global batch whose step takes about `wanted` seconds; the same on every rank."""
    rows = ranks
    for _ in range(50):  # the first steps of a process take several times as long
        ddp.step(tuple(x[:1] for x in workload.example(rows)))
    while True:
        part = tuple(x[: rows // ranks] for x in workload.example(rows))
        taken = []
        for _ in range(12):
            start = time.perf_counter()
            ddp.step(part)
            taken.append(time.perf_counter() - start)
        seconds = torch.tensor(statistics.median(taken[2:]))
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if float(seconds) >= wanted or rows >= 1024:
            return rows
        rows = ranks * max(rows // ranks + 1, int(1.15 * rows / ranks))


def summary(target: str, wanted: float, measured: dict[str, Any]) -> dict[str, Any]:
    """The ratios of each round, their medians, and whether they reach their goals."""
    times = measured["milliseconds"]
    rounds = range(len(times["ddp"]))
    best = [min(times[name][i] for name in ("data", "single")) for i in rounds]
    against = {"data": times["ddp"], "single": times["alone"], "auto": best}
    ratios = {
        name: [a / b for a, b in zip(against[name], times[name], strict=True)] for name in GOALS
    }
    ratios["waiting"] = [a / b for a, b in zip(times["waiting"], times["data"], strict=True)]
    ratio = {name: statistics.median(each) for name, each in ratios.items()}
    return {
        "target": target,
        "wanted": 1e3 * wanted,
        **measured,
        "milliseconds": {name: statistics.median(each) for name, each in times.items()},
        "ratios": ratios,
        "ratio": ratio,
        "goals": GOALS,
        "passed": all(ratio[name] >= goal for name, goal in GOALS.items()),
    }


def show(rows: list[dict[str, Any]]) -> None:
    print(machine())
    sides = ("ddp", "waiting", "data", "alone", "single", "auto")
    print(f"\n{'target':11} {'rows':>5} " + " ".join(f"{s:>8}" for s in sides), end="")
    heads = [*(f"{name} (goal {goal})" for name, goal in GOALS.items()), "waiting over data"]
    print("   ".join(["  ", *heads]))
    for row in rows:
        print(
            f"{row['target']:11} {row['rows']:5} "
            + " ".join(f"{row['milliseconds'][s]:6.2f}ms" for s in sides)
            + "   "
            + "   ".join(
                f"{row['ratio'][name]:.3f} ({min(each):.2f} to {max(each):.2f})"
                for name, each in row["ratios"].items()
            )
            + f"   {row['plan']}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--target", choices=TARGETS, help="only this model")
    parser.add_argument("--ms", type=int, help="only steps of about so many milliseconds")
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        measured = measure(options.target, options.ms / 1e3, options.rounds)
        if dist.get_rank() == 0:
            print(json.dumps(measured), flush=True)
        dist.destroy_process_group()
        return 0
    rows = []
    for target in [options.target] if options.target else TARGETS:
        for wanted in [options.ms] if options.ms else MILLISECONDS:
            print(f"{target}, {wanted} ms ...", file=sys.stderr)
            given = f"--rank --target={target} --ms={wanted} --rounds={options.rounds}"
            measured = launch("benchmarks.short", 2, given.split(), 600)
            rows.append(summary(target, wanted / 1e3, measured))
    passed = all(row["passed"] for row in rows)
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows, "passed": passed}, indent=2))
    else:
        show(rows)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
