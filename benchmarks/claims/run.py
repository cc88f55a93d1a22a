"""One run of a benchmark in its shortest honest form, and why it cannot be made here."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.claims.guard import LATE

ROOT = Path(__file__).parents[2]
# Everything is measured afresh, with one thread a rank.
ENVIRONMENT = {"SYNCHROMESH_CACHE": "off", "OMP_NUM_THREADS": "1"}
PATIENCE = 4.0  # times its usual seconds, after which a run has failed; plus a minute


class RunFailed(Exception):
    """A run gave no document; one sentence says why."""


@dataclass(frozen=True)
class Run:
    """`python -m benchmarks.MODULE OPTIONS --json`.

    seconds  that it takes on two idle cores
    hosts    it emulates hosts, which needs root
    data     folder of real data that it reads
    """

    module: str
    options: str = ""
    seconds: float = 60.0
    hosts: bool = False
    data: str = ""

    @property
    def words(self) -> list[str]:
        return ["-m", f"benchmarks.{self.module}", *self.options.split(), "--json"]

    @property
    def command(self) -> str:
        """As one types it."""
        return " ".join(["python", *self.words])

    def hindrance(self) -> str:
        """Why it cannot be made here now, in one sentence; empty where it can."""
        if self.hosts:
            from synchromesh import lab

            if reason := lab.reason_unavailable():
                return reason
            if up := lab.labs()[0]:
                return f"other emulated hosts are up ({', '.join(up)}): synchromesh lab down"
        if self.data:
            from tests.real_data import DATA

            if not (DATA / self.data).is_dir():
                where = "$SYNCHROMESH_DATA names the folder of real data sets"
                return f"no folder {self.data!r} of real data here ({where})"
        return ""

    def document(self) -> Any:
        """What the benchmark prints, as JSON. It may have missed its goal, which is no failure
        here. RunFailed where there is no document; on KeyboardInterrupt the run is ended."""
        guard = ["-m", "benchmarks.claims.guard", f"{60 + PATIENCE * self.seconds}"]
        words = [sys.executable, *guard, str(os.getpid()), sys.executable, *self.words]
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                words, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, text=True,
                start_new_session=True, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
            try:
                text, _ = process.communicate()
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
            log.seek(0)
            told = [line.strip() for line in log if line.strip()]
        if process.returncode == LATE:
            raise RunFailed(f"it took more than {60 + PATIENCE * self.seconds:.0f} s")
        try:
            return json.loads(text)
        except ValueError:
            last = told[-1] if told else "it printed no reason"
            raise RunFailed(f"exit code {process.returncode}: {last}") from None
