"""What a local program takes: its seconds over rows on each rank, and its memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from synchromesh.values.curve import Curve
from synchromesh.values.fields import Within

Place = Annotated[int, Within(0, 1_000_000)]
NOTHING = Curve(((0.0, 0.0),))  # no bytes, whatever the rows


@dataclass(frozen=True)
class Memory:
    """Bytes of a local program over rows, inputs and parameters not counted.

    kept: what its forward keeps for backward. kept_inputs, kept_outputs: which of the inputs and
    outputs (outputs are part of `kept` then) autograd keeps alive. forward: the most that is alive
    at once of what it makes. backward: the most that is alive at once of what was kept, of what it
    makes and of the gradients of its outputs, a parameter's gradient until it is complete;
    staying: the same where gradients of parameters stay."""

    kept: Curve = NOTHING
    forward: Curve = NOTHING
    backward: Curve = NOTHING
    staying: Curve = NOTHING
    kept_inputs: tuple[Place, ...] = ()
    kept_outputs: tuple[Place, ...] = ()

    @classmethod
    def of(
        cls, rows: Iterable[Sequence[float]], inputs: Sequence[int], outputs: Sequence[int]
    ) -> "Memory":
        """From (rows, kept, forward, backward, staying) at several rows, and what is kept."""
        points = list(rows)
        curves = (Curve.of((point[0], point[i]) for point in points) for i in (1, 2, 3, 4))
        kept, forward, backward, staying = curves
        return cls(kept, forward, backward, staying, tuple(inputs), tuple(outputs))


@dataclass(frozen=True)
class Compute:
    """One local program: seconds over rows, forward and backward, of each rank; its memory.

    spread: the largest distance of a timed block from the median of its blocks, over that median.
    """

    forward: tuple[Curve, ...]
    backward: tuple[Curve, ...]
    memory: Memory
    spread: Annotated[float, Within(0)] = 0.0

    def __post_init__(self) -> None:
        if not (self.forward and self.backward):
            raise ValueError("forward and backward should have a curve for each rank, not none")

    @property
    def reach(self) -> float:
        """The most rows at which every rank was timed."""
        return min(curve.reach for curve in self.forward)

    @property
    def fewest(self) -> float:
        """The fewest rows at which every rank was timed."""
        return max(curve.points[0][0] for curve in self.forward)

    def on(self, rank: int, rows: float) -> tuple[float, float]:
        """Seconds of forward and backward on a rank; one curve alone stands for all ranks."""
        at = min(rank, len(self.forward) - 1)
        return self.forward[at](rows), self.backward[at](rows)

    def joined(self, other: "Compute") -> "Compute":
        """What was measured at further rows besides."""

        def curves(old: tuple[Curve, ...], new: tuple[Curve, ...]) -> tuple[Curve, ...]:
            return tuple(a.joined(b) for a, b in zip(old, new, strict=True))

        m, n = self.memory, other.memory
        memory = replace(
            n,
            kept=m.kept.joined(n.kept),
            forward=m.forward.joined(n.forward),
            backward=m.backward.joined(n.backward),
            staying=m.staying.joined(n.staying),
        )
        return Compute(
            curves(self.forward, other.forward),
            curves(self.backward, other.backward),
            memory,
            max(self.spread, other.spread),
        )
