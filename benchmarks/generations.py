"""What changes of ranks leave behind: `python -m benchmarks.generations [--changes 200]`.

Of three ranks of `train --elastic 1:1` one that is not rank 0 gets a SIGKILL and comes back, over
and over. Descriptors, threads and resident memory of the launcher and of rank 0, behind the first
20 changes and behind the last one: when a group that was left in a collective which never ends has
ended by its time-out. Goals: as many descriptors and threads; 5 % more memory."""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

from benchmarks.hosts import TARGET, Log
from benchmarks.local_kills import ranks_of
from benchmarks.machine import machine

RANKS, FIRST, MORE = 3, 20, 1.05
TIMEOUT = 300.0  # seconds, of a collective (`World.open`)


@dataclass(frozen=True)
class Held:
    """Of a process; memory in bytes."""

    descriptors: int
    threads: int
    memory: int

    @classmethod
    def by(cls, pid: int) -> "Held":
        folder = Path(f"/proc/{pid}")
        pages = int((folder / "statm").read_text().split()[1])
        threads, files = len([*(folder / "task").iterdir()]), len([*(folder / "fd").iterdir()])
        return cls(files, threads, pages * os.sysconf("SC_PAGE_SIZE"))

    def kept(self, before: "Held") -> bool:
        few = self.descriptors <= before.descriptors and self.threads <= before.threads
        return few and self.memory <= MORE * before.memory


def changed(changes: int) -> dict[str, tuple[Held, Held]]:
    """By process, behind the first changes and behind the last one."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mlp.py").write_text(TARGET)
        words = ["train", "mlp.py:workload", "--nproc", str(RANKS), "--plan", "data", "--epochs",
                 "100000", "--elastic", "1:1", "--output", "run"]  # fmt: skip
        path = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            [sys.executable, "-m", "synchromesh", *words], cwd=folder, env=path,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            log, first = Log(Path(folder) / "run" / "log.jsonl"), dict[str, Held]()
            try:
                waited(log, "step", 10, process)
                own = {"launcher": process.pid, "rank 0": ranks_of(process.pid)[0]}
                done = 0
                while done < changes:
                    victim = random.choice(ranks_of(process.pid)[1:])
                    os.kill(victim, SIGKILL)
                    done += 2  # one is lost, one comes
                    waited(log, "generation", done, process)
                    waited(log, "step", len(log.of("step")) + 40, process)
                    now = {name: Held.by(pid) for name, pid in own.items()}
                    first = now if done <= FIRST else first
                limit = time.monotonic() + TIMEOUT + 20
                while time.monotonic() < limit and not kept(first, now):
                    time.sleep(1)
                    now = {name: Held.by(pid) for name, pid in own.items()}
            finally:
                process.kill()
    return {name: (first[name], held) for name, held in now.items()}


def kept(first: dict[str, Held], now: dict[str, Held]) -> bool:
    return all(held.kept(first[name]) for name, held in now.items())


def waited(log: Log, event: str, count: int, process: "subprocess.Popen[bytes]") -> None:
    limit = time.monotonic() + 120
    while len(log.of(event)) < count:
        if process.poll() is not None or time.monotonic() > limit:
            raise RuntimeError(f"{len(log.of(event))} of {count} events of {event!r} came")
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = changed(asked.changes)
    if asked.json:
        rows = {name: [vars(held) for held in pair] for name, pair in found.items()}
        print(json.dumps({"machine": machine(), "changes": asked.changes, "held": rows}, indent=2))
    else:
        print(f"{machine()}\n{asked.changes} changes")
        for name, (before, behind) in found.items():
            print(
                f"{name:9} descriptors {before.descriptors} -> {behind.descriptors}, threads "
                f"{before.threads} -> {behind.threads}, memory {before.memory / 1e6:.1f} -> "
                f"{behind.memory / 1e6:.1f} MB{'' if behind.kept(before) else '  missed'}"
            )
    return 0 if all(behind.kept(before) for before, behind in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
