"""Pipeline stages beside PyTorch's and beside none: `sudo python -m benchmarks.pipeline`.

    local2, local4  ours and torch.distributed.pipelining on local ranks, with the same cuts,
                    micro-batches and schedules: throughput at least 1.0
    narrow          a deep narrow model on 4 emulated hosts with 50 Mbit/s: `auto` picks stages and
                    is at least 1.5 times as fast as DistributedDataParallel, FSDP2, `tensor` and
                    `single`
    unequal         the same with two hosts at half speed: `auto` is at least 1.25 times as fast as
                    stages of equally many blocks
    --bubble        the part of a step in which ranks wait (benchmarks/bubble.py)
    --filled        pipelines without a flush beside those with one (benchmarks/filled.py)

Strategies (benchmarks/strategy.py) run in turns in the same processes (benchmarks/turns.py), on
the same model (benchmarks/deep.py), weights, batch and optimizer; ratios are medians of five
rounds. Losses of the first steps must agree.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks import bubble, filled
from benchmarks.deep import Shape
from benchmarks.machine import machine
from benchmarks.part import Part
from benchmarks.strategy import ALONE, TENSOR, VISITS
from benchmarks.turns import Job, Measured, deviation, ratios
from synchromesh.lab import HostFailed

MICRO_BATCHES = 8
HOSTS, CPU = 4, 0.4
ALIKE = 1e-4  # between losses of the same step, in float32 under AdamW
STAGES = f"1f1b:{HOSTS}:{MICRO_BATCHES}"  # of equally many blocks


@dataclass(frozen=True)
class Goal:
    """`ours` should be `times` as fast as `rival`; 0: they are compared without a goal."""

    ours: str
    rival: str
    times: float


def local(ranks: int) -> tuple[Part, list[Goal]]:
    both = [schedule for schedule in VISITS if schedule not in ALONE]
    ends = [f"{schedule}:{ranks}:{MICRO_BATCHES}" for schedule in both]
    goals = [Goal(f"ours:{end}", f"torch:{end}", 1.0) for end in ends]
    names = tuple(name for goal in goals for name in (goal.rival, goal.ours))
    return Part(f"local{ranks}", ranks, Job(names)), goals


def auto(name: str, goals: dict[str, float], cpu: tuple[float, ...]) -> tuple[Part, list[Goal]]:
    part = Part(name, HOSTS, Job(("auto", *goals)), cpu)
    return part, [Goal("auto", rival, times) for rival, times in goals.items()]


PARTS = {
    part.name: (part, goals)
    for part, goals in (
        local(2),
        local(4),
        auto(
            "narrow",
            {"ddp": 1.5, "fsdp2": 1.5, TENSOR: 1.5, "single": 1.5}
            | {f"torch:{STAGES}": 0.0, f"ours:{STAGES}": 0.0},
            (CPU,) * HOSTS,
        ),
        auto(
            "unequal",
            {f"ours:{STAGES}": 1.25, f"torch:{STAGES}": 0.0},
            (CPU, CPU, CPU / 2, CPU / 2),
        ),
    )
}


def summary(goals: list[Goal], measured: dict[str, Measured]) -> dict[str, Any]:
    """The ratios of a part, and whether its goals are reached; of sides that were measured."""
    rows = []
    for goal in goals:
        if {goal.ours, goal.rival} <= set(measured):
            each = ratios(measured[goal.rival], measured[goal.ours])
            ratio = statistics.median(each)
            staged = goal.ours != "auto" or "@stages=" in measured["auto"].plan
            passed = not goal.times or (ratio >= goal.times and staged)
            rows.append({**asdict(goal), "ratio": ratio, "ratios": each, "passed": passed})
    apart = deviation(list(measured.values()))
    return {
        "strategies": {name: {**asdict(m), "median": m.median} for name, m in measured.items()},
        "comparisons": rows,
        "losses_apart": apart,
        "alike": apart <= ALIKE,
        "passed": apart <= ALIKE and all(row["passed"] for row in rows),
    }


def show(part: Part, told: dict[str, Any]) -> None:
    print(f"\n{part}\n{'strategy':22} {'median':>9} {'processor':>9}  each round")
    for name, m in told["strategies"].items():
        each = " ".join(f"{seconds * 1e3:.0f}" for seconds in m["seconds"])
        work = statistics.median(sum(busy) for busy in m["busy"])  # of all ranks
        print(f"{name:22} {m['median'] * 1e3:6.0f} ms {work * 1e3:6.0f} ms  {each}")
        if m["predicted"] is not None:
            print(f"{'':4}{m['plan']} (predicted {m['predicted'] * 1e3:.0f} ms)")
    for row in told["comparisons"]:
        each = " ".join(f"{ratio:.2f}" for ratio in row["ratios"])
        verdict = "reached" if row["passed"] else "missed"
        goal = f"goal {row['times']:.2f}: {verdict}" if row["times"] else "no goal"
        print(f"{row['rival']} / {row['ours']}: {row['ratio']:.3f} ({goal}; {each})")
    losses = {tuple(round(x, 5) for x in m["losses"]) for m in told["strategies"].values()}
    print(f"losses of the first steps: {sorted(losses)}, {told['losses_apart']:.1e} apart")


def chosen(options: argparse.Namespace, part: Part) -> Part:
    """The part with the strategies and rounds that were asked for."""
    only = tuple(options.only.split(","))
    names = tuple(name for name in part.job.strategies if name.startswith(only))
    job = replace(part.job, strategies=names, rounds=options.rounds or part.job.rounds)
    return replace(part, job=job)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", default=",".join(PARTS), help="which (default: all)")
    parser.add_argument("--only", default="", help="strategies that begin with one of these")
    parser.add_argument("--rounds", type=int, help="default 5; 3 with --bubble and --filled")
    parser.add_argument("--bubble", action="store_true", help="how long stages wait")
    parser.add_argument("--filled", action="store_true", help="pipelines without a flush")
    parser.add_argument("--sides", default="ours", help="with --bubble: ours,torch compares both")
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}: choose of {', '.join(PARTS)}")
    told: dict[str, Any] = {}
    try:
        if options.bubble:
            return bubble.main(options)
        if options.filled:
            return filled.main(options)
        for name in names:
            part, goals = PARTS[name]
            told[name] = summary(goals, chosen(options, part).run())
    except (ValueError, HostFailed, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr)
        return 1
    shape = Shape()
    sizes = {"parameter_bytes": shape.parameter_bytes, "border_bytes": shape.border_bytes}
    passed = all(part["passed"] for part in told.values())
    if options.json:
        document = {"machine": machine(), "shape": asdict(shape), **sizes, "parts": told}
        print(json.dumps({**document, "passed": passed}, indent=2))
        return 0 if passed else 1
    print(
        f"{machine()}\n{shape.blocks} blocks of width {shape.width}, {shape.rows} rows of "
        f"{shape.length} bytes; parameters {sizes['parameter_bytes'] / 1e6:.1f} MB, "
        f"activations between blocks {sizes['border_bytes'] / 1e6:.2f} MB"
    )
    for name, part_told in told.items():
        show(PARTS[name][0], part_told)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
