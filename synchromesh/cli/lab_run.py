"""`synchromesh lab run -- CMD`: a command once on every host of a lab, its output line by line."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from synchromesh.cli import options, ranks

if TYPE_CHECKING:
    from synchromesh.lab import Running


def add_parser(deeds: options.Commands) -> None:
    parser: argparse.ArgumentParser = deeds.add_parser(
        "run", help="start a command once on every host of a lab",
        description="Starts a command once on every host, with torchrun's environment (RANK, "
        "WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and SYNCHROMESH_LAB, the file of the lab's "
        "cluster. Host 0's standard output is shown as it is; all else goes to standard error, "
        "with its host before each line where there are several. Ends with the exit code of the "
        "host that failed first, 124 for the time limit. Ctrl-C or SIGTERM goes to every "
        "host, which has 30 s to checkpoint; a second one kills.",
    )  # fmt: skip
    options.add_lab(parser)
    parser.add_argument(
        "--timeout", type=options.seconds, metavar="SECONDS", help="default: no limit"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    options.complete(parser, main)


def main(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ValueError("what shall the hosts run? synchromesh lab run -- COMMAND ...")
    ranks.refuse_inside("lab run", "the command")
    from synchromesh.lab import HostFailed, Lab

    lab = Lab.open(args.name)
    hosts = len(lab.description.hosts)
    start = time.monotonic()
    output = HostOutput(hosts, document=args.json)
    running = lab.start(command, args.timeout, listener=output.write)
    received: list[int] = []
    try:
        with _passing_on(running, received):
            running.wait()
        code = 0
    except HostFailed as error:
        print(f"synchromesh: {str(error).splitlines()[0]}", file=sys.stderr)
        code = error.code
    finally:
        running.end()
    if received:
        code = 128 + received[0]
    if args.json:
        seconds = round(time.monotonic() - start, 3)
        print(json.dumps({
            "lab": lab.name, "emulated": True, "hosts": hosts, "command": command,
            "seconds": seconds, "exit_code": code,
        }))  # fmt: skip
    return code


class HostOutput:
    """Where the lines of the hosts go; with a `document` to come, none to standard output."""

    def __init__(self, hosts: int, document: bool) -> None:
        self._hosts, self._document = hosts, document

    def write(self, host: int, stream: int, line: bytes) -> None:
        """A line of a host's standard output (1) or standard error (2)."""
        sys.stdout.flush()
        if (host, stream) == (0, 1) and not self._document:
            _write(1, line)
        else:
            prefix = f"[host {host}] ".encode() if self._hosts > 1 else b""
            _write(2, prefix + line)


def _write(stream: int, data: bytes) -> None:
    while data:
        data = data[os.write(stream, data) :]


@contextmanager
def _passing_on(running: "Running", received: list[int]) -> Iterator[None]:
    """The first SIGINT or SIGTERM goes to the hosts, the second kills what runs there."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        running.pass_on(number if len(received) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
