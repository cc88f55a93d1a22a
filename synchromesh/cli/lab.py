"""`synchromesh lab`: emulated hosts on one machine; a lab stays up between commands."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synchromesh.cli import lab_run, options
from synchromesh.values.fault import printable

if TYPE_CHECKING:
    from synchromesh.lab import Lab

# command -> what it does to one host, and what the host then is
DEEDS = {
    "freeze": ("stop every process of a host where it is", "frozen"),
    "thaw": ("let a frozen host go on", "thawed"),
    "cut": ("cut a host off from the others", "cut off"),
    "heal": ("reconnect a host that was cut off", "reconnected"),
    "kill": ("kill everything that runs on a host", "killed"),
}
EPILOG = (
    "Rates are such as 100kbit, 200mbit, 1.5gbit (each way); shares are per cent of one core, "
    "from 10%; memory is such as 1GiB. Needs Linux, root, and the cpu controller of cgroup v1 or "
    "v2 (for memory that controller too)."
)


def add_parser(commands: options.Commands) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "lab", help="emulated hosts on this machine, with stated links and speed (root)",
        description="Emulates hosts by network namespaces, shaped links and CPU quotas. A lab "
        "stays up until `lab down`, or until its keeper process ends.", epilog=EPILOG,
    )  # fmt: skip
    deeds = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_up(deeds)
    lab_run.add_parser(deeds)
    change = _add(
        deeds, "set", "change a link, a share or memory, also while something runs", set_
    )
    change.add_argument("--host", type=options.natural, metavar="N", help="default: every host")
    change.add_argument("--bandwidth", metavar="RATE", help="of the link, as 20mbit")
    change.add_argument("--cpu", metavar="SHARE", help="of a core, as 10%%")
    change.add_argument("--memory", metavar="SIZE", help="that it may hold, as 1GiB")
    change.add_argument("--uplink", metavar="RATE", help="between the racks, as 100mbit")
    for name, (what, _) in DEEDS.items():
        deed = _add(deeds, name, what, do)
        deed.add_argument("--host", type=options.natural, metavar="N", required=True)
        deed.set_defaults(deed=name)
    status = _add(deeds, "status", "the hosts of the labs that are up", show)
    status.set_defaults(name=None)
    _add(deeds, "down", "remove a lab with all that runs in it", down)


def _add(deeds: options.Commands, name: str, what: str, main: Any) -> argparse.ArgumentParser:
    description = f"{what[0].upper()}{what[1:]}."
    parser: argparse.ArgumentParser = deeds.add_parser(
        name, help=what, description=description, epilog=EPILOG
    )
    options.add_lab(parser)
    options.complete(parser, main)
    return parser


def _add_up(deeds: options.Commands) -> None:
    parser = _add(deeds, "up", "make emulated hosts", up)
    parser.add_argument("--hosts", type=options.positive, metavar="N", help="default 4")
    parser.add_argument("--bandwidth", metavar="RATE", help="of every link; default 200mbit")
    parser.add_argument("--cpu", metavar="SHARE", help="of a core for every host; default 40%%")
    parser.add_argument("--memory", metavar="SIZE", help="of every host; default: no limit")
    parser.add_argument(
        "--file", metavar="FILE",
        help="a .yaml or .json file instead: hosts that differ, two racks with a slower uplink",
    )  # fmt: skip


def up(args: argparse.Namespace) -> int:
    from synchromesh.lab import Description, Lab

    asked = ("hosts", "bandwidth", "cpu", "memory")
    given = [f"--{key}" for key in asked if getattr(args, key) is not None]
    if args.file and given:
        raise ValueError(f"--file describes the hosts: leave {' and '.join(given)} out")
    if args.file:
        description = Description.load(Path(args.file))
    else:
        description = Description.alike(
            args.hosts or 4, args.bandwidth or "200mbit", args.cpu or "40%", memory=args.memory
        )
    lab = Lab.of(description, args.name)
    lab.up()
    shown = _document(lab)
    lab.stay()
    if args.json:
        print(json.dumps(shown))
    else:
        _table(shown)
        named = "" if args.name == options.LAB else f" --name {args.name}"
        print(f"run something in it: synchromesh lab run{named} -- synchromesh train digits/cnn")
    return 0


def set_(args: argparse.Namespace) -> int:
    """Changes links, processors or memory of one that is up."""
    from synchromesh.lab import Lab

    lab = Lab.open(args.name)
    lab.set(args.host, args.bandwidth, args.cpu, args.uplink, args.memory)
    shown = _document(lab)
    if args.json:
        print(json.dumps(shown))
    else:
        _table(shown)
    return 0


def do(args: argparse.Namespace) -> int:
    """Does one of `DEEDS` to a host."""
    from synchromesh.lab import Lab

    lab = Lab.open(args.name)
    getattr(lab, args.deed)(args.host)
    if args.json:
        print(json.dumps(_document(lab)))
    else:
        print(f"host {args.host} of lab {args.name} is {DEEDS[args.deed][1]}")
    return 0


def show(args: argparse.Namespace) -> int:
    """Shows one lab, or all."""
    from synchromesh.lab import Lab, labs

    names, removed = labs()
    _report(removed)
    if args.name is not None:
        names = [Lab.open(args.name).name]
    shown = [_document(Lab.open(name)) for name in names]
    if args.json:
        print(json.dumps({"labs": shown, "removed": removed}))
    for document in shown if not args.json else ():
        _table(document)
    if not shown and not args.json:
        print("no lab is up")
    return 0


def down(args: argparse.Namespace) -> int:
    from synchromesh.lab import Lab, labs

    _, removed = labs()
    if args.name not in removed:
        Lab.open(args.name).down()
    _report(removed)
    if args.json:
        print(json.dumps({"name": args.name, "removed": sorted({*removed, args.name})}))
    elif args.name not in removed:
        print(f"lab {args.name} is down")
    return 0


def _report(removed: list[str]) -> None:
    for name in removed:
        print(f"removed lab {name}: its keeper was no longer alive", file=sys.stderr)


def _document(lab: "Lab") -> dict[str, Any]:
    """The lab at this moment; bandwidths in bits a second, shares in cores."""
    shown: dict[str, Any] = {
        "name": lab.name,
        "emulated": True,
        "keeper": lab.tag.pid,
        "cluster": str(lab.cluster_file),
    }
    if lab.description.uplink is not None:
        shown["racks"] = [list(rack) for rack in lab.description.racks]
        shown["uplink"] = lab.current().uplink
    shown["hosts"] = [vars(state) for state in lab.states()]
    return shown


def _table(shown: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from synchromesh.cli.console import Console
    from synchromesh.lab.description import show_bandwidth, show_share
    from synchromesh.values import size

    title = f"lab {shown['name']}: {len(shown['hosts'])} emulated hosts"
    if "uplink" in shown:
        title += f" in two racks, uplink {show_bandwidth(shown['uplink'])}"
    table = Table(title=Text(printable(title)), title_justify="left")
    racks = shown.get("racks", [])
    limited = any(host["memory"] for host in shown["hosts"])
    for column in ("host", *(["rack"] if racks else []), "address", "bandwidth", "cpu",
                   *(["memory"] if limited else []), "state", "processes"):  # fmt: skip
        table.add_column(column)
    for host in shown["hosts"]:
        memory = [size.show(host["memory"]) if host["memory"] else "-"] if limited else []
        rack = [str(i) for i, rack in enumerate(racks) if host["host"] in rack]
        table.add_row(
            str(host["host"]), *rack, host["address"], show_bandwidth(host["bandwidth"]),
            show_share(host["cpu"]), *memory, host["state"], str(host["processes"]),
        )  # fmt: skip
    Console(highlight=False).print(table)
