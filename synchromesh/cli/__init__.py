"""The command `synchromesh`: one file per subcommand, with what declares it, `COMMAND`."""

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

from synchromesh.cli import (
    compare,
    doctor,
    efficiency,
    elastic,
    explain,
    lab,
    plan,
    report,
    run,
    simulate,
    submit,
    trace,
    train,
    verify,
)  # fmt: skip
from synchromesh.cli.command import Parser, commands, option
from synchromesh.cli.completion import complete
from synchromesh.cli.ranks import hush
from synchromesh.launcher.rank import launched, open_closed_streams
from synchromesh.values.fault import Fault, Stopped
from synchromesh.values.version import VERSION

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of files; ours are named
COMMANDS = (
    doctor, plan, simulate, efficiency, train, trace, explain, verify, compare, report, run, lab,
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="synchromesh",
        description="Trains a PyTorch model over your devices, under a plan per component.",
        epilog="TARGET is a bundled workload (digits/cnn, cifar100/resnet50, ...) or "
        "path/to/file.py:function, a function that returns a synchromesh.Workload.",
    )
    option("--version", action="version", version=f"synchromesh {VERSION}")(top)
    others = *elastic.COMMANDS, submit.COMMAND
    commands(*(module.COMMAND for module in COMMANDS), *others)(top)
    return top


def _run(args: argparse.Namespace) -> int:
    """Runs a command; `args.out` gets its document, beside which a TARGET may print nothing."""
    args.out = sys.stdout
    names_target = "target" in args or "targets" in args
    with redirect_stdout(sys.stderr) if names_target and args.json else nullcontext():
        code: int = args.main(args)
    args.out.flush()
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0, 2 for bad input, 1 for other errors,
    128 + N where signal N ended it."""
    open_closed_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    made = parser()
    complete(made)
    args = made.parse_args(words)
    args.words = words
    hush()
    if launched():
        return _run(args)  # errors pass on to launch.rank, which reports them
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except Stopped as end:
        return end.code
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing is left to write at the exit
            error.filename = "standard output"
        fault = Fault.of(error)
        print(fault, file=sys.stderr)
        return fault.code
