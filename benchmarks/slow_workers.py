"""Workers that are slow for a while: `sudo python -m benchmarks.slow_workers [--seconds 80]`.

Four emulated hosts train the convolutions of `benchmarks.zoo` (`pooled`, 64 rows each) between
links of 200 Mbit/s, with 36 % of a core each, and a fifth host that serves those plans that have a
server. Two cases:

    turns     every 10 s another of the four has a tenth of its quota
    always    the last of the four has it all the time

against `every-step`, and `every-step` whose shares of the rows are adapted while it trains. Goal
in turns: 1.5 times the samples a second of both; the lead of `ssp` is never above its bound.
Asynchronous workers make as many steps each, so that a host that is slow all the time is waited
for in the end: there row shares win."""

import argparse
import json
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.machine import machine
from benchmarks.zoo import make
from synchromesh.lab import HostFailed, Lab

WORKERS, MBIT, CPU, SLOWER, TURN, BOUND = 4, 200, 0.36, 10, 10.0, 3
SERVED = f"data; @servers={WORKERS}; @synchronisation="
PLANS = {
    "every-step": f"data; @ranks=0-{WORKERS - 1}",
    "row shares": f"data; @ranks=0-{WORKERS - 1}",  # adapted
    "downpour": f"{SERVED}downpour:1",
    "ssp": f"{SERVED}ssp:1,stale={BOUND}",
    "shat": f"{SERVED}shat:1",
}
GOAL = 1.5


def train(name: str, seconds: float, steps: int) -> None:
    """On every rank: steps until the time is over, or so many; rank 0 tells of all."""
    import synchromesh as sm

    build, loss, batch, optimizer = make("pooled")
    model = build()
    trainer = sm.prepare(model, optimizer(model.parameters()), loss, batch, plan=PLANS[name])
    free = trainer.plan.sync.asynchronous  # all make as many steps, but in times of their own
    for _ in range(3):
        trainer.step(trainer.shard(batch))
    if name == "row shares":
        trainer.adapt()  # measures all hosts while they are equal
    trainer.buffers()  # all have done these
    if trainer.rank == 0:
        print("ready", flush=True)
    began, rows, done = time.monotonic(), 0, 0
    go_on = torch.ones(1)
    while go_on:
        mine = trainer.shard(batch)
        trainer.step(mine)
        rows, done = rows + len(mine[1]), done + 1
        go_on.fill_(time.monotonic() < began + seconds)
        if free:
            go_on.fill_(done < steps)
        else:
            dist.broadcast(go_on, 0)
    trainer.buffers()
    took = time.monotonic() - began
    each = trainer.world.everyone.all_gather_json([rows, took])
    stale, plan = trainer.workers.staleness(), str(trainer.plan)
    if trainer.rank == 0:
        rates = sum(n for n, _ in each) / max(t for _, t in each)
        told = {"samples_per_second": rates, "rows": [n for n, _ in each], "staleness": stale}
        print(json.dumps({**told, "plan": plan, "events": len(trainer.decisions)}), flush=True)
    trainer.close()


def run(name: str, case: str, seconds: float, steps: int) -> dict[str, Any]:
    """What rank 0 told of a run in a lab whose hosts change while it goes on."""
    told: list[dict[str, Any]] = []
    over = False
    with Lab(WORKERS + 1, f"{MBIT}mbit", CPU) as lab:

        def slow_down() -> None:
            host = WORKERS - 1
            while not over:
                lab.set(host=host, cpu=CPU / SLOWER)
                until = time.monotonic() + TURN
                while not over and time.monotonic() < until:
                    time.sleep(0.1)
                if case == "turns":
                    lab.set(host=host, cpu=CPU)
                    host = (host + 1) % WORKERS

        changes = Thread(target=slow_down)

        def hear(host: int, stream: int, line: bytes) -> None:
            if stream == 2:
                sys.stderr.write(line.decode(errors="replace"))
            elif line.startswith(b"ready"):
                changes.start()
            elif line.startswith(b"{"):
                told.append(json.loads(line))

        command = [sys.executable, "-m", "benchmarks.slow_workers", "--train", name]
        command += ["--seconds", str(seconds), "--steps", str(steps)]
        try:
            lab.start(command, timeout=900, cwd=Path(__file__).parents[1], listener=hear).wait()
        finally:
            over = True
            if changes.is_alive():
                changes.join()
    return told[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=80.0, help="of synchronous runs")
    parser.add_argument("--steps", type=int, default=500, help="of a worker in asynchronous runs")
    parser.add_argument("--cases", default="turns,always")
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        train(asked.train, asked.seconds, asked.steps)
        dist.destroy_process_group()
        return 0
    found: dict[str, dict[str, Any]] = {}
    for case in asked.cases.split(","):
        for name in asked.plans.split(","):
            try:
                found.setdefault(case, {})[name] = run(name, case, asked.seconds, asked.steps)
            except (ValueError, HostFailed) as error:
                print(error, file=sys.stderr)
                return 1
    if asked.json:
        print(json.dumps({"machine": machine(), "cases": found}, indent=2))
        return 0
    print(machine())
    for case, rows in found.items():
        print(f"\n{case:12}{'samples/s':>10}{'of every-step':>15}{'lead':>6}  rows of each host")
        for name, row in rows.items():
            rate, lead = row["samples_per_second"], (row["staleness"] or {}).get("lead", "")
            ratio = rate / rows["every-step"]["samples_per_second"] if "every-step" in rows else 0
            print(f"{name:12}{rate:10.0f}{ratio:15.2f}{lead!s:>6}  {row['rows'][:WORKERS]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
