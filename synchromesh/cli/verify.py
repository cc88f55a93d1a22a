"""`synchromesh verify TARGET --plan P`: the plan against one device, same batches and weights."""

import argparse
import sys
from typing import Any

from synchromesh.cli import options, ranks
from synchromesh.cli.command import answer, command, option
from synchromesh.report.numbers import counted
from synchromesh.values.fault import Refuted, printable

ORACLES = {
    "one device": "against one process",
    "simulated workers": "against one process that plays all workers",
    "replay": "against one process that replays all workers",
    None: "with nothing to compare with",
}
BYTES = (("parameter bytes", "parameter_bytes_per_rank"),
         ("bytes sent a step", "sent_bytes_per_step"))  # fmt: skip


def main(args: argparse.Namespace) -> int:
    plan = options.plan(args.plan)
    if args.bf16 and args.dtype == "float64":
        raise ValueError("--bf16 leaves float64 as it is: leave --dtype out, or give float32")
    by_age = args.lr_rule == "staleness"
    if by_age:
        options.check_aged(plan)
    if not ranks.inside():
        count = options.processes(args.nproc)
        options.check_degrees(plan, count)
        with ranks.forked(count, "synchromesh.verify.verify") as forks:
            options.example(args)  # what is wrong with it shows without ranks
            return ranks.again(args.words, count, forks)
    from synchromesh.cli.console import Display
    from synchromesh.verify.verify import verify

    workload = options.example(args)
    say = Display(ranks.first()).say
    autocast = options.precision(args.bf16)
    document = verify(
        workload, str(plan), args.steps, args.dtype, args.seed, say, autocast, by_age
    )
    answer(args, document, lambda: print(_text(args.target, document), file=args.out))
    if not document["passed"] and ranks.first():
        raise Refuted(_deviation(args.target, document))
    return 0


COMMAND = command(
    "verify", main, "a plan against one device",
    "Trains a few steps under the plan and, on one process, without it, and compares losses, "
    "gradients, buffers and parameters, beyond what rounding alone does. Dropout is zero and "
    "batch norm synchronised.",
    options.target(), options.plan_and_seed(), options.BF16, options.nproc(),
    option("--steps", type=options.positive, default=5, metavar="N", help="default 5"),
    option("--dtype", choices=("float64", "float32"),
           help="of model and batches; default float64, with --bf16 float32"),
    option("--lr-rule", choices=("none", "staleness"), default="none",
           help="staleness: servers divide learning rates by a gradient's age"),
    options.JSON,
)  # fmt: skip


def _deviation(target: str, document: dict[str, Any]) -> str:
    faults = [_fault(fault, document) for fault in document["faults"]]
    for what, key in BYTES if document["sent_bytes_compared"] else BYTES[:1]:
        measured, explained = document[key], document[f"explained_{key}"]
        faults += [
            f"{what} of rank {rank} are {own:,} (explained are {due:,})"
            for rank, (own, due) in enumerate(zip(measured, explained, strict=True))
            if own != due
        ]
    count = counted(document["ranks"], "rank")
    return (
        f"{target} under plan {document['plan']} on {count} is not what one process computes: "
        f"{'; '.join(faults)}"
    )


def _fault(fault: dict[str, Any], document: dict[str, Any]) -> str:
    what = f"the {fault['kind']}" + (f" {fault['name']}" if fault["name"] else "")
    value = fault["deviation"]
    shown = "more than any number" if value == sys.float_info.max else f"{value:.2e} of its value"
    return (
        f"{what} deviates by {shown} on rank {fault['rank']} in step {fault['step']} (at most "
        f"{document['tolerance']:.0e} in {_types(document)}; rounding alone does "
        f"{fault['noise_floor']:.0e})"
    )


def _types(document: dict[str, Any]) -> str:
    """What was computed in: `float64`, `bfloat16 by autocast`."""
    autocast = document["autocast"]
    return str(document["dtype"]) if autocast is None else f"{autocast} by autocast"


def _text(target: str, document: dict[str, Any]) -> str:
    lines = [
        f"{target} under {document['plan']} on {counted(document['ranks'], 'rank')} "
        f"{ORACLES[document['oracle']]}, {document['steps']} steps in {_types(document)}"
    ]
    if document["reason"]:
        lines.append(f"  not what one device computes: {document['reason']}")
    for name, floor in document["noise_floor"].items() if document["oracle"] else ():
        value = document[f"max_{name}_deviation"]
        lines.append(f"  largest {name} deviation  {value:.2e} (rounding alone {floor:.2e})")
    for name, key in BYTES:
        lines.append(f"  {name} per rank  {', '.join(f'{n:,}' for n in document[key])}")
    if stale := document["staleness"]:
        lines.append(
            f"  updates between what a gradient was computed on and its own  "
            f"{stale['mean']:.1f} on average, {stale['max']} at most"
        )
    norms = document["batch_norm"]
    lines.append(f"  dropout is set to zero in both, batch norm is {norms}")
    lines.append("passed" if document["passed"] else "FAILED")
    return printable("\n".join(lines), lines=True)
