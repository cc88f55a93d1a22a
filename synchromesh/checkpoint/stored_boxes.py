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
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata, planner
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from synchromesh.checkpoint.local_tensor import LocalTensor
from synchromesh.checkpoint.manifest import CheckpointError, FileEntry, plain
from synchromesh.values.boxes import Box, split, volume


class BoxWriter(DefaultSavePlanner):
    """Plans a save: each rank lists its boxes, rank 0 keeps one writer for each."""

    BOX_BYTES: ClassVar[int] = 32 * 2**20  # larger boxes are stored in parts, read one at a time

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.tensors: dict[str, LocalTensor] = state_dict

    def create_local_plan(self) -> planner.SavePlan:
        """Large boxes first, so that small ones even out what each rank writes. Boxes are told
        apart by their corners: an empty one would hide its neighbour."""
        items = []
        for name, local in self.tensors.items():
            properties = metadata.TensorProperties.create_from_tensor(local.tensor.detach())
            most, empty = max(1, self.BOX_BYTES // local.dtype.itemsize), not prod(local.shape)
            for box in (part for outer in local.boxes for part in split(outer, most)):
                if not (volume(box) or empty):
                    continue
                chunk = _chunk(box)
                data = planner.TensorWriteData(chunk, properties, torch.Size(local.shape))
                index = metadata.MetadataIndex(name, chunk.offsets)
                items.append(
                    planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data)
                )
        return planner.SavePlan(sorted(items, key=lambda item: -(item.tensor_storage_size() or 0)))

    def resolve_data(self, write_item: planner.WriteItem) -> Tensor | io.BytesIO:
        assert write_item.tensor_data is not None
        local = self.tensors[write_item.index.fqn]
        return local.view(box_of(write_item.tensor_data.chunk)).contiguous()


def _chunk(box: Box) -> metadata.ChunkStorageMetadata:
    return metadata.ChunkStorageMetadata(
        torch.Size(a for a, _ in box), torch.Size(b - a for a, b in box)
    )


class BoxReader(DefaultLoadPlanner):
    """Plans a load: the wanted boxes intersected with the stored ones."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        self.tensors: dict[str, LocalTensor] = state_dict
        self.stored = described(metadata)

    def create_local_plan(self) -> planner.LoadPlan:
        """Every part of a stored box that lies in a wanted one."""
        items = []
        for name, local in self.tensors.items():
            wanted = [_chunk(box) for box in local.boxes if volume(box)]
            items += create_read_items_for_chunk_list(name, self.stored[name], wanted)
        return planner.LoadPlan(items)

    def load_bytes(self, read_item: planner.ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn}: pickled objects are not read")

    def resolve_tensor(self, read_item: planner.ReadItem) -> Tensor:
        start = read_item.dest_index.offset
        assert start is not None
        box = tuple(
            (a + d, a + d + n)
            for a, d, n in zip(start, read_item.dest_offsets, read_item.lengths, strict=True)
        )
        return self.tensors[read_item.dest_index.fqn].view(box)


def box_of(chunk: metadata.ChunkStorageMetadata) -> Box:
    """The box of a chunk that torch describes by offsets and sizes."""
    return tuple((a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))


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
