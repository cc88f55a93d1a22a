"""What a local program takes: its seconds over rows on each rank, and its memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from synchromesh.values import document
from synchromesh.values.curve import Curve

NOTHING = Curve(((0.0, 0.0),))  # no bytes, whatever the rows


@dataclass(frozen=True)
class Memory:
    """Bytes of a local program over rows, inputs and parameters not counted.

    kept: what its forward keeps for backward. kept_inputs, kept_outputs: which of the inputs and
    outputs (outputs are part of `kept` then) autograd keeps alive. forward: the most that is alive
    at once of what it makes. backward: the most that is alive at once of what was kept, of what it
    makes and of the gradients of its outputs, a parameter's gradient until it is complete;
    staying: the same where gradients of parameters stay.
    """

    kept: Curve = NOTHING
    forward: Curve = NOTHING
    backward: Curve = NOTHING
    staying: Curve = NOTHING
    kept_inputs: tuple[int, ...] = ()
    kept_outputs: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, rows: Iterable[Sequence[float]], inputs: Sequence[int], outputs: Sequence[int]
    ) -> "Memory":
        """From (rows, kept, forward, backward, staying) at several rows, and what is kept."""
        points = list(rows)
        curves = (Curve.of((point[0], point[i]) for point in points) for i in (1, 2, 3, 4))
        kept, forward, backward, staying = curves
        return cls(kept, forward, backward, staying, tuple(inputs), tuple(outputs))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            **{k: getattr(self, k).to_list() for k in ("kept", "forward", "backward", "staying")},
            "kept_inputs": list(self.kept_inputs),
            "kept_outputs": list(self.kept_outputs),
        }

    @classmethod
    def from_dict(cls, value: Any, path: str) -> "Memory":
        """From the JSON form at `path` of a document. ValueError by the key that is wrong."""
        keys = ("kept", "forward", "backward", "staying", "kept_inputs", "kept_outputs")
        item = document.mapping(value, path, keys, keys)
        kept, forward, backward, staying = (
            Curve.from_list(item[k], f"{path}.{k}") for k in keys[:4]
        )

        def places(key: str) -> tuple[int, ...]:
            listed = document.sequence(item[key], f"{path}.{key}")
            return tuple(document.integer(n, f"{path}.{key}", 0, 1_000_000) for n in listed)

        inputs, outputs = places("kept_inputs"), places("kept_outputs")
        return cls(kept, forward, backward, staying, inputs, outputs)


@dataclass(frozen=True)
class Compute:
    """One local program: seconds over rows, forward and backward, of each rank; its memory.

    spread: the largest distance of a timed block from the median of its blocks, over that median.
    """

    forward: tuple[Curve, ...]
    backward: tuple[Curve, ...]
    memory: Memory
    spread: float = 0.0

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

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "forward": [c.to_list() for c in self.forward],
            "backward": [c.to_list() for c in self.backward],
            "memory": self.memory.to_dict(),
            "spread": self.spread,
        }

    @classmethod
    def from_dict(cls, value: Any, path: str) -> "Compute":
        """From the JSON form at `path` of a document. ValueError by the key that is wrong."""
        keys = ("forward", "backward", "memory", "spread")
        item = document.mapping(value, path, keys, keys)

        def curves(key: str) -> tuple[Curve, ...]:
            listed: Sequence[Any] = document.sequence(item[key], f"{path}.{key}")
            if not listed:
                raise ValueError(f"{path}.{key}: should have a curve for each rank, not none")
            return tuple(Curve.from_list(c, f"{path}.{key}[{i}]") for i, c in enumerate(listed))

        return cls(
            curves("forward"),
            curves("backward"),
            Memory.from_dict(item["memory"], f"{path}.memory"),
            document.number(item["spread"], f"{path}.spread", 0),
        )
