"""Copies in memory of what one host alone has: `sudo python -m benchmarks.copies [--json]`.

Four emulated hosts with links of 1000 Mbit/s and 45 % of a core each train a model of 50 million
parameters under `sharded-data` (ZeRO-3), `train --elastic`, one rank each. One host is killed: the
others take back the copies that they have (`--replicate auto`) and go on. Beside it the recovery
from disk: all ranks are started anew, three of them, with `--resume`. Both count until the plan
is in force. And what copies cost: a step of a small model with them and without, in turns.

Goals: from memory at least 3 times as quick as from disk, and at most 3 % of the time."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.hosts import HOSTS, TARGET, Run
from benchmarks.machine import machine
from synchromesh.lab import Lab
from synchromesh.lab.description import Description

FASTER, SHARE = 3.0, 0.03
LARGE = (
    TARGET.replace("dtype=torch.float64", "dtype=torch.float32").replace(").double()", ")")
    .replace("nn.Linear(256, 512)", "nn.Linear(256, 4096), nn.Tanh(), nn.Linear(4096, 8192)")
    .replace("nn.Linear(512, 256)", "nn.Linear(8192, 2048)")
    .replace("nn.Linear(256, 10)", "nn.Linear(2048, 10)")
    .replace("batch_size=256", "batch_size=64")
)  # fmt: skip


def begun(lab: Lab, folder: Path, *more: str, hosts: int = HOSTS, target: str = LARGE) -> Run:
    return Run(lab, folder, 10_000, hosts, ["--plan", "sharded-data", *more], target)


def recovery(lab: Lab, folder: Path) -> dict[str, Any]:
    """Of a killed host, from memory, then of all ranks, from disk."""
    run = begun(lab, folder, "--checkpoint-every", "2")
    run.until(lambda: bool(run.logged("checkpoint")), 300)
    lab.kill(2)
    run.until(lambda: bool(run.logged("generation")), 300)
    (generation,) = run.logged("generation")
    said = [line for line in run.launchers[0].told if "copies of what" in line]
    run.close()
    began = time.monotonic()
    resumed = begun(lab, folder, "--resume", str(folder / "run"), hosts=3)
    resumed.until(lambda: bool(resumed.logged("resume")), 300)
    took = time.monotonic() - began
    resumed.close()
    memory = generation["recovered_seconds"]  # since its call failed, in the step that went on
    return {"generation": generation, "memory": memory, "disk": took, "said": said}


def pace(lab: Lab, folder: Path, replicate: str, seconds: float) -> float:
    """Seconds of a step, copies among them."""
    run = begun(lab, folder, "--replicate", replicate, target=TARGET)
    run.until(lambda: run.step >= 50, 300)
    first, began = changed(run)
    time.sleep(seconds)
    last, ended = changed(run)
    run.close()
    return (ended - began) / (last - first)


def changed(run: Run) -> tuple[int, float]:
    """The next step that the log has, of which it has ten at a time, and when."""
    before = run.step
    run.until(lambda: run.step > before)
    return run.step, time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=40, help="of each run for what they cost")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found: dict[str, Any] = {"pace": {"off": [], "auto": []}}
    with Lab.of(Description.alike(HOSTS, "1000mbit", "45%")) as lab:
        with tempfile.TemporaryDirectory() as folder:
            found |= recovery(lab, Path(folder))
        for word in ("off", "auto", "auto", "off"):
            with tempfile.TemporaryDirectory() as folder:
                found["pace"][word].append(pace(lab, Path(folder), word, asked.seconds))
    off, auto = (sum(found["pace"][word]) / 2 for word in ("off", "auto"))
    found["times"], found["cost"] = found["disk"] / found["memory"], auto / off - 1
    if asked.json:
        print(json.dumps({"machine": machine(), **found}, indent=2))
    else:
        generation = found["generation"]
        print(*found["said"], sep="")
        print(
            f"noticed after {generation['noticed_seconds']:.2f} s, {found['memory']:.2f} s from "
            f"memory ({generation['state_from']}, {generation['lost_steps']} steps "
            f"lost), {found['disk']:.1f} s from disk: {found['times']:.1f} times"
        )
        print(f"a step takes {1e3 * off:.0f} ms, {100 * found['cost']:+.1f} % with copies")
        print(machine())
    return 0 if found["times"] >= FASTER and found["cost"] <= SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
