"""A live switch shown: two emulated hosts train, their links become slow, the plan changes.

`python -m synchromesh.lab.demo` (root, Linux); elsewhere it says so and shows nothing.

    1 Gbit/s                                    20 Mbit/s
    training under the plan found for it   ->   noticed, measured, a better plan, training goes on
"""

import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from synchromesh.lab.lab import Lab
from synchromesh.lab.requirements import reason_unavailable
from synchromesh.lab.running import HostFailed

FAST, SLOW = "1gbit", "4mbit"
HOSTS, CPU = 2, 0.4
CHANGE = 60  # the step
STEPS = 5000  # enough that measuring again is worth its time; the run is ended early
WORKLOAD = ("digits/cnn", "--batch-size", "360")
POLL_SECONDS = 0.2
SHOWN_SECONDS = 60.0  # after the change, at most
LIMIT_SECONDS = 300.0


def main() -> int:
    """Show the switch; the exit code."""
    reason = reason_unavailable()
    if reason is not None:
        print(f"the live switch is skipped: {reason}")
        return 0
    print(f"\na live switch: {HOSTS} emulated hosts, links of {FAST} that become {SLOW}\n")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        try:
            _train(run)
        except HostFailed as error:
            if not any(_log(run, "stop")):  # else it ended as it was asked to
                print(error, file=sys.stderr)
                return 1
        switched = any(line["switched"] for line in _log(run, "adapt"))
    if not switched:
        print("\nno better plan was found for the slow links, so none was switched to")
    return 0


def _train(run: Path) -> None:
    """Trains on the hosts of a lab of its own, whose links become slow at step `CHANGE`."""

    def show(host: int, stream: int, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if host == 0 and text and "[c10d]" not in text:  # gloo has no names for emulated hosts
            print(f"  {text}", flush=True)

    with Lab(hosts=HOSTS, bandwidth=FAST, cpu=CPU) as lab:
        command = [
            sys.executable, "-m", "synchromesh", "train", *WORKLOAD, "--adapt",
            "--steps", str(STEPS), "--output", str(run),
        ]  # fmt: skip
        running = lab.start(
            command, timeout=LIMIT_SECONDS, listener=show, environment={"COLUMNS": "110"}
        )
        changed = 0.0
        while running.poll() is None:
            with suppress(TimeoutError):
                running.wait(POLL_SECONDS)
            if not changed and any(s["step"] >= CHANGE for s in _log(run, "step")):
                changed = time.monotonic()
                print(f"  --- the links become {SLOW} ---", flush=True)
                lab.set(bandwidth=SLOW)
            late = changed and time.monotonic() > changed + SHOWN_SECONDS
            if changed and (late or any(_log(run, "adapted"))):
                running.pass_on(signal.SIGTERM)  # it checkpoints and ends
                break
        running.wait()


def _log(run: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The lines of one kind in the run's log; none where it is not there yet."""
    with suppress(FileNotFoundError):
        for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n") and (found := json.loads(line))["event"] == kind:
                yield found


if __name__ == "__main__":
    raise SystemExit(main())
