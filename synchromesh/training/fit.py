"""`fit`: trains a workload to its end."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from synchromesh.launcher.member import member
from synchromesh.training import events
from synchromesh.training.active_plan import checked_plan
from synchromesh.training.best import Best
from synchromesh.training.events import FitEvent, FitResult
from synchromesh.training.learning_rate import RateFactor, ScaledRate
from synchromesh.training.loop import Loop
from synchromesh.training.prepare import prepare
from synchromesh.training.stop import Stop
from synchromesh.values.batch_sizes import BatchRange, BatchSchedule, RankBatches, batches_of
from synchromesh.values.plan import Plan
from synchromesh.workloads.workload import Workload


def fit(
    workload: Workload, plan: Plan | str = "auto", *, epochs: int | None = None,
    steps: int | None = None, seed: int = 0, checkpoints: str | Path | None = None,
    checkpoint_every: int | None = None, keep: int | None = None, best: str | None = None,
    patience: int | None = None, resume: str | Path | None = None,
    adapt: bool | None = None, autocast: torch.dtype | None = None, headroom: str | None = None,
    on_event: Callable[[FitEvent], None] | None = None, stop: Callable[[], bool] | None = None,
    say: Callable[[str], None] | None = None, noise_scale: bool = False,
    batches: BatchRange | BatchSchedule | RankBatches | str | None = None, allow: str = "",
    replicate: str = "auto", skip_non_finite: int | None = None, check_replicas: int | None = None,
    roll_back_spikes: bool = False,
) -> FitResult:  # fmt: skip
    """Trains `workload` under `plan` on the ranks of this run; validates after each epoch.

    epochs, steps: in all, with those of a resumed run; default: the workload's epochs.
    seed: of the initial weights, the order of samples and random operators.
    checkpoints: a folder that gets `epoch-N`, `best` and, every `checkpoint_every` steps,
    `step-N`; an elastic run all of whose ranks are lost goes on from the newest. keep: how many of
    the newest stay, besides `best` (default: all).
    best: the metric by which an epoch is, `loss` that of training; of losses, errors and
    perplexities the least one, else the greatest, or as `NAME:min` and `NAME:max` say; default:
    the greatest of the first metric. patience: epochs without a better one until training ends.
    resume: a checkpoint, or a folder of them, of which the newest good one is taken.
    adapt: whether the plan may change while training runs; default: where it is `auto`.
    autocast, headroom, noise_scale, allow: as of `prepare`.
    batches: `auto`, `auto:MIN-MAX`: as the gradient noise scale says, or `EPOCH:xTIMES,...`: they
    grow behind epochs, or `ranks`: each rank of an elastic run keeps its rows; default: all have
    the workload's batch size. Learning rates follow where the workload's come of `scaled`
    (training/learning_rate.py).
    replicate: of an elastic run, after how many steps what ranks of one host alone have is copied
    to another host's memory; `auto`: as often as takes 3 % of the time (training/replication.py).
    skip_non_finite: steps whose gradients are not finite on some rank are left out on all, until
    so many of them follow each other: RuntimeError. check_replicas: after so many steps each rank
    compares what it holds with those that hold the same: RuntimeError where one has another; in
    an elastic run that one is lost. roll_back_spikes: behind a loss far above those before the
    run goes back to the newest checkpoint from before it, and on with the data behind it
    (training/integrity.py).
    on_event: receives the values of training/events.py, on every rank (`events.only_reads`).
    stop: is asked before each step, on each rank; SIGTERM and SIGINT stop as well. Either leads to
    a checkpoint and to a result that says so.
    say: receives a sentence at a time what is measured.

    Raises ValueError for arguments, data or plans that do not fit, CheckpointError where the last
    checkpoint could not be written."""
    if not isinstance(workload, Workload):
        raise ValueError(f"fit trains a synchromesh.Workload, not {type(workload).__name__}")
    numbers: dict[str, Any] = {
        "epochs": epochs, "steps": steps, "keep": keep, "patience": patience,
        "checkpoint_every": checkpoint_every, "skip_non_finite": skip_non_finite,
        "check_replicas": check_replicas, "roll_back_spikes": int(roll_back_spikes) or None,
    }  # fmt: skip
    functions = {"on_event": on_event, "stop": stop, "say": say}
    if replicate not in ("auto", "off"):
        numbers["replicate"] = int(replicate) if replicate.isdecimal() else replicate
    if faults := [*_faults(numbers, functions, autocast, checkpoints)]:
        raise ValueError(f"fit: {'; '.join(faults)}")
    if isinstance(batches, str):
        batches = batches_of(batches)
    by = Best.parse(best, metric=workload.metric is not None)
    workload.check_batch()
    plan = checked_plan(plan)
    torch.manual_seed(seed)
    model = workload.build()
    optimizer = workload.build_optimizer(model.parameters())
    if (own := member()) is not None:
        own.replicate = replicate
    trainer = prepare(
        model, optimizer, workload.loss, workload.example(seed=seed), plan=plan,
        scheduler=_scheduler(workload, optimizer, batches is not None), seed=seed,
        autocast=autocast, carry=workload.carry, headroom=headroom, noise_scale=noise_scale,
        say=say, allow=allow,
    )  # fmt: skip
    requests = Stop(trainer, stop)
    loop = Loop(
        workload, trainer, requests, on_event or events.ignore, epochs or workload.epochs,
        steps, None if checkpoints is None else Path(checkpoints), checkpoint_every, seed, by,
        keep, patience, batches, roll_back_spikes,
    )  # fmt: skip
    adapts = plan.automatic if adapt is None else adapt
    with requests.on_signals():
        try:
            trainer.survival.integrity.require(
                skip_non_finite or 0, check_replicas or 0, roll_back_spikes
            )
            if isinstance(batches, RankBatches) and trainer.options.noise_scale:
                raise ValueError(
                    "batches that follow the ranks go with no noise scale, which is of ranks that "
                    "are lost, and so with no rates by adascale: linear or sqrt"
                )
            return loop.run(None if resume is None else Path(resume), adapts)
        finally:
            trainer.close()


def _scheduler(workload: Workload, optimizer: Optimizer, changing: bool) -> Any:
    """The workload's, which goes on by rows where batches are changing."""
    made, rows = workload.build_scheduler(optimizer), workload.batch_size
    if changing and not isinstance(made, ScaledRate):
        return ScaledRate(optimizer, made, RateFactor("none", rows, rows))
    return made


def _faults(
    numbers: Mapping[str, Any], functions: Mapping[str, Any], autocast: Any, folder: Any
) -> Iterator[str]:
    given = {name: number for name, number in numbers.items() if number is not None}
    if given.keys() >= {"epochs", "steps"}:
        yield f"epochs ({given['epochs']}) and steps ({given['steps']}) exclude each other"
    for name, n in given.items():
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            yield f"{name} must be a whole number of at least 1, not {n!r}"
    if not isinstance(autocast, torch.dtype | None):
        yield f"autocast must be a torch.dtype like torch.bfloat16, not {autocast!r}"
    for name, function in functions.items():
        if not (function is None or callable(function)):
            yield f"{name} must be a function, not {function!r}"
    for name in ("checkpoint_every", "keep", "roll_back_spikes"):
        if given.get(name) and folder is None:
            yield f"{name} needs a folder: checkpoints=..."
