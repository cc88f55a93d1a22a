"""`synchromesh explain TARGET --plan P`: what a plan does to a model; ranks are pretended."""

import argparse
import json
from typing import TYPE_CHECKING

from synchromesh.cli import options, ranks
from synchromesh.cli.command import command
from synchromesh.values.fault import printable

if TYPE_CHECKING:
    import torch

    from synchromesh.trace.partition.explain import Explanation
    from synchromesh.values.plan import Plan
    from synchromesh.workloads.workload import Workload


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


COMMAND = command(
    "explain", main, "components, placements and collectives of a plan; starts no processes",
    "Prints the components of the training step with their layouts, how each tensor is sharded, "
    "the collectives of a step with their bytes, and why what is whole is not cut.",
    options.target(), options.plan_and_seed(default="data"), options.BF16,
    options.nproc("ranks to pretend"), options.JSON,
)  # fmt: skip


def _explanation(args: argparse.Namespace, plan: "Plan", count: int) -> str:
    from synchromesh.trace.partition.explain import text

    precision = options.precision(args.bf16)
    explanation = explained(options.example(args), plan, count, precision)
    if args.json:
        return json.dumps({"bf16": args.bf16, **explanation.document()})
    return printable(text(explanation), lines=True)


def explained(
    workload: "Workload", plan: "Plan", ranks: int, autocast: "torch.dtype | None" = None
) -> "Explanation":
    """The explanation of `plan` on `ranks` pretended ranks, with the workload's batch size."""
    from synchromesh.planner.stages.cut import cut_plan, estimated_work
    from synchromesh.programs.model import Model
    from synchromesh.trace.capture.capture import compare, opaque, trace
    from synchromesh.trace.capture.carry import joined
    from synchromesh.trace.partition.explain import explain
    from synchromesh.trace.partition.partition import partition
    from synchromesh.values.layout import Layout
    from synchromesh.workloads.stand_in import stand_in

    model = Model(stand_in(workload))
    rows = workload.batch_size
    loss, example = joined(workload.loss, workload.example(rows), workload.carry)
    step = trace(
        model.module, loss, example, training=True,
        cuts=plan.cuts(model.paths()), autocast=autocast,
    )  # fmt: skip
    if fault := compare(model.module, loss, example, step, autocast=autocast).fault:
        step = opaque(model.module, example, fault)
    plan.check_rows(rows)
    names = step.chain.names
    if plan.open_cuts:
        one = partition(step, [Layout()] * len(names), rows=rows)
        plan = cut_plan(step, plan, estimated_work(one), ranks)
    layouts = step.undivided(plan.layouts(names, ranks, model.inside(names)))
    return explain(step, partition(step, layouts, rows=rows), plan, ranks, rows)
