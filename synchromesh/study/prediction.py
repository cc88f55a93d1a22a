"""Rows of a study that nobody has run: what strategies would take on devices of the catalogue."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch

from synchromesh import catalogue
from synchromesh.planner.candidate import Candidate
from synchromesh.planning.offline import lacking, quickest
from synchromesh.results.run import Quartiles, RunResult
from synchromesh.results.study import StudySettings
from synchromesh.study import strategy
from synchromesh.study.cell import StudyCell, grid
from synchromesh.trace.capture.capture import trace
from synchromesh.trace.capture.carry import joined
from synchromesh.values.cluster import Cluster
from synchromesh.workloads.stand_in import stand_in
from synchromesh.workloads.workload import Workload


def cluster(kind: str, devices: int) -> Cluster:
    """So many of `v100`, or `v100-ethernet25` with another network. ValueError: no such kind."""
    device, dash, network = kind.partition("-")
    return catalogue.cluster(f"{device}x{devices}{dash}{network}")


def predicted(
    workload: Workload, settings: StudySettings, kinds: Sequence[str], bf16: bool = False
) -> list[RunResult]:
    """A row for each strategy of ours, number of devices and batch size, on each kind of device;
    of a model that cannot be traced with the reason. bf16: computed in bfloat16 by autocast."""
    name = workload.name or ""
    model, autocast = stand_in(workload), torch.bfloat16 if bf16 else None
    ours = tuple(s for s in settings.strategies if s not in strategy.RIVALS)
    cells = grid(name, replace(settings, strategies=ours, seeds=settings.seeds[:1]))
    rows: list[RunResult] = []
    for size, of_size in _by(cells, "batch"):
        loss, batch = joined(workload.loss, workload.example(size), workload.carry)
        step = trace(model, loss, batch, training=True, autocast=autocast)
        if step.opaque:
            why = f"nothing can be estimated of a model that runs whole: {step.reason}"
            rows += [_row(c, kind, None, why) for kind in kinds for c in of_size]
            continue
        for kind, (devices, here) in product(kinds, _by(of_size, "devices")):
            place = cluster(kind, devices)
            if warning := lacking(place, autocast):
                warnings.warn(warning, stacklevel=2)
            families, failed = _families(here)
            best = quickest(
                step, model, workload.build_optimizer, batch, place, families, settings.allow
            )
            rows += [_row(c, kind, best.get(c.strategy), failed.get(c.strategy, "")) for c in here]
    return rows


def _by(cells: Sequence[StudyCell], name: str) -> list[tuple[int, list[StudyCell]]]:
    groups: dict[int, list[StudyCell]] = {}
    for cell in cells:
        groups.setdefault(getattr(cell, name), []).append(cell)
    return list(groups.items())


def _families(cells: Sequence[StudyCell]) -> tuple[dict[str, list[str]], dict[str, str]]:
    families, failed = dict[str, list[str]](), dict[str, str]()
    for cell in cells:
        try:
            families[cell.strategy] = strategy.plans(cell.strategy, cell.devices, cell.batch)
        except ValueError as error:
            failed[cell.strategy] = str(error)
    return families, failed


def _row(cell: StudyCell, kind: str, best: Candidate | None, why: str) -> RunResult:
    reason = why if best is None else "" if best.fits else best.reason
    row = replace(cell.failed(reason), predicted=True, cluster=kind)
    if best is None or best.time is None or not best.fits:
        return row
    seconds = best.seconds
    return replace(
        row, status="done", plan=str(best.plan), step_seconds=Quartiles(seconds, seconds, seconds),
        samples_per_second=cell.batch / seconds, computation_share=best.time.computed / seconds,
        predicted_step_seconds=seconds, predicted_peak_bytes=max(m.peak for m in best.memory),
    )  # fmt: skip
