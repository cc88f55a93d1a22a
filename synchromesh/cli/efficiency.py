"""`synchromesh efficiency FILE`: the curve of epochs to a target over batch sizes, fitted."""

import argparse
from math import inf
from typing import TYPE_CHECKING, Any

from synchromesh.cli import options
from synchromesh.cli.command import answer, command, option, together

if TYPE_CHECKING:
    from synchromesh.cost.efficiency import EpochCurve, Goal
    from synchromesh.workloads.workload import Workload

GOAL = together(
    option("--efficiency", metavar="FILE", help="CSV of batch,epochs: epochs to the target"),
    option("--dataset-rows", type=options.positive, metavar="N", help="of an epoch"),
)


def main(args: argparse.Namespace) -> int:
    from synchromesh.cost.efficiency import EpochFit

    fit = EpochFit.load(args.file)
    told, text = {"file": args.file, **fit.to_dict()}, equation(fit.curve)
    if not fit.slope_known:
        text += "\nThese points show no slope: the critical batch is beyond what they can tell."
    answer(args, told, lambda: _show(told, text))
    return 0


def _show(told: dict[str, Any], text: str) -> None:
    from synchromesh.cli.console import Console, table

    forms = {"batch": ",g", "epochs": ".4g", "fitted": ".4g", "error": ".1%", "left_out": ".1%"}
    rows = [[format(p[key], form) for key, form in forms.items()] for p in told["points"]]
    for kind in ("mean", "largest"):
        errors = (told[f"{kind}_error"], told[f"left_out_{kind}_error"])
        rows.append([kind, "", "", *map("{:.1%}".format, errors)])
    console = Console.wide(140)
    console.print(table(told["file"], [*forms], rows))
    console.print(text, soft_wrap=True)


def equation(curve: "EpochCurve") -> str:
    slope = f" (1 + B / {curve.critical_batch:,.4g})" if curve.critical_batch < inf else ""
    return f"epochs with batches of B rows: {curve.minimum_epochs:.4g}{slope}"


def goal(args: argparse.Namespace, workload: "Workload | None" = None) -> "Goal":
    """Of `GOAL` and --to; without a file the workload's epochs. ValueError for unknown rows."""
    from synchromesh.cost.efficiency import EpochCurve, EpochFit, Goal
    from synchromesh.study.target import Target
    from synchromesh.workloads.target import rows_of_an_epoch

    rows: int | None = args.dataset_rows
    if rows is None and workload:
        rows = rows_of_an_epoch(workload, args.target, args.data is None)
    if rows is None:
        of = args.target or args.profile
        raise ValueError(f"how many rows an epoch of {of} has is not known: --dataset-rows N says")
    if workload and not args.efficiency:
        return Goal("workload's epochs", EpochCurve(workload.epochs), rows)
    target = str(Target.parse(args.to)) if "to" in args else "target"
    return Goal(target, EpochFit.load(args.efficiency).curve, rows)


COMMAND = command(
    "efficiency", main, "how many epochs a batch size needs to a target",
    "Fits E(B) = E_min (1 + B / B_crit), the epochs to a target with batches of B rows, to what "
    "was measured, and says what it errs by, also of points that are left out.",
    option("file", metavar="FILE", help="CSV of batch,epochs, also several lines of one batch"),
    options.JSON,
)  # fmt: skip
