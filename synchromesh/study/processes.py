"""The processes of a contestant: local ranks, or one rank on each of a lab's first hosts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from synchromesh.lab import Lab, Way
from synchromesh.values import document, fields

RANK = "synchromesh.study.rank"  # the module that each rank runs, with the job's file
STUDY = "SYNCHROMESH_STUDY"  # process id of the study, in its contestants
HOSTS = "SYNCHROMESH_HOSTS"  # a file: the ways of a contestant's ranks onto the hosts of a lab
END_SECONDS = 10.0  # to end in good order; chosen
LOG_CHARACTERS = 20_000  # of a contestant's log that is searched for the reason it failed


class Processes(Protocol):
    """What a study starts for a contestant; what they write goes to the contestant's log."""

    def code(self) -> int | None:
        """None while they run; else 0, or how they failed (-9: killed by signal 9)."""

    def end(self) -> None:
        """Ends what still runs."""


Start = Callable[[int, Path, Path], Processes]  # ranks, the job's file, the log


class RankProcesses:
    """Ranks on this machine. ways: by rank, onto the hosts of a lab; none: they stay."""

    def __init__(self, ranks: int, job: Path, log: Path, ways: Sequence[Way] = ()) -> None:
        environment = {**os.environ, STUDY: str(os.getpid())}
        if ways:
            hosts = job.with_name("hosts.json")
            document.write(hosts, json.dumps([fields.to_plain(way) for way in ways]))
            environment[HOSTS] = str(hosts)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "synchromesh.study.ranks", str(ranks), str(job)],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
                env=environment,
            )  # fmt: skip

    @classmethod
    def on(cls, lab: Lab) -> Start:
        """Those on the first hosts of a lab."""
        return lambda ranks, job, log: cls(ranks, job, log, lab.ways(ranks))

    def code(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def reason(code: int, log: Path) -> str:
    """Why a contestant failed, in one sentence: its own last words, or the signal."""
    text = log.read_text(errors="replace")[-LOG_CHARACTERS:] if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [x.removeprefix("synchromesh: ") for x in lines if x.startswith("synchromesh: ")]
    words = [x for x in ours if not x.startswith("warning: ")]
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (the system's memory may have run out)" if -code == signal.SIGKILL else ""
        words = words or [f"killed by {name}{hint}"]
    return (words or lines or [f"it ended with code {code}"])[-1]
