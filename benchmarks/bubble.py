"""How long stages wait: `sudo python -m benchmarks.pipeline --bubble`.

p = 2 and 4 stages of equal blocks on emulated hosts with a share of a core each, so that stages
that compute at once do not compete, and links that nothing fills; m = 4 and 8 micro-batches. Of a
step of T seconds a rank with a share `cpu` of a core waits

    1 - (processor seconds of the rank) / (cpu T)

which should be within 5 points of (p-1)/(v m + p-1), v being how often a rank comes in the chain
(`Pipeline.bubble`); interleaved stages (v = 2) wait at least a quarter less than 1F1B, and zero
bubble, by the formula a third of it, processes at least 1.1 times the samples a second. Of
the micro-batches those alive at once on the first stage are counted: at most p under 1F1B.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.deep import Shape
from benchmarks.machine import machine
from benchmarks.part import Part
from benchmarks.strategy import ALONE, VISITS, Pipeline
from benchmarks.turns import Job, Measured

CPU = 0.45  # two hosts share a core, and leave it a tenth
BLOCKS = 6  # of a rank
POINTS = 0.05
SHORTER = 0.75  # interleaved waiting of 1F1B's
QUICKER = 1.1  # times 1F1B's samples a second under zero bubble
LEAST = 0.1  # seconds of an action


def part(ranks: int, sides: list[str], rounds: int) -> Part:
    """All schedules and numbers of micro-batches on so many hosts."""
    shape = Shape(blocks=BLOCKS * ranks, width=256, length=128, rows=64)
    names = [
        f"{side}:{schedule}:{ranks}:{micro_batches}"
        for micro_batches in (4, 8)
        for schedule in VISITS
        for side in sides
        if side == "ours" or schedule not in ALONE
    ]
    job = Job(tuple(names), shape, rounds, checked=2)
    return Part(f"bubble{ranks}", ranks, job, (CPU,) * ranks, "10gbit")


@dataclass(frozen=True)
class Waiting:
    """The waiting of one strategy: parts of a step, measured and by formula."""

    name: str
    seconds: float
    share: float
    shares: list[float]
    formula: float
    action: float  # seconds of a forward, a third of what forward and backward take
    alive: int

    @classmethod
    def of(cls, name: str, measured: Measured) -> "Waiting":
        pipeline = Pipeline.parse(name.partition(":")[2])
        shares = [
            1 - statistics.fmean(busy) / (CPU * seconds)
            for busy, seconds in zip(measured.busy, measured.seconds, strict=True)
        ]
        computing = statistics.median(statistics.fmean(busy) for busy in measured.busy) / CPU
        return cls(
            name,
            measured.median,
            statistics.median(shares),
            shares,
            pipeline.bubble(),
            computing / (3 * pipeline.micro_batches * VISITS[pipeline.schedule]),
            measured.alive,
        )

    def faults(self, others: dict[str, "Waiting"]) -> list[str]:
        """The goals that it misses."""
        pipeline = Pipeline.parse(self.name.partition(":")[2])
        faults = []
        if abs(self.share - self.formula) > POINTS:
            faults.append(f"{abs(self.share - self.formula) * 100:.0f} points off")
        if self.action < LEAST:
            faults.append(f"actions below {LEAST * 1e3:.0f} ms")
        plain = others.get(self.name.replace("interleaved", "1f1b"))
        if pipeline.schedule == "interleaved" and plain and self.share > SHORTER * plain.share:
            faults.append(f"waits {self.share / plain.share:.2f} of 1f1b")
        plain = others.get(self.name.replace("zero-bubble", "1f1b"))
        if pipeline.schedule == "zero-bubble" and plain and QUICKER * self.seconds > plain.seconds:
            faults.append(f"{plain.seconds / self.seconds:.2f} times as quick as 1f1b")
        if pipeline.schedule in ("1f1b", "zero-bubble") and self.alive > pipeline.ranks:
            faults.append(f"more than {pipeline.ranks} micro-batches alive")
        return faults


def main(options: argparse.Namespace) -> int:
    """Measures, prints; 0 where all goals of our side are reached."""
    rows: dict[str, Waiting] = {}
    for ranks in (2, 4):
        found = part(ranks, options.sides.split(","), options.rounds or 3).run()
        rows.update((name, Waiting.of(name, m)) for name, m in found.items())
    faults = {name: row.faults(rows) for name, row in rows.items()}
    if options.json:
        told: dict[str, Any] = {n: {**vars(r), "faults": faults[n]} for n, r in rows.items()}
        print(json.dumps({"machine": machine(), "emulated": True, "rows": told}, indent=2))
    else:
        print(
            f"emulated hosts with {CPU:.0%} of a core each; {machine()}\n\n"
            f"{'strategy':22} {'step':>8} {'forward':>8} {'waits':>6} {'formula':>7} "
            f"{'alive':>5}  each round"
        )
        for name, row in rows.items():
            each = " ".join(f"{share:.1%}" for share in row.shares)
            print(
                f"{name:22} {row.seconds * 1e3:5.0f} ms {row.action * 1e3:5.0f} ms "
                f"{row.share:6.1%} {row.formula:7.1%} {row.alive:5}  {each}  "
                f"{', '.join(faults[name]) or 'as it should be'}"
            )
    return 1 if any(faults[name] for name in rows if name.startswith("ours")) else 0
