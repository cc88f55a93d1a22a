"""The ranks of one contestant: `python -m synchromesh.study.ranks RANKS JOB`; a process of its
own, so that one that fails, or is killed for its memory, takes no other with it."""

import importlib
import os
import sys

from synchromesh.launcher import forks, rank
from synchromesh.launcher.launcher import launch
from synchromesh.study.processes import RANK, STUDY

# ranks have these imported when they begin: one import for all
IMPORTED = ("synchromesh.study.ours", "synchromesh.study.rivals", "torch.export._trace")


def main() -> int:
    """Runs the ranks; returns their exit code."""
    rank.die_with(int(os.environ.pop(STUDY)))
    ranks, job = int(sys.argv[1]), sys.argv[2]
    for module in IMPORTED:
        importlib.import_module(module)
    with forks.forked(ranks) as waiting:
        ending = launch(["-m", RANK, job], ranks, grace=5, forks=waiting)
    if ending.failure is not None:
        print(ending.failure, file=sys.stderr, flush=True)
    return ending.code


if __name__ == "__main__":
    raise SystemExit(main())
