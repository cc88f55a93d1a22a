"""CIFAR-100's files: the binary version (plain, packed, in several files) and the Python version.

A record of the binary version is `<coarse label><fine label><3072 pixels>`, 3074 bytes. The
Python version is a pickle, read by an unpickler that makes arrays, bytes, strings, lists, dicts
and numbers and refuses everything else.
"""

import io
import lzma
import pickle
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

RECORD = 2 + 3 * 32 * 32
CLASSES = 100
LAYOUTS = (
    "train.bin and test.bin, cifar-100-binary.tar.gz, train-*.bin.xz and test-*.bin.xz, "
    "or cifar-100-python*.tar.gz"
)


def read(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Pixels uint8 (n, 3, 32, 32) and fine labels int64 (n) of `split`, train or test."""
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}: name one that holds {LAYOUTS} with --data DIR"
        )
    for place in (folder, folder / "cifar-100-binary"):
        if (place / f"{split}.bin").is_file():
            return records((place / f"{split}.bin").read_bytes(), place / f"{split}.bin")
    for archive in sorted(folder.glob("cifar-100-binary*.tar.gz")):
        return records(_member(archive, f"{split}.bin"), archive)
    packed = sorted(folder.glob(f"{split}-*.bin.xz"))
    if packed:
        parts = [records(_unpack(path), path) for path in packed]
        return torch.cat([p for p, _ in parts]), torch.cat([n for _, n in parts])
    if (folder / "cifar-100-python" / split).is_file():
        path = folder / "cifar-100-python" / split
        return pickled(path.read_bytes(), path)
    for archive in sorted(folder.glob("cifar-100-python*.tar.gz")):
        return pickled(_member(archive, split), archive)
    raise ValueError(
        f"{folder} holds no CIFAR-100 {split} data: looked for {LAYOUTS}; "
        "name the right folder with --data DIR"
    )


def records(content: bytes, path: Path) -> tuple[Tensor, Tensor]:
    """Pixels and fine labels of the binary version's records; `path` is for messages."""
    if not content or len(content) % RECORD:
        raise ValueError(
            f"{path} has {len(content)} bytes of records, not a multiple of {RECORD}: "
            "it is cut short or not CIFAR-100's binary version, fetch it again"
        )
    table = torch.from_numpy(np.frombuffer(content, np.uint8).reshape(-1, RECORD).copy())
    return table[:, 2:].reshape(-1, 3, 32, 32).contiguous(), _labels(
        table[:, 1].to(torch.int64), path
    )


def pickled(content: bytes, path: Path) -> tuple[Tensor, Tensor]:
    """Pixels and fine labels of the Python version; `path` is for messages."""
    try:
        entries = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
        pixels = np.asarray(entries[b"data"])
        labels = np.asarray(entries[b"fine_labels"], np.int64)
    except Refused as error:
        raise ValueError(
            f"{path} asks for {error}, which no CIFAR-100 file needs: it is not loaded"
        ) from error
    except Exception as error:  # a broken pickle raises almost anything
        raise ValueError(
            f"{path} is not CIFAR-100's Python version ({type(error).__name__}: {error}): "
            "fetch it again"
        ) from error
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3072):
        raise ValueError(
            f"{path} holds pixels {pixels.dtype} {pixels.shape} for {len(labels)} labels, "
            f"not uint8 ({len(labels)}, 3072): fetch it again"
        )
    images = torch.from_numpy(np.ascontiguousarray(pixels).copy()).reshape(-1, 3, 32, 32)
    return images, _labels(torch.from_numpy(labels.copy()), path)


def _labels(labels: Tensor, path: Path) -> Tensor:
    if len(labels) == 0 or int(labels.min()) < 0 or int(labels.max()) >= CLASSES:
        found = "no labels" if len(labels) == 0 else f"a fine label {int(labels.max())}"
        raise ValueError(
            f"{path} has {found}, not 0 to {CLASSES - 1}: it is not CIFAR-100, fetch it again"
        )
    return labels


def _unpack(path: Path) -> bytes:
    try:
        return lzma.decompress(path.read_bytes())
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} is not a whole xz file ({error}): fetch it again") from error


def _member(archive: Path, name: str) -> bytes:
    """The bytes of the regular file `name` in any folder of a tar; nothing is written to disk."""
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and Path(member.name).name == name:
                    content = tar.extractfile(member)
                    assert content is not None
                    return content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(
            f"{archive} is not a whole tar.gz file ({error}): fetch it again"
        ) from error
    raise ValueError(f"{archive} has no file {name}: fetch it again")


class Refused(Exception):
    """A pickle asked for something that is not plain data; the message is its name."""


_ARRAY = object()  # stands for numpy.ndarray, which a pickle only hands to `_reconstruct`


def _reconstruct(kind: object, shape: tuple[int, ...], code: object) -> Any:
    """The empty array that the pickle's next step fills."""
    if kind is not _ARRAY or shape != (0,):
        raise Refused(f"an array of {kind} {shape}")
    return np.ndarray((0,), "b")


def _encode(text: str, encoding: str | bytes = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    return text.encode("latin1")


def _dtype(code: str | bytes, *rest: Any) -> Any:
    name = code.decode() if isinstance(code, bytes) else code
    if np.dtype(name).hasobject:
        raise Refused("an array of objects")
    return np.dtype(name)


ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise Refused(f"{module}.{name}") from None
