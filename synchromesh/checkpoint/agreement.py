"""Agreement of all ranks: one answer, or one and the same error, on each of them."""

from collections.abc import Callable
from typing import TypeVar, cast

from synchromesh.checkpoint.manifest import CheckpointError
from synchromesh.engine.groups import Group

T = TypeVar("T")


def agreed(group: Group, do: Callable[[], T], what: str) -> T:
    """`do()` of this rank; where it fails on any rank, the same CheckpointError on all."""
    result, fault = _attempt(do, what)
    faults = [f for f in group.all_gather_json(fault) if f]
    if faults:
        raise CheckpointError("; ".join(dict.fromkeys(faults)))
    return cast(T, result)


def on_first(group: Group, do: Callable[[], T], what: str) -> T:
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
