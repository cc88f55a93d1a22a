"""One rank of a contestant: `python -m synchromesh.study.rank JOB`, in torchrun's environment.

In a lab it goes to its host before any other code of its own runs; what it imports is there
already (study/ranks.py), for which a host with a part of a core would take long."""

import os
import sys

from synchromesh.lab import Way
from synchromesh.study import ours, rivals
from synchromesh.study.cell import CellJob
from synchromesh.study.channel import Channel
from synchromesh.study.meter import Meter
from synchromesh.study.processes import HOSTS
from synchromesh.study.strategy import RIVALS
from synchromesh.values import document, fields


def main() -> int:
    """Trains as the job says; returns the exit code."""
    if hosts := os.environ.pop(HOSTS, ""):
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the agent's is on no host
        fields.of_plain(Way, document.read(hosts)[int(os.environ["RANK"])], hosts).take()
    job = CellJob.load(sys.argv[1])
    meter = Meter(Channel(job.socket, job.cell.key, int(os.environ["RANK"])), job.cell.batch)
    train = rivals.train if job.cell.strategy in RIVALS else ours.train
    train(job, meter)
    return 0


if __name__ == "__main__":
    sys.exit(main())  # launch.rank reports what it raises
