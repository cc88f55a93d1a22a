"""One rank of a contestant: `python -m synchromesh.study.rank JOB`, in torchrun's environment."""

import os
import sys

import torch

from synchromesh.study import ours, rivals
from synchromesh.study.channel import Channel
from synchromesh.study.job import CellJob
from synchromesh.study.meter import Meter
from synchromesh.study.strategy import RIVALS
from synchromesh.values.fault import Fault


def main() -> int:
    """Trains as the job says; returns the exit code."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    job = CellJob.load(sys.argv[1])
    meter = Meter(Channel(job.socket, job.cell.key, int(os.environ["RANK"])))
    train = rivals.train if job.cell.strategy in RIVALS else ours.train
    train(job, meter)
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except Exception as error:
        if "SYNCHROMESH_LAUNCHER" in os.environ:
            raise  # launch.rank reports it
        fault = Fault.of(error)
        print(f"{fault.traceback}\nsynchromesh: {fault.sentence}", file=sys.stderr, flush=True)
        code = fault.code
    sys.exit(code)
