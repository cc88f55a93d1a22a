"""The facts of a choice: what a choice of plan needs, measured on the ranks that would run it.

    partitions   of the step under the layouts on the table
      -> programs      each distinct one, at the rows it would get and at a piece of them
      -> collectives   each kind on each pattern, up to the largest payload asked for
      -> overlap, optimizer, what a step costs besides

All ranks call `facts` alike and get equal profiles. What is known already is not measured again.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from synchromesh.engine import batches
from synchromesh.engine.groups import World
from synchromesh.engine.overlap import PIECES
from synchromesh.layout import Layout
from synchromesh.measure import network
from synchromesh.measure.borders import record, stand_ins
from synchromesh.measure.compute import BLOCK_SECONDS, LONG_BLOCK_SECONDS, Bench
from synchromesh.measure.sprint import sprint
from synchromesh.measure.update import update
from synchromesh.profile import Compute, Curve, Memory, Pattern, Profile
from synchromesh.trace.local import LocalComponent, Partition
from synchromesh.trace.step import Step

SAMPLE_ROWS = 8  # real rows from which larger batches are tiled
SMALL = 256  # bytes of the messages that every step sends to agree


@dataclass(frozen=True)
class Subject:
    """What is measured: the step, its tensors as far as this rank has them whole, an example."""

    step: Step
    tensors: Mapping[str, Tensor]
    example: Any  # a global batch
    optimizer: Optimizer
    rows: int  # of a global batch


def facts(
    world: World,
    ranks: Sequence[int],
    subject: Subject,
    partitions: Iterable[Partition],
    known: Profile | None = None,
    besides: Iterable[tuple[str, Pattern, int]] = (),
) -> Profile:
    """The profile of `partitions`, each on all of `ranks`, with what `known` has besides.

    besides: kinds, patterns and payloads of further collectives that may be asked for.
    """
    began = time.perf_counter()
    made = list(partitions)
    wanted = [w for p in made for w in traffic(p, subject.rows, len(ranks))] + list(besides)
    kinds = {kind for kind, _, _ in wanted}
    profile = _besides(world, ranks, subject, kinds) if known is None else known
    compute, missing = _programs(world, ranks, subject, made, profile)
    new = [w for w in wanted if w[:2] not in profile.network]
    found = network.collectives(world, ranks, new)
    return replace(
        profile,
        compute={**profile.compute, **compute},
        network={**profile.network, **found},
        missing=tuple(dict.fromkeys((*profile.missing, *missing))),
        seconds=profile.seconds + time.perf_counter() - began,
    )


def _programs(
    world: World,
    ranks: Sequence[int],
    subject: Subject,
    partitions: Sequence[Partition],
    known: Profile,
) -> tuple[dict[str, Compute], list[str]]:
    """Every distinct program that is not known yet, timed on each rank at the same time."""
    wanted: dict[str, tuple[Partition, LocalComponent]] = {}
    for partition in partitions:
        for local in partition.components:
            key = partition.program(local)
            if key not in known.compute:
                wanted.setdefault(key, (partition, local))
    if not wanted:
        return {}, []
    device = world.device
    tensors = stand_ins(subject.step.chain, subject.tensors, device)
    sample = batches.take_rows(subject.example, 0, min(SAMPLE_ROWS, subject.rows))
    borders = record(subject.step, batches.to_device(sample, device), tensors, device)
    mine: dict[str, Any] = {}
    least = LONG_BLOCK_SECONDS if known.sprint.credit else BLOCK_SECONDS
    for key, (partition, local) in wanted.items():
        mine[key] = _measured(subject, partition, local, tensors, borders, world.device, least)
    everyone = world.everyone.all_gather_json(mine)
    return _joined(wanted, [everyone[r] for r in ranks])


def sizes(rows: int, layout: Layout) -> tuple[int, ...]:
    """The rows at which a program is timed: of a data block, and of a piece of it."""
    block = -(-rows // layout.data)
    return tuple(sorted({block, max(1, -(-block // PIECES))}))


def _measured(
    subject: Subject,
    partition: Partition,
    local: LocalComponent,
    tensors: Mapping[str, Tensor],
    borders: Mapping[str, Tensor],
    device: torch.device,
    least: float,
) -> dict[str, Any]:
    """Numbers of one program on this rank, or why there are none."""
    points, memory, spread = [], [], 0.0
    try:
        for rows in sizes(subject.rows, local.layout):
            bench = Bench(subject.step, partition, local, tensors, borders, rows, device)
            taken, held = bench.timing(least), bench.bytes()
            points.append((rows, taken.forward, taken.backward))
            memory.append((rows, held.kept, held.forward, held.backward))
            spread = max(spread, taken.spread)
            inputs, outputs = held.kept_inputs, held.kept_outputs
            del bench
    except (RuntimeError, MemoryError) as error:  # torch's allocator raises RuntimeError
        reason = str(error).partition("\n")[0][:200]
        return {"fault": f"{local.component.name} ({local.layout}): {reason}"}
    return {
        "points": points, "memory": memory, "spread": spread, "inputs": inputs, "outputs": outputs,
    }  # fmt: skip


def _joined(
    wanted: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Compute], list[str]]:
    found, missing = {}, []
    for key in wanted:
        faults = [rank[key]["fault"] for rank in ranks if "fault" in rank[key]]
        if faults:
            missing.append(faults[0])
            continue
        first = ranks[0][key]
        kept, forward, backward = (
            Curve.of((row[0], row[i]) for row in first["memory"]) for i in (1, 2, 3)
        )
        found[key] = Compute(
            tuple(Curve.of((p[0], p[1]) for p in rank[key]["points"]) for rank in ranks),
            tuple(Curve.of((p[0], p[2]) for p in rank[key]["points"]) for rank in ranks),
            Memory(kept, forward, backward, tuple(first["inputs"]), tuple(first["outputs"])),
            max(float(rank[key]["spread"]) for rank in ranks),
        )
    return found, missing


def traffic(partition: Partition, rows: int, devices: int) -> Iterable[tuple[str, Pattern, int]]:
    """Kinds, patterns and payloads of what a partition sends; gradients over all data ranks."""
    for local in partition.components:
        for c in local.collectives:
            if c.ranks > 1:
                data = c.data or local.layout.data
                yield c.kind, Pattern(c.ranks, c.stride), c.payload(-(-rows // data))
        layout = local.layout
        bytes_ = sum(p.bytes for p in local.component.parameters if p.trainable)
        for pattern in {Pattern(layout.data, layout.tensor), Pattern(devices)}:
            if pattern.size > 1 and bytes_:
                yield "all_reduce", pattern, min(bytes_, 26 << 20)


def _besides(
    world: World, ranks: Sequence[int], subject: Subject, kinds: Iterable[str]
) -> Profile:
    """What no component has: overlap, the optimizer, agreement and Python of a step."""
    dtypes = [p.dtype for p in subject.optimizer.param_groups[0]["params"]]
    taken = update(subject.optimizer, world.device, dtypes[0])
    numbers = [taken.byte, taken.tensor, taken.copy_byte]
    table = world.everyone.all_gather_json(numbers)
    byte, tensor, copy_byte = (max(column) for column in zip(*table, strict=True))
    quick = sprint(world)
    seconds = LONG_BLOCK_SECONDS if quick.credit else BLOCK_SECONDS
    return Profile(
        devices=len(ranks),
        overlap=network.overlap(world, ranks, kinds, seconds),
        sprint=quick,
        update_byte=byte,
        update_tensor=tensor,
        copy_byte=copy_byte,
        state_factor=taken.state_factor,
        host=_agreement(world),
    )


def _agreement(world: World) -> float:
    """Seconds of the control messages of a step: an all-gather of three numbers, an all-reduce of
    two."""
    numbers = torch.zeros(3, dtype=torch.int64, device=world.device)
    began, runs = 0.0, 6
    for turn in range(runs + 1):
        if turn == 1:
            world.everyone.barrier()
            began = time.perf_counter()
        world.everyone.all_gather(numbers, counted=False)
        world.everyone.all_reduce(
            torch.zeros(2, dtype=torch.float64, device=world.device), counted=False
        )
    spent = (time.perf_counter() - began) / runs
    return max(float(t) for t in world.everyone.all_gather_json(spent))
