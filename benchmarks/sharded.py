"""Sharded states beside PyTorch's: `sudo python -m benchmarks.sharded [--rounds N] [--json]`.

Four emulated hosts, 200 and 1,000 Mbit/s, 40 % of a core each, in turns (benchmarks/turns.py), on
the deep model (benchmarks/deep.py) with wider layers. Goals, in throughput:

    sharded-data (ZeRO 3)    at least 1.0 of FSDP2, which gathers again in backward too
    zero1                    at least 1.0 of DistributedDataParallel with ZeroRedundancyOptimizer
    zero1                    at most 1.1 times the seconds of `data`
"""

import argparse
import json
import subprocess
import sys
from typing import Any

from benchmarks.deep import Shape
from benchmarks.machine import machine
from benchmarks.part import Part
from benchmarks.pipeline import Goal, show, summary
from benchmarks.turns import Job
from synchromesh.lab import HostFailed

HOSTS, CPU = 4, 0.4
SHAPE = Shape(blocks=6, width=256, rows=32)
STRATEGIES = ("fsdp2:again", "sharded-data; @pieces=1", "ddp:zero", "zero1; @pieces=1",
              "data; @pieces=1", "zero2; @pieces=1")  # fmt: skip
GOALS = [
    Goal("sharded-data; @pieces=1", "fsdp2:again", 1.0),
    Goal("zero1; @pieces=1", "ddp:zero", 1.0),
    Goal("zero1; @pieces=1", "data; @pieces=1", 1 / 1.1),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--bandwidth", default="200mbit,1gbit", help="of the hosts' links")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    options = parser.parse_args()
    told: dict[str, Any] = {}
    for bandwidth in options.bandwidth.split(","):
        job = Job(STRATEGIES, SHAPE, options.rounds)
        part = Part(bandwidth, HOSTS, job, (CPU,) * HOSTS, bandwidth)
        try:
            found = part.run()
        except (HostFailed, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{part}: {error}", file=sys.stderr)
            return 1
        told[bandwidth] = summary(GOALS, found)
        if not options.json:
            show(part, told[bandwidth])
    if options.json:
        print(json.dumps({"machine": machine(), "parts": told}))
    return 0 if all(part["passed"] for part in told.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
