"""Pipelines that stay filled beside those that are flushed: `sudo python -m benchmarks.pipeline
--filled`.

4 stages of equal blocks on emulated hosts with a share of a core each and links that nothing
fills, 4 and 8 micro-batches. `pipedream` and `pipedream-2bw` should process 1.2 times the samples
a second of 1F1B with 4 micro-batches (with a flush a step takes (m + p - 1) (f + b), without
m (f + b): at most 1.75 times), zero bubble 1.1 times; and stages should stash as many bytes of
older weights as predicted. A turn is of several steps, as a stage that has waited at its beginning
for the others has to be filled anew.
"""

import argparse
import json
import statistics
from dataclasses import asdict
from typing import Any

from benchmarks.bubble import BLOCKS, CPU
from benchmarks.deep import Shape
from benchmarks.machine import machine
from benchmarks.part import Part
from benchmarks.turns import Job, Measured, ratios

RANKS, STEPS = 4, 4  # steps of a turn
GOALS = {"1f1b": 0.0, "zero-bubble": 1.1, "pipedream": 1.2, "pipedream-2bw": 1.2}
APART = 0.05  # of stashed bytes from the prediction


def part(rounds: int) -> Part:
    shape = Shape(blocks=BLOCKS * RANKS, width=256, length=128, rows=16)
    names = tuple(f"ours:{word}:{RANKS}:{count}" for count in (4, 8) for word in GOALS)
    job = Job(names, shape, rounds, checked=2, steps=STEPS)
    return Part("filled", RANKS, job, (CPU,) * RANKS, "10gbit")


def row(name: str, found: dict[str, Measured]) -> dict[str, Any]:
    """What was measured of a strategy beside 1F1B with as many micro-batches, and its faults."""
    _, word, ranks, count = name.split(":")
    own, plain = found[name], found[f"ours:1f1b:{ranks}:{count}"]
    each = ratios(plain, own)
    ratio, goal = statistics.median(each), GOALS[word] * (count == "4")
    faults = [f"below {goal}"] if ratio < goal else []
    pairs = zip(own.stashed, own.stashed_due, strict=True)
    if any(abs(really - due) > APART * due for really, due in pairs):
        faults.append("stashed bytes are not as predicted")
    waits = 1 - statistics.fmean(map(statistics.fmean, own.busy)) / (CPU * own.median)
    return {
        "name": name, "seconds": own.median, "ratio": ratio, "ratios": each, "goal": goal,
        "waits": waits, "stashed": own.stashed, "stashed_due": own.stashed_due, "faults": faults,
    }  # fmt: skip


def main(options: argparse.Namespace) -> int:
    """Measures, prints; 0 where all goals are reached."""
    asked = part(options.rounds or 3)
    found = asked.run()
    rows = [row(name, found) for name in found]
    if options.json:
        told = {"machine": machine(), "emulated": True, "shape": asdict(asked.job.shape)}
        print(json.dumps({**told, "rows": rows}, indent=2))
        return 1 if any(r["faults"] for r in rows) else 0
    print(
        f"emulated hosts with {CPU:.0%} of a core each; {machine()}\n\n"
        f"{'strategy':24} {'step':>8} {'waits':>6} {'of 1f1b':>7}  each round; "
        "stashed bytes by stage (predicted)"
    )
    for r in rows:
        each = " ".join(f"{ratio:.2f}" for ratio in r["ratios"])
        stashed = ", ".join(
            f"{really:,.0f} ({due:,.0f})"
            for really, due in zip(r["stashed"], r["stashed_due"], strict=True)
        )
        print(
            f"{r['name']:24} {r['seconds'] * 1e3:5.0f} ms {r['waits']:6.1%} {r['ratio']:7.2f}  "
            f"{each}; {stashed}  {', '.join(r['faults']) or 'as it should be'}"
        )
    return 1 if any(r["faults"] for r in rows) else 0
