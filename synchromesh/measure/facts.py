"""The facts of a choice: all that a choice of plan needs, measured on the ranks that would run it.

    partitions   of the step under the layouts on the table
      -> programs      each distinct one, at the rows it would get and at a piece of them
      -> collectives   each kind on each pattern, up to the largest payload asked for
      -> overlap, optimizer, what a step costs besides

All ranks call `facts` alike and get equal profiles. What is known already is not measured again.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from synchromesh.measure.overlap import overlap
from synchromesh.measure.sprint import clock, ease
from synchromesh.measure.update import update
from synchromesh.profile import Compute, Curve, Memory, Pattern, Profile
from synchromesh.trace.local import LocalComponent, Partition
from synchromesh.trace.step import Step

LOOK_BYTES = 1 << 14  # the least payload with which links are looked at again ...
LOOK_SECONDS = 0.05  # ... and one call longer than this tells enough
LOOKS = 3  # runs that tell how devices compute now
SAMPLE_ROWS = 8  # real rows from which larger batches are tiled
TRAFFIC, QUOTA_TRAFFIC = 0.1, 0.4  # seconds of traffic that show overlap: periods of a quota
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
        more = overlap(world, ranks, kinds - set(profile.overlap), seconds)
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
                wanted.setdefault(key, _Wanted(partition, local, new, _remembered(known, key)))
    return _timed_on(world, ranks, subject, wanted, known) if wanted else ({}, [])


def _timed_on(
    world: World,
    ranks: Sequence[int],
    subject: Subject,
    wanted: Mapping[str, "_Wanted"],
    known: Profile,
) -> tuple[dict[str, Compute], list[str]]:
    """What all ranks tell of the programs that are wanted."""
    wall = known.sprint.credit and clock(world.device) is None
    least = LONG_BLOCK_SECONDS if wall else BLOCK_SECONDS
    with Streams(0, world.device).preserved():  # random operators draw from the user's generator
        if world.rank in ranks:
            mine = _timed(subject, wanted, world.device, least)
        else:
            mine = ((key, {}) for key in wanted)
        everyone = _told(world, mine, waits=len(ranks) < world.size)
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
    """A program to be timed, and with how many rows; its memory, where that is known: bytes grow
    with rows as they did, seconds need not."""

    partition: Partition
    local: LocalComponent
    rows: tuple[int, ...]
    memory: Memory | None = None


def _timed(
    subject: Subject,
    wanted: Mapping[str, _Wanted],
    device: torch.device,
    least: float,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each program's key and its numbers on this rank, or why there are none."""
    try:
        tensors = stand_ins(subject.step.chain, subject.tensors, device)
        sample = batches.take_rows(subject.example, 0, min(SAMPLE_ROWS, subject.rows))
        borders = record(subject.step, batches.to_device(sample, device), tensors, device)
    except Exception as error:  # whatever it is: the other ranks wait for this one's numbers
        fault = {"fault": f"the values between components: {_words(error)}"}
        yield from ((key, fault) for key in wanted)
        return
    for key, asked in wanted.items():
        yield key, _measured(subject, asked, tensors, borders, device, least)


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
    asked: _Wanted,
    tensors: Mapping[str, Tensor],
    borders: Mapping[str, Tensor],
    device: torch.device,
    least: float,
) -> dict[str, Any]:
    """Numbers of one program on this rank, or why there are none."""
    points, memory, spread = [], [], 0.0
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    partition, local = asked.partition, asked.local
    try:
        for rows in asked.rows:
            bench = Bench(subject.step, partition, local, tensors, borders, rows, device)
            if asked.memory is None:
                held = bench.bytes()
                memory.append((rows, held.kept, held.forward, held.backward, held.staying))
                inputs, outputs = held.kept_inputs, held.kept_outputs
            taken = bench.timing(least)
            points.append((rows, taken.forward, taken.backward))
            spread = max(spread, taken.spread)
            del bench
    except Exception as error:  # whatever it is: the other ranks wait for this one's numbers
        return {"fault": f"{local.component.name} ({local.layout}): {_words(error)}"}
    return {
        "points": points, "memory": memory, "spread": spread, "inputs": inputs, "outputs": outputs,
    }  # fmt: skip


def _joined(
    wanted: Mapping[str, _Wanted], ranks: Sequence[Mapping[str, Any]], pace: Sequence[float]
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
        found[key] = Compute(
            curves(key, 1),
            curves(key, 2),
            asked.memory or _memory(ranks[0][key]),
            max(float(rank[key]["spread"]) for rank in ranks),
        )
    return found, missing


def _remembered(known: Profile, key: str) -> Memory | None:
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
        host=_agreement(world),
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
    curves change by its own ratio. links: each kind of collective on each pattern, at sizes that
    grow until one takes `LOOK_SECONDS`; its curve changes by the ratio at its payload. Takes
    seconds; all ranks call alike.
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
    local, before = locals_[longest], known.compute[longest]
    wanted = _Wanted(
        partition, local, sizes(subject.rows, local.layout), _remembered(known, longest)
    )
    measured, _ = _timed_on(world, ranks, subject, {longest: wanted}, profile)
    if longest not in measured:
        return known
    ratios = []
    for then, now in zip(
        zip(*_sides(before), strict=True),
        zip(*_sides(measured[longest]), strict=True),
        strict=True,
    ):
        size = now[0].reach
        ratios.append(sum(c(size) for c in now) / max(1e-9, sum(c(size) for c in then)))
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


@dataclass(frozen=True)
class _Change:
    """What links take now over what they took: ratios at the sizes that were sampled, ascending;
    seconds more that the largest takes."""

    ratio: Curve
    more: float

    @classmethod
    def of(cls, before: Curve, now: Sequence[tuple[float, float]]) -> "_Change":
        ratio = Curve(tuple((x, y / max(1e-9, before(x))) for x, y in now))
        largest, seconds = now[-1]
        return cls(ratio, seconds - before(largest))

    @property
    def largest(self) -> float:
        """The ratio at the largest size."""
        return self.ratio.points[-1][1]

    def __call__(self, size: float, seconds: float) -> float:
        """Seconds now, where it took so many. Beyond the sizes: slower links take so much more a
        byte, whatever else had bounded them before; quicker ones take off in proportion."""
        least, most = self.ratio.points[0][0], self.ratio.reach
        if size > most and self.more > 0:
            return seconds + self.more * size / most
        return seconds * self.ratio(min(max(size, least), most))


def _links_again(world: World, ranks: Sequence[int], known: Profile) -> Profile:
    """Each kind on each pattern once more, at growing sizes; its curve and, by the largest size on
    the most ranks, the kind's overlap change alike. One that needs more ranks than there are
    changes as another one of its kind does."""
    changes: dict[tuple[str, Pattern], _Change] = {}
    for kind, pattern in sorted(known.network):
        if pattern.size * pattern.stride <= len(ranks):
            before = known.network[kind, pattern]
            sizes = [int(size) for size, _ in before.points if size >= LOOK_BYTES]
            now = network.sampled(world, ranks, kind, pattern, sizes, LOOK_SECONDS)
            changes[kind, pattern] = _Change.of(before, now)
    if not changes:
        return known
    of_kind = {key[0]: change for key, change in changes.items()}  # of the most ranks
    other = of_kind.get("all_reduce", next(iter(of_kind.values())))
    links = {}
    for key, curve in known.network.items():
        change = changes.get(key, of_kind.get(key[0], other))
        links[key] = Curve.of((x, change(x, y)) for x, y in curve.points)
    rates = {
        kind: o.stretched(of_kind.get(kind, other).largest) for kind, o in known.overlap.items()
    }
    return replace(known, network=links, overlap=rates, host=_agreement(world))
