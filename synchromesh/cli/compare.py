"""`synchromesh compare TARGET...`: strategies on one workload, in turns; results and a report."""

import argparse
import hashlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from synchromesh.cli import options, ranks
from synchromesh.study import strategy, turns
from synchromesh.values import document
from synchromesh.values.fault import Stopped

if TYPE_CHECKING:
    from synchromesh.results.study import HourlyPrice, Settings, StudyResults
    from synchromesh.study.cell import StudyCell
    from synchromesh.study.folder import StudyFolder
    from synchromesh.study.processes import Start
    from synchromesh.workloads.workload import Workload

STEPS = 30  # that are timed where neither steps nor epochs nor a target are asked for


def add_parser(commands: options.Commands) -> None:
    """Adds the command and its options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "compare", help="strategies on one workload, fairly; a report",
        description="Trains a workload under several strategies on the same data, seeds and "
        "global batches, in turns, so that what changes on the machine meets all alike. Writes "
        "results.json, results.csv and report.html. The same command goes on where a study was "
        "interrupted. A run that fails is a row with its reason.",
        epilog=f"Strategies: {', '.join(strategy.NAMES)}, and any plan's text with --plan. ddp, "
        "fsdp2 and torch-pipeline are PyTorch's own. On CPUs a device is as many cores as the "
        "largest number of processes leaves to each, for all strategies alike.",
    )  # fmt: skip
    options.add_targets(parser)
    parser.add_argument(
        "--strategies", type=names, default=strategy.DEFAULT, metavar="S,S,...",
        help=f"default {','.join(strategy.DEFAULT)}",
    )  # fmt: skip
    parser.add_argument(
        "--plan", action="append", default=[], metavar="PLAN", help="a plan besides; repeatable"
    )
    parser.add_argument(
        "--nproc", type=counts, metavar="N,N,...", help="devices; default: the GPUs, else 2"
    )
    parser.add_argument(
        "--batch-sizes", type=counts, metavar="N,N,...",
        help="rows of a global batch, under weak scaling of one device; default: the workload's",
    )  # fmt: skip
    parser.add_argument(
        "--scaling", choices=("strong", "weak"), default="strong",
        help="whether batches grow with the devices (weak); default strong",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=options.positive, default=1, metavar="N", help="runs of each; default 1"
    )
    parser.add_argument(
        "--target", action="append", default=[], metavar="METRIC=VALUE",
        help="what is to be reached, as accuracy=0.9 or loss<=1.5; repeatable",
    )  # fmt: skip
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--epochs", type=options.positive, metavar="N",
        help="to train, with validation; default with --target: the workload's",
    )  # fmt: skip
    length.add_argument(
        "--steps", type=options.positive, metavar="N",
        help=f"to time, without validation; default {STEPS}",
    )  # fmt: skip
    parser.add_argument(
        "--at-most", type=seconds, metavar="SECONDS",
        help=f"of timed steps of a run: one whose steps are slow times fewer of them, though at "
        f"least {turns.LEAST}",
    )  # fmt: skip
    _add_places(parser)
    options.add_precision(parser)
    parser.add_argument("--note", default="", metavar="TEXT", help="for the report")
    parser.add_argument("-o", "--output", default="study", metavar="DIR", help="default study")
    options.add_json(parser)
    parser.set_defaults(main=main)


def _add_places(parser: argparse.ArgumentParser) -> None:
    """On what it runs, is predicted, and what that costs."""
    parser.add_argument("--lab", metavar="FILE", help="emulated hosts, as of `lab up --file`")
    parser.add_argument(
        "--predict", action="append", default=[], metavar="DEVICE",
        help="rows that are predicted, not run, for devices of the catalogue: v100, or "
        "v100-ethernet25 with another network between hosts; repeatable",
    )  # fmt: skip
    price = parser.add_mutually_exclusive_group()
    price.add_argument(
        "--hourly-price", type=dollars, metavar="DOLLARS", help="of one device for an hour"
    )
    price.add_argument("--instance", metavar="NAME", help="of AWS or Google, as p3.2xlarge")
    parser.add_argument("--region", metavar="R", help="of the instance's price")
    parser.add_argument("--price-date", metavar="DATE", help="of the instance's price")


def names(text: str) -> tuple[str, ...]:
    """Strategies, each once."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise argparse.ArgumentTypeError("name at least one strategy")
    return found


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, each once."""
    return tuple(dict.fromkeys(options.positive(part.strip()) for part in text.split(",")))


def dollars(text: str) -> float:
    """A price above 0."""
    return _above_zero(text, "dollars")


def seconds(text: str) -> float:
    """A time above 0."""
    return _above_zero(text, "seconds")


def _above_zero(text: str, unit: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 10**6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {unit} above 0")
    return number


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    if ranks.inside():
        raise ValueError(
            "`compare` starts ranks and this process is one already (RANK is set): start it itself"
        )
    asked = AskedStudy(args)
    folder = _folder(args)
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


def _stopped(number: int, frame: FrameType | None) -> None:
    """Ends the study in good order: contestants end, and what they have written is removed."""
    raise Stopped(number)


class AskedStudy:
    """What the command line asks for, checked as far as it can be before anything runs."""

    def __init__(self, args: argparse.Namespace) -> None:
        from synchromesh.study.prediction import cluster
        from synchromesh.study.target import Target

        self.args = args
        self.strategies = tuple(dict.fromkeys((*args.strategies, *args.plan)))
        for name in self.strategies:
            strategy.check(name)
        self.price = _price(args)
        for kind in args.predict:
            cluster(kind, 1)
        self.targets = tuple(Target.parse(text) for text in args.target)
        if self.targets and args.steps is not None:
            raise ValueError("--target needs validation, which --steps leaves out: use --epochs")
        if len(args.data) > 1 and len(args.data) != len(args.targets):
            raise ValueError(
                f"--data is given {len(args.data)} times for {len(args.targets)} TARGETs: give it "
                "once for all, or once for each in their order"
            )
        self.devices = args.nproc or (options.processes(None),)
        self.workloads = self._loaded()
        self.epochs = args.epochs or (self._usual_epochs() if self.targets else None)
        self.steps = None if self.epochs else args.steps or STEPS
        if self.epochs and args.at_most is not None:
            raise ValueError("--at-most limits the steps that are timed: epochs are trained whole")
        self.groups(1)  # says what is wrong with batches

    def _loaded(self) -> "dict[str, tuple[str, str | None, Workload]]":
        """By name: TARGET, the folder of its data, and the workload."""
        from synchromesh.workloads.target import load

        found: dict[str, tuple[str, str | None, Workload]] = {}
        folders = self.args.data or [None]
        for i, target in enumerate(self.args.targets):
            data = folders[i % len(folders)]
            workload = load(target, data)
            name = workload.name or target
            if name in found:
                raise ValueError(f"the workload {name} is there twice: give its TARGET once")
            for target_value in self.targets:
                target_value.check(metric_names(workload))
            found[name] = target, data, workload
        return found

    def _usual_epochs(self) -> int:
        return max(workload.epochs for _, _, workload in self.workloads.values())

    def settings(self, batch_sizes: tuple[int, ...]) -> "Settings":
        """What every workload's runs share, and its batch sizes."""
        from synchromesh.results.study import Settings

        return Settings(
            self.strategies, self.devices, batch_sizes, tuple(range(self.args.seeds)),
            self.args.scaling, self.epochs, self.steps, tuple(map(str, self.targets)),
            self.args.at_most,
        )  # fmt: skip

    def groups(self, most: int) -> "list[list[StudyCell]]":
        """The cells, by those that take turns. ValueError for batches that data cannot fill."""
        from synchromesh.study.cell import grid, groups, require_distinct

        found: list[list[StudyCell]] = []
        for name, (_, _, workload) in self.workloads.items():
            settings = self.settings(self.args.batch_sizes or (workload.batch_size,))
            cells = grid(name, settings)
            for rows in {cell.batch for cell in cells}:
                replace(workload, batch_size=rows).check_batch()
            found += groups(cells, settings, most)
        if not found:
            raise ValueError(
                f"--strategies {','.join(self.strategies)} need more than one device and --nproc "
                "is 1: add single, or more devices"
            )
        require_distinct([cell for group in found for cell in group])
        return found

    def document(self) -> dict[str, Any]:
        """What makes a study this one: with another it does not share a folder."""
        args = self.args
        sizes = args.batch_sizes or [w.batch_size for _, _, w in self.workloads.values()]
        return {
            "workloads": list(self.workloads), "data": args.data, **_digests(args.targets),
            "strategies": list(self.strategies), "devices": list(self.devices),
            "batch_sizes": list(sizes), "scaling": args.scaling, "seeds": args.seeds,
            "epochs": self.epochs, "steps": self.steps, "at_most": args.at_most,
            "targets": list(map(str, self.targets)),
            "bf16": args.bf16, "predicted": args.predict,
            "lab": args.lab and Path(args.lab).read_text(),
        }  # fmt: skip


def _digests(targets: list[str]) -> dict[str, str]:
    """SHA-256 of each file that a TARGET names: with another one it is another study."""
    files = [file for target in targets if (file := target.rpartition(":")[0]).endswith(".py")]
    return {f"file {file}": hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}


def metric_names(workload: "Workload") -> tuple[str, ...]:
    """What the workload's metric gives, of one row under fresh weights; nothing without one."""
    import torch

    if workload.metric is None or workload.valid_data is None:
        return ()
    model, batch = workload.build().eval(), workload.example(1)
    with torch.no_grad():
        if workload.carry is None:
            return tuple(workload.metric(model, batch))
        return tuple(workload.metric(model, batch, workload.carry(1))[0])


def _price(args: argparse.Namespace) -> "HourlyPrice | None":
    from synchromesh.catalogue.prices import price
    from synchromesh.results.study import HourlyPrice

    if args.instance is None and (args.region or args.price_date):
        raise ValueError("--region and --price-date are those of an --instance: name one")
    if args.hourly_price is not None:
        return HourlyPrice(args.hourly_price, source="--hourly-price")
    return args.instance and price(args.instance, args.region, args.price_date)


def _folder(args: argparse.Namespace) -> "StudyFolder":
    from synchromesh.study.folder import StudyFolder

    return StudyFolder(Path(os.path.abspath(args.output)))


@dataclass(frozen=True)
class _Machines:
    """What contestants run on. processors: cores of rank r of N. cluster: its document; words:
    what it is, of other than this machine."""

    start: "Start"
    processors: Callable[[int, int], float]
    cluster: dict[str, Any] | None = None
    words: str = ""


@contextmanager
def _machines(asked: AskedStudy) -> Iterator[_Machines]:
    """This machine, or the hosts of a lab."""
    from synchromesh.lab import Description, Lab
    from synchromesh.study.processes import RankProcesses

    most = max(asked.devices)
    if asked.args.lab is None:
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores // most)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        yield _Machines(RankProcesses, lambda rank, ranks: min(threads, cores / ranks))
        return
    description = Description.load(Path(asked.args.lab))
    hosts = description.hosts
    if len(hosts) < most:
        raise ValueError(
            f"--lab {asked.args.lab} has {len(hosts)} hosts, too few for --nproc {most}: a device "
            "is a host there"
        )
    with Lab.of(description) as lab:
        yield _Machines(
            RankProcesses.on(lab),
            lambda rank, ranks: hosts[rank].cpu,
            lab.cluster().to_dict(),
            str(description),
        )


def samples_of(workload: "Workload") -> int | None:
    """Of an epoch; None of a stream that does not say."""
    from synchromesh.workloads.workload import is_stream

    data: Any = workload.train_data
    return None if is_stream(data) else len(data)


def _study(asked: AskedStudy, folder: "StudyFolder", machines: _Machines) -> "StudyResults":
    """Runs it, and writes what came of it."""
    from synchromesh.cli.study_display import StudyDisplay
    from synchromesh.report.page import page
    from synchromesh.results.derive import derive
    from synchromesh.results.study import StudyResults
    from synchromesh.results.table import table
    from synchromesh.study.contest import Common, Contest, Trained
    from synchromesh.study.flops import gpu, with_flops
    from synchromesh.study.machine import machine, most_processes, versions
    from synchromesh.study.prediction import predicted

    args = asked.args
    trained = {
        name: Trained(target, data, samples_of(workload), workload.carry is not None)
        for name, (target, data, workload) in asked.workloads.items()
    }
    common = Common(
        trained, machines.start, asked.targets, args.bf16, asked.epochs, asked.steps,
        args.at_most, args.lab is not None, machines.processors,
    )  # fmt: skip
    models = [workload for _, _, workload in asked.workloads.values()]
    groups = asked.groups(most_processes(models, max(asked.devices)))
    with closing(StudyDisplay()) as display:
        runs = Contest(common, folder, display.take).run(groups)
    runs = [replace(run, cluster=machines.words) for run in runs]
    sizes = args.batch_sizes or tuple(dict.fromkeys(w.batch_size for w in models))
    named = {name: workload for name, (_, _, workload) in asked.workloads.items()}
    runs = with_flops(runs, named, gpu() if args.lab is None else None, args.bf16)
    if args.predict:
        for workload in models:
            sizes_of = args.batch_sizes or (workload.batch_size,)
            runs += predicted(workload, asked.settings(sizes_of), args.predict)
    results = derive(
        StudyResults(
            title=" and ".join(trained),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=shlex.join(["synchromesh", *args.words]),
            machine=machine(),
            runs=tuple(runs),
            settings=asked.settings(sizes),
            cluster=machines.cluster,
            emulated=args.lab is not None,
            versions=versions(),
            price=asked.price or None,
            note=args.note,
        )
    )
    document.write(folder.results, results.to_json())
    document.write(folder.path / "results.csv", table(results))
    document.write(folder.path / "report.html", page(results))
    return results
