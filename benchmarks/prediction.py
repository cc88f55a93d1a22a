"""Predicted and measured step times side by side: `sudo python -m benchmarks.prediction`.

For each model and lab (hosts x Mbit/s) the trainer finds its plan (`auto`), which gives a
prediction for it and for every other candidate; then each of them is trained for some steps in the
same processes, and the median full-size step compared with what was predicted before. Goals: mean
absolute error of step time at most 8 %, of peak memory at most 5 %, rank correlation of the plans
of one model and lab at least 0.95. Pairs with steps below 150 ms are listed and not counted.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scipy.stats import spearmanr

from benchmarks.machine import machine
from benchmarks.zoo import MODELS, make
from synchromesh.lab import HostFailed, Lab

LEAST = 0.150  # seconds of a step that counts
GOALS = {"time": 0.08, "memory": 0.05, "rank": 0.95}
LABS = ("4x200", "4x50", "4x1000", "2x200", "8x200")


def measure(name: str, most: int, steps: int) -> list[dict[str, Any]]:
    """On every rank: the candidates of `auto`, predicted and then measured."""
    import synchromesh as sm
    from synchromesh.measure.memory import LiveBytes

    build, loss, batch, optimizer = make(name)
    model = build()
    trainer = sm.prepare(model, optimizer(model.parameters()), loss, batch, plan="auto")
    assert trainer.choice is not None
    rows = []
    for candidate in trainer.choice.candidates[:most]:
        if candidate.time is None:
            continue
        trainer.switch(candidate.plan)
        mine = trainer.shard(batch)
        trainer._arranged.overlap.chosen = candidate.time.pieces
        taken = []
        for _ in range(steps + 3):
            dist.barrier()
            began = time.perf_counter()
            trainer.step(mine)
            taken.append(time.perf_counter() - began)
        slowest = torch.tensor(taken[3:], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        known = [
            *trainer.model.parameters.values(),
            *trainer.model.buffers.values(),
            *(b.flat for b in trainer._arranged.sync._buckets),
            *(
                x
                for s in trainer.optimizer.state.values()
                for x in s.values()
                if torch.is_tensor(x)
            ),
            *(x for x in (mine if isinstance(mine, tuple) else (mine,))),
        ]
        with LiveBytes(known) as live:
            trainer.step(mine)
        peak = torch.tensor(float(live.peak))
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        rows.append(
            {
                "model": name,
                "plan": str(candidate.plan),
                "predicted": candidate.seconds,
                "measured": statistics.median(slowest.tolist()),
                "predicted_bytes": max(m.peak for m in candidate.memory),
                "measured_bytes": float(peak),
                "share": candidate.time.communication_share,
                "measuring_seconds": trainer.choice.profile.seconds,
            }
        )
    trainer.close()
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors over the pairs that count, and the rank correlation of each model and lab."""
    counted = [r for r in rows if r["measured"] >= LEAST]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in counted:
        groups.setdefault((row["model"], row["lab"]), []).append(row)
    ranks = {
        " ".join(key): float(
            spearmanr([r["predicted"] for r in g], [r["measured"] for r in g]).statistic
        )
        for key, g in groups.items()
        if len(g) >= 3
    }
    time_errors = [abs(r["predicted"] / r["measured"] - 1) for r in counted]
    memory_errors = [abs(r["predicted_bytes"] / r["measured_bytes"] - 1) for r in rows]
    return {
        "pairs": len(counted),
        "time": statistics.fmean(time_errors) if counted else None,
        "memory": statistics.fmean(memory_errors) if rows else None,
        "rank": ranks,
    }


def show(rows: list[dict[str, Any]], told: dict[str, Any]) -> None:
    print(f"emulated hosts; {machine()}\n")
    print(
        f"{'model':9} {'lab':7} {'predicted':>9} {'measured':>9} {'error':>7} {'memory':>7}  plan"
    )
    for r in rows:
        error = r["predicted"] / r["measured"] - 1
        memory = r["predicted_bytes"] / r["measured_bytes"] - 1
        mark = " " if r["measured"] >= LEAST else "-"
        print(
            f"{r['model']:9} {r['lab']:7} "
            f"{r['predicted'] * 1e3:7.0f}ms {r['measured'] * 1e3:7.0f}ms"
            f"{mark}{error:+7.1%} {memory:+7.1%}  {r['plan']}"
        )
    print(f"\n{told['pairs']} pairs of at least {LEAST * 1e3:.0f} ms")
    for key in ("time", "memory"):
        if told[key] is not None:
            print(f"mean absolute error of {key}: {told[key]:.1%} (goal {GOALS[key]:.0%})")
    for key, rank in told["rank"].items():
        print(f"rank correlation {key}: {rank:.2f} (goal {GOALS['rank']})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--labs", default=",".join(LABS), help="hosts x Mbit/s")
    parser.add_argument("--cpu", type=float, help="share of a core (0.4; 0.2 for 8 hosts)")
    parser.add_argument("--most", type=int, default=9, help="candidates of a model and lab")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each")
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    parser.add_argument("--rank", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        rows = measure(options.rank, options.most, options.steps)
        if dist.get_rank() == 0:
            print(json.dumps(rows))
        dist.destroy_process_group()
        return 0
    found: list[dict[str, Any]] = []
    root = Path(__file__).parents[1]
    for lab_name in options.labs.split(","):
        hosts, mbit = (int(n) for n in lab_name.split("x"))
        cpu = options.cpu or (0.2 if hosts > 4 else 0.4)
        try:
            with Lab(hosts=hosts, bandwidth=f"{mbit}mbit", cpu=cpu) as lab:
                for name in options.models.split(","):
                    print(f"{name} on {hosts} hosts, {mbit} Mbit/s ...", file=sys.stderr)
                    command = [
                        sys.executable, "-m", "benchmarks.prediction", "--rank", name,
                        "--most", str(options.most), "--steps", str(options.steps),
                    ]  # fmt: skip
                    results = lab.run(command, timeout=900, cwd=root)
                    rows = json.loads(results[0].output.splitlines()[-1])
                    found += [{**row, "lab": lab_name} for row in rows]
        except (ValueError, HostFailed) as error:
            print(error, file=sys.stderr)
            return 1
    told = summary(found)
    if options.json:
        print(json.dumps({"rows": found, **told, "emulated": True, "machine": machine()}))
    else:
        show(found, told)
    good = (
        told["time"] is not None
        and told["time"] <= GOALS["time"]
        and told["memory"] <= GOALS["memory"]
        and all(r >= GOALS["rank"] for r in told["rank"].values())
    )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
