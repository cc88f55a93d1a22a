"""Servers against a ring on emulated hosts: `sudo python -m benchmarks.servers [--workers 4,2,8]`.

The convolutional model of `benchmarks.hybrid`, 16 rows a worker, links of 200 Mbit/s, hosts for
the workers and two more, two cores for all of them. Plans take turns in the same processes, and
step as `fit` lets them:

    ring         data                          the workers' all-reduces
    one          server:1; @servers=4          one more host
    two          server:2; @servers=4,5        two more hosts
    on workers   server:4                      each of them serves a part

exchange: what a step takes longer than one worker's own step (`compute`), whose part that backward
hides is left out alike. Goals at four workers, over the ring: 2.4 to 3.0, 1.5, 1.10; predicted
within 10 % of the step."""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.hybrid import RATE, Local, build_model, loss
from benchmarks.machine import machine
from synchromesh.lab import HostFailed, Lab

MBIT, CORES, ROWS = 200.0, 1.8, 16


def plans(workers: int) -> dict[str, str]:
    ranks = f"data; @ranks=0-{workers - 1}; @synchronisation="
    return {
        "ring": f"{ranks}every-step",
        "one": f"{ranks}server:1; @servers={workers}",
        "two": f"{ranks}server:2; @servers={workers},{workers + 1}",
        "on workers": f"{ranks}server:{workers}",
    }


def measure(workers: int, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of each round's median step, and what was predicted of it, by plan."""
    import synchromesh as sm

    generator = torch.Generator().manual_seed(1)
    images = torch.randn(ROWS * workers, 3, 32, 32, generator=generator)
    batch = images, torch.randint(0, 100, (ROWS * workers,), generator=generator)
    trainers, seconds, predicted = {}, {}, {}
    for name, plan in plans(workers).items():
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        trainer = trainers[name] = sm.prepare(model, optimizer, loss, batch, plan=plan)
        trainer.workers.early.allowed = True  # as in `fit`
        predicted[name], seconds[name] = trainer.predict().seconds, []
    own, alone = Local(), [x[:ROWS] for x in batch]
    seconds["compute"] = []
    for _ in range(rounds):
        for name, trainer in trainers.items():
            mine = trainer.shard(batch)
            seconds[name].append(_median(steps, lambda t=trainer, b=mine: t.step(b)))
        seconds["compute"].append(_median(steps, lambda: own.step((alone[0], alone[1]))))
    for trainer in trainers.values():
        trainer.close()
    return {"workers": workers, "seconds": seconds, "predicted": predicted}


def _median(steps: int, step: Any) -> float:
    """Of steps after two, on the rank that takes longest: some compute nothing."""
    taken = []
    for _ in range(2 + steps):
        dist.barrier()
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    slowest = torch.tensor(taken[2:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def show(document: dict[str, Any]) -> None:
    seconds = {n: statistics.median(x) for n, x in document["seconds"].items()}
    compute, workers = seconds.pop("compute"), document["workers"]
    ring = seconds["ring"] - compute
    print(f"\n{workers} workers; one's own step takes {compute * 1e3:.0f} ms")
    print(f"{'':12}{'step':>9}{'predicted':>11}{'exchange':>10}{'of ring':>9}  each round")
    for name, step in seconds.items():
        due = document["predicted"][name]
        each = " ".join(
            f"{(x - c) / (r - c):.2f}"
            for x, r, c in zip(
                *(document["seconds"][n] for n in (name, "ring", "compute")), strict=True
            )
        )
        print(
            f"{name:12}{step * 1e3:6.0f} ms{due / step - 1:10.0%} {(step - compute) * 1e3:7.0f} ms"
            f"{(step - compute) / ring:9.2f}  {each}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", default="4", help="numbers of workers, a lab each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of a plan in a round")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        measured = measure(asked.rank, asked.rounds, asked.steps)
        if dist.get_rank() == 0:
            print(json.dumps(measured))
        dist.destroy_process_group()
        return 0
    documents = []
    for workers in map(int, asked.workers.split(",")):
        hosts = workers + 2
        command = [
            sys.executable, "-m", "benchmarks.servers", "--rank", str(workers),
            "--rounds", str(asked.rounds), "--steps", str(asked.steps),
        ]  # fmt: skip
        try:
            with Lab(hosts, f"{MBIT:g}mbit", CORES / hosts) as lab:
                results = lab.run(command, timeout=900, cwd=Path(__file__).parents[1])
        except (ValueError, HostFailed) as error:
            print(error, file=sys.stderr)
            return 1
        documents.append(json.loads(results[0].output.splitlines()[-1]))
    if asked.json:
        print(json.dumps({"machine": machine(), "mbit": MBIT, "labs": documents}, indent=2))
        return 0
    print(f"{machine()}; links of {MBIT:g} Mbit/s, {ROWS} rows a worker")
    for document in documents:
        show(document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
