"""Bytes that are alive at a moment of a step, by their kind."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal, get_args

# what a gigabyte of a device is: tensors of the model and of the optimizer; activations, their
# gradients and what a component works with; buffers of the model and of what is under way
MemoryKind = Literal["parameters", "gradients", "states", "activations", "buffers"]
KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


class AliveBytes:
    """Bytes by what they are, the most that there were at once, and of which kinds these were.

    kinds: of a key's first entry; activations where it is not there."""

    def __init__(self, kinds: Mapping[str, MemoryKind]) -> None:
        self.bytes: dict[tuple[Any, ...], float] = {}  # (what, micro-batch, which): bytes
        self.now = self.highest = 0.0
        self.of_highest: Mapping[MemoryKind, float] = {}
        self._kinds = kinds
        self._by_kind: dict[MemoryKind, float] = defaultdict(float)

    def set(self, key: tuple[Any, ...], size: float) -> None:
        """`key` has `size` bytes from now on."""
        self._add(key, size - self.bytes.get(key, 0.0))
        self.bytes[key] = size

    def free(self, key: tuple[Any, ...]) -> None:
        """`key` has no bytes any more, if it had."""
        self._add(key, -self.bytes.pop(key, 0.0))

    def _add(self, key: tuple[Any, ...], more: float) -> None:
        self.now += more
        self._by_kind[self._kinds.get(key[0], "activations")] += more

    def meanwhile(self, working: float) -> None:
        """A component works, in `working` bytes more."""
        if self.now + working > self.highest:
            self.highest = self.now + working
            activations = self._by_kind["activations"] + working
            self.of_highest = {**self._by_kind, "activations": activations}
