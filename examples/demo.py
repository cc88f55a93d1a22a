"""What several devices bring, on emulated hosts: `python examples/demo.py [PART]`.

    hosts     one host, PyTorch's DistributedDataParallel on four, and `auto` on four, in turns
    switch    two hosts train, their links become slow, the plan changes

Without PART both. It needs root and Linux; elsewhere it says so and shows nothing. It fails where
`auto` is not quicker than one host, or no switch follows that makes steps quicker."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from synchromesh.lab import HostFailed, Lab
from synchromesh.lab.requirements import reason_unavailable

HOSTS = Path(__file__).with_name("lab.yaml")


@dataclass(frozen=True)
class Demonstration:
    """What is shown. Chosen."""

    hosts: int = 2
    cpu: float = 0.4
    fast: str = "1gbit"
    slow: str = "4mbit"
    change: int = 60  # the step at which links become slow
    steps: int = 5000  # enough that measuring again is worth its time; the run is ended early
    workload: tuple[str, ...] = ("digits/cnn", "--batch-size", "360")
    poll_seconds: float = 0.2
    shown_seconds: float = 90.0  # after the change, at most
    limit_seconds: float = 300.0


DEMO = Demonstration()


def main(parts: list[str]) -> int:
    """Shows the parts, or all; the exit code."""
    reason = reason_unavailable()
    if reason is not None:
        print(f"the rest of the demo is skipped: {reason}")
        return 0
    known = {"hosts": show_hosts, "switch": show_switch}
    return max(known[part]() for part in parts or known)


def show_hosts() -> int:
    """One host beside four with a wide layer and slow links."""
    print("\none emulated host beside four, with links of 200 Mbit/s: about two minutes\n")
    study = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    words = f"compare digits/wide --strategies single,ddp,auto --nproc 4 --steps 10 --lab {HOSTS}"
    command = [sys.executable, "-m", "synchromesh", *words.split(), "-o", str(study)]
    if code := subprocess.run(command, check=False).returncode:
        return code
    runs = json.loads((study / "results.json").read_text())["runs"]
    taken = {run["strategy"]: run["step_seconds"]["median"] for run in runs}
    told = f"with four hosts steps are {taken['single'] / taken['auto']:.1f} times as fast as"
    told += f" with one, and {taken['ddp'] / taken['auto']:.1f} times as under PyTorch's DDP"
    print(f"\n{told}")
    return int(taken["auto"] >= taken["single"])


def show_switch() -> int:
    """A live switch."""
    links = f"links of {DEMO.fast} that become {DEMO.slow}"
    print(f"\na live switch: {DEMO.hosts} emulated hosts, {links}\n")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        try:
            changed = _train(run)
        except HostFailed as error:
            print(error, file=sys.stderr)
            return 1
        fault, told = _judged(run, changed)
    print(f"\n{told}", file=sys.stderr if fault else sys.stdout)
    return int(fault)


def _train(run: Path) -> int:
    """Trains on the hosts of a lab of its own, whose links become slow at step `change`, until a
    switch has followed or time is over; the last step that was known then."""

    def show(host: int, stream: int, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if host == 0 and text and "[c10d]" not in text:  # gloo has no names for emulated hosts
            print(f"  {text}", flush=True)

    with Lab(hosts=DEMO.hosts, bandwidth=DEMO.fast, cpu=DEMO.cpu) as lab:
        command = [
            sys.executable, "-m", "synchromesh", "train", *DEMO.workload, "--adapt",
            "--steps", str(DEMO.steps), "--output", str(run),
        ]  # fmt: skip
        wide = {"COLUMNS": "110"}
        running = lab.start(command, DEMO.limit_seconds, environment=wide, listener=show)
        changed, late = 0, 0.0
        while running.poll() is None:
            with suppress(TimeoutError):
                running.wait(DEMO.poll_seconds)
            step = max((s["step"] for s in _log(run, "step")), default=0)
            if not changed and step >= DEMO.change:
                changed, late = step, time.monotonic() + DEMO.shown_seconds
                print(f"  --- the links become {DEMO.slow} ---", flush=True)
                lab.set(bandwidth=DEMO.slow)
            if changed and (_switched(run, "adapted", changed) or time.monotonic() > late):
                running.pass_on(signal.SIGTERM)  # it checkpoints and ends
                break
        try:
            running.wait()
        except HostFailed:
            if not any(_log(run, "stop")):  # else it ended as it was asked to
                raise
    return changed


def _judged(run: Path, changed: int) -> tuple[bool, str]:
    """Whether no switch has followed that makes steps quicker, and what it brought or why not."""
    if not changed:
        return True, f"the run ended before step {DEMO.change}, at which links were to become slow"
    usual = [
        seconds
        for steps in _log(run, "steps")
        for step, seconds in enumerate(steps["seconds"], steps["first"])
        if changed - 20 < step <= changed and step not in steps["special"]
    ]
    before = f"{median(usual) * 1e3:.0f} ms a step before"
    switch = _switched(run, "adapted", changed) or _switched(run, "adapt", changed)
    if switch is None:
        reasons = [f"step {d['step']}: {d['noticed']}; {d['reason']}" for d in _log(run, "adapt")]
        said = "; ".join(reasons[-2:]) or "nothing was noticed"
        return True, f"no plan was switched to in {DEMO.shown_seconds:.0f} s ({before}; {said})"
    slow, after = switch["measured_before"], switch.get("measured_after")
    told = f"{before}, {slow * 1e3:.0f} ms over slow links"
    if after is None:
        return True, f"{told}; the run ended before it was known what steps take since the switch"
    told += f", {after * 1e3:.0f} ms since the switch to {switch['to']}"
    return after >= slow, told


def _switched(run: Path, kind: str, changed: int) -> dict[str, Any] | None:
    switches = (d for d in _log(run, kind) if d["switched"] and d["step"] > changed)
    return next((d for d in switches if d["measuring_seconds"]), None)


def _log(run: Path, kind: str) -> Iterator[dict[str, Any]]:
    with suppress(FileNotFoundError):
        for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n") and (event := json.loads(line))["event"] == kind:
                yield event


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
