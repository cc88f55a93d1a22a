"""The headroom of a device: memory that plans leave free, for predictions of it are not exact."""

import re
from dataclasses import dataclass

from synchromesh.values import size

SHARE = 0.05  # of a device's memory: of 148 plans that were measured (benchmarks/README.md) none
# took more than 3.6 % more than was predicted
# Bytes that a process on a CPU holds besides tensors: at most 24 MiB in steps of 18 models and
# plans, once `heap.keep_small` was asked; loaders, logs and checkpoints take more.
RESERVE = 64 * 2**20


@dataclass(frozen=True, order=True)
class Headroom:
    """Bytes of a device that plans may use, those that are kept, and why so many."""

    usable: float
    kept: float
    why: str

    @classmethod
    def of(
        cls, memory: float, asked: str | None = None, error: float = 0.0, reserve: float = 0.0
    ) -> "Headroom":
        """As `asked`: `10%` of the memory, or `4GiB`. Else the most of a share of it, of what
        plans may take more than is predicted (`error`, relative), and of what a process holds
        besides tensors (`reserve`, bytes): whichever it is, it has room for a part of the others.
        ValueError where `asked` is neither, or leaves nothing."""
        reasons = {
            f"{SHARE:.0%} of it": SHARE * memory,
            f"predictions may be off by {error:.0%}": memory * error / (1 + error),
            "what a process holds besides tensors": min(reserve, memory),
        }
        if asked is not None:
            part = re.fullmatch(r"([0-9]{1,2}(?:\.[0-9]+)?)%", asked := str(asked))
            if not part and not size.SIZE.fullmatch(asked):
                raise ValueError(f"headroom {asked!r}: no part, as 10%, and no size, as 4GiB")
            kept = float(part[1]) / 100 * memory if part else size.parse(asked)
            if kept >= memory:
                raise ValueError(f"headroom {asked} leaves nothing of {size.readable(memory)}")
            reasons = {"as asked for": kept}
        why = max(reasons, key=lambda reason: reasons[reason])
        return cls(memory - reasons[why], reasons[why], why)

    def __str__(self) -> str:
        shown = map(size.readable, (self.usable, self.usable + self.kept, self.kept))
        return "plans may use {} of a device's {}: {} are headroom ({})".format(*shown, self.why)
