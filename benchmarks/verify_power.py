"""The power of `verify`: planted errors that it has to find, and correct plans that it has to
pass: `python -m benchmarks.verify_power`.

Six models on four ranks, two or three steps in float64. An error is one of `tests/planted.py`. The
sizes of those that have one are drawn from 1e-7 up, evenly in their logarithm; where a model
computes in single precision itself, from 1e-4 up (`LEAST`). Non-zero exit where an error is missed
or a correct plan fails; each such line has what repeats it.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.equality import mixed
from benchmarks.machine import machine
from synchromesh.verify.verify import cast, cast_model, verify
from tests.planted import DIVIDED, KINDS, SIZED, Planted, planted
from tests.ranks import run
from tests.targets import target
from tests.traces import shared

LEAST = {
    "mobilenet": 1e-7, "lstm": 1e-7, "experts": 1e-7,
    "qwen3": 1e-4, "bloom": 1e-4, "t5": 1e-4,
}  # fmt: skip
MOST = 0.1
PLANS = ("data", "hybrid:tensor=2", "mixed", "tensor")
RANKS = 4


@dataclass(frozen=True)
class Case:
    """One verification: a model, a plan, and an error or none."""

    family: str
    plan: str
    seed: int
    error: Planted | None = None


def cases(
    family: str, plans: Sequence[str], errors: int, correct: int, seed: int
) -> list[Case]:  # fmt: skip
    """The cases of a family, all drawn by `seed`. The first two plans divide rows."""
    chance = random.Random(f"{family} {seed}")
    kinds = [k for k in KINDS if k != "stale buffer" or family == "mobilenet"]
    drawn = []
    for index in range(errors):
        kind = kinds[index % len(kinds)]
        size = LEAST[family] * (MOST / LEAST[family]) ** chance.random() if kind in SIZED else 0.0
        size = LEAST[family] if index < len(SIZED) else size
        error = Planted(kind, chance.randrange(RANKS), size, chance.randrange(1000))
        plan = chance.choice(plans[:2] if kind in DIVIDED else plans)
        drawn.append(Case(family, plan, chance.randrange(1000), error))
    for index in range(correct):
        drawn.append(Case(family, plans[index % len(plans)], chance.randrange(1000)))
    return drawn


def verified(drawn: list[Case]) -> list[dict[str, Any]]:
    """The documents of cases of one family, in one group of ranks."""
    documents = []
    for case in drawn:
        with planted(case.error):
            job, steps = target(case.family, case.seed), 2 if case.error else 3
            documents.append(verify(job, case.plan, steps))
    return documents


@dataclass
class Row:
    """A model's line of the table.

    noise     of gradients: the largest noise floor of a correct plan
    nearest   of correct plans: the largest part of what is allowed
    smallest  size of an error that was found
    """

    family: str
    planted: int = 0
    found: int = 0
    plans: int = 0
    alarms: int = 0
    noise: float = 0.0
    nearest: float = 0.0
    smallest: float = MOST

    def add(self, case: Case, document: dict[str, Any]) -> bool:
        """Counts one; returns whether the answer is right."""
        if case.error is not None:
            found = bool(document["faults"])
            self.planted, self.found = self.planted + 1, self.found + found
            if found and case.error.size:
                self.smallest = min(self.smallest, case.error.size)
            return found
        self.plans += 1
        self.alarms += not document["passed"]
        self.noise = max(self.noise, document["noise_floor"]["gradient"])
        self.nearest = max(self.nearest, *document["of_allowed"].values())
        return bool(document["passed"])

    def __str__(self) -> str:
        return (
            f"{self.family:10} {self.found:4} of {self.planted:3} {self.smallest:9.0e} "
            f"{self.alarms:7} of {self.plans:3} {self.noise:9.0e} {self.nearest:9.2f}"
        )


def measured(family: str, errors: int, correct: int, seed: int, quiet: bool) -> Row:
    """Draws and verifies a family's cases; prints wrong answers."""
    job = target(family)
    model, example = cast_model(job.model(), torch.float64), cast(job.example(), torch.float64)
    plans = [mixed(family, RANKS) if plan == "mixed" else plan for plan in PLANS]
    drawn, row = cases(family, plans, errors, correct, seed), Row(family)
    with shared(family, model, job.loss, example, *plans):
        documents = run(RANKS, verified, drawn, timeout=3600)[0]
    for case, document in zip(drawn, documents, strict=True):
        if not row.add(case, document) and not quiet:
            print(f"WRONG: {case}: {document}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--errors", type=int, default=200)
    parser.add_argument("--plans", type=int, default=100)
    parser.add_argument("--families", default=",".join(LEAST))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start, rows, families = time.monotonic(), list[Row](), args.families.split(",")
    if not args.json:
        print(f"{machine()}; seed {args.seed}")
        print("model      errors found  smallest  false alarms     noise   allowed")
    for index, family in enumerate(families):
        shares = ((total + index) // len(families) for total in (args.errors, args.plans))
        rows.append(measured(family, *shares, args.seed, args.json))
        if not args.json:
            print(rows[-1], flush=True)
    missed, alarms = sum(r.planted - r.found for r in rows), sum(r.alarms for r in rows)
    summary = {"missed": missed, "alarms": alarms, "seconds": round(time.monotonic() - start)}
    if args.json:
        print(json.dumps({"seed": args.seed, **summary, "rows": [asdict(r) for r in rows]}))
    else:
        print(f"{missed} errors missed, {alarms} false alarms, {summary['seconds']} s")
    return 1 if missed or alarms else 0


if __name__ == "__main__":
    sys.exit(main())
