"""Bytes that are alive at a moment of a step."""

from typing import Any


class AliveBytes:
    """Bytes by what they are, and the most that there were at once."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[Any, ...], float] = {}  # (what, micro-batch, which): bytes
        self.now = self.highest = 0.0

    def set(self, key: tuple[Any, ...], size: float) -> None:
        """`key` has `size` bytes from now on."""
        self.now += size - self.bytes.get(key, 0.0)
        self.bytes[key] = size

    def free(self, key: tuple[Any, ...]) -> None:
        """`key` has no bytes any more, if it had."""
        self.now -= self.bytes.pop(key, 0.0)

    def meanwhile(self, working: float) -> None:
        """A component works, in `working` bytes more."""
        self.highest = max(self.highest, self.now + working)
