"""The facts of a choice: all that a choice of plan needs, measured on the ranks that would run it.

    partitions   of the step under the layouts on the table
      -> programs      each distinct one, at the rows it would get and at a piece of them
      -> collectives   each kind on each pattern, up to the largest payload asked for
      -> overlap, optimizer, what a step costs besides

All ranks call `facts` alike and get equal profiles. What is known already is not measured again.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from synchromesh.engine import batches
from synchromesh.engine.groups import World
from synchromesh.engine.overlap import PIECES
from synchromesh.engine.random import Streams
from synchromesh.profiling import collectives as network
from synchromesh.profiling.borders import record, stand_ins
from synchromesh.profiling.burst_speed import ease
from synchromesh.profiling.clock import clock
from synchromesh.profiling.compute import BLOCK_SECONDS, LONG_BLOCK_SECONDS, Bench
from synchromesh.profiling.memory import storage_bytes
from synchromesh.profiling.optimizer import update
from synchromesh.profiling.overlap import overlap
from synchromesh.trace.capture.export import take
from synchromesh.trace.partition.local import LocalComponent, Partition
from synchromesh.trace.step import Step
from synchromesh.values.layout import Layout
from synchromesh.values.profile import Compute, Curve, Memory, Pattern, Profile

SAMPLE_ROWS = 8  # real rows from which larger batches are tiled
TRAFFIC, QUOTA_TRAFFIC = 0.1, 0.4  # seconds of traffic that show overlap: periods of a quota
ROOMY = 3.0  # times the memory that a program is thought to need
EXTRAPOLATE = 1.5  # times the rows that were timed, beyond which a program is timed again


@dataclass(frozen=True)
class Subject:
    """What is measured: the step, its tensors as far as this rank has them whole, an example."""

    step: Step
    tensors: Mapping[str, Tensor]
    example: Any  # a global batch
    optimizer: Optimizer
    rows: int  # of a global batch
    limit: float = float("inf")  # bytes of tensors that this rank may hold; measuring stops there
    refused: dict[str, int] = field(default_factory=dict)  # programs, the rows that did not fit

    @property
    def held(self) -> list[Tensor]:
        """What is there before anything is measured."""
        given = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in given if p.grad is not None]
        state = (x for s in self.optimizer.state.values() for x in s.values())
        tensors = (x for x in state if isinstance(x, Tensor))
        found = [*self.tensors.values(), *given, *gradients, *tensors]
        return [x for x in found if not x.is_meta and x.layout == torch.strided]


def facts(
    world: World,
    ranks: Sequence[int],
    subject: Subject,
    partitions: Iterable[Partition],
    known: Profile | None = None,
    besides: Iterable[tuple[str, Pattern, int]] = (),
    quick: bool = False,
) -> Profile:
    """The profile of `partitions`, each on all of `ranks`, with what `known` has besides.

    besides: kinds, patterns and payloads of further collectives that may be asked for. quick: the
    memory of programs that are known for fewer rows is not watched where there is plenty.
    """
    began = time.perf_counter()
    made = list(partitions)
    wanted = [w for p in made for w in traffic(p, subject.rows, len(ranks))] + list(besides)
    kinds = {kind for kind, _, _ in wanted}
    profile = _besides(world, ranks, subject) if known is None else known
    if kinds - set(profile.overlap):
        seconds = QUOTA_TRAFFIC if profile.sprint.credit else TRAFFIC
        more = overlap(world, ranks, kinds - set(profile.overlap), seconds)
        profile = replace(profile, overlap={**profile.overlap, **more})
    compute, missing = _programs(world, ranks, subject, made, profile, quick)
    links = profile.network
    new = [w for w in wanted if w[:2] not in links or not network.reaches(links[w[:2]], w[2])]
    found = network.collectives(world, ranks, new)
    return replace(
        profile,
        compute={
            **profile.compute,
            **{
                k: profile.compute[k].joined(c) if k in profile.compute else c
                for k, c in compute.items()
            },
        },
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
    quick: bool,
) -> tuple[dict[str, Compute], list[str]]:
    """Every distinct program that is not known yet, or not for so many rows, timed on `ranks` at
    the same time while the others are idle, as they will be: hosts may share more than links."""
    wanted: dict[str, Wanted] = {}
    for partition in partitions:
        for local in partition.components:
            key = partition.program(local)
            reach = known.compute[key].reach if key in known.compute else 0.0
            rows = sizes(subject.rows, local.layout)
            if rows[-1] > EXTRAPOLATE * reach:
                fits = subject.refused.get(key, rows[-1] + 1)
                new = tuple(n for n in rows if reach < n < fits)
                if not new:
                    continue
                memory = remembered(known, key) if quick else None
                wanted.setdefault(key, Wanted(partition, local, new, memory))
    return timed_on(world, ranks, subject, wanted, known) if wanted else ({}, [])


def timed_on(
    world: World,
    ranks: Sequence[int],
    subject: Subject,
    wanted: Mapping[str, "Wanted"],
    known: Profile,
    block: float = 0.0,
) -> tuple[dict[str, Compute], list[str]]:
    """What all ranks tell of the programs that are wanted. block: seconds on the wall of one of
    the blocks of runs that are timed, at least."""
    wall = known.sprint.credit and clock(world.device) is None
    least = LONG_BLOCK_SECONDS if wall else BLOCK_SECONDS
    least = max(least, block / known.pace_of(world.rank))
    with Streams(0, world.device).preserved():  # random operators draw from the user's generator
        if world.rank in ranks:
            mine = _timed(subject, wanted, world.device, least)
        else:
            mine = ((key, {}) for key in wanted)
        everyone = _told(world, mine, waits=len(ranks) < world.size)
    first, speeds = ranks[0], known.speeds
    told, pace = [], []
    for r in range(world.size):
        idle = r not in ranks  # takes what the first one does, at its own speed or pace
        told.append(everyone[first if idle else r])
        for key, numbers in everyone[r].items():
            if "lacking" in numbers:
                subject.refused[key] = min(numbers["lacking"], subject.refused.get(key, 1 << 62))
        known_speed = idle and len(speeds) == world.size
        pace.append(
            known.pace_of(first) * speeds[first] / speeds[r] if known_speed else known.pace_of(r)
        )
    return _joined(wanted, told, pace)


@dataclass(frozen=True)
class Wanted:
    """A program to be timed, and with how many rows; memory: as far as it is known, where it need
    not be watched anew."""

    partition: Partition
    local: LocalComponent
    rows: tuple[int, ...]
    memory: Memory | None = None

    def roomy(self, rows: int, left: float) -> bool:
        """Whether memory is known and far from the bytes that are left. Beyond the rows that it
        was measured at it is no more than a lower bound: another moment may then be the highest.
        """
        if self.memory is None:
            return False
        return ROOMY * max(self.memory.forward(rows), self.memory.backward(rows)) <= left


def _timed(
    subject: Subject,
    wanted: Mapping[str, Wanted],
    device: torch.device,
    least: float,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each program's key and its numbers on this rank, or why there are none."""
    try:
        tensors = stand_ins(subject.step.chain, subject.tensors, device)
        sample = take(subject.example, 0, min(SAMPLE_ROWS, subject.rows))
        borders = record(subject.step, batches.to_device(sample, device), tensors, device)
        taken = storage_bytes((*subject.held, *tensors.values(), *borders.values()))
    except Exception as error:  # whatever it is: the other ranks wait for this one's numbers
        fault = {"fault": f"the values between components: {_words(error)}"}
        yield from ((key, fault) for key in wanted)
        return
    left = subject.limit - taken
    for key, asked in wanted.items():
        yield key, _measured(subject, asked, tensors, borders, left, device, least)


def _told(
    world: World, mine: Iterator[tuple[str, dict[str, Any]]], waits: bool
) -> list[dict[str, Any]]:
    """What every rank tells of every program. Where some ranks wait for others, one after the
    other: no wait is longer than a program."""
    if not waits:
        return world.everyone.all_gather_json(dict(mine))
    everyone: list[dict[str, Any]] = [{} for _ in range(world.size)]
    for key, numbers in mine:
        for rank, told in enumerate(world.everyone.all_gather_json(numbers)):
            everyone[rank][key] = told
    return everyone


def _words(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0][:200]


def sizes(rows: int, layout: Layout) -> tuple[int, ...]:
    """The rows at which a program is timed: of a data block, and of a piece of it."""
    block = -(-rows // layout.data)
    return tuple(sorted({block, max(1, -(-block // PIECES))}))


def _measured(
    subject: Subject,
    asked: Wanted,
    tensors: Mapping[str, Tensor],
    borders: Mapping[str, Tensor],
    left: float,
    device: torch.device,
    least: float,
) -> dict[str, Any]:
    """Numbers of one program on this rank, or why there are none. left: bytes that it may take;
    with rows that need more it is not run."""
    points, memory, spread = [], [], 0.0
    lack: dict[str, Any] = {}
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    partition, local = asked.partition, asked.local
    what = f"{local.component.name} ({local.layout})"
    try:
        for rows in asked.rows:
            if Bench.input_bytes(local, borders, rows) > left:
                raise MemoryError
            bench = Bench(subject.step, partition, local, tensors, borders, rows, device)
            if not asked.roomy(rows, left):
                held = bench.bytes(left)
                memory.append((rows, held.kept, held.forward, held.backward, held.staying))
                inputs, outputs = held.kept_inputs, held.kept_outputs
            taken = bench.timing(least)
            points.append((rows, taken.forward, taken.backward))
            spread = max(spread, taken.spread)
            del bench
    except Exception as error:  # whatever it is: the other ranks wait for this one's numbers
        if not _out_of_memory(error):
            return {"fault": f"{what}: {_words(error)}"}
        lack = {"lacking": rows, "lack": f"{what}: {rows} rows take more memory than is left"}
    if not points:
        return {"fault": lack["lack"], **lack}
    return {
        "points": points, "memory": memory, "spread": spread, "inputs": inputs,
        "outputs": outputs, **lack,
    }  # fmt: skip


def _out_of_memory(error: Exception) -> bool:
    """Whether that is what failed; PyTorch's own words on a CPU are no class."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "allocate memory" in str(error)


def _joined(
    wanted: Mapping[str, Wanted], ranks: Sequence[Mapping[str, Any]], pace: Sequence[float]
) -> tuple[dict[str, Compute], list[str]]:
    """What the ranks told; pace: what passes on the wall in a second of their clocks."""
    found, missing = {}, []

    def curves(key: str, side: int) -> tuple[Curve, ...]:
        return tuple(
            Curve.of((p[0], p[side] * seconds) for p in rank[key]["points"])
            for rank, seconds in zip(ranks, pace, strict=True)
        )

    for key, asked in wanted.items():
        faults = [rank[key]["fault"] for rank in ranks if "fault" in rank[key]]
        if faults:
            missing.append(faults[0])
            continue
        missing += [rank[key]["lack"] for rank in ranks if "lack" in rank[key]][:1]
        found[key] = Compute(
            curves(key, 1),
            curves(key, 2),
            _memory(ranks[0][key])
            if ranks[0][key]["memory"] or not asked.memory
            else asked.memory,
            max(float(rank[key]["spread"]) for rank in ranks),
        )
    return found, missing


def remembered(known: Profile, key: str) -> Memory | None:
    """A program's memory where two sizes of it were measured, which tell all others."""
    memory = known.compute[key].memory if key in known.compute else None
    return memory if memory and len(memory.kept.points) > 1 else None


def _memory(told: Mapping[str, Any]) -> Memory:
    kept, forward, backward, staying = (
        Curve.of((row[0], row[i]) for row in told["memory"]) for i in (1, 2, 3, 4)
    )
    inputs, outputs = (tuple(told[side]) for side in ("inputs", "outputs"))
    return Memory(kept, forward, backward, staying, inputs, outputs)


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


def _besides(world: World, ranks: Sequence[int], subject: Subject) -> Profile:
    """What no component has: sprint, the optimizer, agreement and Python of a step."""
    found = ease(world)
    costs, fault = _costs(world, subject.optimizer)
    pace = found.pace[world.rank]
    table = world.everyone.all_gather_json([pace * n for n in costs[:3]] + list(costs[3:]))
    byte, tensor, copy_byte, state, largest, work = (max(c) for c in zip(*table, strict=True))
    faults = [f for f in world.everyone.all_gather_json(fault) if f]
    return Profile(
        devices=len(ranks),
        sprint=found.sprint,
        pace=found.pace,
        update_byte=byte,
        update_tensor=tensor,
        copy_byte=copy_byte,
        state_factor=state,
        work_largest=largest,
        work_byte=work,
        host=agreement(world),
        missing=tuple(f"the optimizer's step: {f}" for f in faults[:1]),
    )


def _costs(world: World, optimizer: Optimizer) -> tuple[tuple[float, ...], str]:
    """An optimizer's seconds a byte, a tensor and a copied byte, its bytes of state and of work;
    nothing, and why, where its step fails."""
    dtypes = [p.dtype for group in optimizer.param_groups for p in group["params"]]
    try:
        t = update(optimizer, world.device, dtypes[0])
    except Exception as error:  # whatever it is: the other ranks wait for this one's numbers
        return (0.0,) * 6, _words(error)
    return (t.byte, t.tensor, t.copy_byte, t.state_factor, t.work_largest, t.work_byte), ""


def agreement(world: World) -> float:
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
