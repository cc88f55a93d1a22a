"""`synchromesh simulate TARGET --plan P --cluster C` (or `--profile FILE`): plans walked alone."""

import argparse
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from synchromesh.cli import options, ranks
from synchromesh.cli.command import answer, command, option
from synchromesh.cli.completion import clusters
from synchromesh.cli.efficiency import GOAL, goal
from synchromesh.cli.plan import PROFILE, layers, one_of_both, size
from synchromesh.values.extras import require

if TYPE_CHECKING:
    from synchromesh.planner.problem import Say
    from synchromesh.planning.simulation import Failures
    from synchromesh.simulator.simulated import Simulated


def main(args: argparse.Namespace) -> int:
    from synchromesh.cli.console import working
    from synchromesh.simulator.step import trace_events
    from synchromesh.values.document import write

    _check(args)
    one_of_both(args, "simulate")
    with ranks.uncollected(), working() as say:
        made = _made(args, say)
    if args.trace and (step := made.plans[0].step):
        write(Path(args.trace), trace_events(step, made.names))
    if args.output:
        from synchromesh.report.simulation import page

        write(args.output, page(made))
    answer(args, made.to_dict(), lambda: _show(made))
    return 0 if all(p.step for p in made.plans) else 1


def _made(args: argparse.Namespace, say: "Say") -> "Simulated":
    from synchromesh.planning import simulation
    from synchromesh.planning.offline import cluster_of
    from synchromesh.simulator.replay import Variation
    from synchromesh.workloads.stand_in import stand_in

    cluster = cluster_of(args.cluster)
    plans = [options.plan(text) for text in args.plan]
    for plan in plans:
        if not plan.automatic:
            options.check_degrees(plan, len(cluster.ranks))
    price, failures = options.price(args) or None, _failures(args)
    asked = simulation.Conditions(
        Variation(args.jitter, _speeds(args.slow), args.seed), args.devices, args.scaling,
        failures, price, options.spot(args, price),
    )  # fmt: skip
    if args.profile:
        if args.allow:
            raise ValueError("--allow is of a TARGET, not of a --profile, whose plans are exact")
        profile, _ = layers(args)
        asked = replace(asked, goal=args.to and goal(args))
        made = simulation.simulate_layers(
            profile, cluster, plans, asked, rows=args.batch_size, memory=args.memory,
            headroom=args.headroom, say=say,
        )  # fmt: skip
        return replace(made, workload=args.profile)
    workload = options.example(args)
    asked = replace(asked, goal=args.to and goal(args, workload))
    return simulation.simulate(
        stand_in(workload), workload.loss, workload.example(), cluster=cluster, plans=plans,
        workload=args.target, optimizer=workload.build_optimizer, memory=args.memory,
        headroom=args.headroom, autocast=options.precision(args.bf16), carry=workload.carry,
        allow=args.allow, say=say, **vars(asked),
    )  # fmt: skip


def _check(args: argparse.Namespace) -> None:
    """ValueError for a file that cannot be written, before there is anything to write."""
    files = (("--trace", args.trace, (".json",)), ("--output", args.output, (".html", ".htm")))
    for name, file, endings in files:
        if file and (refused := options.refusal(file, args.force, endings, name)):
            raise ValueError(refused)
    if args.trace and len(args.plan) > 1:
        raise ValueError(f"--trace is of one plan, and --plan names {len(args.plan)}")
    if args.output:
        require("report")
    if bool(args.to) != bool(args.efficiency) or (args.dataset_rows and not args.to):
        raise ValueError(
            "--to METRIC=VALUE needs --efficiency FILE, which says how many epochs it takes; "
            "--efficiency and --dataset-rows need --to"
        )


def _failures(args: argparse.Namespace) -> "Failures | None":
    from synchromesh.planning.simulation import Failures
    from synchromesh.simulator.failures import Presence, Recovery

    if args.failures is None and args.presence is None:
        if given := [name for name, usual in OF_FAILURES.items() if vars(args)[name] != usual]:
            told = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"{told}: only with --failures RATE or --presence FILE")
        return None
    kind, spares = Recovery.parse(args.recovery)
    recovery = Recovery(kind, spares, args.detection, args.restart, 3600.0 * args.repair_hours)
    presence = Presence.load(Path(args.presence)) if args.presence else None
    return Failures(
        args.failures or 0.0, recovery, args.days, args.checkpoint_every, args.checkpoint_seconds,
        presence, args.draws, args.storage,
    )  # fmt: skip


def _show(made: "Simulated") -> None:
    from synchromesh.cli.console import Console, table

    console = Console.wide(160)
    for title, (heading, *rows) in made.tables():
        console.print(table(title, heading, rows))
    for kind, price in made.prices.items():
        console.print(f"dollars {kind}: {price}", soft_wrap=True, highlight=False)


OF_FAILURES = {
    "recovery": "restart", "days": 30.0, "draws": 20, "detection": 60.0, "restart": 300.0,
    "repair_hours": 24.0, "checkpoint_every": None, "checkpoint_seconds": None, "storage": 1e9,
}  # fmt: skip


def several(text: str) -> list[str]:
    """Plans by commas: behind a comma inside of one stands a number or `name=`."""
    return re.split(r",(?!\s*(?:[0-9]|[a-z_]+=))", text)


def slow(text: str) -> dict[int, float] | Path:
    """A device and its speed, `17:0.5`, or a run folder, whose log tells them."""
    device, _, speed = text.partition(":")
    with suppress(argparse.ArgumentTypeError):
        if 0.0 < (found := options.rate(speed)) <= 1e3:
            return {options.natural(device): found}
    if (path := Path(text)).exists():
        return path
    raise argparse.ArgumentTypeError(
        f"{text!r} is no DEVICE:SPEED, as 17:0.5 for half of its speed, and no run folder"
    )


def _speeds(asked: Sequence[dict[int, float] | Path]) -> dict[int, float]:
    """Of devices, later ones in place of earlier ones."""
    from synchromesh.cli.report import LOG, log_lines
    from synchromesh.runs.speeds import measured_speeds

    found: dict[int, float] = {}
    for item in asked:
        if isinstance(item, Path):
            log = item / LOG if item.is_dir() else item
            item = measured_speeds(log_lines(log), str(log))
        found |= item
    return found


COMMAND = command(
    "simulate", main, "what plans do on a cluster: steps, failures, money",
    "Walks plans from event to event on a cluster that need not be there, from its data sheets or "
    "from what doctor measured, and prints seconds of a step and what they go into.",
    options.target(required=False), PROFILE,
    option("--cluster", metavar="C", required=True, completer=clusters,
           help="a name of the catalogue (h100x64), or a file that doctor wrote"),
    option("--plan", type=several, default=["auto"], metavar="PLANS",
           help="one, or several by commas"),
    option("--memory", type=size, metavar="SIZE", help="of a device, as 8GiB; default: its own"),
    options.HEADROOM, options.ALLOW, options.BF16,
    option("--jitter", type=options.rate, default=0.0, metavar="SHARE",
           help="standard deviation of the seconds of each computation, as 0.03"),
    option("--slow", type=slow, action="append", default=[], metavar="DEVICE:SPEED",
           help="a device and its share of the speed, as 17:0.5, or a run folder of `synchromesh "
           "train`, which has measured them; repeatable"),
    option("--seed", type=options.natural, default=0, metavar="N", help="of what is drawn"),
    option("--devices", type=options.counts, default=(), metavar="N,N",
           help="also on so many devices of the same kind"),
    option("--scaling", choices=("strong", "weak"), default="strong",
           help="with the same rows in all, or on each device"),
    option("--failures", type=options.rate, metavar="RATE",
           help="of hosts, in 1,000 host-days"),
    option("--presence", metavar="FILE",
           help="how many hosts are there, as CSV of seconds,instances"),
    option("--recovery", default=OF_FAILURES["recovery"], metavar="R",
           help="restart, spares:COUNT or continue; default restart"),
    option("--days", type=options.seconds, default=OF_FAILURES["days"], metavar="N",
           help="default 30"),
    option("--draws", type=options.positive, default=OF_FAILURES["draws"], metavar="N",
           help="of these days; default 20"),
    option("--detection", type=options.rate, default=OF_FAILURES["detection"], metavar="SECONDS",
           help="until a failure is noticed; default 60"),
    option("--restart", type=options.rate, default=OF_FAILURES["restart"], metavar="SECONDS",
           help="from then on until steps run, besides moving state; default 300"),
    option("--repair-hours", type=options.rate, default=OF_FAILURES["repair_hours"], metavar="N",
           help="until a host that failed is there again; default 24"),
    option("--checkpoint-every", type=options.seconds, metavar="SECONDS",
           help="default: what loses least"),
    option("--checkpoint-seconds", type=options.rate, metavar="SECONDS",
           help="that steps wait for a checkpoint; default: its bytes over --storage"),
    option("--storage", type=size, default=OF_FAILURES["storage"], metavar="SIZE",
           help="of checkpoints that a host writes or reads a second; default 1GB"),
    options.PRICE,
    option("--spot-price", type=options.dated, metavar="DOLLARS@DATE",
           help="besides, of what --hourly-price or --instance is the price on demand"),
    option("--to", metavar="METRIC=VALUE",
           help="what plans take to this target, as accuracy=0.9, by --efficiency"),
    GOAL,
    option("--trace", metavar="FILE", help="what goes on in a step, .json for Perfetto"),
    option("-o", "--output", metavar="FILE", help="one HTML page: figures, tables, method"),
    options.FORCE, options.JSON,
)  # fmt: skip
