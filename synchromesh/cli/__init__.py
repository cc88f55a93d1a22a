"""The command `synchromesh`: one file per subcommand, each with `add_parser`, which adds it and
its options, and `main(args)`, which runs it and returns its exit code."""

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from typing import NoReturn

from synchromesh.cli import compare, doctor, explain, lab, plan, report, run, trace, train, verify
from synchromesh.cli.ranks import hush
from synchromesh.launch.rank import launched, open_closed_streams
from synchromesh.values.fault import Fault, Stopped, printable
from synchromesh.values.version import VERSION

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of files; ours are named
COMMANDS = (doctor, plan, train, trace, explain, verify, compare, report, run, lab)


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        self.exit(2, f"{printable(f'{self.prog}: {message}')}; see {self.prog} --help\n")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """As argparse's, but a command refuses what it does not know itself, by its own name."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="synchromesh",
        description="Trains a PyTorch model over your devices, under a plan per component.",
        epilog="TARGET is a bundled workload (digits/cnn, cifar100/resnet50, ...) or "
        "path/to/file.py:function, a function that returns a synchromesh.Workload.",
    )
    top.add_argument("--version", action="version", version=f"synchromesh {VERSION}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return top


def _run(args: argparse.Namespace) -> int:
    """Runs a command; `args.out` gets its document, beside which a TARGET may print nothing."""
    args.out = sys.stdout
    code: int
    names_target = "target" in args or "targets" in args
    with redirect_stdout(sys.stderr) if names_target and args.json else nullcontext():
        code = args.main(args)
    args.out.flush()
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0, 2 for bad input, 1 for other errors,
    128 + N where signal N ended it."""
    open_closed_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    args = parser().parse_args(words)
    args.words = words
    hush()
    if launched():
        code = _run(args)  # errors pass on to launch.rank, which reports them
        return code
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
