"""The same choice each time: what `sudo python -m benchmarks.choice --starts` measures.

Each model is started several times on emulated hosts, in turns from nothing and from the profile
that the first of these starts kept: processes of their own, which choose a plan and end. Then
every plan that was chosen by any of them is trained in turns in the same processes, as `pairs`
does it, so that what the machine does meanwhile is the same for all.

    apart     measured step of the slowest plan that was chosen / of the quickest     at most 1.05
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.pairs import Row, emulated
from benchmarks.zoo import make
from synchromesh.lab import HostFailed, Lab

ROOT = Path(__file__).parents[1]
MODELS, LABS = "bert,conv,vgg,lstm,mlp", "4x200"
APART = 1.05
LIMIT = 1200  # seconds of one start, or of the turns of one model
FROM = ("empty", "kept")


def start(name: str, cache: str) -> Row:
    """On every rank: a start, with profiles in the folder `cache` (`off`: none)."""
    import torch

    import synchromesh as sm

    torch.set_num_threads(1)
    os.environ["SYNCHROMESH_CACHE"] = cache
    build, loss, batch, optimizer = make(name)
    model = build()
    said: list[str] = []
    began = time.perf_counter()
    trainer = sm.prepare(
        model, optimizer(model.parameters()), loss, batch, plan="auto", say=said.append
    )
    seconds = time.perf_counter() - began
    assert trainer.choice is not None
    chosen = trainer.choice.chosen
    trainer.close()
    return {
        "model": name, "plan": str(chosen.plan), "predicted": chosen.seconds,
        "prepare_seconds": seconds, "said": said[0],
    }  # fmt: skip


def started(lab: Lab, name: str, starts: int) -> list[Row]:
    """So many starts from nothing and as many from a kept profile, and the plans they chose."""

    def on_hosts(*words: str) -> Any:
        results = lab.run([sys.executable, "-m", *words], timeout=LIMIT, cwd=ROOT)
        return json.loads(results[0].output.splitlines()[-1])

    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(starts):
            first = folder if turn == 0 else "off"  # what it measures is kept
            for kind, cache in zip(FROM, (first, folder), strict=True):
                row = on_hosts("benchmarks.repeated", name, cache)
                print(f"  {kind}: {row['plan']}", file=sys.stderr, flush=True)
                found.append({**row, "from": kind})
    plans = dict.fromkeys(row["plan"] for row in found)
    turns = on_hosts("benchmarks.pairs", "--rank", name, "--plans", *plans)
    return found + [{k: row[k] for k in ("model", "plan", "measured")} for row in turns]


def run(options: argparse.Namespace) -> list[Row]:
    """The starts of every model in every lab; SystemExit with one sentence where a host fails."""
    if options.given:
        return list(json.loads(Path(options.given).read_text()))
    found: list[Row] = []
    try:
        for lab_name in (options.labs or LABS).split(","):
            with emulated(lab_name, options.cpu) as lab:
                for name in (options.models or MODELS).split(","):
                    print(f"{name} on {lab_name} ...", file=sys.stderr, flush=True)
                    found += [
                        {**row, "lab": lab_name} for row in started(lab, name, options.starts)
                    ]
                    if options.out:
                        Path(options.out).write_text(json.dumps(found))
    except (ValueError, HostFailed) as error:
        raise SystemExit(str(error)) from None
    return found


def table(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """By model and lab: how often each plan was chosen from where, what was predicted of it then,
    what it took, and how far the plans are apart."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['model']} {row['lab']}", []).append(row)
    found = {}
    for key, group in groups.items():
        measured = {r["plan"]: r["measured"] for r in group if "measured" in r}
        starts = [r for r in group if "from" in r]
        plans = {
            plan: {
                **{k: Counter(r["plan"] for r in starts if r["from"] == k)[plan] for k in FROM},
                "predicted": [r["predicted"] for r in starts if r["plan"] == plan],
                "measured": seconds,
            }
            for plan, seconds in sorted(measured.items(), key=lambda x: x[1])
        }
        found[key] = {"plans": plans, "apart": max(measured.values()) / min(measured.values())}
    return found


def faults(found: dict[str, dict[str, Any]]) -> list[str]:
    """Goals that are not reached, in words."""
    return [
        f"{key}: plans that were chosen are {case['apart']:.3f} apart (goal {APART})"
        for key, case in found.items()
        if case["apart"] > APART
    ]


def show(found: dict[str, dict[str, Any]]) -> None:
    print(f"emulated hosts; {machine()}; starts from nothing and from a kept profile\n")
    print(f"{'model and lab':14} {'empty':>5} {'kept':>5} {'predicted':>16} {'measured':>9}  plan")
    for key, case in found.items():
        for plan, told in case["plans"].items():
            least, most = (f(told["predicted"]) * 1e3 for f in (min, max))
            print(
                f"{key:14} {told['empty']:5} {told['kept']:5} {least:6.0f} to {most:4.0f}ms "
                f"{told['measured'] * 1e3:7.0f}ms  {plan}"
            )
        print(f"{'':14} apart: {case['apart']:.3f}")


def report(options: argparse.Namespace) -> int:
    """What `choice --starts` prints; the exit code."""
    found = table(run(options))
    missed = faults(found)
    if options.json:
        each = [case["apart"] for case in found.values()]
        told = {"found": found, "mean": statistics.fmean(each), "goals": {"apart": APART}}
        print(json.dumps({**told, "missed": missed, "emulated": True, "machine": machine()}))
        return 1 if missed else 0
    show(found)
    for fault in missed:
        print(f"missed: {fault}")
    return 1 if missed else 0


def main() -> int:
    """One start on one host."""
    import torch.distributed as dist

    row = start(*sys.argv[1:3])
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(row))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
