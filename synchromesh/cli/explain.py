"""`synchromesh explain TARGET --plan P`: what a plan does to a model; ranks are pretended."""

import argparse
import json
from typing import TYPE_CHECKING

from synchromesh.cli import options, ranks
from synchromesh.values.fault import printable

if TYPE_CHECKING:
    from synchromesh.values.plan import Plan


def add_parser(commands: options.Commands) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain", help="components, placements and collectives of a plan; starts no processes",
        description="Prints the components of the training step with their layouts, how each "
        "tensor is sharded, the collectives of a step with their bytes, and why what is whole is "
        "not cut.",
    )  # fmt: skip
    options.add_target(parser)
    options.add_plan(parser, default="data")
    options.add_precision(parser)
    options.add_nproc(parser, "ranks to pretend")
    options.complete(parser, main)


def main(args: argparse.Namespace) -> int:
    plan = options.plan(args.plan)
    if plan.automatic:
        raise ValueError(
            "plan auto: explain describes a given plan and starts no processes; `synchromesh "
            "train` finds one and says why (its run folder has it as plan.yaml)"
        )
    count = options.processes(args.nproc)
    options.check_degrees(plan, count)
    with ranks.uncollected():
        print(_explanation(args, plan, count), file=args.out)
    return 0


def _explanation(args: argparse.Namespace, plan: "Plan", count: int) -> str:
    from synchromesh.planning.offline import explain_plan
    from synchromesh.trace.partition.explain import text

    precision = options.precision(args.bf16)
    explanation = explain_plan(options.example(args), plan, count, precision)
    if args.json:
        return json.dumps({"bf16": args.bf16, **explanation.document()})
    return printable(text(explanation), lines=True)
