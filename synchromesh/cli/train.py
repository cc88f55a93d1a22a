"""`synchromesh train TARGET`: trains a workload under a plan; log, checkpoints, --resume."""

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synchromesh.cli import elastic, options, ranks
from synchromesh.cli.command import command, either, option
from synchromesh.launcher.generation import SOCKET
from synchromesh.launcher.rank import launched
from synchromesh.runs import run_folder
from synchromesh.runs.run_folder import Job, Resumed, RunFolder
from synchromesh.values.batch_sizes import BatchRange, BatchSchedule, RankBatches, batches_of
from synchromesh.values.extras import require
from synchromesh.values.plan import Plan

if TYPE_CHECKING:
    from synchromesh.training.learning_rate import RateFactor
    from synchromesh.workloads.workload import Workload


def span(text: str) -> tuple[int, int]:
    """The first and last of some steps: `20-24`, or `20`."""
    first, dash, last = text.partition("-")
    try:
        steps = int(first), int(last if dash else first)
    except ValueError:
        steps = 0, 0
    if not 1 <= steps[0] <= steps[1]:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no range of steps: give the first and the last, counted from 1, as 20-24"
        )
    return steps


def main(args: argparse.Namespace) -> int:
    if args.coordinator and SOCKET not in os.environ:
        ranks.forget()  # srun or the lab has started one process on each host: its launcher
    asked = Asked.of(args)
    if ranks.inside():
        if args.elastic and SOCKET not in os.environ and ranks.first():
            print(
                "synchromesh: --elastic: another launcher has started these ranks: the run ends "
                "where one is lost",
                file=sys.stderr,
            )
        from synchromesh.cli.training import train

        return train(asked.job(), args.out if args.json else None)
    count = options.processes(args.nproc)
    elastic.check(args)
    if args.coordinator is None:
        options.check_degrees(asked.plan, count)
    with ranks.forked(count, "synchromesh.cli.training") as forks:
        job = asked.job()
        made = job.folder.make()
        try:
            words = [*args.words, "--output", str(job.folder.path)]
            if args.elastic:
                return elastic.start(args, words, count, forks)
            return ranks.again(words, count, forks)
        finally:
            run_folder.remove_empty(made)


COMMAND = command(
    "train", main, "trains a workload under a plan",
    "Trains a workload on local processes or, started by torchrun, as one rank of its group. "
    "SIGTERM or Ctrl-C checkpoints and ends the run; a second one ends it now.",
    options.target(changing=True), options.plan_and_seed(), options.ALLOW, options.BF16,
    options.HEADROOM, options.nproc(),
    either(
        option("--epochs", type=options.positive, metavar="N", help="the workload's"),
        option("--steps", type=options.positive, metavar="N", help="updates, in all"),
    ),
    option("--output", metavar="DIR", help="default runs/NAME-TIME"),
    option("--checkpoint-every", type=options.positive, metavar="N",
           help="steps; besides each epoch"),
    option("--keep", type=options.positive, metavar="N",
           help="the newest checkpoints that stay, besides the best; default: all"),
    option("--best", metavar="METRIC",
           help="by which an epoch is; `loss`: of training; NAME:min and NAME:max say which is "
           "better; default: the greatest of the first metric"),
    option("--patience", type=options.positive, metavar="N",
           help="epochs without a better one until training ends"),
    option("--resume", metavar="DIR", help="a run's folder, or one checkpoint"),
    option("--adapt", action=argparse.BooleanOptionalAction,
           help="watch what steps take and shift to a better plan when links or devices "
           "change; default: where the plan is `auto`"),
    option("--trace-steps", type=span, metavar="A-B",
           help="steps that are recorded for `synchromesh trace`; default: one, the "
           "twentieth"),
    option("--lr-rule", choices=("none", "linear", "sqrt", "adascale", "staleness"),
           help="learning rates for --batch-size: the workload's times B / B_0, its square root "
           "or AdaScale's gain, B_0 being its own batch; default none, with --batch-size auto "
           "adascale for SGD, else sqrt; or divided by a gradient's age (staleness)"),
    option("--batch-schedule", type=options.schedule, metavar="EPOCH:xTIMES,...",
           help="batches grow behind these epochs, as 30:x5,60:x5, in place of a rate that "
           "decays, as far as memory and data allow; then the rate is lowered"),
    option("--warm-up", type=options.rate, metavar="EPOCHS",
           help="in which --lr-rule's factor grows from 1, step by step; default 0"),
    *elastic.of_run(), elastic.REPLICATE,
    option("--keep-rows", action="store_true",
           help="with --elastic: batches grow and shrink with the ranks, of which each keeps its "
           "rows, and rates follow by --lr-rule; default: the global batch stays"),
    option("--skip-non-finite", type=options.positive, metavar="K",
           help="leave out steps whose gradients are not finite on some rank, on all of them, and "
           "end the run behind K of them in a row"),
    option("--check-replicas", type=options.positive, metavar="K",
           help="compare, every K steps, what several ranks hold alike, and end the run where one "
           "of them has changed; with --elastic go on without that one"),
    option("--roll-back-spikes", action="store_true",
           help="where a loss is far above those before, go back to the newest checkpoint from "
           "before it, and on with the data behind it"),
    option("--noise-scale", action="store_true",
           help="measure the gradient noise scale, a number of rows, in so many steps that it "
           "takes 1 %% of their time"),
    option("--tensorboard", action="store_true", help="TensorBoard logs in the run folder, too"),
    options.JSON,
    epilog="What was measured of the model and the links is kept in "
    "~/.cache/synchromesh/profiles and sampled where it is used again; the environment variable "
    "SYNCHROMESH_CACHE names another folder, or is `off`.",
    seed=None, plan=None, bf16=None, allow=None,  # a resumed run keeps its own
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What the command line asks for, as far as it shows before the user's code runs."""

    args: argparse.Namespace
    resumed: Resumed | None
    before: dict[str, Any]  # what the resumed run was asked for
    plan: Plan
    seed: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Asked":
        """ValueError for what cannot be."""
        if args.tensorboard:
            require("tensorboard")
        resumed = Resumed.of(_resumable(args)) if args.resume else None
        before = resumed.folder.asked() if resumed and resumed.folder else {}
        plan = options.plan(args.plan or _plan_before(args, before))
        seed = before.get("seed", 0) if args.seed is None else args.seed
        if seed != before.get("seed", seed):
            raise ValueError(
                f"--seed {seed}: the resumed run has seed {before['seed']}, which its order of "
                "samples depends on; leave --seed out"
            )
        return cls(args, resumed, before, plan, seed)

    def job(self) -> Job:
        """The job, with the workload that TARGET names; every fault that shows without ranks."""
        args, before = self.args, self.before
        batches = _batches(args, before)
        (workload, rate), adapts = _workload(args, before, batches), args.adapt
        if rate.rule == "staleness":
            options.check_aged(self.plan)
        if adapts is None:  # where nobody said which plan it should be, now or when the run began
            adapts = self.plan.automatic or (args.plan is None and bool(before.get("adapt")))
        return Job(
            workload=workload, plan=self.plan, seed=self.seed,
            folder=_folder(args, workload, self.resumed),
            epochs=args.epochs or workload.epochs, steps=args.steps, every=args.checkpoint_every,
            resumed=self.resumed,
            bf16=bool(before.get("bf16") if args.bf16 is None else args.bf16),
            adapt=adapts, trace_steps=args.trace_steps, tensorboard=args.tensorboard,
            command=tuple(args.words), headroom=args.headroom, keep=args.keep, best=args.best,
            patience=args.patience, noise_scale=args.noise_scale, rate=rate, batches=batches,
            allow=str(before.get("allow", "") if args.allow is None else args.allow),
            replicate=args.replicate, skip_non_finite=args.skip_non_finite,
            check_replicas=args.check_replicas, roll_back_spikes=args.roll_back_spikes,
        )  # fmt: skip


def _resumable(args: argparse.Namespace) -> str:
    """What --resume names, or the run's own folder where that is gone, as `--keep` removes it
    before a rank is started anew."""
    path = str(args.resume)
    return str(args.output) if SOCKET in os.environ and not Path(path).exists() else path


def _plan_before(args: argparse.Namespace, before: dict[str, Any]) -> str:
    """The resumed run's plan on as many ranks, else `auto`, which is told where that differs."""
    if not before:
        return "auto"
    count = ranks.size() if ranks.inside() else options.processes(args.nproc)
    plan = str(before["plan"])
    if before["ranks"] == count or plan == "auto":
        return plan
    if _begins():
        told = (
            f"the plan {plan!r} was that of {before['ranks']} ranks: on {count} one is chosen "
            "(auto); give --plan for another"
        )
        print(f"synchromesh: {told}", file=sys.stderr)
    return "auto"


def _begins() -> bool:
    """Whether nobody has begun this run: no launcher of ours, no other rank, no torchrun."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return not launched() and ranks.first() and not again


def _batches(
    args: argparse.Namespace, before: dict[str, Any]
) -> BatchRange | BatchSchedule | RankBatches | None:
    """That change while training; a resumed run's, where nothing else is said."""
    asked = {
        "--batch-schedule": args.batch_schedule,
        "--batch-size auto": args.batch_size if isinstance(args.batch_size, BatchRange) else None,
        "--keep-rows": RankBatches() if args.keep_rows else None,
    }
    given = {name: batches for name, batches in asked.items() if batches is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other")
    chosen: BatchRange | BatchSchedule | RankBatches | None = next(iter(given.values()), None)
    if chosen is None and before.get("batches") and not args.batch_size:
        chosen = batches_of(before["batches"])
    return chosen


def _workload(
    args: argparse.Namespace, before: dict[str, object], batches: object
) -> "tuple[Workload, RateFactor]":
    """And by what its learning rates are multiplied."""
    from synchromesh.training.learning_rate import scaled, usual_rule
    from synchromesh.workloads.target import load

    workload = load(args.target, args.data)
    chosen_for = workload.batch_size
    if before.get("workload", workload.name) != workload.name:
        raise ValueError(
            f"--resume {args.resume}: that run trained {before['workload']}, not {workload.name}"
        )
    asked = None if isinstance(args.batch_size, BatchRange) else args.batch_size
    size = asked or before.get("batch_size")
    if isinstance(size, int):
        workload = replace(workload, batch_size=size)
    workload.check_batch()
    kept, chosen = str(before.get("lr_rule", "none")), isinstance(batches, BatchRange)
    if chosen and kept == "none" and not before.get("batches"):
        kept = usual_rule(workload)
    warm_up = before.get("warm_up", 0.0) if args.warm_up is None else args.warm_up
    rule = args.lr_rule or kept
    return scaled(workload, rule, chosen_for, float(str(warm_up)), batches is not None)


def _folder(args: argparse.Namespace, workload: "Workload", resumed: Resumed | None) -> RunFolder:
    """Where the run writes: as asked, else on in the resumed run's folder, else a new one."""
    if args.output:
        folder = RunFolder(Path(os.path.abspath(args.output)))
        own = resumed and resumed.folder and resumed.folder.path.resolve() == folder.path.resolve()
        if folder.holds_run() and not own and _begins():
            raise ValueError(
                f"--output {args.output} holds a run already: --resume {args.output} goes on with "
                "it, another --output begins a new one"
            )
        return folder
    if resumed and resumed.folder:
        return resumed.folder
    return RunFolder(run_folder.default(workload.name or "run"))
