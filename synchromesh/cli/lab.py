"""`synchromesh lab`: emulated hosts on one machine; a lab stays up between commands."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from synchromesh.cli import options, ranks
from synchromesh.cli.command import Argument, answer, command, commands, option

if TYPE_CHECKING:
    from rich.table import Table

    from synchromesh.lab import Description, Lab, Running

# command -> what it does to one host, and what the host then is
DEEDS = {
    "freeze": ("stop every process of a host where it is", "frozen"),
    "thaw": ("let a frozen host go on", "thawed"),
    "cut": ("cut a host off from the others", "cut off"),
    "heal": ("reconnect a host that was cut off", "reconnected"),
    "kill": ("kill everything that runs on a host", "killed"),
}


def up(args: argparse.Namespace) -> int:
    from synchromesh.lab import Lab

    lab = Lab.of(_described(args), args.name)
    lab.up()
    shown = _document(lab)
    lab.stay()
    answer(args, shown, lambda: _show(shown))
    if not args.json:
        named = "" if args.name == UNNAMED else f" --name {args.name}"
        print(f"run something in it: synchromesh lab run{named} -- synchromesh train digits/cnn")
    return 0


def _described(args: argparse.Namespace) -> "Description":
    from synchromesh.lab import Description

    asked = ("hosts", "bandwidth", "cpu", "memory")
    given = [f"--{key}" for key in asked if getattr(args, key) is not None]
    if args.file and given:
        raise ValueError(f"--file describes the hosts: leave {' and '.join(given)} out")
    if args.file:
        return Description.load(Path(args.file))
    return Description.alike(
        args.hosts or 4, args.bandwidth or "200mbit", args.cpu or "40%", memory=args.memory
    )


def _opened(name: str) -> "Lab":
    from synchromesh.lab import Lab

    return Lab.open(name)


def set_(args: argparse.Namespace) -> int:
    """Changes links, processors or memory of one that is up."""
    lab = _opened(args.name)
    lab.set(args.host, args.bandwidth, args.cpu, args.uplink, args.memory)
    shown = _document(lab)
    answer(args, shown, lambda: _show(shown))
    return 0


def do(args: argparse.Namespace) -> int:
    """Does one of `DEEDS` to a host."""
    lab = _opened(args.name)
    getattr(lab, args.deed)(args.host)
    answer(args, _document(lab), f"host {args.host} of lab {args.name} is {DEEDS[args.deed][1]}")
    return 0


def show(args: argparse.Namespace) -> int:
    """Shows one lab, or all."""
    from synchromesh.lab import labs

    names, removed = labs()
    _report(removed)
    names = names if args.name is None else [args.name]
    shown = [_document(_opened(name)) for name in names]
    answer(args, {"labs": shown, "removed": removed}, lambda: _show(*shown))
    return 0


def down(args: argparse.Namespace) -> int:
    from synchromesh.lab import labs

    _, removed = labs()
    if args.name not in removed:
        _opened(args.name).down()
    _report(removed)
    if args.json or args.name not in removed:
        document = {"name": args.name, "removed": sorted({*removed, args.name})}
        answer(args, document, f"lab {args.name} is down")
    return 0


def _report(removed: list[str]) -> None:
    for name in removed:
        print(f"removed lab {name}: its keeper was no longer alive", file=sys.stderr)


def _document(lab: "Lab") -> dict[str, Any]:
    """The lab at this moment; bandwidths in bits a second, shares in cores."""
    shown: dict[str, Any] = {
        "name": lab.name, "emulated": True, "keeper": lab.tag.pid,
        "cluster": str(lab.cluster_file),
    }  # fmt: skip
    if lab.description.uplink is not None:
        shown["racks"] = [list(rack) for rack in lab.description.racks]
        shown["uplink"] = lab.current().uplink
    shown["hosts"] = [vars(state) for state in lab.states()]
    return shown


def _show(*labs: dict[str, Any]) -> None:
    from synchromesh.cli.console import Console

    for lab in labs:
        Console(highlight=False).print(_table(lab))
    if not labs:
        print("no lab is up")


def _table(lab: dict[str, Any]) -> "Table":
    from synchromesh.cli.console import table
    from synchromesh.lab.description import show_bandwidth, show_share
    from synchromesh.values import size

    title = f"lab {lab['name']}: {len(lab['hosts'])} emulated hosts"
    if "uplink" in lab:
        title += f" in two racks, uplink {show_bandwidth(lab['uplink'])}"
    racks = {host: str(i) for i, rack in enumerate(lab.get("racks", [])) for host in rack}
    rows = [
        {
            "host": str(host["host"]), "rack": racks.get(host["host"], ""),
            "address": host["address"], "bandwidth": show_bandwidth(host["bandwidth"]),
            "cpu": show_share(host["cpu"]),
            "memory": size.show(host["memory"]) if host["memory"] else "-",
            "state": host["state"], "processes": str(host["processes"]),
        }
        for host in lab["hosts"]
    ]  # fmt: skip
    known = {"rack": bool(racks), "memory": any(host["memory"] for host in lab["hosts"])}
    columns = [name for name in rows[0] if known.get(name, True)]
    return table(title, columns, ([row[name] for name in columns] for row in rows), left=columns)


def run(args: argparse.Namespace) -> int:
    """Runs a command once on every host, its output line by line."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ValueError("what shall the hosts run? synchromesh lab run -- COMMAND ...")
    ranks.refuse_inside("lab run", "the command")
    from synchromesh.lab import HostFailed

    lab = _opened(args.name)
    hosts = args.hosts or [*range(len(lab.description.hosts))]
    start = time.monotonic()
    shown = partial(_show_line, len(hosts) > 1, None if args.json else hosts[0])
    running = lab.start(command, args.timeout, listener=shown, hosts=hosts)
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
        print(json.dumps({
            "lab": lab.name, "emulated": True, "hosts": len(hosts), "command": command,
            "seconds": round(time.monotonic() - start, 3), "exit_code": code,
        }))  # fmt: skip
    return code


def numbers(text: str) -> list[int]:
    """Of hosts: `0-2,4`."""
    found: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = [int(n) for n in (first, last if dash else first) if n.isdecimal()]
        if len(ends) < 2 or ends[0] > ends[1]:
            raise argparse.ArgumentTypeError(f"{text!r} names no hosts: give numbers, as 0-2,4")
        found |= dict.fromkeys(range(ends[0], ends[1] + 1))
    return [*found]


def _show_line(several: bool, host_shown: int | None, host: int, stream: int, line: bytes) -> None:
    """A line of a host's standard output (1) or standard error (2); that of `host_shown` goes to
    standard output as it is, others to standard error, with their host where there are several."""
    sys.stdout.flush()
    if (host, stream) == (host_shown, 1):
        _write(1, line)
    else:
        _write(2, f"[host {host}] ".encode() * several + line)


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


UNNAMED = "lab"  # the name of the lab where none is given
NAME = option("--name", default=UNNAMED, metavar="NAME",
              help="of the lab, where several are up; default lab")  # fmt: skip
ON_A_HOST = option("--host", type=options.natural, metavar="N", required=True)
EPILOG = (
    "Rates are such as 100kbit, 200mbit, 1.5gbit (each way); shares are per cent of one core, "
    "from 10%; memory is such as 1GiB. Needs Linux, root, and the cpu controller of cgroup v1 or "
    "v2 (for memory that controller too)."
)


def _command(
    name: str, main: Callable[[argparse.Namespace], int], what: str, /, *arguments: Argument,
    **defaults: object,
) -> Argument:  # fmt: skip
    said, arguments = f"{what[0].upper()}{what[1:]}.", (NAME, options.JSON, *arguments)
    return command(name, main, what, said, *arguments, epilog=EPILOG, **defaults)


UP = _command(
    "up", up, "make emulated hosts",
    option("--hosts", type=options.positive, metavar="N", help="default 4"),
    option("--bandwidth", metavar="RATE", help="of every link; default 200mbit"),
    option("--cpu", metavar="SHARE", help="of a core for every host; default 40%%"),
    option("--memory", metavar="SIZE", help="of every host; default: no limit"),
    option("--file", metavar="FILE",
           help="a .yaml or .json file instead: hosts that differ, two racks with a slower "
           "uplink"),
)  # fmt: skip
RUN = command(
    "run", run, "start a command once on every host of a lab, or on some",
    "Starts a command once on every host, or on those of --hosts, with torchrun's environment "
    "(RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and SYNCHROMESH_LAB, the file of the lab's "
    "cluster. The first one's standard output is shown as it is; all else goes to standard "
    "error, with its host before each line where there are several. Ends with the exit code of "
    "the host that failed first, 124 for the time limit. Ctrl-C or SIGTERM goes to every host, "
    "which has 30 s to checkpoint; a second one kills.",
    NAME,
    option("--hosts", type=numbers, metavar="A-B,...", help="as 0-2 or 3; default: every one"),
    option("--timeout", type=options.seconds, metavar="SECONDS", help="default: no limit"),
    option("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ..."),
    options.JSON,
)  # fmt: skip
SET = _command(
    "set", set_, "change a link, a share or memory, also while something runs",
    option("--host", type=options.natural, metavar="N", help="default: every host"),
    option("--bandwidth", metavar="RATE", help="of the link, as 20mbit"),
    option("--cpu", metavar="SHARE", help="of a core, as 10%%"),
    option("--memory", metavar="SIZE", help="that it may hold, as 1GiB"),
    option("--uplink", metavar="RATE", help="between the racks, as 100mbit"),
)  # fmt: skip
COMMAND = command(
    "lab", None, "emulated hosts on this machine, with stated links and speed (root)",
    "Emulates hosts by network namespaces, shaped links and CPU quotas. A lab stays up until `lab "
    "down`, or until its keeper process ends.",
    commands(
        UP, RUN, SET,
        *(_command(name, do, what, ON_A_HOST, deed=name) for name, (what, _) in DEEDS.items()),
        _command("status", show, "the hosts of the labs that are up", name=None),
        _command("down", down, "remove a lab with all that runs in it"),
    ),
    epilog=EPILOG,
)  # fmt: skip
