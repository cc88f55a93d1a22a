"""Simulating thousands of devices: `python -m benchmarks.scale [--part NAME]`.

    10240, 65536   96 blocks of GPT-2, width 1,024, as data x tensor(8) x 32 stages, in 64
                   micro-batches
    planned        a GPT-2 of 175 billion parameters in bfloat16 on the meta device, under `auto`
                   on 1,024 devices, planned and simulated
    failures       30 days on 16,384 devices, 100 seeds

Each part in a process of its own, with its peak of memory. The first two count from when the model
has been traced, which takes half a second a block and does not depend on the devices; the third
counts all. Goals: 20 s and 2 GB, 60 s, 120 s and 8 GB, 60 s.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.machine import machine
from synchromesh.cli.ranks import uncollected

GOALS = {"10240": (20.0, 2e9), "65536": (60.0, 2e9), "planned": (120.0, 8e9),
         "failures": (60.0, 2e9)}  # fmt: skip
STAGED = "hybrid:stages=32,tensor=8,microbatches=64"
ROWS = 64 * 40  # of 10,240 devices: one of a data rank's micro-batch


def gpt2(width: int, heads: int, length: int) -> nn.Module:
    """96 blocks on the meta device, in bfloat16."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=96, n_embd=width, n_head=heads, n_positions=length, use_cache=False
    )
    with torch.device("meta"):
        model: nn.Module = GPT2LMHeadModel(config)
    return model.bfloat16()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(input_ids=batch, labels=batch).loss
    return found


def walked(name: str) -> float:
    """Seconds of a part, in this process."""
    if name == "failures":
        return failures()
    import synchromesh as sm
    from synchromesh.planning.offline import traced

    planned = name == "planned"
    width, heads, length = (12_288, 96, 2_048) if planned else (1_024, 16, 128)
    devices = 1_024 if planned else int(name)
    rows = 1_536 if planned else ROWS * devices // 10_240
    model = gpt2(width, heads, length)
    batch = torch.zeros(rows, length, dtype=torch.long)
    ends: list[float] = []

    def noted(*arguments: Any) -> Any:
        found = traced(*arguments)
        ends.append(time.perf_counter())
        return found

    began, plan = time.perf_counter(), "auto" if planned else STAGED
    patched = mock.patch("synchromesh.planning.simulation.traced", noted)
    with patched, uncollected():  # as the command does
        made = sm.simulate(model, loss, batch, cluster=f"h100x{devices}", plans=[plan])
    assert made.plans[0].step is not None, made.plans[0].reason
    return time.perf_counter() - (began if planned else ends[0])


def failures() -> float:
    from synchromesh.simulator.failures import DAY, Checkpoints, Training, failures_a_second

    began = time.perf_counter()
    training = Training(2_048, failures_a_second(6.5), Checkpoints(600.0, 30.0))
    for seed in range(100):
        training.run(30 * DAY, seed)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=GOALS, help="one of these; default all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        seconds = walked(args.part)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "bytes": peak}))
        return
    told = {}
    for name in [args.part] if args.part else GOALS:
        command = [sys.executable, "-m", "benchmarks.scale", "--here", "--part", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        told[name] = json.loads(done.stdout.splitlines()[-1])
        seconds, size = GOALS[name]
        if not args.json:
            took, peak = told[name]["seconds"], told[name]["bytes"] / 1e9
            goals = f"goals {seconds:.0f} s, {size / 1e9:.0f} GB"
            print(f"{name:9} {took:6.1f} s, {peak:.2f} GB ({goals})", flush=True)
    print(json.dumps(told) if args.json else machine())


if __name__ == "__main__":
    main()
