"""`synchromesh explain TARGET --plan P`: what a plan does to a model; ranks are pretended."""

import argparse
import json

from synchromesh.cli import options, ranks
from synchromesh.cli.command import command
from synchromesh.values.fault import printable


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
        from synchromesh.planning.offline import explain_plan
        from synchromesh.trace.partition.explain import text

        example, autocast = options.example(args), options.precision(args.bf16)
        explanation = explain_plan(example, plan, count, autocast)
        if args.json:
            print(json.dumps({"bf16": args.bf16, **explanation.document()}), file=args.out)
        else:
            print(printable(text(explanation), lines=True), file=args.out)
    return 0


COMMAND = command(
    "explain", main, "components, placements and collectives of a plan; starts no processes",
    "Prints the components of the training step with their layouts, how each tensor is sharded, "
    "the collectives of a step with their bytes, and why what is whole is not cut.",
    options.target(), options.plan_and_seed(default="data"), options.BF16,
    options.nproc("ranks to pretend"), options.JSON,
)  # fmt: skip
