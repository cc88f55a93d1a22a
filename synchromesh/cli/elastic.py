"""Hosts of an elastic run: `synchromesh join`, `leave` and `status`, and how `train --elastic` and
`run --elastic` begin."""

import argparse
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synchromesh.cli import options, ranks
from synchromesh.cli.command import Argument, answer, command, option
from synchromesh.values.fault import Refuted

if TYPE_CHECKING:
    from synchromesh.launcher.elastic import HostJob
    from synchromesh.launcher.forks import Fork
    from synchromesh.launcher.lighthouse import Lighthouse

PROGRAM = ("-m", "synchromesh")


def address(text: str) -> tuple[str, int]:
    """HOST:PORT, of one address of one host."""
    host, colon, number = text.rpartition(":")
    if not (colon and host):
        raise argparse.ArgumentTypeError(f"{text!r} is no address: give HOST:PORT")
    if host in ("0.0.0.0", "::", "[::]", "*"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is every address of a host: give the one of the network that hosts share, "
            "which strangers do not reach"
        )
    return host.strip("[]"), options.port(number)


def hosts(text: str) -> tuple[int, int]:
    """The least and the most number of hosts of an elastic run: `2:4`."""
    least, _, most = text.partition(":")
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no range of hosts: give the least number and the most, as 1:1"
        )
    return int(least), int(most)


def replicated(text: str) -> str:
    """`auto`, `off`, or a number of steps."""
    if text not in ("auto", "off") and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto, off nor a number of steps")
    return text


def check(args: argparse.Namespace) -> None:
    """ValueError for options of an elastic run that do not go together."""
    several = args.coordinator is not None
    least, most = args.elastic or (1, 1)
    faults = {
        "--token-file and --interface are of several hosts: give --coordinator HOST:PORT":
            not several and bool(args.token_file or args.interface),
        "--replicate is of an elastic run: give --elastic MIN:MAX":
            vars(args).get("replicate", "auto") != "auto" and not args.elastic,
        "--keep-rows is of an elastic run: give --elastic MIN:MAX":
            vars(args).get("keep_rows", False) and not args.elastic,
        "--notice-file is of an elastic run: give --elastic MIN:MAX":
            bool(args.notice_file) and not args.elastic,
        "--coordinator is of an elastic run: give --elastic MIN:MAX":
            several and not args.elastic,
        "--coordinator needs --token-file, a secret that all hosts have: openssl rand -hex 32 > "
        "FILE; chmod 600 FILE": several and not args.token_file,
        f"--elastic {least}:{most}: there is one host; others come to --coordinator HOST:PORT":
            not several and most > 1,
    }  # fmt: skip
    if why := next((why for why, found in faults.items() if found), ""):
        raise ValueError(why)


def _quiet() -> int:
    """From now on standard error is Python's alone: torchft logs every quorum there. Returns the
    descriptor of what it was."""
    sys.stderr.flush()
    own, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    sys.stderr = os.fdopen(own, "w", buffering=1)
    return own


def _say(text: str) -> None:
    print(f"synchromesh: {text}", file=sys.stderr, flush=True)


def start(
    args: argparse.Namespace, words: Sequence[str], count: int, forks: Sequence["Fork"] = ()
) -> int:
    """The part of an elastic run that is on this host. words: as others hear them."""
    from synchromesh.launcher import elastic  # imports torch
    from synchromesh.launcher.coordinator import Coordinator

    job = _job(args, words, count, forks)
    if args.coordinator is None:
        one = elastic.OneHost(Coordinator(elastic.LOCAL, elastic.LOCAL, _say, ranks=0))
        return ranks.ended(job.run(elastic.LOCAL, elastic.LOCAL, one))
    host, port = args.coordinator
    name, own, sealed = _identity(args)
    job = replace(job, errors=_quiet())
    if own != _resolved(host):
        return ranks.ended(job.run(name, own, _reached(args, sealed)))
    from synchromesh.launcher.lighthouse import Lighthouse

    coordinator = Coordinator(name, own, _say, args.elastic, ranks=0)
    lighthouse = Lighthouse.serve(own, port, sealed, coordinator, words).start()
    _say(f"hosts come by: synchromesh join {host}:{port} --token-file FILE")
    return ranks.ended(job.run(name, own, lighthouse))


def _job(
    args: argparse.Namespace, words: Sequence[str], count: int, forks: Sequence["Fork"]
) -> "HostJob":
    """words: `train ...`, or `run SCRIPT ...`, whose ranks are the script itself."""
    from synchromesh.launcher.elastic import HostJob
    from synchromesh.launcher.slot import LIMITS

    command = words[1:] if words[0] == "run" else [*PROGRAM, *words]
    notice = None if args.notice_file is None else Path(args.notice_file)
    return HostJob(command, count, _say, forks=forks, restarts=LIMITS.restarts, notice=notice)


def _resolved(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ValueError(f"the coordinator's host {host} is not known: {error}") from None


def _identity(args: argparse.Namespace) -> tuple[str, str, Any]:
    """This host's name and address, and how it proves what it says."""
    from synchromesh.launcher.lighthouse import Sealed, reaching, token_of

    host, port = args.coordinator
    own, interface = reaching(_resolved(host), port, args.interface)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if interface:
            os.environ.setdefault(variable, interface)
    name = f"{own}/{os.getpid()}-{secrets.token_hex(2)}"  # containers have equal ones
    return name, own, Sealed(token_of(Path(args.token_file)), name)


def _reached(args: argparse.Namespace, sealed: Any, observes: bool = False) -> "Lighthouse":
    """The coordinator's Lighthouse. ValueError where it does not answer."""
    from synchromesh.launcher.lighthouse import LIMITS, Lighthouse

    host, port = args.coordinator
    own = Lighthouse(f"http://{host}:{port}", sealed, observes=observes).start()
    if not own.known.wait(LIMITS.answer):
        own.close()
        raise ValueError(
            f"the coordinator at {host}:{port} has not answered within {LIMITS.answer:.0f} s: it "
            "does not run, cannot be reached, or has another token"
        )
    return own


def join(args: argparse.Namespace) -> int:
    """Takes part in a run with this host."""
    ranks.forget()
    name, own, sealed = _identity(args)
    errors = _quiet()
    lighthouse = _reached(args, sealed)
    words = list(lighthouse.words)
    if words[:1] not in (["train"], ["run"]):
        lighthouse.close()
        raise ValueError(f"the coordinator runs {words[:1]}, which is no command that is joined")
    count = options.processes(args.nproc)
    _say(f"comes to {' '.join(words)} with {count} ranks")
    with ranks.forked(count, "synchromesh.cli.training") as forks:
        job = replace(_job(args, words, count, forks), errors=errors)
        return ranks.ended(job.run(name, own, lighthouse))


def status(args: argparse.Namespace) -> int:
    """Says who takes part in a run."""
    _, _, sealed = _identity(args)
    _quiet()
    lighthouse = _reached(args, sealed, observes=True)
    orders, states = lighthouse.orders, lighthouse.shown
    lighthouse.close()
    seats = [(seat.host, seat.slot) for seat in orders.seats]
    shown = {
        "generation": orders.number,
        "hosts": [
            {
                "host": state["host"], "leaves": state["leaves"],
                "ranks": [
                    {"rank": _index(seats, (state["host"], r["slot"])), "step": r["step"]}
                    for r in state["ranks"] if not r["why"]
                ],
            }
            for state in states
        ],
    }  # fmt: skip
    answer(args, shown, partial(_show, shown))
    return 0


def leave(args: argparse.Namespace) -> int:
    """Lets hosts of a run leave."""
    from synchromesh.launcher.coordinator import HostRanks
    from synchromesh.launcher.generation import address_of
    from synchromesh.launcher.lighthouse import LIMITS

    name, own, sealed = _identity(args)
    _quiet()
    lighthouse, address = _reached(args, sealed, observes=True), args.host or own

    def there() -> list[str]:
        return [state["host"] for state in lighthouse.shown]

    try:
        if address == _resolved(args.coordinator[0]):
            raise ValueError(f"host {address} is the coordinator's, with which the run ends")
        if address not in map(address_of, there()):
            raise ValueError(f"host {address} is none of the run's: {', '.join(there())}")
        lighthouse.asks = address
        while address in map(address_of, there()):
            if why := lighthouse(HostRanks(name, ())).end:
                raise Refuted(f"host {address} has not left before the end: {why}")
            time.sleep(LIMITS.turn)
    finally:
        lighthouse.close()
    _say(f"host {address} has left")
    return 0


def _index(seats: list[tuple[str, int]], seat: tuple[str, int]) -> int | None:
    return seats.index(seat) if seat in seats else None


def _show(shown: dict[str, Any]) -> None:
    print(f"generation {shown['generation']}")
    for host in shown["hosts"]:
        told = [
            f"rank {r['rank']} at step {r['step']}" if r["rank"] is not None else "one that builds"
            for r in host["ranks"]
        ]
        leaves = " (leaves)" if host["leaves"] else ""
        print(f"{host['host']}{leaves}: {', '.join(told) or 'no ranks'}")


def _where() -> list[Argument]:
    return [
        option("coordinator", type=address, metavar="HOST:PORT", help="the run's coordinator"),
        option("--token-file", required=True, metavar="FILE", help="the secret of its hosts"),
        option("--interface", metavar="NAME",
               help="the network interface; default: that by which the coordinator is reached"),
    ]  # fmt: skip


NOTICE = option(
    "--notice-file", metavar="FILE",
    help="a file that appears when this host is to end soon, as what watches for the notices of "
    "spot instances makes it: the host leaves then, as by SIGTERM",
)  # fmt: skip


REPLICATE = option(
    "--replicate", type=replicated, default="auto", metavar="K",
    help="with --elastic: steps between copies, in other hosts' memory, of what one host alone "
    "has; off; default: auto, as often as takes 3 %% of the time",
)  # fmt: skip


def of_run() -> list[Argument]:
    """The options of `run` and `train`."""
    return [
        option("--elastic", type=hosts, metavar="MIN:MAX",
               help="go on with other ranks where some are killed, fall silent or come, of so "
               "many hosts"),
        option("--coordinator", type=address, metavar="HOST:PORT",
               help="with --elastic: where hosts hear of each other; the host that has this "
               "address decides, and the run ends with it"),
        option("--token-file", metavar="FILE",
               help="with --coordinator: a secret that all hosts have, which its owner alone may "
               "read"),
        option("--interface", metavar="NAME",
               help="with --coordinator: the network interface; default: that by which it is "
               "reached"),
        NOTICE,
    ]  # fmt: skip


JOIN = command(
    "join", join, "takes part in an elastic run with this host",
    "Takes part in a run that goes on elsewhere, with ranks of this host. SIGTERM or Ctrl-C: the "
    "host leaves when others hold what its ranks have; a second one ends it now.",
    *_where(), options.nproc(), NOTICE,
)  # fmt: skip
LEAVE = command(
    "leave", leave, "lets a host of an elastic run leave",
    "Lets a host leave an elastic run, as SIGTERM at its `join` does, and waits until it has.",
    *_where(),
    option("--host", metavar="ADDRESS", help="of the host; default: this one"),
)  # fmt: skip
STATUS = command(
    "status", status, "says who takes part in an elastic run",
    "Says which hosts and ranks take part in an elastic run, and how far they are.",
    *_where(), options.JSON,
)  # fmt: skip
COMMANDS = JOIN, LEAVE, STATUS
