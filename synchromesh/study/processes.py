"""The processes of a contestant, and how many of them a machine holds."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from synchromesh.lab import Lab, Way
from synchromesh.launcher.machine import device_bytes
from synchromesh.values import document, fields
from synchromesh.workloads.workload import Workload

RANK = "synchromesh.study.rank"  # the module that each rank runs, with the job's file
STUDY = "SYNCHROMESH_STUDY"  # process id of the study, in its contestants
HOSTS = "SYNCHROMESH_HOSTS"  # a file: the ways of a contestant's ranks onto the hosts of a lab


class RankProcesses:
    """The ranks of a contestant, which write to its log. ways: by rank, onto the hosts of a lab;
    none: they stay on this machine."""

    END_SECONDS = 10.0  # to end in good order; chosen

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
    def on(cls, lab: Lab) -> "Start":
        """Those on the first hosts of a lab."""
        return lambda ranks, job, log: cls(ranks, job, log, lab.ways(range(ranks)))

    def code(self) -> int | None:
        """None while they run; else 0, or how they failed (-9: killed by signal 9)."""
        return self._process.poll()

    def end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self.END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


Start = Callable[[int, Path, Path], RankProcesses]  # ranks, the job's file, the log


def reason(code: int, log: Path, searched: int = 20_000) -> str:
    """Why a contestant failed: its last words, or the signal. searched: characters of its log."""
    text = log.read_text(errors="replace")[-searched:] if log.exists() else ""
    lines = list(filter(None, map(str.strip, text.splitlines())))
    ours = [x.removeprefix("synchromesh: ") for x in lines if x.startswith("synchromesh: ")]
    words = [x for x in ours if not x.startswith("warning: ")]
    hint = " (the system's memory may have run out)" * (-code == signal.SIGKILL)
    killed = [f"killed by {signal.Signals(-code).name}{hint}"] if code < 0 else []
    return (words or killed or lines or [f"it ended with code {code}"])[-1]


@dataclass(frozen=True)
class RankBytes:
    """Bytes that a rank needs.

    process, cuda   besides its model: of its own on a CPU, for a CUDA context and its libraries;
                    measured with torch 2.13 (0.2 and 1.5 GB), rounded up
    copies          times the bytes of parameters: themselves, gradients, two states, and as much
                    again for activations and what communication holds; chosen"""

    process: int = 250_000_000
    cuda: int = 1_500_000_000
    copies: int = 8


def most_processes(models: Sequence[Workload], devices: int, rank: RankBytes = RankBytes()) -> int:
    """How many ranks may be there at once, most of them waiting for their turn."""
    built = [built_without_values(workload).parameters() for workload in models]
    model = rank.copies * max(sum(p.nbytes for p in parameters) for parameters in built)
    if torch.cuda.is_available():
        return devices * max(1, torch.cuda.mem_get_info()[0] // (rank.cuda + model))
    return device_bytes(torch.device("cpu")) // (rank.process + model)


def built_without_values(workload: Workload) -> nn.Module:
    """Its model, on the meta device where it can be built there."""
    try:
        with torch.device("meta"):
            return workload.build()
    except Exception:  # its constructor reads values, as drop rates by linspace(...).item()
        return workload.build()
