"""Deviations: how far values under a plan are from those of one process; which are errors."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor

from synchromesh.checkpoint.switch import redistribute
from synchromesh.training.trainer import Trainer
from synchromesh.values.boxes import full_box
from synchromesh.verify.reference import Computed

KINDS = ("loss", "gradient", "buffer", "parameter")
TOLERANCE = {
    "float64": 1e-10,
    "float32": 1e-4,
    "autocast": 2e-2,  # what a trace may deviate by (trace/capture/gradients.py)
}


# How often its noise floor a deviation may be before it is an error. Chosen with
# `benchmarks.verify_power`: of 10, correct plans need at most 2.
MARGIN = 10.0


@dataclass(frozen=True)
class Worst:
    """The entry that comes nearest to being an error, or is it by most.

    excess       its difference over what it may be; an error above 1
    deviation    its difference over its reference value (where that is 0: over the largest one)
    noise_floor  the same of what rounding alone does"""

    excess: float = 0.0
    name: str = ""
    step: int = 0
    rank: int = 0
    deviation: float = 0.0
    noise_floor: float = 0.0


@dataclass
class Deviation:
    """The largest difference of one kind of values, and the largest reference value, its divisor.

    An entry x with reference y is an error where it exceeds both limits together:

        |x - y|  >  tolerance |y|  +  margin * noise floor of its tensor"""

    tolerance: float
    difference: float = 0.0
    reference: float = 0.0
    noise: float = 0.0  # the largest noise floor of a tensor
    worst: Worst = field(default_factory=Worst)

    def add(
        self, value: Tensor, reference: Tensor, noise: float = 0.0, name: str = "", step: int = 0
    ) -> None:
        """Compares one more tensor with its reference; noise: what rounding alone does to it."""
        if not reference.numel():
            return
        exact = torch.complex128 if reference.is_complex() else torch.float64
        value, reference = value.detach().to(exact).flatten(), reference.to(exact).flatten()
        size, apart = reference.abs(), (value - reference).abs()
        apart = torch.where(value == reference, 0.0, apart)  # of equal infinities too
        scale = float(size[size.isfinite()].max()) if size.isfinite().any() else 0.0
        self.difference = _larger(self.difference, float(apart.max()))
        self.reference = max(self.reference, scale)
        self.noise = _larger(self.noise, noise)
        excess = apart / (self.tolerance * size + MARGIN * noise)
        excess = torch.where(apart == 0.0, 0.0, excess).nan_to_num(inf, inf)
        index = int(excess.argmax())
        if float(excess[index]) > self.worst.excess:
            by = float(size[index]) or scale or 1.0
            deviation = float(apart[index]) / by
            self.worst = Worst(float(excess[index]), name, step, 0, deviation, noise / by)

    @property
    def relative(self) -> float:
        return self.difference / self.reference if self.reference else self.difference

    @property
    def noise_floor(self) -> float:
        """What rounding alone does, over the reference."""
        return self.noise / self.reference if self.reference else self.noise

    @property
    def wrong(self) -> bool:
        return self.worst.excess > 1.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def merged(documents: Sequence[dict[str, Any]]) -> Deviation:
    """The deviation over all ranks, from the `to_dict` of each."""
    result = Deviation(documents[0]["tolerance"])
    for rank, document in enumerate(documents):
        result.difference = _larger(result.difference, document["difference"])
        result.reference = max(result.reference, document["reference"])
        result.noise = _larger(result.noise, document["noise"])
        if document["worst"]["excess"] > result.worst.excess:
            result.worst = Worst(**document["worst"] | {"rank": rank})
    return result


def number(value: float) -> float:
    """`value`, or the largest number there is: JSON has neither NaN nor infinity."""
    return value if value < sys.float_info.max else sys.float_info.max


def _larger(a: float, b: float) -> float:
    """The larger one; a NaN is the largest there is, which max() would drop."""
    return a if a != a else b if b != b else max(a, b)


class Deviations:
    """The deviation of each kind of values, where every rank compares what it has. Rank 0 has the
    reference, which goes to the ranks box by box: an error in one of several equal shards is seen
    on the rank that has it. All ranks call alike."""

    def __init__(self, trainer: Trainer, tolerance: float) -> None:
        self._trainer, self._tolerance = trainer, tolerance
        self._deviations = {kind: Deviation(tolerance) for kind in KINDS}

    def loss(self, value: Tensor, computed: Computed | None, step: int) -> None:
        """Compares the global mean loss, which every rank has."""
        own = None if computed is None else computed.values["loss"][""].item()
        reference, noise = self._broadcast((own, computed and computed.floors["loss"][""]))
        expected = torch.tensor(reference, dtype=torch.float64)
        self._deviations["loss"].add(value.cpu(), expected, noise, step=step)

    def compare(self, kind: str, value: Tensor, computed: Computed, name: str, step: int) -> None:
        """Compares a whole tensor, on this rank alone."""
        expected, noise = computed.values[kind][name], computed.floors[kind][name]
        self._deviations[kind].add(value.flatten(), expected.flatten(), noise, name, step)

    def shards(
        self, kind: str, local: Mapping[str, Tensor], computed: Computed | None, step: int,
        of: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        """Compares this rank's shards, which lie as parameters and buffers of their names. of: the
        ranks that `computed` is the reference of; None: all."""
        complete = {} if computed is None else computed.values[kind]
        floors = self._broadcast(computed and computed.floors[kind])
        deviation = self._deviations.setdefault(kind, Deviation(self._tolerance))
        for name, shard in local.items():
            expected = self._expected(name, shard, complete.get(name), of)
            if of is not None and self._trainer.rank not in of:
                continue
            deviation.add(shard.flatten(), expected.flatten(), floors[name], name, step)

    def _expected(
        self, name: str, shard: Tensor, complete: Tensor | None, of: Collection[int] | None
    ) -> Tensor:
        state = self._trainer.state
        shape = state.model.described[name].shape
        have = tuple((full_box(shape),) if r == 0 else () for r in range(self._trainer.world.size))
        want = state.sides(state.holdings[name], state.ranks)
        want = tuple(x if of is None or r in of else () for r, x in enumerate(want))
        own = shard.new_empty(0) if complete is None else complete.to(shard)
        return redistribute(own, have, want, shape, self._trainer.world.everyone)

    def _broadcast(self, value: Any) -> Any:
        return self._trainer.world.everyone.broadcast_json(value)

    def document(self) -> dict[str, Any]:
        """Deviations and noise floors, relative to the largest value of their kind, and `faults`,
        the worst error of each kind where there is one, relative to its own value."""
        gather = self._trainer.world.everyone.all_gather_json
        deviations = {k: merged(gather(d.to_dict())) for k, d in self._deviations.items()}
        faults = [
            {
                "kind": kind, "name": d.worst.name, "step": d.worst.step, "rank": d.worst.rank,
                "deviation": number(d.worst.deviation), "noise_floor": number(d.worst.noise_floor),
            }
            for kind, d in deviations.items()
            if d.wrong
        ]  # fmt: skip
        return {
            **{f"max_{kind}_deviation": number(d.relative) for kind, d in deviations.items()},
            "noise_floor": {kind: number(d.noise_floor) for kind, d in deviations.items()},
            "of_allowed": {kind: number(d.worst.excess) for kind, d in deviations.items()},
            "faults": faults,
        }
