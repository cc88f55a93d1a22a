"""`synchromesh plan TARGET --cluster C`: ranked plans for devices that need not be there.

`--profile FILE` in place of TARGET: stages for layers that somebody else has measured."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from synchromesh.cli import options, ranks
from synchromesh.values import document
from synchromesh.values import size as sizes
from synchromesh.values.fault import Refuted, printable

if TYPE_CHECKING:
    from rich.table import Table

    from synchromesh.planning.layers import LayerPlanned
    from synchromesh.planning.offline import Planned

FILE = "cluster.yaml"  # that `doctor` writes unless told otherwise


def add_parser(commands: options.Commands) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan", help="ranked plans with time and memory, without devices",
        description="Searches the plan of least step time for a cluster from its data sheets or "
        "from what doctor measured, and prints it beside the plain ones: seconds, memory, the "
        "share of the step that waits for traffic, and why.",
    )  # fmt: skip
    options.add_target(parser, required=False)
    parser.add_argument(
        "--profile", metavar="FILE",
        help="in place of TARGET: layers with their times and sizes in PipeDream's text form; "
        "finds the stages to train them in",
    )  # fmt: skip
    parser.add_argument(
        "--profile-rows", type=options.positive, metavar="N",
        help="rows that the profile was measured with; default: by its last linear layer",
    )  # fmt: skip
    parser.add_argument(
        "--cluster", metavar="C",
        help="a name of the catalogue (v100x8), or a file that doctor wrote; default cluster.yaml",
    )  # fmt: skip
    parser.add_argument("--clusters", action="store_true", help="list the catalogue's names")
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="of a device, as 8GiB; default: its own"
    )
    options.add_headroom(parser)
    parser.add_argument(
        "--plan", action="append", default=[], metavar="PLAN",
        help="prices this plan, or its .yaml or .json file, beside those that are found; also "
        "several times",
    )  # fmt: skip
    options.add_precision(parser)
    parser.add_argument(
        "--explain", action="store_true", help="each component's layout and what the next costs"
    )
    parser.add_argument("--output", metavar="FILE", help="writes the chosen plan, .yaml or .json")
    parser.add_argument("--force", action="store_true", help="overwrite that file")
    options.complete(parser, main)


def size(text: str) -> float:
    """Bytes of `8GiB`, `16GB`, `500MB`."""
    try:
        return sizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(args: argparse.Namespace) -> int:
    made: LayerPlanned | Planned
    if args.clusters:
        return _list(args)
    if (args.target is None) == (args.profile is None):
        raise ValueError(
            "plan needs either a TARGET or a --profile FILE (or --clusters, which lists the "
            "catalogue)"
        )
    if args.output and (refused := options.refusal(args.output, args.force)):
        raise ValueError(refused)
    made = _of_layers(args) if args.profile else _of_model(args)
    args.out.flush()
    if made.refusal:
        raise Refuted(made.refusal)
    if args.output:
        path, plan = Path(args.output), made.plan
        document.write(path, plan.to_json() if path.suffix == ".json" else plan.to_yaml())
    return 0


def _of_layers(args: argparse.Namespace) -> "LayerPlanned":
    from synchromesh.cli.layers import show
    from synchromesh.planning.layer_profile import load
    from synchromesh.planning.layers import plan_layers
    from synchromesh.planning.offline import cluster_of

    if args.bf16 or args.explain or args.data or args.plan:
        raise ValueError("--bf16, --explain, --data, --plan are of a TARGET, not of a --profile")
    profile = load(Path(args.profile))
    rows = args.profile_rows or profile.rows
    if rows is None:
        raise ValueError(
            f"{args.profile} does not say of how many rows it is, as it has no linear layer: "
            "--profile-rows N does"
        )
    cluster = cluster_of(args.cluster or _here())
    made = plan_layers(profile, cluster, rows, args.batch_size, args.memory, args.headroom)
    if args.json:
        print(json.dumps({"profile": args.profile, **made.to_dict()}), file=args.out)
    else:
        show(args.profile, made)
    return made


def _of_model(args: argparse.Namespace) -> "Planned":
    from synchromesh.cli.progress import working

    with ranks.uncollected(), working() as say:
        made = _planned(args, say)
    if args.json:
        shown = {"target": args.target, "bf16": args.bf16, **made.to_dict()}
        print(json.dumps(shown), file=args.out)
    else:
        _show(f"{args.target}, bf16" if args.bf16 else args.target, made)
    return made


def _planned(args: argparse.Namespace, say: Callable[[str], None]) -> "Planned":
    from synchromesh.planning import offline as planning
    from synchromesh.workloads.stand_in import stand_in

    cluster = planning.cluster_of(args.cluster or _here())
    given = [options.plan(text) for text in args.plan]
    for plan in given:
        options.check_degrees(plan, len(cluster.ranks))
    workload = options.example(args)
    return planning.plan(
        stand_in(workload), workload.loss, workload.example(), optimizer=workload.build_optimizer,
        cluster=cluster, memory=args.memory, headroom=args.headroom, plans=given,
        explained=args.explain, autocast=options.precision(args.bf16), carry=workload.carry,
        say=say,
    )  # fmt: skip


def _here() -> str:
    """The cluster that doctor measured in this folder."""
    if not Path(FILE).is_file():
        raise ValueError(
            f"plan needs a cluster: --cluster NAME of the catalogue (--clusters lists them), or "
            f"a {FILE} here, which `synchromesh doctor` measures"
        )
    return FILE


def _list(args: argparse.Namespace) -> int:
    from synchromesh import catalogue

    names = catalogue.names()
    if args.json:
        print(json.dumps({"clusters": list(names)}), file=args.out)
    else:
        print("\n".join(names))
    return 0


def _show(target: str, made: "Planned") -> None:
    from rich.text import Text

    from synchromesh.cli.choice import choice_table, memory_table, notes
    from synchromesh.cli.console import Console

    console = Console.wide(140)
    table = choice_table(made.choice)
    table.title = Text(
        printable(f"{target} on {made.cluster.name}, {made.rows} rows a step ({made.certainty})")
    )
    console.print(table)
    memory = memory_table(made.choice)
    if memory.row_count:
        console.print(memory)
    for line in notes(made.choice):
        console.print(Text(printable(line)), soft_wrap=True)
    if made.components:
        console.print(_components(made))
    console.print(
        Text(
            f"profile of {len(made.choice.profile.compute)} programs in "
            f"{made.choice.profile.seconds:.1f} s, searched and priced in "
            f"{made.choice.planning_seconds:.2f} s"
        )
    )


def _components(made: "Planned") -> "Table":
    """Layouts and runners-up, and of which plan where that is not the chosen one."""
    from rich.table import Table
    from rich.text import Text

    of = f" {made.choice.of}," if made.choice.of else ""
    title = f"components (data x tensor){of} and what the next layout costs ({made.certainty})"
    table = Table(title=Text(printable(title)), title_justify="left")
    for name in ("component", "layout", "runner-up", "a step more"):
        table.add_column(name, justify="left" if name == "component" else "right")
    for row in made.components:
        more = "" if row.seconds is None else f"{row.seconds * 1e3:+.3f} ms"
        table.add_row(
            Text(printable(row.component)), str(row.layout), str(row.other or "none"), more
        )
    return table
