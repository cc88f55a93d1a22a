"""Memory by kind: what the bytes of a device are, predicted, measured and reported alike."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from synchromesh.values import document

STORED_KINDS: Mapping[str, str] = {"states": "optimizer"}  # names of documents that differ


@dataclass(frozen=True)
class MemoryByKind:
    """What is alive on a device at its peak, in bytes. states: of the optimizer. buffers: of the
    model and of what is under way. activations: all that is none of the others, as gradients of
    activations and what a component works with."""

    parameters: int = 0
    gradients: int = 0
    states: int = 0
    buffers: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """Their sum, the peak."""
        return sum(vars(self).values())

    def to_plain(self) -> dict[str, int]:
        """As documents have it, where the states are `optimizer`."""
        return {STORED_KINDS.get(kind, kind): size for kind, size in vars(self).items()}

    @classmethod
    def from_plain(cls, value: Any, path: str) -> Self:
        """The inverse; a kind that is left out has no bytes."""
        kinds = {STORED_KINDS.get(f.name, f.name): f.name for f in fields(cls)}
        given = document.mapping(value, path, kinds)
        return cls(**{
            kinds[key]: document.integer(size, f"{path}.{key}", -(2**63), 2**63)
            for key, size in given.items()
        })  # fmt: skip


KINDS = tuple(f.name for f in fields(MemoryByKind))
