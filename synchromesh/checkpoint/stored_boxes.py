"""Stored boxes: the files of torch's distributed checkpoints. Which rank writes which box, which
stored boxes fill the wanted ones, and their index (`.metadata`), read without trusting it.

torch reads the index with `pickle.load`, which executes what it names. Here it is unpickled from
an allow-list of the classes that an index consists of, and must then be a list of boxes of tensors
that lie in files of the manifest: pickled objects (BYTE_IO), paths that lead elsewhere and places
outside a file are refused."""

import io
import pathlib
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata, planner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

from synchromesh.checkpoint.local_tensor import LocalTensor
from synchromesh.checkpoint.manifest import CheckpointError, FileEntry, plain
from synchromesh.values.boxes import Box, full_box, intersection, place, split, volume


class BoxWriter(planner.SavePlanner):
    """Plans a save: each rank lists its boxes, rank 0 keeps one writer for each."""

    BOX_BYTES: ClassVar[int] = 32 * 2**20  # larger boxes are stored in parts, read one at a time

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.tensors: dict[str, LocalTensor] = state_dict

    def create_local_plan(self) -> planner.SavePlan:
        items = []
        for name, local in self.tensors.items():
            properties = metadata.TensorProperties.create_from_tensor(local.tensor.detach())
            most = max(1, self.BOX_BYTES // local.dtype.itemsize)
            for box in (part for outer in local.boxes for part in split(outer, most)):
                data = planner.TensorWriteData(_chunk(box), properties, torch.Size(local.shape))
                index = _at_corner(name, box)
                items.append(
                    planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data)
                )
        return planner.SavePlan(items)

    def create_global_plan(
        self, all_plans: list[planner.SavePlan]
    ) -> tuple[list[planner.SavePlan], metadata.Metadata]:
        """Each box goes to the holder that writes least so far; boxes must tile each tensor."""
        holders: dict[tuple[str, Box], list[int]] = {}
        items: dict[tuple[str, Box], planner.WriteItem] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                assert item.tensor_data is not None
                key = item.index.fqn, box_of(item.tensor_data.chunk)
                holders.setdefault(key, []).append(rank)
                items[key] = item
        load = [0] * len(all_plans)
        chosen: list[list[planner.WriteItem]] = [[] for _ in all_plans]
        stored: dict[str, metadata.TensorStorageMetadata] = {}
        # large boxes first, so that small ones even out what each rank writes
        for key in sorted(items, key=lambda k: (-_stored_bytes(items[k]), k)):
            item, rank = items[key], min(holders[key], key=lambda r: load[r])
            load[rank] += _stored_bytes(item)
            assert item.tensor_data is not None
            data = item.tensor_data
            empty = metadata.TensorStorageMetadata(data.properties, data.size, [])
            entry = stored.setdefault(key[0], empty)
            index = _at_corner(*key, len(entry.chunks))
            entry.chunks.append(data.chunk)
            chosen[rank].append(replace(item, index=index))
        for name, entry in stored.items():
            _check_tiling(name, entry)
        index_file = metadata.Metadata(dict(sorted(stored.items())))
        return [planner.SavePlan(items) for items in chosen], index_file

    def finish_plan(self, new_plan: planner.SavePlan) -> planner.SavePlan:
        return new_plan

    def resolve_data(self, write_item: planner.WriteItem) -> Tensor | io.BytesIO:
        assert write_item.tensor_data is not None
        local = self.tensors[write_item.index.fqn]
        return local.view(box_of(write_item.tensor_data.chunk)).contiguous()


def _check_tiling(name: str, stored: metadata.TensorStorageMetadata) -> None:
    """Every element of a tensor is in exactly one stored box."""
    boxes = boxes_of(stored)
    total, wanted = sum(map(volume, boxes)), volume(full_box(stored.size))
    overlap = any(intersection(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a)
    if total != wanted or overlap:
        raise ValueError(f"{name}: boxes of {total} elements do not tile {tuple(stored.size)}")


def _stored_bytes(item: planner.WriteItem) -> int:
    assert item.tensor_data is not None
    return volume(box_of(item.tensor_data.chunk)) * item.tensor_data.properties.dtype.itemsize


def _chunk(box: Box) -> metadata.ChunkStorageMetadata:
    return metadata.ChunkStorageMetadata(
        torch.Size(a for a, _ in box), torch.Size(b - a for a, b in box)
    )


class BoxReader(planner.LoadPlanner):
    """Plans a load: the wanted boxes intersected with the stored ones."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        self.tensors: dict[str, LocalTensor] = state_dict
        known = described(metadata)
        self.stored = {name: boxes_of(known[name]) for name in state_dict}

    def create_local_plan(self) -> planner.LoadPlan:
        """Every part of a stored box that lies in a wanted one."""
        items = []
        for name, local in self.tensors.items():
            for box in local.boxes:
                for number, there in enumerate(self.stored[name]):
                    shared = intersection(box, there)
                    if shared is not None:
                        items.append(_read_item(name, number, box, there, shared))
        return planner.LoadPlan(items)

    def create_global_plan(self, global_plan: list[planner.LoadPlan]) -> list[planner.LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: planner.LoadPlan) -> planner.LoadPlan:
        return central_plan

    def load_bytes(self, read_item: planner.ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn}: pickled objects are not read")

    def resolve_bytes(self, read_item: planner.ReadItem) -> io.BytesIO:
        raise CheckpointError(f"{read_item.dest_index.fqn}: pickled objects are not read")

    def resolve_tensor(self, read_item: planner.ReadItem) -> Tensor:
        start = read_item.dest_index.offset
        assert start is not None
        box = tuple(
            (a + d, a + d + n)
            for a, d, n in zip(start, read_item.dest_offsets, read_item.lengths, strict=True)
        )
        return self.tensors[read_item.dest_index.fqn].view(box)

    def commit_tensor(self, read_item: planner.ReadItem, tensor: Tensor) -> None:
        """Nothing to do: what was resolved is a view of the local tensor."""


def _read_item(name: str, number: int, box: Box, there: Box, shared: Box) -> planner.ReadItem:
    """Reads `shared` of the wanted `box` from the stored one, `there`, the tensor's `number`th."""

    def offsets(outer: Box) -> torch.Size:
        return torch.Size(first for first, _ in place(shared, [outer]))

    return planner.ReadItem(
        planner.LoadItemType.TENSOR, dest_index=_at_corner(name, box), dest_offsets=offsets(box),
        storage_index=_at_corner(name, there, number), storage_offsets=offsets(there),
        lengths=torch.Size(b - a for a, b in shared),
    )  # fmt: skip


def _at_corner(name: str, box: Box, number: int | None = None) -> metadata.MetadataIndex:
    """What torch calls a box of a tensor by; number: its place in the tensor's list, a hint."""
    return metadata.MetadataIndex(name, torch.Size(a for a, _ in box), number)


def box_of(chunk: metadata.ChunkStorageMetadata) -> Box:
    """The box of a chunk that torch describes by offsets and sizes."""
    return tuple((a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))


def boxes_of(stored: metadata.TensorStorageMetadata) -> list[Box]:
    return [box_of(chunk) for chunk in stored.chunks]


def described(index: metadata.Metadata) -> dict[str, metadata.TensorStorageMetadata]:
    """The tensors of an index by name; it has nothing else once it was read here."""
    entries = index.state_dict_metadata.items()
    return {n: entry for n, entry in entries if isinstance(entry, metadata.TensorStorageMetadata)}


class IndexReader(FileSystemReader):
    """torch's reader with an index that is checked against the manifest's `files`."""

    def __init__(self, path: Path, files: Mapping[str, FileEntry]) -> None:
        super().__init__(path)
        self.files = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """The index; CheckpointError where it is damaged or names more than tensors."""
        where = Path(self.path) / ".metadata"
        try:
            index = _Unpickler(io.BytesIO(where.read_bytes())).load()
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{where}: is no index: {why}") from None
        if not isinstance(index, metadata.Metadata):
            raise CheckpointError(f"{where}: is no index of a checkpoint")
        faults = _faults(index, self.files)
        if faults:
            raise CheckpointError(f"{where}: {'; '.join(faults[:5])}")
        return index


def _faults(index: metadata.Metadata, files: Mapping[str, FileEntry]) -> list[str]:
    """What in an index is not as a checkpoint of tensors has it."""
    faults = []
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, metadata.TensorStorageMetadata):
            faults.append(f"{name!r} is a pickled object (BYTE_IO), which is not read")
            continue
        for chunk in entry.chunks:
            if metadata.MetadataIndex(name, chunk.offsets) not in index.storage_data:
                faults.append(f"{name!r} has a box at {tuple(chunk.offsets)} without a place")
    for info in index.storage_data.values():
        path = str(info.relative_path)
        if not plain(path) or path not in files:
            faults.append(f"the path {path[:80]!r} is no file of this checkpoint")
        elif not 0 <= info.offset <= info.offset + info.length <= files[path].bytes:
            faults.append(f"a box lies outside {path}")
        elif getattr(info, "transform_descriptors", None):
            faults.append(f"{path} is transformed, which is not read")
    return faults


_CLASSES: tuple[Any, ...] = (
    metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties,
    metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata,
    metadata._MEM_FORMAT_ENCODING, _StorageInfo,
)  # fmt: skip
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(c.__module__, c.__qualname__): c for c in _CLASSES},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
}


class _Unpickler(pickle.Unpickler):
    """Knows the names that an index needs and refuses every other."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise CheckpointError(f"names {module}.{name}, which no index needs: it is not loaded")
