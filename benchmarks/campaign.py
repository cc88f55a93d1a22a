"""Faults of hosts at random moments while a known run trains:
`sudo python -m benchmarks.campaign [--minutes 30] [--seed 0] [--faults kill,F5,...] [--baseline]
[--presence FILE] [--json]`.

Four emulated hosts (`benchmarks.hosts`) train under `train --elastic`, and every 30 s one of the
faults of `benchmarks.faults` is done to one that is not the coordinator's. Goals: the last step is
reached, with the losses and parameters of a run of one process that nobody disturbs to 1e-10;
0.9 of the steps are useful; 0.75 of the samples a second of four hosts that nobody disturbs; every
cause is named; no minute without a step, no process left, no bad checkpoint.

    --baseline       then the same faults at the same moments for DistributedDataParallel under
                     torchrun, repaired (`benchmarks.repaired`)
    --presence FILE  instead: hosts come and are killed as a trace says how many instances there
                     are, a third of them and 60 times as fast; samples of both, goal 1.5 times"""

import argparse
import csv
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks import repaired
from benchmarks.faults import FAULTS, Act, Broken, Hang, Over, Stage
from benchmarks.hosts import BANDWIDTH, CPU, HOSTS, NEAR, Run, alone, running
from benchmarks.machine import machine
from benchmarks.troubles import TROUBLES
from synchromesh.checkpoint.manifest import CheckpointError, by_age, verify
from synchromesh.lab import Lab
from synchromesh.lab.description import Description

ROWS, STEPS = 256, 32  # of a batch; of an epoch
EVERY = 30.0  # seconds from one fault to the next, in the mean
USEFUL, THROUGHPUT, PRESENCE = 0.9, 0.75, 1.5
LENGTH = 0.8  # of the time, in which four hosts that nobody disturbs would be done
LAST = 60.0  # seconds at the end without a new fault
LOOKS = ("--skip-non-finite", "3", "--check-replicas", "20")
MORE = ("--checkpoint-every", "50", "--keep", "3", *LOOKS)
MEMORY = "1500MiB"  # of a host
PART, FAST = 3, 60.0  # of the trace's instances, and of its seconds


def undisturbed(lab: Lab, seconds: float) -> float:
    """Samples a second of four hosts."""
    with running(lab, begin=HOSTS, more=MORE) as run:
        began = run.logged("step")[-1]
        time.sleep(seconds)
        return speed(began, run.logged("step")[-1])


def speed(first: dict[str, Any], last: dict[str, Any]) -> float:
    return float(ROWS * (last["step"] - first["step"]) / (last["time"] - first["time"]))


def disturb(
    stage: Stage, kinds: Sequence[str], rate: float, steps: int, rows: list[dict[str, Any]]
) -> None:
    """Faults until the run is near its end; each kind as often as others. rate: steps a second;
    rows: of what was done."""
    bag, following = list[str](), time.monotonic()
    while True:
        following += stage.chance.uniform(0.7 * EVERY, 1.3 * EVERY)
        stage.wait(max(1.0, following - time.monotonic()))
        if steps - stage.run.step < LAST * rate:
            return stage.wait(600 + 2 * LAST)
        if not bag:
            bag = stage.chance.sample(kinds, len(kinds))
        rows.append(done(stage, bag.pop(), stage.chance.randrange(1, HOSTS)))
        row = rows[-1]
        print(
            f"step {row['step']}: {row['fault']} of host {row['host']}: "
            f"{' | '.join(c['cause'] for c in row['changes']) or 'no change'}; noticed after "
            f"{row['noticed_seconds']} s, again after {row['recovered_seconds']} s, all there "
            f"after {row['whole_seconds']} s{'' if row['named'] else ', not named'}",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def done(stage: Stage, fault: str, host: int) -> dict[str, Any]:
    """A row: what the run has said of a fault. recovered_seconds: until the last loss was dealt
    with, from when it was made on the clock of the log; whole_seconds: until all took part."""
    stage.named, stage.left, stage.anew = set(), [], []
    before, step, acts = len(stage.run.logged("generation")), stage.run.step, len(stage.acts)
    hit = FAULTS[fault].do(stage, host)
    stage.restore()
    changes = stage.run.logged("generation")[before:]
    named = stage.named == hit
    says = FAULTS[fault].says
    named = named and (not says or any(says in change["cause"] for change in changes))
    stage.wrong += [f"{fault} at step {step}: {text}" for text in stage.anew]
    if odd := stage.named - hit:
        causes = " | ".join(change["cause"] for change in changes)
        stage.wrong.append(f"{fault} of host {host} at step {step}: also lost {odd}: {causes}")
    began = stage.began + stage.acts[acts].seconds
    return {
        "fault": fault, "step": step, "host": host, "named": named,
        "noticed_seconds": max((c["noticed_seconds"] for c in changes), default=0.0),
        "recovered_seconds": round(max(_recovered(stage, changes, acts), default=0.0), 3),
        "lost_steps": sum(c["lost_steps"] for c in changes),
        "whole_seconds": round(time.time() - began, 3), "ended_by_themselves": stage.anew,
        "changes": [*changes],
    }  # fmt: skip


def _recovered(stage: Stage, changes: list[dict[str, Any]], acts: int) -> Iterator[float]:
    """Of each loss, seconds from the act in front of it that can be its cause."""
    causes = [
        stage.began + act.seconds for act in stage.acts[acts:]
        if act.word in ("kill", "rank", "freeze", "cut", *TROUBLES)
    ]  # fmt: skip
    for change in changes:
        if change["culprit"] and causes:
            yield change["time"] - max((t for t in causes if t < change["time"]), default=0.0)
        else:
            yield change["recovered_seconds"]


def parameters(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Of a checkpoint, as torch's own tool reads it."""
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(checkpoint, f"{folder}/all.pt")
        return dict(torch.load(f"{folder}/all.pt", weights_only=True))


def compared(run: Run, epochs: int, skipped: Sequence[int]) -> tuple[dict[str, Any], list[str]]:
    """The run beside one that nobody disturbs, of which the same steps are left out; what is
    wrong."""
    wrong, losses = list[str](), {x["step"]: x["loss"] for x in run.logged("step")}
    usual = alone(run.folder, epochs, ["--keep", "1", *LOOKS], skipped)
    if missing := [n + 1 for n in range(len(usual)) if n + 1 not in losses]:
        wrong.append(f"the log lacks {len(missing)} steps, from step {missing[0]}")
    left = {n for n, loss in enumerate(usual, 1) if not _finite(loss)}
    if left != {*skipped}:
        wrong.append(f"the undisturbed run has left out {sorted(left)}, not {sorted(skipped)}")
    pairs = {n: (losses[n], x) for n, x in enumerate(usual, 1) if n in losses and n not in left}
    far = max(abs(a - b) if _finite(a) else math.inf for a, b in pairs.values())
    if not far <= NEAR:
        first = next(n for n, (a, b) in pairs.items() if not (_finite(a) and abs(a - b) <= NEAR))
        wrong.append(f"losses are apart by {far:.0e}, more than {NEAR:.0e} from step {first}")
    own = parameters(run.folder / "run" / "checkpoints" / f"epoch-{epochs}")
    plain = parameters(run.folder / "alone" / "checkpoints" / f"epoch-{epochs}")
    of = {
        part: max(float((own[n] - x).abs().max()) for n, x in plain.items() if n.startswith(part))
        for part in ("model/", "optimizer/")
    }
    if own.keys() != plain.keys() or not max(of.values()) <= NEAR:
        wrong.append(f"tensors at the end are apart: {of}")
    equal = own.keys() == plain.keys() and of["model/"] <= NEAR
    return {"parameters_equal": equal, "losses_apart": far, "tensors_apart": of}, wrong


def _finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def bad_checkpoints(run: Run) -> list[str]:
    bad = list[str]()
    for folder in by_age(run.folder / "run" / "checkpoints"):
        try:
            verify(folder)
        except CheckpointError as error:
            bad.append(str(error))
    return bad


def orphans(lab: Lab) -> list[str]:
    """Processes that are there ten seconds behind the end."""
    limit = time.monotonic() + 10
    while (left := {s.host: s.processes for s in lab.states() if s.processes}) and (
        time.monotonic() < limit
    ):
        time.sleep(0.2)
    return [f"host {host} still has {count} processes" for host, count in left.items()]


def campaign(
    lab: Lab, minutes: float, seed: int, kinds: Sequence[str]
) -> tuple[dict[str, Any], list[Act], float]:
    """What came of it, what was done, and for how many seconds."""
    quiet = undisturbed(lab, min(60.0, 12 * minutes))
    rate = quiet / ROWS
    epochs = math.ceil(LENGTH * minutes * 60 * rate / STEPS)
    with running(lab, epochs, HOSTS, MORE) as run:
        stage, hangs, rows = Stage(run, random.Random(seed)), 0, list[dict[str, Any]]()
        first, found, beside = run.logged("step")[-1], dict[str, Any](), dict[str, Any]()
        try:
            with suppress(Over):
                disturb(stage, kinds, rate, epochs * STEPS, rows)
            found = run.end()
        except Broken as broken:
            hangs = int(isinstance(broken, Hang))
            stage.wrong.append(f"{broken}: {''.join(run.launchers[0].told[-20:])}")
        share = speed(first, run.logged("step")[-1]) / quiet
        seconds = time.time() - stage.began
        if found:
            stage.wrong += orphans(lab)
            beside, apart = compared(run, epochs, found["skipped_steps"])
            stage.wrong += apart
        stage.wrong += bad_checkpoints(run)
    lost = sum(x["lost_steps"] for x in found.get("generations", ()))
    reached = found.get("steps", run.step)
    if reached != epochs * STEPS:
        stage.wrong.append(f"it reached step {reached} of {epochs * STEPS}")
    stage.wrong += [f"{r['fault']} at step {r['step']}: not named" for r in rows if not r["named"]]
    answer = {
        "faults": rows, "steps": reached, "useful_steps": reached / max(1, reached + lost),
        "useful_share": found.get("useful_share"), "throughput_share": share,
        "samples_per_second": share * quiet, "longest_without_a_step": stage.stalled,
        "parameters_equal": False, "hangs": hangs, "wrong": stage.wrong, "baseline": None,
    }  # fmt: skip
    return answer | beside, stage.acts, seconds


def table(row: dict[str, Any]) -> None:
    """By rows of RELIABILITY.md, measured next to expected."""
    print(
        f"{'fault':11}{'row':>4}{'count':>6}{'noticed':>14}{'again':>9}{'longest':>15}{'lost':>6}"
    )
    for kind, fault in FAULTS.items():
        if not (of := [r for r in row["faults"] if r["fault"] == kind]):
            continue
        again = [r["recovered_seconds"] for r in of]
        noticed = max(r["noticed_seconds"] for r in of)
        slow = noticed > fault.noticed or max(again) > fault.again
        print(
            f"{kind:11}{fault.row:>4}{len(of):6}{noticed:7.2f} ({fault.noticed:3.1f}) s"
            f"{median(again):7.2f} s{max(again):7.2f} ({fault.again:4.1f}) s"
            f"{sum(r['lost_steps'] for r in of):6}{'  slower' * slow}"
            f"{'' if all(r['named'] for r in of) else '  missed: not named'}"
        )
    for text, good in goals(row).items():
        print(f"{text}{'' if good else '  missed'}")
    for sentence in row["wrong"]:
        print(f"wrong: {sentence}")


def goals(row: dict[str, Any]) -> dict[str, bool]:
    """Each as measured, and whether it is reached."""
    useful, share = row["useful_steps"], row["throughput_share"]
    stalled = row["longest_without_a_step"]
    return {
        f"{len(row['faults'])} faults (goal 1; {LAST:.0f} s at the end have none)":
            bool(row["faults"]),
        f"useful steps {useful:.4f} of {row['steps']} (goal {USEFUL})": useful >= USEFUL,
        f"samples a second {share:.3f} of an undisturbed run (goal {THROUGHPUT})":
            share >= THROUGHPUT,
        f"parameters {'equal' if row['parameters_equal'] else 'differ'}": row["parameters_equal"],
        f"hangs {row['hangs']}; at most {stalled:.1f} s without a step": not row["hangs"],
        f"{len(row['wrong'])} things wrong": not row["wrong"],
    }  # fmt: skip


def trace(file: Path, minutes: float) -> list[tuple[float, int]]:
    """Seconds and hosts that are there from then on, the coordinator's always."""
    with file.open() as lines:
        rows = [(float(r["seconds"]), int(r["instances"])) for r in csv.DictReader(lines)]
    there = [(s / FAST, min(HOSTS, max(1, round(n / PART)))) for s, n in rows]
    return [(s, n) for s, n in there if s < 60 * minutes]


def acts_of(there: Sequence[tuple[float, int]]) -> list[Act]:
    """Joins and kills that follow a trace, of the hosts with the highest numbers."""
    acts, now = list[Act](), there[0][1]
    for seconds, count in there[1:]:
        acts += [Act(seconds, "join", host) for host in range(now, count)]
        acts += [Act(seconds, "kill", host) for host in range(count, now)]
        now = count
    return acts


def presence(lab: Lab, file: Path, minutes: float) -> dict[str, Any]:
    """Samples of both in the same time, while hosts come and go as in a trace."""
    there = trace(file, minutes)
    acts, begin = acts_of(there), there[0][1]
    end = min(60 * minutes, there[-1][0] + EVERY)
    with running(lab, begin=begin) as run:
        before = run.step
        repaired.replay(run, acts, end)
        own = ROWS * (run.step - before)
        changes = len(run.logged("generation"))
    other = repaired.samples(lab, acts, end, begin)
    return {
        "seconds": end, "acts": len(acts), "changes": changes, "samples": own,
        "baseline": other, "ratio": own / max(1, other["samples"]),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default=",".join(FAULTS), metavar="FAULT,...")
    parser.add_argument("--baseline", action="store_true")
    parser.add_argument("--presence", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    words = asked.faults.split(",")
    rows = {*words} - {*FAULTS}
    if unknown := rows - {fault.row for fault in FAULTS.values()}:
        known = ", ".join(f"{name} ({fault.row})" for name, fault in FAULTS.items())
        parser.error(f"no fault {', '.join(sorted(unknown))}: there are {known}")
    kinds = [name for name, fault in FAULTS.items() if name in words or fault.row in rows]
    hosts = Description.alike(HOSTS, BANDWIDTH, CPU, memory=MEMORY)
    with Lab.of(hosts) as lab:
        if asked.presence is not None:
            row = presence(lab, asked.presence, asked.minutes)
            good = row["ratio"] >= PRESENCE
        else:
            row, acts, seconds = campaign(lab, asked.minutes, asked.seed, kinds)
            good = all(goals(row).values())
    if asked.baseline and asked.presence is None:
        with Lab.of(hosts) as lab:
            row["baseline"] = repaired.samples(lab, acts, seconds, HOSTS)
    if asked.json:
        print(json.dumps({"machine": machine(), **row}, indent=2))
        return 0 if good else 1
    print(machine())
    if asked.presence is not None:
        print(
            f"{row['samples']} samples in {row['seconds']:.0f} s, {row['baseline']['samples']} of "
            f"torchrun's: {row['ratio']:.2f} times (goal {PRESENCE})"
            f"{'' if good else '  missed'}"
        )
        return 0 if good else 1
    table(row)
    if row["baseline"] is not None:
        own, other = row["samples_per_second"], row["baseline"]["samples_per_second"]
        print(f"samples a second: {own:.0f}, of torchrun's with the same faults {other:.0f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
