"""`synchromesh doctor`: devices, links and collectives measured, and what will go wrong here."""

import argparse
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from synchromesh.cli import options, ranks
from synchromesh.cli.command import answer, command, option
from synchromesh.values.document import write
from synchromesh.values.fault import Refuted, printable

if TYPE_CHECKING:
    from rich.table import Table

    from synchromesh.doctor.checks import Finding, Ports
    from synchromesh.doctor.links import Line
    from synchromesh.doctor.survey import Survey
    from synchromesh.engine.world import World

MARKS = {"ok": "ok     ", "warning": "WARNING", "problem": "PROBLEM"}


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
    measured = _survey(args)
    if ranks.first():
        _report(args, measured)
    return 0


def _survey(args: argparse.Namespace) -> "Survey":
    from synchromesh.doctor.survey import survey
    from synchromesh.launcher.machine import machine_of

    world = _open()
    try:
        machine = machine_of(world.rank, world.device)
        if refused := world.everyone.broadcast_json(options.refusal(args.output, args.force)):
            raise ValueError(refused)
        return survey(world, machine, args.quick)
    finally:
        world.close()


def _report(args: argparse.Namespace, measured: "Survey") -> None:
    from synchromesh.doctor.checks import checks

    findings = checks(measured, _port(args.port))
    cluster, path = measured.cluster(), Path(args.output)
    write(path, cluster.to_json() if path.suffix == ".json" else cluster.to_yaml())
    problems = [x.sentence for x in findings if x.level == "problem"]
    document = {
        **measured.to_dict(), "checks": [vars(x) for x in findings], "passed": not problems,
        "cluster": cluster.to_dict(), "output": str(path),
    }  # fmt: skip
    answer(args, document, lambda: _show(measured, findings, f"{cluster} -> {path}"))
    if problems:
        count = f"{len(problems)} problem{'s' * (len(problems) != 1)}"
        raise Refuted(f"{count}: {'; '.join(problems)}")


COMMAND = command(
    "doctor", main, "devices, links, collectives measured; what will go wrong; cluster.yaml",
    "Reports device, memory, cores and versions of every rank, measures matrix products, messages "
    "and collectives between the ranks for about 10 s, checks what tends to go wrong, and writes "
    "the cluster to a file. Exit code 1 where there is a problem.",
    options.nproc(),
    option("--quick", action="store_true", help="fewer sizes, about 3 s"),
    option("--output", default="cluster.yaml", metavar="FILE", help="default cluster.yaml"),
    options.FORCE,
    option("--port", type=options.port, metavar="N",
           help="of rank 0's host, checked to be free; default MASTER_PORT, else 29500"),
    options.JSON,
)  # fmt: skip


def _open(seconds: int = 60) -> "World":
    """The world of all ranks; an error says what this host may have to do with it.

    seconds: within which ranks must have come, and for any one collective."""
    import torch

    from synchromesh.doctor.checks import alone
    from synchromesh.engine.world import World
    from synchromesh.launcher.machine import machine_of

    limit = timedelta(seconds=seconds)
    try:
        world = World.open(timeout=limit, startup=limit)
        world.everyone.barrier()
        return world
    except (ValueError, TimeoutError, RuntimeError) as error:
        several = os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]
        machine = machine_of(int(os.environ["RANK"]), torch.device("cpu"))
        problems = [x.sentence for x in alone(machine, several) if x.level != "ok"]
        if not problems:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"the ranks do not reach each other ({reason}); {'; '.join(problems)}"
        ) from error


def _port(asked: int | None, torchrun: int = 29500) -> "Ports | None":
    """Whether the port is free, or torchrun's default one; None for that of this very run."""
    from synchromesh.doctor.checks import Ports
    from synchromesh.launcher.machine import port_taken

    port = asked or torchrun
    return None if str(port) == os.environ.get("MASTER_PORT") else Ports(port, port_taken(port))


def _show(survey: "Survey", findings: "list[Finding]", written: str) -> None:
    from rich.text import Text

    from synchromesh.cli.console import Console

    console = Console.wide(110)
    for table in (_ranks(survey), _links(survey), _collectives(survey)):
        if table.row_count:
            console.print(table)
    for finding in findings:
        style = {"warning": "yellow", "problem": "bold red"}.get(finding.level, "")
        line = f"{MARKS[finding.level]}  {finding.check}: {finding.sentence}"
        console.print(Text(printable(line), style=style), soft_wrap=True)
    console.print(Text(printable(written)), soft_wrap=True)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> "Table":
    from rich.box import SIMPLE_HEAD

    from synchromesh.cli.console import table

    made = table(title, columns, rows)
    made.box, made.pad_edge = SIMPLE_HEAD, False
    return made


def _ranks(survey: "Survey") -> "Table":
    dtypes = list(dict.fromkeys(dtype for rates in survey.flops for dtype in rates))
    columns = (
        "rank", "host", "device", "memory GB", "free GB", "cores", "threads", "torch",
        *(f"{dtype} GFLOP/s" for dtype in dtypes), "copy GB/s",
    )  # fmt: skip
    hosts = {rank: host for host, group in survey.hosts.items() for rank in group}
    rows = (
        (
            str(m.rank), hosts[m.rank], m.device, f"{m.memory_bytes / 1e9:.1f}",
            f"{m.free_bytes / 1e9:.1f}",
            f"{len(m.processors)}" + (f" ({m.quota:g} allowed)" if m.quota else ""),
            str(m.threads), m.torch,
            *(f"{flops.get(d, 0.0) / 1e9:,.1f}" for d in dtypes), f"{copied / 1e9:,.1f}",
        )
        for m, flops, copied in zip(survey.machines, survey.flops, survey.copied, strict=True)
    )  # fmt: skip
    return _table("Ranks", columns, rows)


def _latency_and_rate(line: "Line") -> tuple[str, str]:
    return f"{line.latency_seconds * 1e6:,.0f}", f"{line.bytes_per_second / 1e6:,.0f}"


def _links(survey: "Survey") -> "Table":
    hosts = {rank: host for host, group in survey.hosts.items() for rank in group}
    ends = [(m, hosts[m.a], hosts[m.b]) for m in survey.messages]
    rows = (
        (f"inside {a}" if a == b else f"{a}, {b}", f"{m.a}, {m.b}", *_latency_and_rate(m.line))
        for m, a, b in ends
    )
    return _table("Messages", ("between", "ranks", "latency us", "MB/s"), rows)


def _collectives(survey: "Survey") -> "Table":
    sizes = sorted({size for t in survey.timings for size, _ in t.points})
    named = (f"{n >> 20} MB" if n >= 1 << 20 else f"{n >> 10} KB" for n in sizes)
    title = f"Collectives on {len(survey.machines)} ranks: milliseconds; rate of what a rank sends"
    timed = [(t, dict(t.points)) for t in survey.timings]
    rows = (
        (t.kind + (f" ({t.way})" if t.way else ""),
         *(f"{of[n] * 1e3:.2f}" if n in of else "" for n in sizes), *_latency_and_rate(t.line))
        for t, of in timed
    )  # fmt: skip
    return _table(title, ("", *named, "latency us", "MB/s"), rows)
