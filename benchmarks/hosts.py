"""Hosts that come and go: `sudo python -m benchmarks.hosts [--only PART,...] [--rounds 3]`.

Emulated hosts (`synchromesh lab`) between links of 200 Mbit/s, with 45 % of a core each, train an
MLP of float64 with 0.3 M parameters under `train --elastic`, one rank each:

    presence      three begin, a fourth joins and leaves; another one is killed, one is frozen for
                  8 s and comes back by itself. No step is lost, losses are those of one process to
                  1e-10, a silent host is noticed within 5 s, training goes on 4 s later at most;
                  the fourth brings 0.95 of the samples a second of a run that began with four
    pauses        a host is cut off for 3 s, as often as --rounds says: nothing changes
    cut           a host is cut off for good: its ranks end within 5 s, the others go on
    coordinator   its host is killed: all other hosts' ranks end within 2 s

Every part is a run of its own, cut and coordinator one a round."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import IO, Any

from benchmarks.machine import machine
from benchmarks.troubles import POISONED, TROUBLE
from synchromesh.lab import Lab
from synchromesh.lab.description import Description

HOSTS, BANDWIDTH, CPU = 4, "200mbit", "45%"
NEAR, SILENT, LONGEST, SPEED, GONE = 1e-10, 5.0, 4.0, 0.95, 2.0
PARTS = ("presence", "pauses", "cut", "coordinator")
TARGET = """
import torch
import synchromesh as sm
from benchmarks.troubles import Rows
from torch import nn

def workload():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8192, 256, generator=generator, dtype=torch.float64)
    rows = Rows(list(zip(x, x[:, :10].argmax(1))))
    def model():
        return nn.Sequential(
            nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 10)
        ).double()
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
    return sm.Workload(
        model=model, loss=loss, train_data=rows, batch_size=256, epochs=1, name="mlp",
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
"""


class Log:
    """Events of a run's log by their names, of which only what is new is read."""

    def __init__(self, file: Path) -> None:
        self.file, self._read = file, 0
        self._events = dict[str, list[dict[str, Any]]]()

    def of(self, event: str) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError), self.file.open("rb") as file:
            file.seek(self._read)
            lines, end, _ = file.read().rpartition(b"\n")
            self._read += len(lines + end)
            for found in map(json.loads, lines.splitlines()):
                self._events.setdefault(found["event"], []).append(found)
        return self._events.get(event, [])


class Launcher:
    """A command on a host. told, out: lines of its errors and output so far."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process, self.told, self.out = process, list[str](), list[str]()
        self._readers = [
            threading.Thread(target=self._keep, args=pair, daemon=True)
            for pair in ((process.stderr, self.told), (process.stdout, self.out))
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _keep(pipe: IO[bytes], lines: list[str]) -> None:
        for line in pipe:
            lines.append(line.decode(errors="replace"))

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, seconds: float = 300.0) -> int:
        """Its code, once all that it has written is here."""
        code = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(1.0)
        return code


class Run:
    """One run over hosts of a lab. more: further words of `train`; target: what is trained."""

    def __init__(
        self, lab: Lab, folder: Path, epochs: int, begin: int, more: Sequence[str] = (),
        target: str = TARGET,
    ) -> None:  # fmt: skip
        self.lab, self.folder, self.ways = lab, folder, lab.ways()
        self.log = Log(folder / "run" / "log.jsonl")
        self.token, address = folder / "token", self.ways[0].variables["MASTER_ADDR"]
        self.address = f"{address}:{self.ways[0].variables['MASTER_PORT']}"
        self.token.write_text(os.urandom(16).hex())
        self.token.chmod(0o600)
        (folder / "mlp.py").write_text(target)
        self.words = [
            "train", "mlp.py:workload", "--nproc", "1", "--plan", "data", "--epochs", str(epochs),
            "--elastic", f"1:{HOSTS}", "--coordinator", self.address, "--output", "run", "--json",
            *more,
        ]  # fmt: skip
        self.launchers = {h: self.start(h, *self.words) for h in range(begin)}

    def start(self, host: int, *words: str) -> Launcher:
        command = [sys.executable, "-m", "synchromesh", *words, "--token-file", str(self.token)]
        return Launcher(
            self.ways[host].start(command, os.getpid(), self.variables(host), self.folder)
        )

    def variables(self, host: int) -> dict[str, str]:
        return {"PYTHONPATH": os.getcwd(), TROUBLE: str(self.folder / f"trouble-{host}")}

    def join(self, host: int) -> None:
        self.launchers[host] = self.start(host, "join", self.address, "--nproc", "1")

    def leave(self, host: int) -> None:
        self.launchers[host].process.terminate()

    def logged(self, event: str) -> list[dict[str, Any]]:
        return self.log.of(event)

    @property
    def step(self) -> int:
        """The last one that the log has."""
        steps = self.logged("step")
        return int(steps[-1]["step"]) if steps else 0

    def until(self, holds: Callable[[], bool], seconds: float = 120.0) -> float:
        """Seconds until it holds."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > seconds:
                raise RuntimeError(f"{self.folder.name}: nothing came of it in {seconds:.0f} s")
            time.sleep(0.02)
        return time.monotonic() - began

    def generations(self, count: int, seconds: float = 120.0) -> float:
        return self.until(lambda: len(self.logged("generation")) >= count, seconds)

    def steps(self, count: int = 10) -> None:
        """Until so many more are done."""
        done = len(self.logged("step"))
        self.until(lambda: len(self.logged("step")) >= done + count)

    def processes(self, host: int) -> int:
        return self.lab.states()[host].processes

    def end(self) -> dict[str, Any]:
        if self.launchers[0].wait():
            raise RuntimeError("".join(self.launchers[0].told)[-2000:])
        found: dict[str, Any] = json.loads("".join(self.launchers[0].out))
        return found

    def close(self) -> None:
        for host in range(HOSTS):
            self.lab.kill(host)
        for host, launcher in self.launchers.items():
            launcher.wait()
            if sys.exc_info()[0] is not None:
                print(f"host {host}: {''.join(launcher.told)}", file=sys.stderr)


@contextmanager
def running(
    lab: Lab, epochs: int = 10_000, begin: int = 3, more: Sequence[str] = ()
) -> Iterator[Run]:
    """Once it trains; what is left of it ends behind the block."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(lab, Path(folder), epochs, begin, more)
        try:
            run.until(lambda: bool(run.logged("step")))
            run.steps()
            yield run
        finally:
            run.close()


def speed(run: Run) -> float:
    """Samples a second, by the log's epochs from now on."""
    done = len(run.logged("epoch"))
    run.until(lambda: len(run.logged("epoch")) >= done + 4)
    return float(median(e["samples_per_second"] for e in run.logged("epoch")[done + 1 :]))


def alone(
    folder: Path, epochs: int, more: Sequence[str] = (), poisoned: Sequence[int] = ()
) -> list[float]:
    """Losses of one process with a core, that nobody disturbs. more: further words of `train`;
    poisoned: steps with a row that is not finite."""
    words = ["--plan", "single", "--epochs", str(epochs), "--output", "alone", *more]
    command = [sys.executable, "-m", "synchromesh", "train", "mlp.py:workload", *words]
    with Lab.of(Description.alike(1, BANDWIDTH, "100%")) as lab:
        steps = " ".join(map(str, poisoned))
        lab.run(command, None, {"PYTHONPATH": os.getcwd(), POISONED: steps}, folder)
    return [x["loss"] for x in Log(folder / "alone" / "log.jsonl").of("step")]


def presence(lab: Lab, rounds: int) -> dict[str, Any]:
    with running(lab, begin=4) as run:
        whole = speed(run)
    epochs = 60
    with running(lab, epochs) as run:
        run.join(3)
        run.generations(1)
        joined = speed(run)
        run.leave(3)
        run.generations(3)
        run.steps()
        lab.kill(1)
        run.generations(4)
        run.steps()
        lab.freeze(2)
        run.generations(5)
        time.sleep(4)
        lab.thaw(2)
        run.generations(6)
        generations = run.end()["generations"]
        losses = {x["step"]: x["loss"] for x in run.logged("step")}
        usual = alone(run.folder, epochs)
        apart = max(abs(losses[n + 1] - loss) for n, loss in enumerate(usual))
    row = {
        "generations": generations, "speed": joined / whole, "apart": apart,
        "noticed": max(g["noticed_seconds"] for g in generations),
        "recovered": max(g["recovered_seconds"] - g["noticed_seconds"] for g in generations),
        "lost_steps": sum(g["lost_steps"] for g in generations),
    }  # fmt: skip
    row["good"] = (
        row["noticed"] <= SILENT and row["recovered"] <= LONGEST and apart <= NEAR
        and not row["lost_steps"] and row["speed"] >= SPEED
    )  # fmt: skip
    return row


def pauses(lab: Lab, rounds: int) -> dict[str, Any]:
    with running(lab) as run:
        for _ in range(rounds):
            lab.cut(2)
            time.sleep(3)
            lab.heal(2)
            run.steps()
        changes = run.logged("generation")
    return {"pauses": rounds, "generations": changes, "good": not changes}


def cut(lab: Lab, rounds: int) -> dict[str, Any]:
    """ended: seconds until the launcher, which writes nothing, is alone there; later: until it is
    gone, too."""
    ended, later = [], []
    for _ in range(rounds):
        with running(lab) as run:
            lab.cut(2)
            ended.append(run.until(lambda: run.processes(2) < 2))
            later.append(run.until(lambda: not run.processes(2)))
            run.generations(1)
            run.steps()
            lab.heal(2)
    return {"ended": ended, "later": later, "good": max(ended) <= SILENT}


def coordinator(lab: Lab, rounds: int) -> dict[str, Any]:
    ended = []
    for _ in range(rounds):
        with running(lab) as run:
            lab.kill(0)
            ended.append(run.until(lambda: not (run.processes(1) or run.processes(2))))
    return {"ended": ended, "good": max(ended) <= GONE}


def told(part: str, row: dict[str, Any]) -> str:
    if part == "presence":
        causes = "; ".join(g["cause"] for g in row["generations"])
        text = (
            f"noticed in {row['noticed']:.2f} s at most, again {row['recovered']:.2f} s later at "
            f"most, {row['lost_steps']} steps lost, losses apart {row['apart']:.0e}, "
            f"{row['speed']:.3f} of the speed of four ({causes})"
        )
    elif part == "pauses":
        text = f"{row['pauses']} times 3 s: {len(row['generations'])} changes"
    else:
        text = f"ended after {', '.join(f'{s:.2f} s' for s in row['ended'])}"
        if "later" in row:
            text += f"; the launcher at most {max(row['later']):.2f} s later"
    return f"{part:12} {text}{'' if row['good'] else '  missed'}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,...")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    rows = {}
    for part in asked.only.split(","):
        with Lab.of(Description.alike(HOSTS, BANDWIDTH, CPU)) as lab:
            rows[part] = globals()[part](lab, asked.rounds)
        if not asked.json:
            print(told(part, rows[part]), flush=True)
    if asked.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
    else:
        print(machine())
    return 0 if all(row["good"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
