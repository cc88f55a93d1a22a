"""`synchromesh run --nproc N script.py [args]`: a user's own script on local processes."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from synchromesh.cli import elastic, options, ranks
from synchromesh.cli.command import command, option


def main(args: argparse.Namespace) -> int:
    if args.coordinator is not None:
        ranks.forget()  # srun or the lab has started one process on each host: its launcher
    ranks.refuse_inside("run", "the script")
    elastic.check(args)
    if not Path(args.script).is_file():
        raise ValueError(f"there is no script {args.script}")
    count = options.processes(args.nproc)
    start = time.monotonic()
    if not args.json:
        return _started(args, count)
    standard = os.dup(1)
    os.dup2(2, 1)  # the script's own words; standard output is for the document
    try:
        code = _started(args, count)
    finally:
        sys.stdout.flush()
        os.dup2(standard, 1)
        os.close(standard)
    seconds = round(time.monotonic() - start, 3)
    document = {"script": args.script, "ranks": count, "seconds": seconds, "exit_code": code}
    print(json.dumps(document))
    return code


def _started(args: argparse.Namespace, count: int) -> int:
    words = [args.script, *args.arguments]
    if args.elastic:
        return elastic.start(args, ["run", *words], count)
    return ranks.start(words, count)


COMMAND = command(
    "run", main, "a script of yours on several local processes",
    "Runs a script on local processes with torchrun's environment. The same script runs under "
    "torchrun on several machines. Only rank 0's standard output is shown.",
    options.nproc(),
    *elastic.of_run(),
    option("script", metavar="SCRIPT", help="a Python file"),
    option("arguments", nargs=argparse.REMAINDER, help="the script's own arguments"),
    options.JSON,
)  # fmt: skip
