"""Fewer bytes over slow links: `sudo python -m benchmarks.slow_links [--mbit 50,1000]`.

The convolutional model of `benchmarks.hybrid`, four emulated hosts with 44 % of a core each, 16
rows a worker. Strategies take turns in the same processes; a turn is of sixteen steps, of which
`local:8` sends in two.

    at 50 Mbit/s      samples a second over DistributedDataParallel: `local:8` at least 4 times,
                      `powersgd:4` 6, `int8` 2.5; `powersgd:4` no slower than DDP with torch's
                      `powerSGD_hook` of equal rank
    at 1000 Mbit/s    `auto` with allow="compression" at most 2 % behind `data`
"""

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from benchmarks.hybrid import RATE, Local, build_model, loss
from benchmarks.machine import machine
from synchromesh.lab import HostFailed, Lab

HOSTS, CPU, ROWS, RANK, STEPS = 4, 0.44, 16, 4, 16
HOOK = f"DDP, powerSGD_hook of rank {RANK}"
PLANS = {
    "data": "data", "fp16": "data; @compression=fp16", "int8": "data; @compression=int8",
    f"powersgd:{RANK}": f"data; @compression=powersgd:{RANK}",
    "local:8": "data; @synchronisation=local:8", "auto": "auto",
}  # fmt: skip
SLOW = ("ddp", HOOK, *(name for name in PLANS if name != "auto"))
QUICK = ("data", "auto", "ddp")
GOALS = {"local:8": 4.0, f"powersgd:{RANK}": 6.0, "int8": 2.5}  # samples a second over DDP's
BEHIND = 0.02  # that `auto` may be, of data


def hooked(model: nn.Module) -> nn.Module:
    # in one bucket: the hook's second all-reduces begin in callbacks, whose order over several
    # buckets gloo's threads leave open, and ranks then add up different ones
    made = DistributedDataParallel(model, bucket_cap_mb=256)
    state = powersgd.PowerSGDState(None, RANK, start_powerSGD_iter=2)
    made.register_comm_hook(state, powersgd.powerSGD_hook)
    return made


class Own:
    """Synchromesh under a plan."""

    def __init__(self, plan: str, batch: Any) -> None:
        import synchromesh as sm

        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        allow = "compression" if plan == "auto" else ""
        self.trainer = sm.prepare(model, optimizer, loss, batch, plan=plan, allow=allow)
        self.predicted = self.trainer.predict().seconds
        self.batch = self.trainer.shard(batch)

    def step(self, _: Any) -> Any:
        return self.trainer.step(self.batch)


def measure(names: list[str], rounds: int) -> dict[str, Any]:
    """Seconds a step by strategy and round, of the slowest rank."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(ROWS * HOSTS, 3, 32, 32, generator=generator)
    batch = images, torch.randint(0, 100, (ROWS * HOSTS,), generator=generator)
    mine = tuple(x.chunk(HOSTS)[dist.get_rank()].clone() for x in batch)
    makers = {
        "ddp": partial(Local, DistributedDataParallel), HOOK: partial(Local, hooked),
        **{name: partial(Own, plan, batch) for name, plan in PLANS.items()},
    }  # fmt: skip
    strategies = {name: makers[name]() for name in names}
    for strategy in strategies.values():
        for _ in range(STEPS):
            strategy.step(mine)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds):
        for name in names if round_ % 2 == 0 else reversed(names):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(STEPS):
                strategies[name].step(mine)
            taken = torch.tensor((time.perf_counter() - began) / STEPS, dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            seconds[name].append(float(taken))
    own = {name: s for name, s in strategies.items() if isinstance(s, Own)}
    plans = {name: str(s.trainer.plan) for name, s in own.items()}
    predicted = {name: s.predicted for name, s in own.items()}
    for each in own.values():
        each.trainer.close()
    return {"seconds": seconds, "predicted": predicted, "plans": plans}


def faults(name: str, ratio: float, found: dict[str, list[float]]) -> str:
    """What misses its goal. ratio: samples a second over the first strategy's."""
    if name == "auto":
        of_data = zip(found["data"], found[name], strict=True)
        behind = statistics.median(auto / data for data, auto in of_data) - 1
        return f"{behind:.1%} behind data" if behind > BEHIND else ""
    if HOOK not in found:
        return ""
    if ratio < GOALS.get(name, 0.0):
        return f"below {GOALS[name]}"
    hook, ours = (statistics.median(found[x]) for x in (HOOK, f"powersgd:{RANK}"))
    return f"slower than {HOOK}" if name == f"powersgd:{RANK}" and ours > hook else ""


def show(mbit: str, document: dict[str, Any]) -> bool:
    """Whether all goals are reached."""
    found, missed = document["seconds"], False
    first = next(iter(found))
    print(f"\n{mbit} Mbit/s{'':26}{'step':>9}{'predicted':>11}{'of ' + first:>8}  each round")
    for name, each in found.items():
        ratios = [a / b for a, b in zip(found[first], each, strict=True)]
        step, ratio = statistics.median(each), statistics.median(ratios)
        due = document["predicted"].get(name)
        apart = "" if due is None else f"{due / step - 1:.0%}"
        fault = faults(name, ratio, found)
        missed |= bool(fault)
        rounds = " ".join(f"{x:.2f}" for x in ratios)
        plan = f" ({document['plans'][name]})" if name == "auto" else ""
        print(
            f"{name + plan:36}{step * 1e3:6.0f} ms{apart:>11}{ratio:8.2f}  {rounds}"
            f"{'; ' + fault if fault else ''}"
        )
    return not missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mbit", default="50,1000", help="of links, a lab each")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--names", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.names:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        measured = measure(asked.names.split(";"), asked.rounds)
        if dist.get_rank() == 0:
            print(json.dumps(measured))
        dist.destroy_process_group()
        return 0
    documents = {}
    for mbit in asked.mbit.split(","):
        names = ";".join(SLOW if float(mbit) < 500 else QUICK)
        command = [sys.executable, "-m", "benchmarks.slow_links", "--names", names]
        try:
            with Lab(HOSTS, f"{mbit}mbit", CPU) as lab:
                results = lab.run(
                    [*command, "--rounds", str(asked.rounds)], timeout=1800,
                    cwd=Path(__file__).parents[1],
                )  # fmt: skip
        except (ValueError, HostFailed) as error:
            print(error, file=sys.stderr)
            return 1
        documents[mbit] = json.loads(results[0].output.splitlines()[-1])
    if asked.json:
        print(json.dumps({"machine": machine(), "links": documents}, indent=2))
        return 0
    print(f"{machine()}; {ROWS} rows a worker")
    reached = [show(mbit, document) for mbit, document in documents.items()]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    raise SystemExit(main())
