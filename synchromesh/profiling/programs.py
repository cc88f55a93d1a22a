"""Programs timed on this rank: seconds and memory at the rows that are wanted, or why none.

What a rank finds of a program is a dict that all ranks exchange as JSON:

    points    [[rows, seconds forward, seconds backward], ...]        spread    of its blocks
    memory    [[rows, kept, forward, backward, staying], ...]         inputs, outputs that are kept
    fault     why nothing is known            lack, lacking    the rows from which memory is short
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from synchromesh.programs.compute import Bench
from synchromesh.trace.partition.local import LocalComponent, Partition
from synchromesh.trace.step import Step
from synchromesh.values.fault import message
from synchromesh.values.profile import Compute, Curve, Memory, Profile

Numbers = dict[str, Any]  # see above


@dataclass(frozen=True)
class ProgramTuning:
    """When a program is measured again, and with what care. Chosen, not measured."""

    sample_rows: int = 8  # real rows from which larger batches are tiled
    extrapolate: float = 1.5  # times the rows that were timed, or a part, beyond which it is again
    roomy: float = 3.0  # times the memory a program is thought to need: with more, not watched


TUNING = ProgramTuning()


@dataclass(frozen=True)
class Wanted:
    """A program to be timed with these rows; memory: known, where it need not be watched anew."""

    partition: Partition
    local: LocalComponent
    rows: tuple[int, ...]
    memory: Memory | None = None

    def roomy(self, rows: int, left: float) -> bool:
        """Whether memory is known and far from the bytes that are left. Beyond the rows that it
        was measured at it is a lower bound: another moment may then be the highest."""
        if self.memory is None:
            return False
        return TUNING.roomy * max(self.memory.forward(rows), self.memory.backward(rows)) <= left


@dataclass(frozen=True)
class ProgramTimer:
    """What every program of a step is timed with on this rank."""

    step: Step
    tensors: Mapping[str, Tensor]  # parameters and buffers, unsharded
    borders: Mapping[str, Tensor]  # a few rows of every value between components
    left: float  # bytes that a program may take; with rows that need more it is not run
    device: torch.device
    least: float  # seconds of a block of runs

    def __call__(self, wanted: Wanted) -> Numbers:
        points, memory, spread = [], [], 0.0
        lack: Numbers = {}
        inputs, outputs = tuple[int, ...](), tuple[int, ...]()
        partition, local = wanted.partition, wanted.local
        what = f"{local.component.name} ({local.layout})"
        try:
            for rows in wanted.rows:
                if Bench.input_bytes(local, self.borders, rows) > self.left:
                    raise MemoryError
                of = self.step, partition, local
                bench = Bench(*of, self.tensors, self.borders, rows, self.device)
                if not wanted.roomy(rows, self.left):
                    used = bench.bytes(self.left)
                    memory.append((rows, used.kept, used.forward, used.backward, used.staying))
                    inputs, outputs = used.kept_inputs, used.kept_outputs
                timing = bench.timing(self.least)
                points.append((rows, timing.forward, timing.backward))
                spread = max(spread, timing.spread)
                del bench
        except Exception as error:  # whatever it is: the other ranks wait for this one's numbers
            known = isinstance(error, MemoryError | torch.OutOfMemoryError)
            if not known and "allocate memory" not in message(error):  # on a CPU it has no class
                return {"fault": f"{what}: {first_line(error)}"}
            lack = {"lacking": rows, "lack": f"{what}: {rows} rows take more memory than is left"}
        if not points:
            return {"fault": lack["lack"], **lack}
        return {
            "points": points, "memory": memory, "spread": spread, "inputs": inputs,
            "outputs": outputs, **lack,
        }  # fmt: skip


def first_line(error: Exception) -> str:
    return (message(error) or type(error).__name__).partition("\n")[0][:200]


def joined(
    wanted: Mapping[str, Wanted], ranks: Sequence[Mapping[str, Numbers]],
    slowdowns: Sequence[float],
) -> tuple[dict[str, Compute], list[str]]:  # fmt: skip
    """What all ranks measured, and what is missing; slowdowns: of each rank's clock."""
    compute, missing = {}, []

    def curves(key: str, side: int) -> tuple[Curve, ...]:
        return tuple(
            Curve.of((p[0], p[side] * seconds) for p in rank[key]["points"])
            for rank, seconds in zip(ranks, slowdowns, strict=True)
        )

    for key, program in wanted.items():
        faults = [rank[key]["fault"] for rank in ranks if "fault" in rank[key]]
        if faults:
            missing.append(faults[0])
            continue
        missing += [rank[key]["lack"] for rank in ranks if "lack" in rank[key]][:1]
        watched = ranks[0][key]["memory"] or not program.memory
        memory = memory_of(ranks[0][key]) if watched else program.memory
        assert memory is not None
        spread = max(float(rank[key]["spread"]) for rank in ranks)
        compute[key] = Compute(curves(key, 1), curves(key, 2), memory, spread)
    return compute, missing


def known_memory(known: Profile, key: str) -> Memory | None:
    """A program's memory where two sizes of it were measured, which tell all others."""
    memory = known.compute[key].memory if key in known.compute else None
    return memory if memory and len(memory.kept.points) > 1 else None


def memory_of(numbers: Numbers) -> Memory:
    return Memory.of(*(numbers[key] for key in ("memory", "inputs", "outputs")))
