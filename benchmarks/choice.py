"""The chosen plan against all others: `sudo python -m benchmarks.choice`.

Over the pairs of `benchmarks.pairs` (`--from FILE` takes those of a file): the measured step of
the plan that `auto` chose over that of

    best      the quickest of all candidates                    at most 1.03 on average, 1.08 ever
    ddp       the quicker of DistributedDataParallel's two ways     at most 1.02 where data is best
    fsdp2     torch's fully_shard
    tensor    uniform tensor parallelism     these three at least 1.8 times as slow for conv and
                                             the LSTM models on 4 hosts at 200 Mbit/s
    uniform   the quickest of data, tensor and uniform hybrids      1.18 times as slow, two models

--json has what `prediction` says of the same pairs, too.

--starts [N]: the plans that N starts of each of five models choose instead (`repeated`).
"""

import json
import statistics
from typing import Any

from benchmarks import repeated
from benchmarks.machine import machine
from benchmarks.pairs import Row, asked, rows_of
from benchmarks.prediction import document

MEAN, MOST, BEHIND, QUICKER, UNIFORM = 1.03, 1.08, 1.02, 1.8, 1.18
SHOWN = ("conv", "lstm", "context")  # where QUICKER is asked for,
SHOWN_LAB = "4x200"  # in this lab


def ratios(rows: list[Row]) -> dict[str, Any]:
    """One model in one lab: seconds of the chosen plan, and the others' over it."""
    plans = {r["plan"]: r["measured"] for r in rows if "plan" in r}
    rivals = {r["rival"]: r["measured"] for r in rows if "rival" in r}
    chosen = next(r for r in rows if r.get("chosen"))
    mine = chosen["measured"]

    def over(found: list[float]) -> float | None:
        return min(found) / mine if found else None

    def uniform(*words: str) -> list[float]:
        plain = {p: s for p, s in plans.items() if "=" not in p.partition(";")[2].split("@")[0]}
        return [s for p, s in plain.items() if p.split(";")[0].startswith(words)]

    best = min(plans, key=lambda p: plans[p])
    return {
        "chosen": chosen["plan"],
        "seconds": mine,
        "best": best,
        "behind": mine / plans[best],
        "data_is_best": best.split(";")[0] == "data" and len(uniform("data")) > 0
        and plans[best] == min(uniform("data")),
        "ddp": over([s for r, s in rivals.items() if r.startswith("ddp")]),
        "fsdp2": over([s for r, s in rivals.items() if r == "fsdp2"]),
        "tensor": over(uniform("tensor")),
        "uniform": over(uniform("data", "tensor", "hybrid")),
    }  # fmt: skip


def table(rows: list[Row]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['model']} {row['lab']}", []).append(row)
    return {key: ratios(group) for key, group in groups.items()}


def faults(found: dict[str, dict[str, Any]]) -> list[str]:
    """Goals that are not reached, in words."""
    told = []
    behind = [r["behind"] for r in found.values()]
    if statistics.fmean(behind) > MEAN:
        told.append(f"behind the best: {statistics.fmean(behind):.3f} on average (goal {MEAN})")
    told += [
        f"{key}: {r['behind']:.3f} of the best, {r['best']!r} (goal {MOST})"
        for key, r in found.items()
        if r["behind"] > MOST
    ]
    told += [
        f"{key}: {1 / r['ddp']:.3f} of DDP where data is best (goal {BEHIND})"
        for key, r in found.items()
        if r["data_is_best"] and r["ddp"] is not None and 1 / r["ddp"] > BEHIND
    ]
    told += [
        f"{key}: {other} takes {found[key][other]:.2f} times as long (goal {QUICKER})"
        for model in SHOWN
        if (key := f"{model} {SHOWN_LAB}") in found
        for other in ("ddp", "fsdp2", "tensor")
        if found[key][other] is not None and found[key][other] < QUICKER
    ]
    above = {
        key.split()[0] for key, r in found.items() if r["uniform"] and r["uniform"] >= UNIFORM
    }
    if len(above) < 2:
        told.append(f"{UNIFORM} times the best uniform plan on {len(above)} models (goal 2)")
    return told


def main() -> int:
    options = asked(__doc__.splitlines()[0] if __doc__ else "")
    if options.starts:
        return repeated.report(options)
    rows = rows_of(options)
    found = table(rows)
    missed = faults(found)
    if options.json:
        goals = {"mean": MEAN, "most": MOST}
        told = {"found": found, "goals": goals, "missed": missed, "prediction": document(rows)}
        print(json.dumps({**told, "emulated": True, "machine": machine()}))
        return 1 if missed else 0
    print(f"emulated hosts; {machine()}; steps of the others over those of the chosen plan\n")
    others = ("ddp", "fsdp2", "tensor", "uniform")
    print(
        f"{'model and lab':16} {'chosen':>8} {'/ best':>7} "
        + " ".join(f"{o:>7}" for o in others)
        + "  plan"
    )
    for key, r in found.items():
        ratio = " ".join(f"{r[o]:7.2f}" if r[o] is not None else f"{'-':>7}" for o in others)
        print(f"{key:16} {r['seconds'] * 1e3:6.0f}ms {r['behind']:7.3f} {ratio}  {r['chosen']}")
    print(f"\nbehind the best: {statistics.fmean(r['behind'] for r in found.values()):.3f} (mean)")
    for fault in missed:
        print(f"missed: {fault}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
