"""A part of a benchmark: strategies in turns on one set of ranks, local ones or emulated hosts."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.turns import Job, Measured
from synchromesh.lab import Lab
from synchromesh.lab.running import Stream

ROOT = Path(__file__).parents[1]
LIMIT = 900.0  # seconds of one part
# Everything is measured afresh, with one thread per rank.
ENVIRONMENT = {"SYNCHROMESH_CACHE": "off", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Part:
    """`job` on `ranks` local ranks, or on as many hosts with `cpu` of a core each and links of
    `bandwidth`."""

    name: str
    ranks: int
    job: Job
    cpu: tuple[float, ...] = ()
    bandwidth: str = "50mbit"

    def __str__(self) -> str:
        if not self.cpu:
            return f"{self.name}: {self.ranks} local ranks"
        shares = ", ".join(f"{share:.1%}" for share in self.cpu)
        return f"{self.name}: {self.ranks} emulated hosts, {self.bandwidth}, {shares} of a core"

    def run(self) -> dict[str, Measured]:
        """What was measured of each strategy. HostFailed, CalledProcessError or TimeoutExpired
        where a rank fails or is late; its own words are on standard error by then."""
        print(f"{self} ...", file=sys.stderr, flush=True)
        job = ["-m", "benchmarks.turns", self.job.to_json()]
        text = self._on_hosts(job) if self.cpu else self._locally(job)
        return {name: Measured(**m) for name, m in json.loads(text).items()}

    def _on_hosts(self, job: list[str]) -> str:
        last = [b""]

        def heard(host: int, stream: int, line: bytes) -> None:
            if stream == Stream.OUTPUT:
                last[0] = line
            else:
                sys.stderr.buffer.write(line)
                sys.stderr.flush()

        with Lab(self.ranks, self.bandwidth, self.cpu) as lab:
            lab.start([sys.executable, *job], LIMIT, ENVIRONMENT, ROOT, heard).wait()
        return last[0].decode()

    def _locally(self, job: list[str]) -> str:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        done = subprocess.run(
            [sys.executable, *start, *job], cwd=ROOT, env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE, text=True, timeout=LIMIT, check=True,
        )  # fmt: skip
        return done.stdout.splitlines()[-1]
