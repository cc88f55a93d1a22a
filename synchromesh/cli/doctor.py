"""`synchromesh doctor`: devices, links and collectives measured, and what will go wrong here."""

import argparse
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synchromesh.cli import options, ranks
from synchromesh.values.document import write
from synchromesh.values.fault import Refuted, printable

if TYPE_CHECKING:
    from rich.table import Table

    from synchromesh.doctor.checks import Finding
    from synchromesh.doctor.survey import Survey
    from synchromesh.engine.groups import World

TORCHRUN_PORT = 29500  # where torchrun lets hosts meet where nothing else is given
SECONDS = 60  # within which ranks must have come, and for any one collective
MARKS = {"ok": "ok     ", "warning": "WARNING", "problem": "PROBLEM"}


def add_parser(commands: options.Commands) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor", help="devices, links, collectives measured; what will go wrong; cluster.yaml",
        description="Reports device, memory, cores and versions of every rank, measures matrix "
        "products, messages and collectives between the ranks for about 10 s, checks what tends "
        "to go wrong, and writes the cluster to a file. Exit code 1 where there is a problem.",
    )  # fmt: skip
    options.add_nproc(parser)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, about 3 s")
    parser.add_argument(
        "--output", default="cluster.yaml", metavar="FILE", help="default cluster.yaml"
    )
    parser.add_argument("--force", action="store_true", help="overwrite that file")
    parser.add_argument(
        "--port", type=options.port, metavar="N",
        help="of rank 0's host, checked to be free; default MASTER_PORT, else 29500",
    )  # fmt: skip
    options.complete(parser, main)


def main(args: argparse.Namespace) -> int:
    if not ranks.inside():
        if refused := options.refusal(args.output, args.force):
            raise ValueError(refused)
        words = list(args.words)
        if args.port is None and os.environ.get("MASTER_PORT", "").isdecimal():
            words += ["--port", os.environ["MASTER_PORT"]]  # the launcher chooses its own
        count = options.processes(args.nproc)
        with ranks.forked(count, "synchromesh.doctor.checks") as forks:
            return ranks.again(words, count, forks)
    from synchromesh.doctor.checks import checks
    from synchromesh.doctor.survey import survey
    from synchromesh.launch.machine import machine_of

    world = _open()
    try:
        machine = machine_of(world.rank, world.device)
        if refused := world.everyone.broadcast_json(options.refusal(args.output, args.force)):
            raise ValueError(refused)
        found = survey(world, machine, args.quick)
    finally:
        world.close()
    if not ranks.first():
        return 0
    answers = checks(found, _port(args.port, found))
    cluster = found.cluster()
    path = Path(args.output)
    write(path, cluster.to_json() if path.suffix == ".json" else cluster.to_yaml())
    problems = [x for x in answers if x.level == "problem"]
    if args.json:
        document = {
            **found.to_dict(),
            "checks": [x.to_dict() for x in answers],
            "passed": not problems,
            "cluster": cluster.to_dict(),
            "output": str(path),
        }
        print(json.dumps(document))
    else:
        _show(found, answers, f"{cluster} -> {path}")
    sys.stdout.flush()
    if problems:
        raise Refuted(
            f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}: "
            f"{'; '.join(x.sentence for x in problems)}"
        )
    return 0


def _open() -> "World":
    """The world of all ranks; an error says what this host may have to do with it."""
    import torch

    from synchromesh.doctor.checks import alone
    from synchromesh.engine.groups import World
    from synchromesh.launch.machine import machine_of

    limit = timedelta(seconds=SECONDS)
    try:
        world = World.open(timeout=limit, startup=limit)
        world.everyone.barrier()
        return world
    except (ValueError, TimeoutError, RuntimeError) as error:
        several = os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]
        machine = machine_of(int(os.environ["RANK"]), torch.device("cpu"))
        problems = [
            finding.sentence for finding in alone(machine, several) if finding.level != "ok"
        ]
        if not problems:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"the ranks do not reach each other ({reason}); {'; '.join(problems)}"
        ) from error


def _port(asked: int | None, survey: "Survey") -> Any:
    """Whether the port is free; nothing where it is the one that this very run meets at."""
    from synchromesh.doctor.checks import Ports
    from synchromesh.launch.machine import port_taken

    port = asked or TORCHRUN_PORT
    if str(port) == os.environ.get("MASTER_PORT"):
        return None
    return Ports(port, port_taken(port))


def _show(survey: "Survey", answers: "list[Finding]", written: str) -> None:
    from rich.text import Text

    from synchromesh.cli.console import Console

    console = Console.wide(110)
    for table in (_ranks(survey), _links(survey), _collectives(survey)):
        if table.row_count:
            console.print(table)
    for answer in answers:
        style = {"warning": "yellow", "problem": "bold red"}.get(answer.level, "")
        line = f"{MARKS[answer.level]}  {answer.check}: {answer.sentence}"
        console.print(Text(printable(line), style=style), soft_wrap=True)
    console.print(Text(printable(written)), soft_wrap=True)


def _table(title: str, *columns: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < 1 else "right")
    return table


def _ranks(survey: "Survey") -> "Table":
    dtypes = list(dict.fromkeys(dtype for rates in survey.flops for dtype in rates))
    table = _table(
        "Ranks", "rank", "host", "device", "memory GB", "free GB", "cores", "threads", "torch",
        *(f"{dtype} GFLOP/s" for dtype in dtypes), "copy GB/s",
    )  # fmt: skip
    hosts = {rank: host for host, group in survey.hosts.items() for rank in group}
    for m, flops, copied in zip(survey.machines, survey.flops, survey.copied, strict=True):
        table.add_row(
            str(m.rank), printable(hosts[m.rank]), printable(m.device),
            f"{m.memory_bytes / 1e9:.1f}", f"{m.free_bytes / 1e9:.1f}",
            f"{len(m.processors)}" + (f" ({m.quota:g} allowed)" if m.quota else ""),
            str(m.threads), printable(m.torch),
            *(f"{flops.get(d, 0.0) / 1e9:,.1f}" for d in dtypes), f"{copied / 1e9:,.1f}",
        )  # fmt: skip
    return table


def _links(survey: "Survey") -> "Table":
    table = _table("Messages", "between", "ranks", "latency us", "MB/s")
    hosts = {rank: host for host, group in survey.hosts.items() for rank in group}
    for m in survey.messages:
        a, b = printable(hosts[m.a]), printable(hosts[m.b])
        line = m.line
        table.add_row(
            f"inside {a}" if a == b else f"{a}, {b}", f"{m.a}, {m.b}",
            f"{line.latency_seconds * 1e6:,.0f}", f"{line.bytes_per_second / 1e6:,.0f}",
        )  # fmt: skip
    return table


def _collectives(survey: "Survey") -> "Table":
    sizes = sorted({size for t in survey.timings for size, _ in t.points})
    table = _table(
        f"Collectives on {len(survey.machines)} ranks: milliseconds; rate of what a rank sends",
        "", *(f"{n >> 20} MB" if n >= 1 << 20 else f"{n >> 10} KB" for n in sizes),
        "latency us", "MB/s",
    )  # fmt: skip
    for t in survey.timings:
        times, line = dict(t.points), t.line
        table.add_row(
            t.kind + (f" ({t.way})" if t.way else ""),
            *(f"{times[n] * 1e3:.2f}" if n in times else "" for n in sizes),
            f"{line.latency_seconds * 1e6:,.0f}", f"{line.bytes_per_second / 1e6:,.0f}",
        )  # fmt: skip
    return table
