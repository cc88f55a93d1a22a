"""The index of a checkpoint (torch's `.metadata`), read without trusting it.

torch reads it with `pickle.load`, which executes what it names. Here it is unpickled from an
allow-list of the classes that an index consists of, and must then be a list of boxes of tensors
that lie in files of the manifest: pickled objects (BYTE_IO), paths that lead elsewhere and places
outside a file are refused."""

import io
import pathlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from synchromesh.checkpoint.manifest import CheckpointError, FileEntry, plain
from synchromesh.values.placement import Box


def box_of(chunk: ChunkStorageMetadata) -> Box:
    """The box of a chunk that torch describes by offsets and sizes."""
    return tuple((a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))


def boxes_of(stored: TensorStorageMetadata) -> list[Box]:
    """The boxes of a stored tensor, in the order of its chunks."""
    return [box_of(chunk) for chunk in stored.chunks]


def described(index: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors of an index by name; it has nothing else once it was read here."""
    entries = index.state_dict_metadata.items()
    return {n: entry for n, entry in entries if isinstance(entry, TensorStorageMetadata)}


class IndexReader(FileSystemReader):
    """torch's reader with an index that is checked against the manifest's `files`."""

    def __init__(self, path: Path, files: Mapping[str, FileEntry]) -> None:
        super().__init__(path)
        self.files = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index; CheckpointError with the faults of one that is damaged or asks for more than
        a checkpoint of tensors has."""
        where = Path(self.path) / ".metadata"
        try:
            found = _Unpickler(io.BytesIO(where.read_bytes())).load()
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None
        except Exception as error:
            raise CheckpointError(
                f"{where}: is no index: {type(error).__name__}: {error}"
            ) from None
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{where}: is no index of a checkpoint")
        faults = _faults(found, self.files)
        if faults:
            raise CheckpointError(f"{where}: {'; '.join(faults[:5])}")
        return found


def _faults(found: Metadata, files: Mapping[str, FileEntry]) -> list[str]:
    """What in an index is not as a checkpoint of tensors has it."""
    faults = []
    for name, entry in found.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            faults.append(f"{name!r} is a pickled object (BYTE_IO), which is not read")
            continue
        for chunk in entry.chunks:
            if MetadataIndex(name, chunk.offsets) not in found.storage_data:
                faults.append(f"{name!r} has a box at {tuple(chunk.offsets)} without a place")
    for info in found.storage_data.values():
        path = str(info.relative_path)
        if not plain(path) or path not in files:
            faults.append(f"the path {path[:80]!r} is no file of this checkpoint")
        elif not 0 <= info.offset <= info.offset + info.length <= files[path].bytes:
            faults.append(f"a box lies outside {path}")
        elif getattr(info, "transform_descriptors", None):
            faults.append(f"{path} is transformed, which is not read")
    return faults


_CLASSES: tuple[Any, ...] = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    _StorageInfo,
)
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
