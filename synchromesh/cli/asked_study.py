"""What a study is asked for on the command line of `compare`, checked before anything runs."""

import argparse
import hashlib
import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synchromesh.cli import options
from synchromesh.results.study import StudySettings
from synchromesh.study import strategy
from synchromesh.values.fault import message, near
from synchromesh.values.fields import to_plain

if TYPE_CHECKING:
    from synchromesh.study.cell import StudyCell
    from synchromesh.workloads.workload import Workload

NAME = re.compile(r"[^*?\[@]+\*?")  # a pattern that matches a module, or nothing


class AskedStudy:
    """What the command line asks for, checked as far as it can be before anything runs."""

    STEPS = 30  # that are timed where neither steps nor epochs nor a target are asked for

    def __init__(self, args: argparse.Namespace) -> None:
        from synchromesh.study.prediction import cluster
        from synchromesh.study.target import Target

        self.args = args
        self.strategies = tuple(dict.fromkeys((*args.strategies, *args.plan)))
        for name in self.strategies:
            strategy.check(name)
        self.price = options.price(args)
        for kind in args.predict:
            cluster(kind, 1)
        self.targets = tuple(Target.parse(text) for text in args.target)
        self._require_agreement()
        self.devices = args.nproc or (options.processes(None),)
        self.workloads = self._loaded()
        self._require_modules()
        usual = max(workload.epochs for workload in self.models)
        self.epochs = args.epochs or (usual if self.targets else None)
        self.steps = None if self.epochs else args.steps or self.STEPS
        if self.epochs and args.at_most is not None:
            raise ValueError("--at-most limits the steps that are timed: epochs are trained whole")
        self.groups(1)  # says what is wrong with batches

    def _require_agreement(self) -> None:
        args = self.args
        if self.targets and args.steps is not None:
            raise ValueError("--target needs validation, which --steps leaves out: use --epochs")
        if len(args.data) > 1 and len(args.data) != len(args.targets):
            raise ValueError(
                f"--data is given {len(args.data)} times for {len(args.targets)} TARGETs: give it "
                "once for all, or once for each in their order"
            )

    def _loaded(self) -> "dict[str, tuple[str, str | None, Workload]]":
        from synchromesh.workloads.target import load

        loaded: dict[str, tuple[str, str | None, Workload]] = {}
        folders = self.args.data or [None]
        for i, target in enumerate(self.args.targets):
            data = folders[i % len(folders)]
            workload = load(target, data)
            name = workload.name or target
            if name in loaded:
                raise ValueError(f"the workload {name} is there twice: give its TARGET once")
            for target_value in self.targets:
                target_value.check(metric_names(workload))
            loaded[name] = target, data, workload
        return loaded

    def _require_modules(self) -> None:
        """ValueError for a name in a plan that no model has a module for, which components are."""
        if not (patterns := strategy.patterns(self.strategies)):
            return
        from synchromesh.study.processes import built_without_values
        from synchromesh.trace.capture.components import root_name

        names: set[str] = set()
        for workload in self.models:
            model = built_without_values(workload)
            names |= {path for path, _ in model.named_modules(remove_duplicate=False)}
            names.add(root_name(model))
        for pattern, plan in patterns.items():
            if NAME.fullmatch(pattern) and not any(fnmatchcase(n, pattern) for n in names):
                raise ValueError(
                    f"strategy {plan!r}: pattern {pattern!r} matches no module of "
                    f"{' or '.join(self.workloads)}{near(pattern, names)}"
                )

    @property
    def models(self) -> "list[Workload]":
        return [workload for _, _, workload in self.workloads.values()]

    def settings(self, usual: Iterable[int]) -> StudySettings:
        """What the runs share. usual: the workloads' batch sizes, where none is asked for."""
        return StudySettings(
            self.strategies, self.devices, self.args.batch_sizes or tuple(usual),
            tuple(range(self.args.seeds)), self.args.scaling, self.epochs, self.steps,
            tuple(map(str, self.targets)), self.args.at_most, self.args.allow,
        )  # fmt: skip

    def groups(self, most: int) -> "list[list[StudyCell]]":
        """The cells, by those that take turns. ValueError for batches that data cannot fill."""
        from synchromesh.study.cell import grid, groups, require_distinct

        cut: list[list[StudyCell]] = []
        for name, (_, _, workload) in self.workloads.items():
            settings = self.settings([workload.batch_size])
            cells = grid(name, settings)
            for rows in {cell.batch for cell in cells}:
                replace(workload, batch_size=rows).check_batch()
            cut += groups(cells, settings, most)
        if not cut:
            raise ValueError(
                f"--strategies {','.join(self.strategies)} need more than one device and --nproc "
                "is 1: add single, or more devices"
            )
        cells = [cell for group in cut for cell in group]
        require_distinct(cells)
        _require_rows(cells)
        return cut

    def document(self) -> dict[str, Any]:
        """What makes a study this one: with another it does not share a folder."""
        args, settings = self.args, self.settings(w.batch_size for w in self.models)
        named = [target.rpartition(":")[0] for target in args.targets]
        # with another file it is another study
        files = {name: Path(name).read_bytes() for name in named if name.endswith(".py")}
        return {
            "workloads": list(self.workloads), "data": args.data,
            **{f"file {name}": hashlib.sha256(code).hexdigest() for name, code in files.items()},
            **to_plain(settings), "seeds": args.seeds, "bf16": args.bf16,
            "lab": args.lab and Path(args.lab).read_text(),
        }  # fmt: skip


def _require_rows(cells: "Sequence[StudyCell]") -> None:
    most: dict[int, int] = {}
    needing = [cell for cell in cells if cell.strategy in strategy.ROW_EACH]
    for cell in needing:
        most[cell.devices] = max(cell.batch, most.get(cell.devices, 0))
    for devices, rows in most.items():
        if devices > rows:
            names = ", ".join(dict.fromkeys(cell.strategy for cell in needing))
            raise ValueError(
                f"--nproc {devices} is more than the rows of any batch ({rows} at most), of which "
                f"{names} give each device one or more: ask for fewer devices, or for larger "
                "batches with --batch-sizes"
            )


def metric_names(workload: "Workload", sampled: int = 32, alike: float = 0.01) -> tuple[str, ...]:
    """What the workload's metric gives, of some rows under fresh weights; nothing without one.
    ValueError where it fails, or gives means: twice the same rows must give twice the sum.

    sampled: rows, at most. alike: how near to the same value that of twice as many is a mean."""
    import torch

    from synchromesh.trace.capture.batch import pick

    metric: Any = workload.metric
    if metric is None or workload.valid_data is None:
        return ()
    count = min(sampled, workload.batch_size)
    model, batch = workload.build().eval(), workload.example(count)

    def values(times: int) -> dict[str, float]:
        rows = torch.arange(times * count) % count
        carry = () if workload.carry is None else (workload.carry(len(rows)),)
        with torch.no_grad():
            given = metric(model, pick(batch, rows), *carry)
        return {name: float(value) for name, value in (given[0] if carry else given).items()}

    try:
        once, twice = values(1), values(2)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"the metric of {workload.name} fails on {count} rows ({type(error).__name__}: "
            f"{message(error)}; {where.filename}, line {where.lineno})"
        ) from error
    for name, value in once.items():
        if value and abs(twice[name] / value - 1) < alike:
            raise ValueError(
                f"the metric of {workload.name} gives a mean: {name} of {count} rows is "
                f"{value:.4g}, and of the same rows twice {twice[name]:.4g}; give the sum over "
                "the rows, which ranks can add up"
            )
    return tuple(once)
