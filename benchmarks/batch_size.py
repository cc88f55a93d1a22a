"""Batches that change while training: `sudo python -m benchmarks.batch_size [--out FILE]`.

Four emulated hosts with links of 100 Mbit/s and 40 % of a core each train two models, with three
seeds, in turns: under a fixed batch, the workload's own times 1, 4, 8 and 16, and under `auto`,
which chooses up to 16 times the own one by the noise scale. Plans are `auto`, so that they may
change in every run; learning rates follow batches by the same rule in all runs of a model, the one
that `auto` takes for its optimizer. Own batches are small, 8 rows:

    vit     the net of digits/vit, whose many operators take longer than what they compute for so
            few rows; 10,000 rows of Fashion-MNIST in 8 x 8, AdamW, `sqrt`
    conv    convolutions, that one host computes for so few rows before four have exchanged their
            gradients; 3,000 rows of Fashion-MNIST, SGD with momentum, `adascale`

Seconds to the target are those of epochs until one reaches the target accuracy, by a straight line
between two. They have all that happens between steps: loading, and measuring, pricing, switching,
also of `auto`. Left out are validation (its seconds stand beside) and what is measured before the
first step. Goals, of medians of the seeds: `auto` takes at most 1.10 times as long as the best
fixed batch and 0.7 times as long as the workload's own; accuracies at the end differ from its by
0.5 points at most; in one run at least batch and plan change at the same step.

--schedule: `conv` on one process, whose rate is divided by 5 behind two epochs, and whose batch is
multiplied by 5 instead: accuracy at the end within 0.5 points, at most half the updates.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

from benchmarks.machine import machine
from synchromesh.lab import HostFailed, Lab
from synchromesh.workloads import mnist_files
from synchromesh.workloads.images import ImageFormat, Images, loss, metric
from synchromesh.workloads.target import load
from synchromesh.workloads.training import adamw, momentum, warm_up
from synchromesh.workloads.workload import Workload

HOSTS, BANDWIDTH, CPU = 4, "100mbit", 0.4
AUTO, TIMES = "auto", (1, 4, 8, 16)  # of the workload's own batch
SIDES = (AUTO, *(f"x{times}" for times in TIMES))
OWN, SEEDS = 8, (0, 1, 2)  # rows
OVER_BEST, OVER_OWN, POINTS, UPDATES = 1.10, 0.7, 0.5, 0.5  # goals
DATA = Path(os.environ.get("SYNCHROMESH_DATA", Path(__file__).parents[2] / "shared" / "data"))
GROWTH, DECAYS = 5, (4, 8)  # by what the rate is divided, or the batch multiplied, behind epochs


# The models


def part_of_fashion(rows: int, size: int = 28, valid: int = 1_000) -> tuple[Images, Images]:
    """Rows of Fashion-MNIST's training and test files, drawn by a seed. size: of the images."""
    form, found = ImageFormat(mean=(0.286,), deviation=(0.353,), size=size), []
    for split, count in (("train", rows), ("test", valid)):
        pixels, labels = mnist_files.read(DATA / "fashion-mnist-lean", split)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:count]
        found.append(Images(pixels[order], labels[order], form))
    return found[0], found[1]


def net() -> nn.Module:
    """Three convolutions, which compute, and two linear layers, which have most parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(288, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def conv(rows: int = 3_000, epochs: int = 8) -> Workload:
    """52 K parameters, 3 ms of a host for each row."""
    train, valid = part_of_fashion(rows)
    return Workload(
        model=net, loss=loss, optimizer=momentum(0.005), train_data=train, batch_size=OWN,
        valid_data=valid, metric=metric, scheduler=warm_up(100, decay=epochs * -(-rows // OWN)),
        epochs=epochs, name="conv",
    )  # fmt: skip


def vit(rows: int = 10_000, epochs: int = 16) -> Workload:
    """The net of digits/vit, 69 K parameters; 3 ms of a host for 8 rows, 5 ms for 64."""
    train, valid = part_of_fashion(rows, size=8, valid=2_000)
    return replace(
        load("digits/vit"), train_data=train, valid_data=valid, optimizer=adamw(1e-3, 0.05),
        batch_size=OWN, scheduler=warm_up(200, decay=epochs * -(-rows // OWN)), epochs=epochs,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model. accuracy: the target, one that all batches reach; chosen before runs in the lab, by
    runs of one process."""

    workload: Callable[[], Workload]
    accuracy: float


CASES = {"vit": Case(vit, 0.78), "conv": Case(conv, 0.76)}


# On every rank


def train(name: str, side: str, seed: int) -> dict[str, Any]:
    """One run; what its events told of it."""
    import synchromesh as sm
    from synchromesh.training.batch_sizes import BatchChange
    from synchromesh.training.events import EpochEnded, Started
    from synchromesh.training.learning_rate import scaled, usual_rule

    workload = CASES[name].workload()
    own, rule, fixed = workload.batch_size, usual_rule(workload), side != AUTO
    rows = own * int(side[1:]) if fixed else own
    batches = None if fixed else f"auto:{own}-{own * TIMES[-1]}"
    workload, _ = scaled(replace(workload, batch_size=rows), rule, own, changes=not fixed)
    run: dict[str, Any] = {"model": name, "side": side, "seed": seed, "rows": rows, "rule": rule}
    run |= {"epochs": [], "changes": []}
    began = prepared = time.monotonic()

    def take(event: Any) -> None:
        nonlocal began
        if isinstance(event, Started):
            began = time.monotonic()
            run["first"], run["preparing"] = str(event.trainer.plan), began - prepared
        seconds = time.monotonic() - began
        if isinstance(event, EpochEnded):
            trained = event.seconds + (run["epochs"][-1]["trained"] if run["epochs"] else 0.0)
            values = {"seconds": seconds, "trained": trained, "step": event.step}
            run["epochs"].append(values | {"accuracy": event.metrics["accuracy"]})
        elif isinstance(event, BatchChange):
            run["changes"].append({"at": seconds, **event.to_dict()})

    result = sm.fit(workload, seed=seed, on_event=take, batches=batches)
    noise = None if result.noise_scale is None else result.noise_scale.known
    run |= {"updates": result.steps, "plan": str(result.plan), "noise": noise}
    run["measured"] = 0 if result.noise_scale is None else result.noise_scale.steps
    return run | {"decisions": [decision.to_dict() for decision in result.decisions]}


def on_rank(name: str, seeds: Sequence[int], sides: Sequence[str]) -> None:
    """All runs of a model in turns. Each side keeps a profile of its own, so that no run finds
    measured what another one has measured."""
    with tempfile.TemporaryDirectory() as folder:
        everyone: list[Any] = [folder]
        dist.broadcast_object_list(everyone)
        for turn, seed in enumerate(seeds):
            for side in sides if turn % 2 == 0 else sides[::-1]:
                os.environ["SYNCHROMESH_CACHE"] = f"{everyone[0]}/{side}"
                run = train(name, side, seed)
                if dist.get_rank() == 0:
                    print(json.dumps(run), flush=True)
        dist.barrier()


# The parent


def in_lab(name: str, seeds: Sequence[int], sides: Sequence[str], out: Path) -> None:
    """Appends a line for each run as it ends."""

    def hear(host: int, stream: int, line: bytes) -> None:
        if host == 0 and stream == 1 and line.startswith(b"{"):
            with out.open("ab") as file:
                file.write(line.rstrip() + b"\n")
            run = json.loads(line)
            last = run["epochs"][-1]
            told = f"{last['seconds']:.1f} s, {last['accuracy']:.2%}, {run['plan']}"
            print(f"{name} {run['side']} seed {run['seed']}: {told}", file=sys.stderr, flush=True)
        elif stream == 2:
            sys.stderr.write(line.decode(errors="replace"))

    words = ["--rank", name, "--seeds", ",".join(map(str, seeds)), "--sides", ",".join(sides)]
    with Lab(hosts=HOSTS, bandwidth=BANDWIDTH, cpu=CPU) as lab:
        lab.start(
            [sys.executable, "-m", "benchmarks.batch_size", *words],
            timeout=3600, cwd=Path(__file__).parents[1], listener=hear,
        ).wait()  # fmt: skip


def reached(run: dict[str, Any], accuracy: float, clock: str = "trained") -> float | None:
    """Seconds to the target, by a straight line between the ends of epochs; None: never. clock:
    `trained`, or `seconds` with validation."""
    before: dict[str, Any] | None = None
    for epoch in run["epochs"]:
        if epoch["accuracy"] >= accuracy:
            if before is None:
                return float(epoch[clock])
            part = (accuracy - before["accuracy"]) / (epoch["accuracy"] - before["accuracy"])
            return float(before[clock] + part * (epoch[clock] - before[clock]))
        before = epoch
    return None


def rows_of(name: str, runs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row of the table for each side that has runs: medians of the seeds."""
    for side in SIDES:
        own = [run for run in runs if (run["model"], run["side"]) == (name, side)]
        if not own:
            continue
        seconds = [reached(run, CASES[name].accuracy) for run in own]
        validated = [reached(run, CASES[name].accuracy, "seconds") or 0.0 for run in own]
        known = [s for s in seconds if s is not None]
        yield {
            "side": side, "rows": own[0]["rows"],
            "seconds": statistics.median(known) if known == seconds else None,
            "all": seconds, "updates": statistics.median(run["updates"] for run in own),
            "accuracy": statistics.median(run["epochs"][-1]["accuracy"] for run in own),
            "validated": statistics.median(validated),
            "plans": sorted({run["plan"] for run in own}), "runs": len(own),
        }  # fmt: skip


def summary(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios, and the goals that are missed, in words."""
    rows = {row["side"]: row for row in rows_of(name, runs)}
    auto = rows.pop(AUTO, None)
    fixed = {side: row["seconds"] for side, row in rows.items() if row["seconds"]}
    changes = [c for r in runs if r["model"] == name for c in r["changes"]]
    found: dict[str, Any] = {"model": name, "rows": [*([auto] if auto else []), *rows.values()]}
    found["together"] = sum(c["plan_from"] != c["plan_to"] for c in changes)
    if auto is None or auto["seconds"] is None or len(fixed) < len(TIMES):
        return found | {"missed": ["not all runs have reached the target"]}
    best, own = min(fixed, key=fixed.__getitem__), SIDES[1]
    found |= {"best": best, "over_best": auto["seconds"] / fixed[best]}
    found |= {"over_own": auto["seconds"] / fixed[own]}
    found["points"] = 100 * (auto["accuracy"] - rows[own]["accuracy"])
    return found | {"missed": [*_missed(found)]}


def _missed(found: dict[str, Any]) -> Iterator[str]:
    if found["over_best"] > OVER_BEST:
        yield f"{found['over_best']:.2f} of the time of the best fixed batch (goal {OVER_BEST})"
    if found["over_own"] > OVER_OWN:
        yield f"{found['over_own']:.2f} of the time of the workload's own (goal {OVER_OWN})"
    if abs(found["points"]) > POINTS:
        yield f"accuracy differs by {found['points']:+.2f} points (goal {POINTS})"


def show(found: dict[str, Any], runs: Sequence[dict[str, Any]]) -> None:
    name = found["model"]
    print(f"\n{name}: seconds to {CASES[name].accuracy:.0%}, medians of the seeds")
    print("| batch | to the target | each | validated | updates | accuracy | plans at the end |")
    print("|---|---|---|---|---|---|---|")
    for row in found["rows"]:
        each = " ".join("never" if s is None else f"{s:.1f}" for s in row["all"])
        rows = AUTO if row["side"] == AUTO else row["rows"]
        seconds = "never" if row["seconds"] is None else f"{row['seconds']:.1f} s"
        print(
            f"| {rows} | {seconds} | {each} | {row['validated']:.1f} s | {row['updates']:.0f} "
            f"| {row['accuracy']:.2%} | {', '.join(f'`{p}`' for p in row['plans'])} |"
        )
    if "best" in found:
        print(
            f"auto over the best ({found['best']}) {found['over_best']:.2f}, over the own "
            f"{found['over_own']:.2f}, accuracy {found['points']:+.2f} points"
        )
    print(f"changes of batch and plan at one step: {found['together']}")
    for run in runs:
        for c in run["changes"] if run["model"] == name else ():
            print(
                f"  seed {run['seed']}, step {c['step']}, after {c['at']:.1f} s: {c['from']} -> "
                f"{c['to']} rows ({c['reason']}), {c['plan_from']} -> {c['plan_to']}, "
                f"took {c['seconds']:.2f} s"
            )
    for fault in found["missed"]:
        print(f"  missed: {fault}")


# The schedule, on one process


def schedule(rows: int = 2_000, epochs: int = 12) -> dict[str, Any]:
    """Medians of accuracies at the end, and updates: of rates that decay, of batches that grow."""
    import synchromesh as sm

    workload = replace(conv(rows), epochs=epochs, scheduler=None)
    steps = -(-rows // workload.batch_size)

    def decays(optimizer: torch.optim.Optimizer) -> MultiStepLR:
        return MultiStepLR(optimizer, [e * steps for e in DECAYS], gamma=1 / GROWTH)

    decayed = replace(workload, scheduler=decays)
    growth = ",".join(f"{epoch}:x{GROWTH}" for epoch in DECAYS)
    found: dict[str, list[Any]] = {"decayed": [], "grown": []}
    for seed in SEEDS:
        found["decayed"].append(sm.fit(decayed, "single", seed=seed))
        found["grown"].append(sm.fit(workload, "single", seed=seed, batches=growth))
    result: dict[str, Any] = {}
    for side, runs in found.items():
        accuracies = [run.metrics["accuracy"] for run in runs]
        result[side] = {"accuracies": accuracies, "updates": runs[0].steps}
        result[side]["accuracy"] = statistics.median(accuracies)
    grown, decay = result["grown"], result["decayed"]
    result["points"] = 100 * (grown["accuracy"] - decay["accuracy"])
    result["updates"] = grown["updates"] / decay["updates"]
    passed = abs(result["points"]) <= POINTS and result["updates"] <= UPDATES
    return result | {"schedule": growth, "passed": passed}


def show_schedule(found: dict[str, Any]) -> None:
    for side in ("decayed", "grown"):
        each = " ".join(f"{a:.2%}" for a in found[side]["accuracies"])
        print(f"{side}: {found[side]['updates']} updates, accuracy {each}")
    print(
        f"--batch-schedule {found['schedule']}: {found['updates']:.2f} of the updates (goal "
        f"{UPDATES}), {found['points']:+.2f} points (goal {POINTS})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--out", type=Path, help="a file that gets a line for each run")
    parser.add_argument("--from", dest="given", type=Path, help="tables of such a file alone")
    parser.add_argument("--schedule", action="store_true")
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    parser.add_argument("--rank", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds, sides = [int(s) for s in options.seeds.split(",")], options.sides.split(",")
    if options.rank:
        dist.init_process_group("gloo")
        on_rank(options.rank, seeds, sides)
        dist.destroy_process_group()
        return 0
    if options.schedule:
        found = schedule()
        document = json.dumps({"machine": machine(), **found}, indent=2)
        print(document) if options.json else show_schedule(found)
        return 0 if found["passed"] else 1
    with tempfile.TemporaryDirectory() as folder:
        out = options.given or options.out or Path(folder) / "runs"
        models = options.models.split(",")
        try:
            for name in [] if options.given else models:
                in_lab(name, seeds, sides, out)
        except (ValueError, HostFailed) as error:
            print(error, file=sys.stderr)
            return 1
        runs = [json.loads(line) for line in out.read_text().splitlines()]
    results = [summary(name, runs) for name in models]
    together = sum(r["together"] for r in results)
    passed = together > 0 and not any(r["missed"] for r in results)
    if options.json:
        told = {"machine": machine(), "models": results, "runs": runs, "passed": passed}
        print(json.dumps(told, indent=2))
    else:
        print(machine())
        for result in results:
            show(result, runs)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
