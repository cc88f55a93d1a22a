"""Predicted and measured step times side by side: `sudo python -m benchmarks.prediction`.

Over the pairs of `benchmarks.pairs` (`--from FILE` takes those of a file): what was predicted for
each plan before its first step, and what it took. Goals: mean absolute error of step time at most
8 %, of peak memory at most 5 %, rank correlation of a model's pairs at least 0.95.
Pairs with steps below 150 ms are listed and not counted.
"""

import json
import statistics
from collections.abc import Callable
from typing import Any

from scipy.stats import spearmanr

from benchmarks.machine import machine
from benchmarks.pairs import Row, asked, rows_of

LEAST = 0.150  # seconds of a step that counts
FEWEST = 3  # plans that have a rank correlation
GOALS = {"time": 0.08, "memory": 0.05, "rank": 0.95}


def summary(rows: list[Row]) -> dict[str, Any]:
    """Errors over the pairs that count, the rank correlation of each model, also in each lab."""
    counted = [r for r in rows if r["measured"] >= LEAST]

    def ranks(key: Callable[[Row], str]) -> dict[str, float]:
        groups: dict[str, list[Row]] = {}
        for row in counted:
            groups.setdefault(key(row), []).append(row)
        return {name: _rank(g) for name, g in groups.items() if len(g) >= FEWEST}

    return {
        "pairs": len(counted),
        "time": _mean_error(counted, "predicted", "measured"),
        "memory": _mean_error(rows, "predicted_bytes", "measured_bytes"),
        "rank": ranks(lambda r: str(r["model"])),
        "lost": _lost(counted),
        "rank_in_lab": ranks(lambda r: f"{r['model']} {r['lab']}"),
    }


def _lost(rows: list[Row]) -> float | None:
    """How much longer the plan of least prediction takes than the quickest of its model and lab;
    the mean over these."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["lab"]), []).append(row)
    if not groups:
        return None
    return statistics.fmean(
        min(g, key=lambda r: r["predicted"])["measured"] / min(r["measured"] for r in g) - 1
        for g in groups.values()
    )


def _rank(rows: list[Row]) -> float:
    columns = ([r[key] for r in rows] for key in ("predicted", "measured"))
    return float(spearmanr(*columns).statistic)


def _mean_error(rows: list[Row], predicted: str, measured: str) -> float | None:
    if not rows:
        return None
    return statistics.fmean(abs(r[predicted] / r[measured] - 1) for r in rows)


def show(rows: list[Row], told: dict[str, Any]) -> None:
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
    if told["lost"] is not None:
        print(f"the least prediction, above the least measurement: {told['lost']:.1%} on average")
    inside = ", ".join(f"{key} {rank:.2f}" for key, rank in told["rank_in_lab"].items())
    print(f"in each lab: {inside}")


def main() -> int:
    options = asked(__doc__.splitlines()[0] if __doc__ else "")
    rows = [r for r in rows_of(options) if "rival" not in r]
    told = summary(rows)
    if options.json:
        print(json.dumps({"rows": rows, **told, "emulated": True, "machine": machine()}))
    else:
        show(rows, told)
    good = (
        told["time"] is not None
        and told["time"] <= GOALS["time"]
        and told["memory"] <= GOALS["memory"]
        and all(r >= GOALS["rank"] for r in told["rank"].values())
    )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
