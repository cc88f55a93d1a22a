"""The control channel of all ranks: one answer, or one and the same error, on each of them."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from synchromesh.state.manifest import CheckpointError

T = TypeVar("T")


class ControlChannel(Protocol):
    """What checkpoints need of the group of all ranks."""

    index: int
    size: int
    handle: Any  # the process group; None where there is one rank

    def all_gather_json(self, value: Any) -> list[Any]:
        """Each rank's value, by rank."""

    def broadcast_json(self, value: Any, root: int = 0) -> Any:
        """The value of rank `root`."""


class AllRanks(Protocol):
    """What checkpoints need of the world."""

    @property
    def everyone(self) -> Any:
        """The control channel."""


def agreed(group: ControlChannel, do: Callable[[], T], what: str) -> T:
    """`do()` of this rank; where it fails on any rank, the same CheckpointError on all."""
    result, fault = _attempt(do, what)
    faults = [f for f in group.all_gather_json(fault) if f]
    if faults:
        raise CheckpointError("; ".join(dict.fromkeys(faults)))
    return cast(T, result)


def on_first(group: ControlChannel, do: Callable[[], T], what: str) -> T:
    """What `do()` gives on rank 0 (JSON-able), on all ranks; so too its failure."""
    result, fault = _attempt(do, what) if group.index == 0 else (None, "")
    answer, fault = group.broadcast_json([result, fault])
    if fault:
        raise CheckpointError(fault)
    return cast(T, answer)


def _attempt(do: Callable[[], T], what: str) -> tuple[T | None, str]:
    prefix = f"{what}: " if what else ""
    try:
        return do(), ""
    except CheckpointError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{prefix}{error.strerror or error}"
    except (TypeError, ValueError, RecursionError) as error:
        return None, f"{prefix}{error}"
