"""A checkpoint: tensors by name and global shape in torch's distributed format, and JSON.

    step-200/
      MANIFEST.json        names, sizes and SHA-256 of the other files (manifest.py)
      state.json           whatever is not a tensor
      .metadata            torch's index: every tensor as boxes, and where each box lies
      __0_0.distcp ...     one file per rank that wrote, the boxes as torch.save writes tensors

A shard is a box, so that any ranks can load from any: loading is intersecting the wanted boxes
with the stored ones. A box that several ranks have is written by one of them. Nothing that is
read is trusted: the manifest is checked first, then the index (stored_boxes.py), and pickled
objects are refused. torch's own tools read these folders too (`torch.distributed.checkpoint.load`,
`format_utils.dcp_to_torch_save`)."""

import json
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from synchromesh.checkpoint import manifest
from synchromesh.checkpoint.agreement import agreed, on_first
from synchromesh.checkpoint.local_tensor import LocalTensor
from synchromesh.checkpoint.manifest import CheckpointError
from synchromesh.checkpoint.stored_boxes import BoxReader, BoxWriter, IndexReader, described
from synchromesh.engine.groups import Group
from synchromesh.engine.world import World
from synchromesh.values.fields import to_plain

STATE = "state.json"


def _of_first(path: str | Path, group: Group) -> Path:
    """Rank 0's path, absolute: names with a time and working folders differ between ranks."""
    return Path(group.broadcast_json(str(Path(path).absolute())))


def save(path: str | Path, tensors: Mapping[str, LocalTensor], extra: Any, world: World) -> None:
    """Writes a folder `path`; collective. What is there stays as `path.previous`. Whatever fails
    on any rank is a CheckpointError on all, leaves what was there, and a group that can go on."""
    group = world.everyone
    path = _of_first(path, group)
    text = agreed(group, lambda: json.dumps(extra, indent=1), f"{path}: state that is no JSON")
    begun = on_first(group, lambda: str(manifest.begin(path)), f"{path}: cannot be written")
    fresh = Path(begun)
    try:
        agreed(group, lambda: _require_shared(fresh, group.index), "")
        _write(fresh, tensors, group, path)
        mine = agreed(group, lambda: _own_files(fresh, group.index), f"{path}: cannot be written")
        listed = dict(file for of_rank in group.all_gather_json(mine) for file in of_rank.items())
        on_first(group, lambda: _finish(fresh, path, text, listed), f"{path}: cannot be written")
    finally:
        if group.index == 0:
            shutil.rmtree(fresh, ignore_errors=True)


def _require_shared(fresh: Path, index: int, timeout: float = 5.0) -> None:
    """CheckpointError where this rank does not see the folder that rank 0 has made."""
    end = time.monotonic() + timeout  # network file systems show a new name after a while
    while not fresh.is_dir():
        if time.monotonic() > end:
            raise CheckpointError(
                f"{fresh.parent}: rank {index} does not see what rank 0 writes there: "
                "checkpoints need a folder that all ranks share"
            )
        time.sleep(0.1)


def _write(fresh: Path, tensors: Mapping[str, LocalTensor], group: Group, path: Path) -> None:
    writer = FileSystemWriter(fresh, sync_files=True, thread_count=1)  # more hide errors
    try:
        with _without_warning_of_one_rank():
            group.world.apart(lambda: state_dict_saver.save(
                dict(tensors), storage_writer=writer, planner=BoxWriter(flatten_state_dict=False),
                process_group=group.handle, no_dist=group.size == 1,
            ))  # fmt: skip
    except CheckpointException as error:
        free = group.broadcast_json(_free_megabytes(fresh))
        needed = max(group.all_gather_json(sum(x.tensor.nbytes for x in tensors.values()))) / 1e6
        why = _reasons(error)
        if free < needed:  # what torch says of that are places in its own code
            why = f"a rank has {needed:.1f} MB to write: free some, or write elsewhere"
        raise CheckpointError(
            f"{path}: cannot be written ({free:.1f} MB free on that disk): {why}"
        ) from None


def _free_megabytes(folder: Path) -> float:
    try:
        return shutil.disk_usage(folder).free / 1e6
    except OSError:
        return 0.0


def _own_files(fresh: Path, index: int) -> Any:
    """Size and hash of the files that this rank wrote, by name."""
    names = [p.name for p in fresh.iterdir() if p.name.startswith(f"__{index}_")]
    if index == 0:
        names.append(".metadata")
    return to_plain({name: manifest.digest(fresh / name) for name in sorted(names)})


def _finish(fresh: Path, path: Path, text: str, listed: Mapping[str, Any]) -> bool:
    manifest.write_durably(fresh / STATE, text.encode())
    entries = {name: manifest.FileEntry(**entry) for name, entry in listed.items()}
    entries[STATE] = manifest.digest(fresh / STATE)
    manifest.manifest_of(entries.items(), path.parent).write(fresh)
    manifest.put_in_place(fresh, path)
    return True


def read_extra(path: str | Path, world: World) -> Any:
    """The `extra` of a checkpoint; its tensors are neither read nor checked. Collective."""
    group = world.everyone
    path = _of_first(path, group)

    def read() -> Any:
        faults = manifest.faults(path, {STATE: _listing(path)[STATE]})
        if faults:
            raise CheckpointError(f"{faults[0]}; {manifest.offer(path)}")
        return json.loads((path / STATE).read_text())

    return on_first(group, read, f"{path}: {STATE}")


def load(
    path: str | Path, wanted: Mapping[str, LocalTensor], world: World, allow: Sequence[str] = ()
) -> Any:
    """Fills the local tensors of `wanted` from a checkpoint; returns its `extra`. Collective.
    allow: patterns of names that may be missing, or may be left unread. CheckpointError, equal on
    all ranks and before anything is filled, with every fault: damaged files, missing, unexpected,
    wrongly shaped or typed tensors; it offers the newest good checkpoint beside this one."""
    group = world.everyone
    path = _of_first(path, group)
    listed = on_first(group, lambda: to_plain(_listing(path)), "")
    files = {name: manifest.FileEntry(**entry) for name, entry in listed.items()}
    order = sorted(files.items(), key=lambda f: (-f[1].bytes, f[0]))
    mine = dict(order[group.index :: group.size])
    faults = [f for part in group.all_gather_json(manifest.faults(path, mine)) for f in part]
    if faults:
        offer = group.broadcast_json(manifest.offer(path) if group.index == 0 else "")
        raise CheckpointError(f"{'; '.join(faults)}; {offer}")
    reader = IndexReader(path, files)
    stored = agreed(group, reader.read_metadata, "")
    differences = group.all_gather_json(_differences(stored, wanted, allow))
    faults = list(dict.fromkeys(f for part in differences for f in part))
    if faults:
        raise CheckpointError(f"{path}: does not fit: {'; '.join(faults)}")
    present = {n: local for n, local in wanted.items() if n in stored.state_dict_metadata}
    try:
        with _without_warning_of_one_rank():
            group.world.apart(lambda: state_dict_loader.load(
                dict(present), storage_reader=reader, planner=BoxReader(),
                process_group=group.handle, no_dist=group.size == 1,
            ))  # fmt: skip
    except CheckpointException as error:
        raise CheckpointError(f"{path}: cannot be read: {_reasons(error)}") from None
    return agreed(group, lambda: json.loads((path / STATE).read_text()), f"{path}: {STATE}")


def _listing(path: Path) -> Mapping[str, manifest.FileEntry]:
    """The manifest's files; what is missing of ours is said with an offer."""
    try:
        files = manifest.Manifest.read(path).files
        for needed in (".metadata", STATE):
            if needed not in files:
                raise CheckpointError(f"{path}: its manifest does not list {needed}")
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {manifest.offer(path)}") from None
    return files


def _differences(
    stored: Metadata, wanted: Mapping[str, LocalTensor], allow: Sequence[str]
) -> list[str]:
    """A sentence for every tensor that the checkpoint and this rank do not describe alike."""

    def allowed(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in allow)

    known = described(stored)
    faults = [f"{n} is missing" for n in wanted if n not in known and not allowed(n)]
    faults += [f"{n} is unexpected" for n in known if n not in wanted and not allowed(n)]
    for name, local in wanted.items():
        there = known.get(name)
        if there is None:
            continue
        if tuple(there.size) != tuple(local.shape):
            faults.append(f"{name} has shape {tuple(there.size)} there, {tuple(local.shape)} here")
        if there.properties.dtype != local.dtype:
            faults.append(f"{name} is {there.properties.dtype} there, {local.dtype} here")
    return faults


def _reasons(error: CheckpointException) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, (cause, _) in error.failures.items():
        text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        ranks.setdefault(" ".join(text.split())[:300] or type(cause).__name__, []).append(rank)
    return "; ".join(f"{text} (rank {', '.join(map(str, r))})" for text, r in ranks.items())


class _without_warning_of_one_rank(warnings.catch_warnings):
    """torch warns that a save without process groups is meant for one process: it is."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
