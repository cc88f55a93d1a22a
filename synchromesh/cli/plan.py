"""`synchromesh plan TARGET --cluster C` (or `--profile FILE`): ranked plans without devices."""

import argparse
import re
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from synchromesh import catalogue
from synchromesh.cli import options, ranks
from synchromesh.cli.command import answer, command, option, together
from synchromesh.cli.completion import clusters
from synchromesh.cli.efficiency import GOAL, equation, goal
from synchromesh.values import size as sizes
from synchromesh.values.document import write
from synchromesh.values.fault import Refuted

if TYPE_CHECKING:
    from synchromesh.catalogue.prices import HourlyPrice
    from synchromesh.cost.target_plans import PlannedToTarget
    from synchromesh.planning.layer_profile import LayerProfile
    from synchromesh.planning.layers import LayerPlanned
    from synchromesh.planning.offline import Planned
    from synchromesh.values.cluster import Cluster

FILE = "cluster.yaml"  # that `doctor` writes unless told otherwise


def size(text: str) -> float:
    """Bytes of `8GiB`, `16GB`, `500MB`."""
    try:
        return sizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def duration(text: str) -> float:
    """Seconds of `24h`, `90min`, `3600s`, `2d`."""
    if not (found := re.fullmatch(r"([0-9.]{1,12})(s|min|h|d)", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no time as 24h, 90min, 3600s or 2d")
    return options.seconds(found[1]) * {"s": 1, "min": 60, "h": 3600, "d": 86_400}[found[2]]


PROFILE = together(
    option("--profile", metavar="FILE",
           help="in place of TARGET: layers with their times and sizes, as CSV or in PipeDream's "
           "text form, in stages that are data parallel"),
    option("--profile-rows", type=options.positive, metavar="N",
           help="rows that the profile was measured with; default: by its last linear layer"),
)  # fmt: skip


def one_of_both(args: argparse.Namespace, command: str, besides: str = "") -> None:
    if (args.target is None) == (args.profile is None):
        raise ValueError(f"{command} needs either a TARGET or a --profile FILE{besides}")


def layers(args: argparse.Namespace) -> "tuple[LayerProfile, int]":
    """Those of `PROFILE`, and of how many rows. ValueError where nobody says these."""
    from synchromesh.planning.layer_profile import load

    if args.bf16 or args.data:
        raise ValueError("--bf16 and --data are of a TARGET, not of a --profile")
    profile = load(Path(args.profile))
    profile = replace(profile, measured_rows=args.profile_rows or profile.rows)
    return profile, profile.needed_rows


def main(args: argparse.Namespace) -> int:
    made: LayerPlanned | Planned | PlannedToTarget
    if args.clusters == "" and not args.wanted:
        names = catalogue.names()
        answer(args, {"clusters": list(names)}, "\n".join(names))
        return 0
    one_of_both(args, "plan", " (or --clusters, which lists the catalogue)")
    endings = (*options.DOCUMENTS, ".html") if args.wanted else options.DOCUMENTS
    if args.output and (refused := options.refusal(args.output, args.force, endings)):
        raise ValueError(refused)
    _check_wanted(args)
    made = (_to_target if args.wanted else _of_layers if args.profile else _of_model)(args)
    if made.refusal:
        raise Refuted(made.refusal)
    if args.output and not _is_page(args):
        path, plan = Path(args.output), made.plan
        write(path, plan.to_json() if path.suffix == ".json" else plan.to_yaml())
    return 0


COMMAND = command(
    "plan", main, "ranked plans with time and memory, without devices",
    "Searches the plan of least step time for a cluster from its data sheets or from what doctor "
    "measured, and prints it beside the plain ones: seconds, memory, the share of the step that "
    "waits for traffic, and why.",
    options.target(required=False),
    PROFILE,
    option("--cluster", metavar="C", completer=clusters,
           help="a name of the catalogue (v100x8), or a file that doctor wrote; default "
           "cluster.yaml"),
    option("--clusters", nargs="?", const="", metavar="C,C", completer=clusters,
           help="lists the catalogue's names; with --for, those to choose from"),
    option("--for", dest="wanted", choices=("time", "money"),
           help="the plan, batch size and cluster that reach a target soonest, or for least"),
    option("--deadline", type=duration, metavar="TIME", help="of --for, as 24h"),
    option("--batch-sizes", type=options.counts, metavar="N,N",
           help="of --for; default: the workload's times powers of two"),
    GOAL, options.PRICE,
    option("--memory", type=size, metavar="SIZE", help="of a device, as 8GiB; default: its own"),
    options.HEADROOM, options.ALLOW,
    option("--plan", action="append", default=[], metavar="PLAN",
           help="prices this plan, or its .yaml or .json file, beside those that are found; "
           "also several times"),
    options.BF16,
    option("--explain", action="store_true",
           help="each component's layout and what the next costs"),
    option("--output", metavar="FILE",
           help="writes the chosen plan, .yaml or .json; with --for also .html, a page with the "
           "frontier"),
    options.FORCE, options.JSON,
)  # fmt: skip


def _of_layers(args: argparse.Namespace) -> "LayerPlanned":
    from synchromesh.cli.choice import show_layers
    from synchromesh.planning.layers import plan_layers
    from synchromesh.planning.offline import cluster_of

    if args.explain or args.plan or args.allow:
        raise ValueError("--explain, --plan and --allow are of a TARGET, not of a --profile")
    profile, rows = layers(args)
    cluster = cluster_of(args.cluster or _here())
    made = plan_layers(profile, cluster, rows, args.batch_size, args.memory, args.headroom)
    document = {"profile": args.profile, **made.to_dict()}
    answer(args, document, lambda: show_layers(args.profile, made))
    return made


def _of_model(args: argparse.Namespace) -> "Planned":
    from synchromesh.cli.console import working

    with ranks.uncollected(), working() as say:
        from synchromesh.cli.choice import show_planned
        from synchromesh.planning import offline as planning
        from synchromesh.workloads.stand_in import stand_in

        cluster = planning.cluster_of(args.cluster or _here())
        given = [options.plan(text) for text in args.plan]
        for plan in given:
            options.check_degrees(plan, len(cluster.ranks))
        workload = options.example(args)
        made = planning.plan(
            stand_in(workload), workload.loss, workload.example(),
            optimizer=workload.build_optimizer, cluster=cluster, memory=args.memory,
            headroom=args.headroom, plans=given, explained=args.explain,
            autocast=options.precision(args.bf16), carry=workload.carry, allow=args.allow, say=say,
        )  # fmt: skip
    title = f"{args.target}, bf16" if args.bf16 else args.target
    document = {"target": args.target, "bf16": args.bf16, **made.to_dict()}
    answer(args, document, lambda: show_planned(title, made))
    return made


def _is_page(args: argparse.Namespace) -> bool:
    return bool(args.wanted) and Path(args.output or "").suffix == ".html"


OF_FOR = "clusters deadline batch_sizes efficiency dataset_rows hourly_price instance region"


def _check_wanted(args: argparse.Namespace) -> None:
    """ValueError for options that do not go with --for, or do not go without it."""
    wrong = "profile plan explain allow" if args.wanted else f"{OF_FOR} price_date"
    if given := [f"--{n}".replace("_", "-") for n in wrong.split() if vars(args)[n]]:
        raise ValueError(f"{', '.join(given)}: {'not' if args.wanted else 'only'} with --for")
    if args.batch_sizes and not args.efficiency:
        raise ValueError("--batch-sizes needs --efficiency FILE: the epochs of each of them")


def _prices(args: argparse.Namespace, places: "list[Cluster]") -> "dict[str, HourlyPrice | None]":
    """Of clusters by name. ValueError where money is to choose and there is none."""
    from synchromesh.catalogue.prices import cluster_price

    prices = {place.name: cluster_price(place, options.price(args)) for place in places}
    if args.wanted == "money" and not any(prices.values()):
        told = f"no price is known of {', '.join(prices)}, so none can be chosen by money"
        raise ValueError(f"{told}: --hourly-price DOLLARS@DATE says what a device costs")
    return prices


def _to_target(args: argparse.Namespace) -> "PlannedToTarget":
    from synchromesh.cli.console import working
    from synchromesh.planning import offline, to_target

    workload = options.example(args)
    names = ",".join(filter(None, (args.cluster, args.clusters))) or _here()
    places = [offline.cluster_of(n.strip()) for n in dict.fromkeys(names.split(","))]
    prices, target = _prices(args, places), goal(args, workload)
    batches = args.batch_sizes or (() if args.efficiency else (workload.batch_size,))
    of = (args.memory, args.headroom), options.precision(args.bf16)
    with ranks.uncollected(), working() as say:
        made = to_target.plan_to_target(workload, target, places, prices, batches, *of, say)
    made = replace(made, by_money=args.wanted == "money", deadline=args.deadline or inf)
    document = {"target": args.target, "dataset_rows": target.rows, **made.to_dict()}
    document["prices"] = {n: p and p.to_dict("on demand") for n, p in prices.items()}
    lines = [f"{equation(target.curve)}, {target.rows:,} rows in one"]
    lines += [f"dollars on {n}: {p or 'no price, so not by money'}" for n, p in prices.items()]
    title = f"{args.target}: time against money to the {target.target}; * is chosen"
    answer(args, document, lambda: _show_frontier(title, made, lines))
    _write_page(args, made, title.removesuffix("; * is chosen"), lines)
    return made


def _write_page(
    args: argparse.Namespace, made: "PlannedToTarget", title: str, told: list[str]
) -> None:
    """The frontier, where --output is to be a page."""
    if _is_page(args) and made.plans:
        from synchromesh.report.frontier import page

        write(args.output, page(made, title, told))


def _show_frontier(title: str, made: "PlannedToTarget", told: list[str]) -> None:
    from synchromesh.cli.console import Console, table
    from synchromesh.simulator.simulated import UNTIL, until_cells

    rows = (
        ("*" * (p == made.chosen), p.cluster, str(p.plan), *until_cells(p.batch, p.until))
        for p in sorted(made.frontier, key=lambda p: p != made.chosen)
    )
    console, names = Console.wide(140), ("", "cluster", "plan", *UNTIL)
    console.print(table(title, names, rows, left=("cluster", "plan")))
    console.print("\n".join([*told, *made.misfits]), soft_wrap=True, markup=False)


def _here() -> str:
    if not Path(FILE).is_file():
        raise ValueError(
            f"plan needs a cluster: --cluster NAME of the catalogue (--clusters lists them), or "
            f"a {FILE} here, which `synchromesh doctor` measures"
        )
    return FILE
