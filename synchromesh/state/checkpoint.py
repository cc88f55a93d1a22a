"""A checkpoint: tensors by name and global shape in torch's distributed format, and JSON.

    step-200/
      MANIFEST.json        names, sizes and SHA-256 of the other files (manifest.py)
      state.json           whatever is not a tensor
      .metadata            torch's index: every tensor as boxes, and where each box lies
      __0_0.distcp ...     one file per rank that wrote, the boxes as torch.save writes tensors

A shard is a box, so that any ranks can load from any: loading is intersecting the wanted boxes
with the stored ones. A box that several ranks hold is written by one of them. Nothing that is
read is trusted: the manifest is checked first, then the index (index.py), and pickled objects
are refused. torch's own tools read these folders too (`torch.distributed.checkpoint.load`,
`format_utils.dcp_to_torch_save`).
"""

import io
import json
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from synchromesh.state import manifest
from synchromesh.state.index import Reader, box_of, boxes_of, described
from synchromesh.state.manifest import CheckpointError, check_writable, newest, verify
from synchromesh.state.pieces import Held, split
from synchromesh.values.placement import Box
from synchromesh.values.transfer import intersection, volume

__all__ = ["CheckpointError", "check_writable", "load", "newest", "read_extra", "save", "verify"]

STATE = "state.json"
BOX_BYTES = 32 * 2**20  # larger boxes are stored in parts: a reader holds one part at a time
T = TypeVar("T")


class Everyone(Protocol):
    """What a checkpoint needs of the group of all ranks."""

    index: int
    size: int
    handle: Any  # the process group; None where there is one rank

    def all_gather_json(self, value: Any) -> list[Any]: ...
    def broadcast_json(self, value: Any, root: int = 0) -> Any: ...


class World(Protocol):
    """What a checkpoint needs of the world."""

    @property
    def everyone(self) -> Any: ...


# Saving


def save(path: str | Path, tensors: Mapping[str, Held], extra: Any, world: World) -> None:
    """Writes a checkpoint to the folder `path`. Collective; rank 0's `extra` (JSON) is kept.

    A folder that is there already stays as `path.previous`. Whatever fails, on whichever rank, is
    a CheckpointError on all of them, leaves what was there, and the group can be used again.
    """
    path, group = Path(path), world.everyone
    text = _agreed(group, lambda: json.dumps(extra, indent=1), f"{path}: state that is no JSON")
    begun = _on_first(group, lambda: str(manifest.begin(path)), f"{path}: cannot be written")
    fresh = Path(begun)
    try:
        _agreed(group, lambda: _shared(fresh, group.index), "")
        _write(fresh, tensors, group, path)
        mine = _agreed(group, lambda: _own_files(fresh, group.index), f"{path}: cannot be written")
        listed = [pair for pairs in group.all_gather_json(mine) for pair in pairs]
        _on_first(group, lambda: _finish(fresh, path, text, listed), f"{path}: cannot be written")
    finally:
        if group.index == 0:
            shutil.rmtree(fresh, ignore_errors=True)


def _shared(fresh: Path, index: int, patience: float = 5.0) -> None:
    """CheckpointError where this rank does not see the folder that rank 0 has made."""
    end = time.monotonic() + patience  # network file systems show a new name after a while
    while not fresh.is_dir():
        if time.monotonic() > end:
            raise CheckpointError(
                f"{fresh.parent}: rank {index} does not see what rank 0 writes there: "
                "checkpoints need a folder that all ranks share"
            )
        time.sleep(0.1)


def _write(fresh: Path, tensors: Mapping[str, Held], group: Everyone, path: Path) -> None:
    writer = FileSystemWriter(fresh, sync_files=True, thread_count=1)  # more hide errors
    try:
        with _without_warning_of_one_rank():
            state_dict_saver.save(
                dict(tensors),
                storage_writer=writer,
                planner=_BoxWriter(),
                process_group=group.handle,
                no_dist=group.size == 1,
            )
    except CheckpointException as error:
        free = group.broadcast_json(_free_megabytes(fresh))
        raise CheckpointError(
            f"{path}: cannot be written ({free:.1f} MB free on that disk): {_reasons(error)}"
        ) from None


def _free_megabytes(folder: Path) -> float:
    try:
        return shutil.disk_usage(folder).free / 1e6
    except OSError:
        return 0.0


def _own_files(fresh: Path, index: int) -> list[tuple[str, int, str]]:
    """Name, size and hash of the files that this rank wrote."""
    names = [p.name for p in fresh.iterdir() if p.name.startswith(f"__{index}_")]
    if index == 0:
        names.append(".metadata")
    entries = ((name, manifest.digest(fresh / name)) for name in sorted(names))
    return [(name, entry.bytes, entry.sha256) for name, entry in entries]


def _finish(fresh: Path, path: Path, text: str, listed: Sequence[Sequence[Any]]) -> bool:
    manifest.write_durably(fresh / STATE, text.encode())
    entries = {name: manifest.Entry(size, sha) for name, size, sha in listed}
    entries[STATE] = manifest.digest(fresh / STATE)
    manifest.manifest_of(entries.items()).write(fresh)
    manifest.put_in_place(fresh, path)
    return True


class _BoxWriter(SavePlanner):
    """Plans a save: each rank lists its boxes, rank 0 keeps one writer for each."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.tensors: dict[str, Held] = state_dict

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, held in self.tensors.items():
            properties = TensorProperties.create_from_tensor(held.tensor.detach())
            most = max(1, BOX_BYTES // held.tensor.element_size())
            for box in (part for whole in held.boxes for part in split(whole, most)):
                data = TensorWriteData(_chunk(box), properties, torch.Size(held.shape))
                index = MetadataIndex(name, torch.Size(a for a, _ in box))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Each box goes to the holder that writes least so far; boxes must tile each tensor."""
        holders: dict[tuple[str, Box], list[int]] = {}
        items: dict[tuple[str, Box], WriteItem] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                assert item.tensor_data is not None
                key = item.index.fqn, box_of(item.tensor_data.chunk)
                holders.setdefault(key, []).append(rank)
                items[key] = item
        load = [0] * len(all_plans)
        chosen: list[list[WriteItem]] = [[] for _ in all_plans]
        stored: dict[str, TensorStorageMetadata] = {}
        # large boxes first, so that small ones even out what each rank writes
        for key in sorted(items, key=lambda k: (-_stored_bytes(items[k]), k)):
            item, rank = items[key], min(holders[key], key=lambda r: load[r])
            load[rank] += _stored_bytes(item)
            assert item.tensor_data is not None
            told = stored.setdefault(
                key[0],
                TensorStorageMetadata(item.tensor_data.properties, item.tensor_data.size, []),
            )
            index = replace_index(item.index, len(told.chunks))
            told.chunks.append(item.tensor_data.chunk)
            chosen[rank].append(replace(item, index=index))
        for name, told in stored.items():
            _check_tiling(name, told)
        index_file = Metadata(dict(sorted(stored.items())))
        return [SavePlan(items) for items in chosen], index_file

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        assert write_item.tensor_data is not None
        held = self.tensors[write_item.index.fqn]
        return held.part(box_of(write_item.tensor_data.chunk)).contiguous()


def replace_index(index: MetadataIndex, number: int) -> MetadataIndex:
    """The same index with a hint where its chunk stands in the tensor's list."""
    return MetadataIndex(index.fqn, index.offset, number)


def _check_tiling(name: str, stored: TensorStorageMetadata) -> None:
    """Every element of a tensor is in exactly one stored box."""
    boxes = boxes_of(stored)
    total, whole = sum(map(volume, boxes)), volume(tuple((0, n) for n in stored.size))
    overlap = any(intersection(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a)
    if total != whole or overlap:
        raise ValueError(f"{name}: boxes of {total} elements do not tile {tuple(stored.size)}")


def _stored_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return volume(box_of(item.tensor_data.chunk)) * item.tensor_data.properties.dtype.itemsize


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(a for a, _ in box), torch.Size(b - a for a, b in box))


# Loading


def read_extra(path: str | Path, world: World) -> Any:
    """The `extra` of a checkpoint; its tensors are neither read nor checked. Collective."""
    path, group = Path(path), world.everyone

    def read() -> Any:
        files = {n: manifest.Entry(size, sha) for n, size, sha in _listing(path)}
        found = manifest.faults(path, {STATE: files[STATE]})
        if found:
            raise CheckpointError(f"{found[0]}; {manifest.offer(path)}")
        return json.loads((path / STATE).read_text())

    return _on_first(group, read, f"{path}: {STATE}")


def load(
    path: str | Path,
    wanted: Mapping[str, Held],
    world: World,
    allow: Sequence[str] = (),
) -> Any:
    """Fills the local tensors of `wanted` from a checkpoint; returns its `extra`. Collective.

    allow: patterns of names that may be missing, or may be left unread. CheckpointError, equal on
    all ranks and before anything is filled, with every fault: damaged files, missing, unexpected,
    wrongly shaped or typed tensors; it offers the newest good checkpoint beside this one.
    """
    path, group = Path(path), world.everyone
    listed = _on_first(group, lambda: _listing(path), "")
    files = {n: manifest.Entry(size, sha) for n, size, sha in listed}
    mine = dict(
        sorted(files.items(), key=lambda f: (-f[1].bytes, f[0]))[group.index :: group.size]
    )
    found = [f for part in group.all_gather_json(manifest.faults(path, mine)) for f in part]
    if found:
        raise CheckpointError(f"{'; '.join(found)}; {_offered(group, path)}")
    reader = Reader(path, files)
    stored = _agreed(group, reader.read_metadata, "")
    told = [f for part in group.all_gather_json(_differences(stored, wanted, allow)) for f in part]
    if told:
        raise CheckpointError(f"{path}: does not fit: {'; '.join(dict.fromkeys(told))}")
    present = {name: held for name, held in wanted.items() if name in stored.state_dict_metadata}
    try:
        with _without_warning_of_one_rank():
            state_dict_loader.load(
                dict(present),
                storage_reader=reader,
                planner=_BoxReader(),
                process_group=group.handle,
                no_dist=group.size == 1,
            )
    except CheckpointException as error:
        raise CheckpointError(f"{path}: cannot be read: {_reasons(error)}") from None
    return _agreed(group, lambda: json.loads((path / STATE).read_text()), f"{path}: {STATE}")


def _listing(path: Path) -> list[tuple[str, int, str]]:
    """The manifest's files; what is missing of ours is said with an offer."""
    try:
        files = manifest.Manifest.read(path).files
        for needed in (".metadata", STATE):
            if needed not in files:
                raise CheckpointError(f"{path}: its manifest does not list {needed}")
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {manifest.offer(path)}") from None
    return [(name, entry.bytes, entry.sha256) for name, entry in files.items()]


def _offered(group: Everyone, path: Path) -> str:
    return str(group.broadcast_json(manifest.offer(path) if group.index == 0 else ""))


def _differences(stored: Metadata, wanted: Mapping[str, Held], allow: Sequence[str]) -> list[str]:
    """A sentence for every tensor that the checkpoint and this rank do not describe alike."""

    def allowed(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in allow)

    known = described(stored)
    told = [f"{n} is missing" for n in wanted if n not in known and not allowed(n)]
    told += [f"{n} is unexpected" for n in known if n not in wanted and not allowed(n)]
    for name, held in wanted.items():
        there = known.get(name)
        if there is None:
            continue
        if tuple(there.size) != tuple(held.shape):
            told.append(f"{name} has shape {tuple(there.size)} there, {tuple(held.shape)} here")
        if there.properties.dtype != held.dtype:
            told.append(f"{name} is {there.properties.dtype} there, {held.dtype} here")
    return told


class _BoxReader(LoadPlanner):
    """Plans a load: the wanted boxes intersected with the stored ones."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        self.tensors: dict[str, Held] = state_dict
        known = described(metadata)
        self.stored = {name: boxes_of(known[name]) for name in state_dict}

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, held in self.tensors.items():
            for box in held.boxes:
                for number, there in enumerate(self.stored[name]):
                    shared = intersection(box, there)
                    if shared is not None:
                        items.append(_read_item(name, number, box, there, shared))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn}: pickled objects are not read")

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        raise CheckpointError(f"{read_item.dest_index.fqn}: pickled objects are not read")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        start = read_item.dest_index.offset
        assert start is not None
        box = tuple(
            (a + d, a + d + n)
            for a, d, n in zip(start, read_item.dest_offsets, read_item.lengths, strict=True)
        )
        return self.tensors[read_item.dest_index.fqn].part(box)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # what was resolved is a view of the local tensor


def _read_item(name: str, number: int, box: Box, there: Box, shared: Box) -> ReadItem:
    def offsets(outer: Box) -> torch.Size:
        return torch.Size(a - b for (a, _), (b, _) in zip(shared, outer, strict=True))

    return ReadItem(
        LoadItemType.TENSOR,
        dest_index=MetadataIndex(name, torch.Size(a for a, _ in box)),
        dest_offsets=offsets(box),
        storage_index=MetadataIndex(name, torch.Size(a for a, _ in there), number),
        storage_offsets=offsets(there),
        lengths=torch.Size(b - a for a, b in shared),
    )


# All ranks, one answer


def _agreed(group: Everyone, do: Callable[[], T], what: str) -> T:
    """`do()` of this rank; where it fails on any rank, the same CheckpointError on all."""
    result, fault = _attempt(do, what)
    told = [f for f in group.all_gather_json(fault) if f]
    if told:
        raise CheckpointError("; ".join(dict.fromkeys(told)))
    return cast(T, result)


def _on_first(group: Everyone, do: Callable[[], T], what: str) -> T:
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


def _reasons(error: CheckpointException) -> str:
    """What went wrong on which ranks, in one line."""
    told: dict[str, list[int]] = {}
    for rank, (cause, _) in error.failures.items():
        text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        told.setdefault(" ".join(text.split())[:300] or type(cause).__name__, []).append(rank)
    return "; ".join(f"{text} (rank {', '.join(map(str, r))})" for text, r in told.items())


class _without_warning_of_one_rank(warnings.catch_warnings):
    """torch warns that a save without process groups is meant for one process: it is."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
