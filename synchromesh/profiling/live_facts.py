"""Live facts: all that deciding a plan asks for, measured on the ranks that would run it.

    partitions   of the step under the layouts on the table
      -> programs      each distinct one, at the rows it would get and at a micro-batch of them
      -> collectives   each kind on each pattern, up to the largest payload asked for
      -> overlap, optimizer, what a step costs besides

All ranks call alike and get equal profiles. What is known already is not measured again."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from synchromesh.engine import batches, control_channel
from synchromesh.engine.world import World
from synchromesh.planner.problem import (
    Demand,
    Find,
    Headroom,
    PartitionCache,
    PlanningProblem,
    Read,
    Write,
    collectives_of,
    program_rows,
    scattering,
)
from synchromesh.profiling import collectives as network
from synchromesh.profiling.burst_speed import measure_device_model
from synchromesh.profiling.calls import call_seconds
from synchromesh.profiling.overlap import overlap
from synchromesh.profiling.programs import (
    TUNING,
    Numbers,
    ProgramTimer,
    Wanted,
    first_line,
    joined,
    known_memory,
)
from synchromesh.programs.borders import StandIns, record
from synchromesh.programs.clock import clock
from synchromesh.programs.compute import TUNING as TIMING
from synchromesh.programs.memory import storage_bytes
from synchromesh.programs.model import Model
from synchromesh.programs.optimizer import states_of, update
from synchromesh.programs.random import RandomStreams
from synchromesh.trace.capture.batch import take
from synchromesh.trace.partition.partition import Partition
from synchromesh.trace.step import Step
from synchromesh.values.allowance import NOTHING, Allowance
from synchromesh.values.profile import Calls, Compute, Curve, Pattern, Profile

T = TypeVar("T")


@dataclass(eq=False)
class LiveFacts:
    """A planning problem on the ranks of a world, measured: implements `planner.problem.Facts`."""

    world: World
    partitions: PartitionCache
    model: Model
    example: Any  # a global batch
    optimizer: Optimizer
    refused: dict[str, int] = field(default_factory=dict)  # by program, the rows that do not fit

    @classmethod
    def of(
        cls, world: World, model: Model, step: Step, optimizer: Optimizer, example: Any,
        rows: int, headrooms: Sequence[Headroom], allowed: Allowance = NOTHING,
    ) -> "LiveFacts":  # fmt: skip
        """For global batches of `rows`; headrooms: of each rank (`RankMemory.limit`)."""
        modules = model.inside(step.chain.names)
        problem = PlanningProblem.of(step, rows, modules, headrooms, optimizer)
        copying = world.member.copying if world.member is not None and world.elastic else ()
        problem = replace(problem, allowed=allowed, copying=copying)
        return cls(world, PartitionCache(problem), model, example, optimizer)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Those of the model, as far as this rank has them unsharded."""
        return {**self.model.parameters, **self.model.buffers}

    @property
    def problem(self) -> PlanningProblem:
        return self.partitions.problem

    @property
    def extrapolation(self) -> float:
        return TUNING.extrapolate

    @property
    def present(self) -> list[Tensor]:
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in trained if p.grad is not None]
        of_optimizer = *trained, *gradients, *states_of(self.optimizer)
        tensors = [*self.tensors.values(), *of_optimizer]
        return [x for x in tensors if not x.is_meta and x.layout == torch.strided]

    def agreed(self, find: Find[T], write: Write[T], read: Read[T]) -> list[T]:
        """What rank 0 finds: the others need not look for it, and cannot disagree."""
        return [read(x) for x in broadcast(self.world, lambda: [write(x) for x in find()])]

    def profile(
        self, partitions: Iterable[Partition], known: Profile | None,
        ranks: Sequence[int] | None = None, *, rows: int = 0, quick: bool = False,
        besides: Iterable[Demand] = (), micro_batches: Collection[int] = (1,),
    ) -> Profile:  # fmt: skip
        """The profile of `partitions`, each on all of `ranks`, with what `known` has besides.
        quick: memory is not watched where it is known for fewer rows and there is plenty."""
        began = time.perf_counter()
        rows = rows or self.problem.rows
        where = range(self.world.size) if ranks is None else ranks
        parts = list(partitions)
        demands = [d for p in parts for d in collectives_of(p, rows, len(where))] + list(besides)
        profile = self._besides(where) if known is None else known
        profile = self._with_overlap(profile, where, {kind for kind, _, _ in demands})
        wanted = self._unknown(parts, profile, rows, quick, micro_batches)
        compute, missing = self.timed(where, wanted, profile) if wanted else ({}, [])
        links = self._links(parts, where, demands, profile.network)
        old = profile.compute
        more = {k: old[k].joined(c) if k in old else c for k, c in compute.items()}
        return replace(
            profile, compute={**old, **more}, network={**profile.network, **links},
            missing=tuple(dict.fromkeys((*profile.missing, *missing))),
            seconds=profile.seconds + time.perf_counter() - began,
        )  # fmt: skip

    def _with_overlap(self, known: Profile, ranks: Sequence[int], kinds: set[str]) -> Profile:
        lacking = kinds - set(known.overlap)
        if not lacking:
            return known
        # one collective alone gave rates from 0.4 to 1.0, several in a row 0.6 to 0.7
        # (docs/design.md); under a CPU quota they last for several of its periods
        seconds = 0.4 if known.device.burst.credit > 0.0 else 0.1
        more = overlap(self.world, ranks, lacking, seconds, known.overlap)
        return replace(known, overlap={**known.overlap, **more})

    def _links(
        self, partitions: Iterable[Partition], ranks: Sequence[int], demands: Iterable[Demand],
        known: Mapping[tuple[str, Pattern], Curve],
    ) -> dict[tuple[str, Pattern], Curve]:  # fmt: skip
        new = [d for d in demands if d[:2] not in known or not network.reaches(known[d[:2]], d[2])]
        for pattern in sorted({x for p in partitions for x in scattering(p)}):
            for group in pattern.groups(len(ranks)):  # as the engine makes them
                self.world.add_ring(tuple(ranks[i] for i in group))
        return network.collectives(self.world, ranks, new)

    def _unknown(
        self, partitions: Sequence[Partition], known: Profile, total: int, quick: bool,
        micro_batches: Collection[int],
    ) -> dict[str, Wanted]:  # fmt: skip
        wanted: dict[str, Wanted] = {}
        for partition in partitions:
            for local in partition.components:
                rows = program_rows(total, local.layout, micro_batches)
                if new := self._unknown_rows(local.program, known, rows):
                    memory = known_memory(known, local.program) if quick else None
                    wanted.setdefault(local.program, Wanted(partition, local, new, memory))
        return wanted

    def _unknown_rows(self, key: str, known: Profile, rows: Sequence[int]) -> tuple[int, ...]:
        """Those of `rows`, ascending, that a program is to be timed with, as far as they fit."""
        fits = self.refused.get(key, rows[-1] + 1)
        before = known.compute.get(key)
        if before is None:
            return tuple(n for n in rows if n < fits)
        low, reach, far = before.fewest, before.reach, TUNING.extrapolate
        if rows[-1] <= far * reach and low <= far * rows[0]:
            return ()
        return tuple(n for n in rows if n < fits and not low <= n <= reach)

    def timed(
        self, ranks: Sequence[int], wanted: Mapping[str, Wanted], known: Profile,
        block: float = 0.0,
    ) -> tuple[dict[str, Compute], list[str]]:  # fmt: skip
        """Programs timed on `ranks` at the same time while the others are idle, as they will be:
        hosts may share more than links. block: least seconds on the wall of a block of runs."""
        world, device = self.world, known.device
        wall = device.burst.credit and clock(world.device) is None
        least = TIMING.long_block_seconds if wall else TIMING.block_seconds
        least = max(least, block / device.slowdown_of(world.rank))
        nothing: Iterator[tuple[str, Numbers]] = ((key, {}) for key in wanted)
        with RandomStreams(0, world.device).preserved():  # random operators draw from the user's
            here = self._timings(wanted, least) if world.rank in ranks else nothing
            everyone = collect_timings(world, here, waits=len(ranks) < world.size)
        self._refuse(everyone)
        # an idle rank takes what the first one does, at its own slowdown
        first, relative = ranks[0], known.relative_slowdowns
        rows = [everyone[r if r in ranks else first] for r in range(world.size)]
        slowdowns = [device.slowdown_of(r) for r in range(world.size)]
        if len(relative) == world.size:
            for r in set(range(world.size)) - set(ranks):
                slowdowns[r] = slowdowns[first] * relative[r] / relative[first]
        return joined(wanted, rows, slowdowns)

    def _refuse(self, everyone: Iterable[Mapping[str, Numbers]]) -> None:
        for of_rank in everyone:
            for key, numbers in of_rank.items():
                if "lacking" in numbers:
                    self.refused[key] = min(numbers["lacking"], self.refused.get(key, 1 << 62))

    def _timings(
        self, wanted: Mapping[str, Wanted], least: float
    ) -> Iterator[tuple[str, Numbers]]:
        step, device = self.problem.step, self.world.device
        try:
            tensors = StandIns(step.chain, self.tensors, device)
            sample = take(self.example, 0, min(TUNING.sample_rows, self.problem.rows))
            borders = record(step, batches.to_device(sample, device), tensors, device)
            taken = storage_bytes((*self.present, *borders.values())) + tensors.largest
        except Exception as error:  # whatever it is: the other ranks wait for this one's numbers
            fault = {"fault": f"the values between components: {first_line(error)}"}
            yield from ((key, fault) for key in wanted)
            return
        left = self.problem.limits[self.world.rank] if self.problem.limits else float("inf")
        timer = ProgramTimer(step, tensors, borders, left - taken, device, least)
        yield from ((key, timer(program)) for key, program in wanted.items())

    def _besides(self, ranks: Sequence[int]) -> Profile:
        world, device = self.world, measure_device_model(self.world)
        costs: tuple[float, ...] = (0.0,) * 7
        fault = ""
        dtypes = [p.dtype for group in self.optimizer.param_groups for p in group["params"]]
        try:  # seconds a step, a byte, a tensor, a copied byte; bytes of state and work
            costs = astuple(update(self.optimizer, world.device, dtypes[0]))
        except Exception as error:  # whatever it is: the other ranks wait for this one's numbers
            fault = first_line(error)
        slowdown = device.slowdown_of(world.rank)
        calls = call_seconds(world, self.model, self.optimizer, self.example)
        calls = replace(calls, step=calls.step + costs[0]).scaled(slowdown)
        here = [*astuple(calls), *(slowdown * n for n in costs[1:4]), *costs[4:]]
        table = [max(column) for column in zip(*world.everyone.all_gather_json(here), strict=True)]
        *times, byte, tensor, copy_byte, state, largest, work = table
        faults = [f for f in world.everyone.all_gather_json(fault) if f]
        return Profile(
            devices=len(ranks), device=device, update_byte=byte, update_tensor=tensor,
            copy_byte=copy_byte, state_factor=state, work_largest=largest, work_byte=work,
            calls=Calls(*times), host=agreement_seconds(world),
            missing=tuple(f"the optimizer's step: {f}" for f in faults[:1]),
        )  # fmt: skip


def broadcast(world: World, find: Callable[[], Any]) -> Any:
    """What rank 0 finds, in JSON, on all ranks. Where it fails, it does on all."""
    record: dict[str, Any] = {}
    fault: Exception | None = None
    if world.rank == 0:
        try:
            record = {"found": find()}
        except Exception as error:  # whatever it is: the others wait
            users = isinstance(error, ValueError)
            record, fault = {"fault": str(error) or type(error).__name__, "users": users}, error
    record = world.everyone.broadcast_json(record)
    if "fault" in record:
        raise fault or (ValueError if record["users"] else RuntimeError)(record["fault"])
    return record["found"]


def collect_timings(
    world: World, numbers_here: Iterator[tuple[str, Numbers]], waits: bool
) -> list[dict[str, Numbers]]:
    """Every rank's numbers of every program. waits: ranks exchange them one after the other."""
    if not waits:
        return world.everyone.all_gather_json(dict(numbers_here))
    everyone: list[dict[str, Numbers]] = [{} for _ in range(world.size)]
    for key, numbers in numbers_here:
        for rank, gathered in enumerate(world.everyone.all_gather_json(numbers)):
            everyone[rank][key] = gathered
    return everyone


def agreement_seconds(world: World) -> float:
    """Seconds of the control messages of a step: what ranks agree on, and the loss."""
    numbers = [0] * (1 + control_channel.LIMITS.numbers)
    began, runs = 0.0, 6
    for turn in range(runs + 1):
        if turn == 1:
            world.everyone.barrier()
            began = time.perf_counter()
        control_channel.all_gather_numbers(world.everyone, numbers)
        sums = torch.zeros(5, dtype=torch.float64, device=world.device)
        control_channel.start_all_gather(world.everyone, sums)()
    spent = (time.perf_counter() - began) / runs
    return max(float(t) for t in world.everyone.all_gather_json(spent))
