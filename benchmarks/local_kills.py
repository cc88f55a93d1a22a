"""Kills of ranks at random moments: `python -m benchmarks.local_kills [--kills 30] [--seed 0]
[--plans data,hybrid:tensor=2,hybrid:stages=2,sharded-data] [--quiet RANKS] [--switches RUNS]
[--turns 3] [--json]`.

Four ranks of a host train a model of float64 (`tests.elastic_run`) under each plan, as an elastic
run. Two of them, drawn like the moments, get a SIGKILL while it trains (one where a plan divides
the model: two may have shared a part alone), until there were as many kills. Goals: a death is
noticed within 0.5 s, training goes on within 2 s (median) and 4 s (at most), no step is lost under
`data` (elsewhere the last copies in memory may be some steps old), and losses and parameters are
those of an undisturbed run, to 1e-10. Before that the quiet cost: runs without a kill,
in turns, of this launcher and of the one that is not elastic; goal 0.99 of the steps a second.
`--quiet RANKS`: of so many ranks, and no kills. `--switches RUNS`: ranks are lost in a switch of
plans, at a phase of it, and every other time another one while that is dealt with; the run's end
is to be that of an undisturbed one.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import machine
from synchromesh.launcher import elastic, launcher

RANKS, EPOCHS = 4, 60
NEAR = 1e-10
NOTICED, TYPICAL, LONGEST, QUIET = 0.5, 2.0, 4.0, 0.99
SHORT, STEP = 3, 8  # epochs of a run with a switch, and steps in front of it
SWITCHED = ("data", "hybrid:tensor=2", "sharded-data", "hybrid:stages=2", "data; @ranks=0-2")
# of tests.elastic_run: in a switch; and while a loss is dealt with
PHASES = ("copy", "send", "move", "moved", "behind")
LATER = ("enter", "regroup", "restored", "move", "moved", "room")
PLANS = "data,hybrid:tensor=2,hybrid:stages=2,sharded-data"


def launched(file: str, plan: str, kind: str, ranks: str, epochs: str, *words: str) -> int:
    """In a process of its own: runs to the end, under one of the two launchers. words: of
    `tests.elastic_run`."""
    command = ["-m", "tests.elastic_run", file, plan, epochs, *words]
    if kind == "elastic":
        ending = elastic.launch(command, int(ranks), print)
    else:
        ending = launcher.launch(command, int(ranks))
    if ending.failure is not None:
        print(ending.failure, file=sys.stderr)
    return ending.code


def run(
    plan: str, kind: str, moments: Sequence[float] = (), ranks: int = RANKS, epochs: int = EPOCHS,
    words: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """What a run has left. moments: seconds of its training behind which a rank is killed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.local_kills", "--run", str(file), plan, kind]
        command += [str(ranks), str(epochs), *words]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            begun = file.with_suffix(".begun")
            while not begun.exists() and process.poll() is None:
                time.sleep(0.01)
            began = time.monotonic()
            left = ranks_of(process.pid)
            for moment in sorted(moments):
                time.sleep(max(0.0, began + moment - time.monotonic()))
                victim = left.pop(random.randrange(len(left)))
                subprocess.run(["kill", f"-{signal.SIGKILL:d}", str(victim)], check=False)
        if process.returncode:
            raise RuntimeError(f"{plan}: the run ended with {process.returncode}")
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def ranks_of(launching: int) -> list[int]:
    children = Path(f"/proc/{launching}/task/{launching}/children")
    return [int(pid) for pid in children.read_text().split()]


def apart(found: dict[str, Any], plain: dict[str, Any]) -> float:
    """The largest difference of losses and parameters. KeyError where one has others."""
    pairs = [*zip(found["losses"], plain["losses"], strict=True)]
    for name, value in found["parameters"].items():
        pairs += zip(flat(value), flat(plain["parameters"][name]), strict=True)
    return max(abs(a - b) for a, b in pairs)


def flat(value: Any) -> list[float]:
    return [x for item in value for x in flat(item)] if isinstance(value, list) else [value]


def quiet(plan: str, turns: int, ranks: int) -> tuple[float, dict[str, Any]]:
    """Steps a second beside those of the other launcher, and one of the runs."""
    ratios = []
    for _ in range(turns):
        usual, own = run(plan, "usual", (), ranks), run(plan, "elastic", (), ranks)
        ratios.append(median(usual["seconds"]) / median(own["seconds"]))
    return median(ratios), own


def switches(runs: int) -> int:
    """Prints where ranks were lost, and what came of it."""
    plain, rows = run("data", "elastic", (), 2, SHORT), list[dict[str, Any]]()
    print(f"{'from':17}{'to':17}{'lost at':26}{'state from':26}{'again':>8}{'apart':>9}")
    while len(rows) < runs:
        plan, other = random.sample(SWITCHED, 2)
        first, second = random.sample(range(RANKS), 2)
        faults = [f"{first}:{STEP}:{random.choice(PHASES)}"]
        if len(rows) % 2:
            faults.append(f"{second}:{STEP}:{random.choice(LATER)}")
        words = "replicate=1", *faults, f"switch@{STEP}={other}"
        found = run(plan, "elastic", (), RANKS, SHORT, words)
        of, far = found["generations"], apart(found, plain)
        if not of:  # a switch without that phase
            continue
        places = ", ".join(fault.rpartition(":")[2] for fault in faults)
        sources = ", ".join(f"{g['state_from']} at {g['from_step']}" for g in of)
        rows.append({"good": far <= NEAR, "again": max(g["recovered_seconds"] for g in of)})
        print(
            f"{plan:17}{other:17}{places:26}{sources:26}{rows[-1]['again']:6.2f} s{far:9.0e}"
            f"{'' if rows[-1]['good'] else '  missed'}", flush=True,
        )  # fmt: skip
    good = sum(row["good"] for row in rows)
    print(f"{machine()}\n{good} of {runs} runs end as the undisturbed one (goal: all)")
    return 0 if good == runs else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=30, help="under each plan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plans", default=PLANS)
    parser.add_argument("--quiet", type=int, metavar="RANKS")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--switches", type=int, metavar="RUNS")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        return launched(*asked.run)
    if asked.quiet:
        costs = {p: quiet(p, asked.turns, asked.quiet)[0] for p in asked.plans.split(",")}
        told = ", ".join(f"{plan} {cost:.3f}" for plan, cost in costs.items())
        print(f"{machine()}\n{asked.quiet} ranks, steps a second beside the usual ones: {told}")
        return 0 if min(costs.values()) >= QUIET else 1
    random.seed(asked.seed)
    if asked.switches:
        return switches(asked.switches)
    rows = []
    for plan in asked.plans.split(","):
        cost, plain = quiet(plan, asked.turns, RANKS)
        long, faults, far = sum(plain["seconds"]), list[dict[str, Any]](), 0.0
        while sum(len(f["culprit"]) for f in faults) < asked.kills:
            moments = [random.uniform(0, 0.9 * long) for _ in range(2 if plan == "data" else 1)]
            found = run(plan, "elastic", moments)
            faults += found["generations"]
            far = max(far, apart(found, plain))
        seconds = [f["recovered_seconds"] for f in faults]
        row = {
            "plan": plan, "kills": sum(len(f["culprit"]) for f in faults), "quiet": cost,
            "noticed": max(f["noticed_seconds"] for f in faults), "recovered": median(seconds),
            "longest": max(seconds), "lost_steps": sum(f["lost_steps"] for f in faults),
            "apart": far,
        }  # fmt: skip
        row["good"] = (
            row["noticed"] <= NOTICED and row["recovered"] <= TYPICAL and far <= NEAR
            and row["longest"] <= LONGEST and cost >= QUIET
            and (not row["lost_steps"] or plan != "data")  # elsewhere back to the newest copies
        )  # fmt: skip
        rows.append(row)
    if asked.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
    else:
        print(machine())
        print(f"{'plan':18}{'kills':>6}{'noticed':>9}{'again':>8}{'longest':>9}{'lost':>6}"
              f"{'apart':>9}{'quiet':>7}")  # fmt: skip
        for r in rows:
            print(
                f"{r['plan']:18}{r['kills']:6}{r['noticed']:7.2f} s{r['recovered']:6.2f} s"
                f"{r['longest']:7.2f} s{r['lost_steps']:6}{r['apart']:9.0e}{r['quiet']:7.3f}"
                f"{'' if r['good'] else '  missed'}"
            )
    return 0 if all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
