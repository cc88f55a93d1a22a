"""The facts of a choice: all that a choice of plan needs, measured on the ranks that would run it.

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
from synchromesh.engine.random import Streams
from synchromesh.layout import Layout
from synchromesh.measure import network
from synchromesh.measure.borders import record, stand_ins
from synchromesh.measure.compute import BLOCK_SECONDS, LONG_BLOCK_SECONDS, Bench
from synchromesh.measure.sprint import clock, ease
from synchromesh.measure.update import update
from synchromesh.profile import Compute, Curve, Memory, Pattern, Profile
from synchromesh.trace.local import LocalComponent, Partition
from synchromesh.trace.step import Step

LOOK_SECONDS = 0.1  # one call longer than this tells how links are now
LOOKS = 3  # runs that tell how devices compute now
SAMPLE_ROWS = 8  # real rows from which larger batches are tiled
TRAFFIC, QUOTA_TRAFFIC = 0.02, 0.08  # seconds of a collective that shows overlap
EXTRAPOLATE = 1.5  # times the rows that were timed, beyond which a program is timed again


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
    profile = _besides(world, ranks, subject) if known is None else known
    if kinds - set(profile.overlap):
        seconds = QUOTA_TRAFFIC if profile.sprint.credit else TRAFFIC
        more = network.overlap(world, ranks, kinds - set(profile.overlap), seconds)
        profile = replace(profile, overlap={**profile.overlap, **more})
    compute, missing = _programs(world, ranks, subject, made, profile)
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
) -> tuple[dict[str, Compute], list[str]]:
    """Every distinct program that is not known yet, or not for so many rows, timed on `ranks` at
    the same time while the others are idle, as they will be: hosts may share more than links."""
    wanted: dict[str, _Wanted] = {}
    for partition in partitions:
        for local in partition.components:
            key = partition.program(local)
            reach = known.compute[key].reach if key in known.compute else 0.0
            rows = sizes(subject.rows, local.layout)
            if rows[-1] > EXTRAPOLATE * reach:
                new = tuple(n for n in rows if n > reach)
                wanted.setdefault(key, _Wanted(partition, local, new))
    if not wanted:
        return {}, []
    wall = known.sprint.credit and clock(world.device) is None
    least = LONG_BLOCK_SECONDS if wall else BLOCK_SECONDS
    with Streams(0, world.device).preserved():  # random operators draw from the user's generator
        mine = _timed(subject, wanted, world.device, least) if world.rank in ranks else {}
    everyone = world.everyone.all_gather_json(mine)
    first, speeds = ranks[0], known.speeds()
    told, pace = [], []
    for r in range(world.size):
        idle = r not in ranks  # takes what the first one does, at its own speed
        slower = speeds[first] / speeds[r] if idle and len(speeds) == world.size else 1.0
        told.append(everyone[first if idle else r])
        pace.append(known.pace_of(first if idle else r) * slower)
    return _joined(wanted, told, pace)


@dataclass(frozen=True)
class _Wanted:
    """A program to be timed, and with how many rows."""

    partition: Partition
    local: LocalComponent
    rows: tuple[int, ...]


def _timed(
    subject: Subject,
    wanted: Mapping[str, _Wanted],
    device: torch.device,
    least: float,
) -> dict[str, Any]:
    """The numbers of every program on this rank, by key, or why there are none."""
    try:
        tensors = stand_ins(subject.step.chain, subject.tensors, device)
        sample = batches.take_rows(subject.example, 0, min(SAMPLE_ROWS, subject.rows))
        borders = record(subject.step, batches.to_device(sample, device), tensors, device)
    except Exception as error:  # whatever it is: the other ranks wait for this one's numbers
        fault = {"fault": f"the values between components: {_words(error)}"}
        return {key: fault for key in wanted}
    return {
        key: _measured(subject, asked, tensors, borders, device, least)
        for key, asked in wanted.items()
    }


def _words(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0][:200]


def sizes(rows: int, layout: Layout) -> tuple[int, ...]:
    """The rows at which a program is timed: of a data block, and of a piece of it."""
    block = -(-rows // layout.data)
    return tuple(sorted({block, max(1, -(-block // PIECES))}))


def _measured(
    subject: Subject,
    asked: _Wanted,
    tensors: Mapping[str, Tensor],
    borders: Mapping[str, Tensor],
    device: torch.device,
    least: float,
) -> dict[str, Any]:
    """Numbers of one program on this rank, or why there are none."""
    points, memory, spread = [], [], 0.0
    partition, local = asked.partition, asked.local
    try:
        for rows in asked.rows:
            bench = Bench(subject.step, partition, local, tensors, borders, rows, device)
            held, taken = bench.bytes(), bench.timing(least)
            points.append((rows, taken.forward, taken.backward))
            memory.append((rows, held.kept, held.forward, held.backward, held.staying))
            spread = max(spread, taken.spread)
            inputs, outputs = held.kept_inputs, held.kept_outputs
            del bench
    except Exception as error:  # whatever it is: the other ranks wait for this one's numbers
        return {"fault": f"{local.component.name} ({local.layout}): {_words(error)}"}
    return {
        "points": points, "memory": memory, "spread": spread, "inputs": inputs, "outputs": outputs,
    }  # fmt: skip


def _joined(
    wanted: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], pace: Sequence[float]
) -> tuple[dict[str, Compute], list[str]]:
    """What the ranks told; pace: what passes on the wall in a second of their clocks."""
    found, missing = {}, []

    def curves(key: str, side: int) -> tuple[Curve, ...]:
        return tuple(
            Curve.of((p[0], p[side] * seconds) for p in rank[key]["points"])
            for rank, seconds in zip(ranks, pace, strict=True)
        )

    for key in wanted:
        faults = [rank[key]["fault"] for rank in ranks if "fault" in rank[key]]
        if faults:
            missing.append(faults[0])
            continue
        first = ranks[0][key]
        kept, forward, backward, staying = (
            Curve.of((row[0], row[i]) for row in first["memory"]) for i in (1, 2, 3, 4)
        )
        found[key] = Compute(
            curves(key, 1),
            curves(key, 2),
            Memory(
                kept, forward, backward, staying, tuple(first["inputs"]), tuple(first["outputs"])
            ),
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


def _besides(world: World, ranks: Sequence[int], subject: Subject) -> Profile:
    """What no component has: sprint, the optimizer, agreement and Python of a step."""
    dtypes = [p.dtype for group in subject.optimizer.param_groups for p in group["params"]]
    found = ease(world)
    taken = update(subject.optimizer, world.device, dtypes[0])
    pace = found.pace[world.rank]
    numbers = [pace * n for n in (taken.byte, taken.tensor, taken.copy_byte)]
    table = world.everyone.all_gather_json(numbers)
    byte, tensor, copy_byte = (max(column) for column in zip(*table, strict=True))
    return Profile(
        devices=len(ranks),
        sprint=found.sprint,
        pace=found.pace,
        update_byte=byte,
        update_tensor=tensor,
        copy_byte=copy_byte,
        state_factor=taken.state_factor,
        work_largest=taken.work_largest,
        work_byte=taken.work_byte,
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


def again(
    world: World,
    ranks: Sequence[int],
    subject: Subject,
    partition: Partition,
    known: Profile,
    devices: bool,
    links: bool,
) -> Profile:
    """`known` after a change: what drifted is sampled and its curves are scaled accordingly.

    devices: the longest program of `partition` is timed once more on every rank, and each rank's
    curves change by its own ratio. links: an all-reduce on all ranks at a few sizes; curves of all
    collectives change by the ratio at their payload. Takes seconds; all ranks call alike.
    """
    began = time.perf_counter()
    profile = known
    if devices:
        profile = _devices_again(world, ranks, subject, partition, profile)
    if links:
        profile = _links_again(world, ranks, profile)
    return replace(profile, seconds=known.seconds + time.perf_counter() - began)


def _devices_again(
    world: World, ranks: Sequence[int], subject: Subject, partition: Partition, known: Profile
) -> Profile:
    found = ease(world, LOOKS)
    profile = replace(known, sprint=found.sprint, pace=found.pace)
    locals_ = {partition.program(c): c for c in partition.components}

    def seconds(key: str) -> float:
        return sum(max(c(c.reach) for c in side) for side in _sides(known.compute[key]))

    timed = [k for k in locals_ if k in known.compute]
    if not timed:  # nothing to compare with: what is new is measured when plans are priced
        return profile
    longest = max(timed, key=seconds)
    fresh = replace(profile, compute={})
    single = replace(partition, components=(locals_[longest],))
    measured, _ = _programs(world, ranks, subject, [single], fresh)
    if longest not in measured:
        return known
    ratios = []
    for before, now in zip(
        zip(*_sides(known.compute[longest]), strict=True),
        zip(*_sides(measured[longest]), strict=True),
        strict=True,
    ):
        size = now[0].reach
        ratios.append(sum(c(size) for c in now) / max(1e-9, sum(c(size) for c in before)))
    scaled = {
        key: replace(
            found,
            forward=tuple(c.scaled(r) for c, r in zip(found.forward, ratios, strict=True)),
            backward=tuple(c.scaled(r) for c, r in zip(found.backward, ratios, strict=True)),
        )
        for key, found in known.compute.items()
    }
    slowest = max(ratios)  # the optimizer's costs are those of the slowest rank
    return replace(
        profile,
        compute=scaled,
        update_byte=known.update_byte * slowest,
        update_tensor=known.update_tensor * slowest,
        copy_byte=known.copy_byte * slowest,
    )


def _sides(found: Compute) -> tuple[tuple[Curve, ...], tuple[Curve, ...]]:
    return found.forward, found.backward


def _links_again(world: World, ranks: Sequence[int], known: Profile) -> Profile:
    pattern = Pattern(len(ranks))
    before = known.network.get(("all_reduce", pattern))
    if before is None:
        return known
    chosen = [int(size) for size, _ in before.points]
    now = network.at_sizes(world, ranks, "all_reduce", pattern, chosen, LOOK_SECONDS)
    ratio = Curve(tuple((x, y / max(1e-9, before(x))) for x, y in now))

    def scaled(curve: Curve) -> Curve:
        return Curve.of(
            (x, y * ratio(min(max(x, now[0][0]), now[-1][0]))) for x, y in curve.points
        )

    network_now = {key: scaled(c) for key, c in known.network.items()}
    return replace(known, network=network_now, host=_agreement(world))
