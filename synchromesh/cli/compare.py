"""`synchromesh compare TARGET...`: strategies on one workload, in turns; results and a report."""

import argparse
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from synchromesh.cli import options, ranks
from synchromesh.cli.asked_study import AskedStudy
from synchromesh.cli.command import command, either, option
from synchromesh.results.derive import derive
from synchromesh.results.run import RunResult
from synchromesh.results.study import StudyResults
from synchromesh.results.table import table
from synchromesh.study import strategy, turns
from synchromesh.values import document
from synchromesh.values.extras import require
from synchromesh.values.fault import Stopped

if TYPE_CHECKING:
    from synchromesh.study.folder import StudyFolder
    from synchromesh.study.processes import Start
    from synchromesh.workloads.workload import Workload


def names(text: str) -> tuple[str, ...]:
    """Strategies, each once."""
    strategies = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not strategies:
        raise argparse.ArgumentTypeError("name at least one strategy")
    return strategies


def main(args: argparse.Namespace) -> int:
    from synchromesh.study.folder import StudyFolder

    ranks.refuse_inside("compare", "it")
    require("report")
    asked = AskedStudy(args)
    folder = StudyFolder(Path(os.path.abspath(args.output)))
    signal.signal(signal.SIGTERM, _stopped)
    with _machines(asked) as machines:
        folder.open(asked.document())
        try:
            with folder.alone():
                results = _study(asked, folder, machines)
        except (KeyboardInterrupt, Stopped):
            print(
                f"synchromesh: interrupted; the same command goes on in {folder.path} with the "
                "runs that have not ended",
                file=sys.stderr,
            )
            raise
    if args.json:
        print(results.to_json(), file=args.out)
    else:
        from synchromesh.cli.study_display import show

        show(results, folder.path)
    return 0 if any(run.status == "done" for run in results.runs) else 1


COMMAND = command(
    "compare", main, "strategies on one workload, fairly; a report",
    "Trains a workload under several strategies on the same data, seeds and global batches, in "
    "turns, so that what changes on the machine meets all alike. Writes results.json, results.csv "
    "and report.html. The same command goes on where a study was interrupted. A run that fails is "
    "a row with its reason.",
    options.TARGETS,
    option("--strategies", type=names, default=strategy.DEFAULT, metavar="S,S,...",
           help=f"default {','.join(strategy.DEFAULT)}"),
    option("--plan", action="append", default=[], metavar="PLAN",
           help="a plan besides; repeatable"),
    option("--nproc", type=options.counts, metavar="N,N,...",
           help="devices; default: the GPUs, else 2"),
    option("--batch-sizes", type=options.counts, metavar="N,N,...",
           help="rows of a global batch, under weak scaling of one device; default: the "
           "workload's"),
    option("--scaling", choices=("strong", "weak"), default="strong",
           help="whether batches grow with the devices (weak); default strong"),
    option("--seeds", type=options.positive, default=1, metavar="N",
           help="runs of each; default 1"),
    option("--target", action="append", default=[], metavar="METRIC=VALUE",
           help="what is to be reached, as accuracy=0.9 or loss<=1.5; repeatable"),
    either(
        option("--epochs", type=options.positive, metavar="N",
               help="to train, with validation; default with --target: the workload's"),
        option("--steps", type=options.positive, metavar="N",
               help=f"to time, without validation; default {AskedStudy.STEPS}"),
    ),
    option("--at-most", type=options.seconds, metavar="SECONDS",
           help="of timed steps of a run: one whose steps are slow times fewer of them, though "
           f"at least {turns.TUNING.least}"),
    option("--lab", metavar="FILE", help="emulated hosts, as of `lab up --file`"),
    option("--predict", action="append", default=[], metavar="DEVICE",
           help="rows that are predicted, not run, for devices of the catalogue: v100, or "
           "v100-ethernet25 with another network between hosts; repeatable"),
    options.PRICE, options.ALLOW, options.BF16,
    option("--note", default="", metavar="TEXT", help="for the report"),
    option("-o", "--output", default="study", metavar="DIR", help="default study"),
    options.JSON,
    epilog=f"Strategies: {', '.join(strategy.NAMES)}, and any plan's text with --plan. ddp, fsdp2 "
    "and torch-pipeline are PyTorch's own. On CPUs a device is as many cores as the largest "
    "number of processes leaves to each, for all strategies alike.",
)  # fmt: skip


def _stopped(number: int, frame: FrameType | None) -> None:
    """Ends the study in good order: contestants end, and what they have written is removed."""
    raise Stopped(number)


@dataclass(frozen=True)
class _Machines:
    """What contestants run on. processors: cores of rank r of N; words: of other machines."""

    start: "Start"
    processors: Callable[[int, int], float]
    cluster: dict[str, Any] | None = None
    words: str = ""


@contextmanager
def _machines(asked: AskedStudy) -> Iterator[_Machines]:
    from synchromesh.lab import Description, Lab
    from synchromesh.study.processes import RankProcesses

    most = max(asked.devices)
    if asked.args.lab is None:
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores // most)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        yield _Machines(RankProcesses, lambda rank, ranks: min(threads, cores / ranks))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as for what the lab itself starts on a host
    description = Description.load(Path(asked.args.lab))
    hosts = description.hosts
    if len(hosts) < most:
        raise ValueError(
            f"--lab {asked.args.lab} has {len(hosts)} hosts, too few for --nproc {most}: a device "
            "is a host there"
        )
    with Lab.of(description) as lab:
        yield _Machines(
            RankProcesses.on(lab), lambda rank, ranks: hosts[rank].cpu, lab.cluster().to_dict(),
            str(description),
        )  # fmt: skip


def samples_of(workload: "Workload") -> int | None:
    """Of an epoch; None of a stream that does not say."""
    from synchromesh.workloads.workload import is_stream

    data: Any = workload.train_data
    return None if is_stream(data) else len(data)


def _study(asked: AskedStudy, folder: "StudyFolder", machines: _Machines) -> StudyResults:
    from synchromesh.report.page import page
    from synchromesh.runs.machine import machine, versions

    results = derive(
        StudyResults(
            title=" and ".join(asked.workloads),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=shlex.join(["synchromesh", *asked.args.words]), machine=machine(),
            runs=(*_ran(asked, folder, machines), *_predicted(asked)),
            settings=asked.settings(dict.fromkeys(w.batch_size for w in asked.models)),
            cluster=machines.cluster, emulated=asked.args.lab is not None, versions=versions(),
            price=asked.price or None, note=asked.args.note,
        )
    )  # fmt: skip
    document.write(folder.path / "results.json", results.to_json())
    document.write(folder.path / "results.csv", table(results))
    document.write(folder.path / "report.html", page(results))
    return results


def _ran(asked: AskedStudy, folder: "StudyFolder", machines: _Machines) -> list[RunResult]:
    from synchromesh.cli.study_display import StudyDisplay
    from synchromesh.runs.flops import gpu, with_flops
    from synchromesh.study.contest import Common, Contest, Trained

    args = asked.args
    trained = {
        name: Trained(target, data, samples_of(workload), workload.carry is not None)
        for name, (target, data, workload) in asked.workloads.items()
    }
    common = Common(
        trained, machines.start, asked.targets, args.bf16, asked.epochs, asked.steps,
        args.at_most, args.lab is not None, machines.processors, args.allow,
    )  # fmt: skip
    groups = asked.groups(_most_processes(asked))
    with closing(StudyDisplay()) as display:
        runs = Contest(common, folder, display.take).run(groups)
    placed = [replace(run, cluster=machines.words) for run in runs]
    named = {name: workload for name, (_, _, workload) in asked.workloads.items()}
    return with_flops(placed, named, gpu() if args.lab is None else None, args.bf16)


def _most_processes(asked: AskedStudy) -> int:
    from synchromesh.study.processes import most_processes

    devices = max(asked.devices)
    most = most_processes(asked.models, devices)
    if asked.args.lab is None and devices > most:
        warnings.warn(
            f"--nproc {devices} is more processes than the memory of this machine is "
            f"estimated to hold ({most}): some may be killed; ask for fewer devices",
            stacklevel=2,
        )
    return most


def _predicted(asked: AskedStudy) -> Iterator[RunResult]:
    from synchromesh.study.prediction import predicted

    kinds = asked.args.predict
    for workload in asked.models if kinds else ():
        settings = asked.settings([workload.batch_size])
        yield from predicted(workload, settings, kinds, asked.args.bf16)
