"""Simulated and measured steps behind slower uplinks: `sudo python -m benchmarks.racks`.

Four emulated hosts of 200 Mbit/s in two racks of two, whose uplinks carry 1, 1/2 and 1/4 of a
host's link; under each uplink four plans, one of which stays in a rack; in a third of the pairs a
host has half of its share of a core. What is simulated knows nothing of racks but their levels:

    compute        measured on four hosts of one rack; for the plan on two hosts, on two: the
                   hosts share a machine, on which each computes quicker the fewer compute
    a collective   measured there x (its estimate by max-min shares with racks / without)
    links          shared by all that goes on at once (`SharedLinks`)
    a slow host    computes at half speed (`Variation`)

Goals: a mean error of 8 %, none above 20 %.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.machine import machine
from benchmarks.pairs import _timed
from benchmarks.zoo import make
from synchromesh.cost.step_time import recorded
from synchromesh.estimate import network
from synchromesh.estimate.datasheet import DatasheetFacts
from synchromesh.estimate.shared_links import SharedLinks
from synchromesh.lab import Lab
from synchromesh.planner.candidate import planned_step
from synchromesh.planning.offline import traced
from synchromesh.planning.session import PlanningSession
from synchromesh.simulator.replay import Variation
from synchromesh.simulator.step import simulated
from synchromesh.values.cluster import Cluster, Device, Host, Link
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from synchromesh.values.topology import Level

MBIT, CPU = 200, 0.4
RACKS = [[0, 1], [2, 3]]
UPLINKS = (1.0, 0.5, 0.25)  # of a host's link
STAYING = "data; @ranks=0,1"  # in a rack
PLANS = ("data", "hybrid:tensor=2", "pipeline:stages=2,microbatches=4", STAYING)
# By uplink the plans under which a host is slow, by their place: three that cross and one that
# stays in a rack.
SLOW_HOST, SLOW = 1, {1.0: (0,), 0.5: (1, 3), 0.25: (2,)}
GOALS = {"mean": 0.08, "largest": 0.20}


def on_ranks(name: str, texts: Sequence[str], rounds: int, profiled: bool) -> dict[str, Any]:
    """On every rank: median seconds of a step under each plan; what was measured, if asked."""
    import synchromesh as sm

    build, loss, batch, optimizer = make(name)
    model = build()
    trainer = sm.prepare(model, optimizer(model.parameters()), loss, batch, plan=texts[0])
    plans, pieces = {texts[0]: trainer.plan}, {}
    taken: dict[str, list[float]] = {text: [] for text in texts}
    for turn in range(rounds):
        for text in texts if turn % 2 == 0 else texts[::-1]:
            trainer.switch(plans.get(text, text))
            plans[text] = trainer.plan
            if profiled and text not in pieces:
                told = trainer.predict()
                pieces[text] = told.time.pieces if told.time else 1
            mine = pytree.tree_map(Tensor.clone, trainer.shard(batch))
            trainer._execution.pieces.chosen = pieces.get(text, 1)
            taken[text] += _timed(lambda mine=mine: trainer.step(mine))  # type: ignore[misc]
    known = trainer.planning.profile if profiled else None
    found = {
        "seconds": {text: statistics.median(taken[text]) for text in texts},
        "plans": {text: str(plan) for text, plan in plans.items()},
        "profile": known and known.to_dict(),
    }
    trainer.close()
    return found


def in_lab(lab: Lab, name: str, texts: Sequence[str], profiled: bool = False) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.racks", "--rank", name]
    command += ["--profiled"] * profiled + ["--plans", *texts]
    print(f"{len(texts)} plans of {name} ...", file=sys.stderr, flush=True)
    results = lab.run(command, timeout=1200, cwd=Path(__file__).parents[1])
    return dict(json.loads(results[0].output.splitlines()[-1]))


def place(uplink: float | None) -> Cluster:
    """The hosts, of one rack, or of two behind an uplink of so much of a host's link."""
    link = Link("*", "*", MBIT * 1e6 / 8, 1e-4)
    hosts = tuple(Host(f"host{i}", (Device("cpu", 1 << 34, {"float32": 1e10}, 1e10),))
                  for i in range(4))  # fmt: skip
    if uplink is None:
        return Cluster("one rack", hosts, network=link)
    inside = replace(link, bytes_per_second=1e9)
    levels = Level("host", 1, inside), Level("rack", 2, link, 2.0 / uplink), Level("core", 2)
    return Cluster("two racks", hosts, topology=levels)


def behind(known: Profile, racks: Cluster, ranks: Sequence[int]) -> Profile:
    """What was measured in one rack, with collectives that take as much longer as by estimates."""
    wanted = list(known.network)
    before, after = (network.curves(c, wanted, ranks) for c in (place(None), racks))
    longer = {  # where bytes are what takes time
        key: max(1.0, after[key](1 << 22) / before[key](1 << 22)) if before[key](1 << 22) else 1.0
        for key in wanted
    }
    kinds = {kind: max(longer[k] for k in wanted if k[0] == kind) for kind, _ in wanted}
    return replace(
        known,
        network={key: curve.scaled(longer[key]) for key, curve in known.network.items()},
        overlap={k: o.stretched(kinds.get(k, 1.0)) for k, o in known.overlap.items()},
    )


def predicted(name: str, text: str, known: Profile, uplink: float, slow: bool) -> float:
    """Seconds of a step of a plan whose cuts are settled."""
    build, loss, batch, optimizer = make(name)
    model = build()
    rows, step = traced(model, loss, batch, None, None, lambda _: None)
    racks, plan = place(uplink), Plan.parse(text)
    facts = DatasheetFacts.of(step, model, optimizer(model.parameters()), rows, racks, memory=1e15)
    planned = planned_step(PlanningSession(facts).partitions, plan)
    profile = behind(known, racks, plan.devices(4))
    made = recorded(planned, profile, plan.pieces or 1, SharedLinks(racks, planned))
    speeds = {SLOW_HOST: 0.5} if slow else {}
    return simulated(planned, made, Variation(speeds=speeds)).seconds


def run(name: str) -> list[dict[str, Any]]:
    rows = []
    with Lab(hosts=4, bandwidth=f"{MBIT}mbit", cpu=CPU) as lab:
        plain = in_lab(lab, name, PLANS, profiled=True)
    with Lab(hosts=2, bandwidth=f"{MBIT}mbit", cpu=CPU) as lab:
        pair = in_lab(lab, name, ["data"], profiled=True)
    texts = [plain["plans"][text] for text in PLANS]
    known = {text: Profile.from_dict(plain["profile"]) for text in PLANS}
    known[STAYING] = Profile.from_dict(pair["profile"])
    for uplink in UPLINKS:
        slowed = [texts[i] for i in SLOW[uplink]]
        with Lab(hosts=4, bandwidth=f"{MBIT}mbit", cpu=CPU, racks=RACKS,
                 uplink=f"{round(MBIT * uplink)}mbit") as lab:  # fmt: skip
            quick = in_lab(lab, name, [t for t in texts if t not in slowed])
            lab.set(host=SLOW_HOST, cpu=CPU / 2)
            taken = {**quick["seconds"], **in_lab(lab, name, slowed)["seconds"]}
        for asked, text in zip(PLANS, texts, strict=True):
            found = predicted(name, text, known[asked], uplink, text in slowed)
            rows.append({
                "model": name, "uplink": uplink, "plan": asked, "slow": text in slowed,
                "predicted": found, "measured": taken[text], "error": found / taken[text] - 1.0,
                "one_rack": plain["seconds"][asked],
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit", help="of the zoo; default vit")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plans", nargs="*", default=(), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        torch.set_num_threads(1)
        print(json.dumps(on_ranks(args.rank, args.plans, args.rounds, args.profiled)))
        return
    rows = run(args.model)
    errors = [abs(row["error"]) for row in rows]
    told = {"rows": rows, "mean": statistics.mean(errors), "largest": max(errors), "goals": GOALS}
    if args.json:
        print(json.dumps(told))
        return
    print(f"emulated hosts; {machine()}\n")
    for row in rows:
        slow = f"host {SLOW_HOST} at half" if row["slow"] else ""
        found, taken, plain = (1e3 * row[k] for k in ("predicted", "measured", "one_rack"))
        print(f"uplink {row['uplink']:4}  {row['plan']:34} {slow:15} {found:7.0f} ms simulated "
              f"{taken:7.0f} measured {row['error']:+6.1%} (one rack {plain:.0f})")  # fmt: skip
    print(f"{len(rows)} pairs, mean error {told['mean']:.1%} (goal {GOALS['mean']:.0%}), largest "
          f"{told['largest']:.1%} (goal {GOALS['largest']:.0%})")  # fmt: skip


if __name__ == "__main__":
    main()
