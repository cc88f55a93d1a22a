"""Agreement of all ranks: one answer, or one and the same error, on each of them."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from synchromesh.checkpoint import manifest
from synchromesh.checkpoint.manifest import CheckpointError
from synchromesh.engine.groups import Group
from synchromesh.values.caution import caution

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


def found(path: Path, group: Group, since: float = 0.0) -> Path:
    """The checkpoint that rank 0 finds at `path`, or the newest good one in it (since: as of
    `manifest.newest`)."""

    def find() -> str:
        if not since and (not path.is_dir() or (path / manifest.NAME).exists()):
            return str(path)
        damaged: list[str] = []
        newest = manifest.newest(path, passed_over=damaged, since=since)
        if newest is None:
            raise CheckpointError("; ".join(damaged) or f"{path}: no checkpoint lies in it")
        for text in damaged:
            caution(f"{text}; the run goes on from {newest}, which is older")
        return str(newest)

    return Path(on_first(group, find, str(path)))


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
