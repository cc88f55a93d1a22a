"""CIFAR's files: the binary version (plain, packed, in several files) and the Python version.

A record of the binary version is its labels, a byte each, and 3072 pixels:

    CIFAR-10    <label><pixels>                       3073 bytes, in five files and one
    CIFAR-100   <coarse label><fine label><pixels>    3074 bytes, in one file and one

The Python version is a pickle, read by an unpickler that makes arrays, bytes, strings, lists,
dicts and numbers and refuses everything else."""

import io
import lzma
import pickle
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Cifar:
    """One of the two data sets, as its authors publish it."""

    name: str
    classes: int
    labels: int  # bytes of labels in a record, the last of which is the class
    key: bytes  # of the classes in the Python version
    members: dict[str, tuple[str, ...]]  # split -> its files; of the binary version with .bin
    archive: str
    binary: str  # folders of the two versions, as they are unpacked
    python: str
    PIXELS: ClassVar[int] = 3 * 32 * 32

    @property
    def record(self) -> int:
        return self.labels + self.PIXELS

    @property
    def layouts(self) -> str:
        """What a folder may hold, for messages."""
        first, last = self.members["train"][0], self.members["test"][0]
        files = [f"{n}.bin" for n in (*self.members["train"], last)]
        plain = f"{first}.bin to {files[-2]} and {files[-1]}"
        plain = " and ".join(files) if len(files) == 2 else plain
        return (
            f"{plain}, {self.archive}-binary.tar.gz, train-*.bin.xz and test-*.bin.xz, "
            f"or {self.archive}-python*.tar.gz"
        )

    def read(self, folder: Path, split: str) -> tuple[Tensor, Tensor]:
        """Pixels uint8 (n, 3, 32, 32) and classes int64 (n) of `split`, train or test. ValueError
        where the folder has no such data, or a file is damaged."""
        parts = [*self._parts(folder, split)]
        return torch.cat([p for p, _ in parts]), torch.cat([c for _, c in parts])

    def _parts(self, folder: Path, split: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The data of each file in turn, in the first layout that is there."""
        if not folder.is_dir():
            raise ValueError(
                f"there is no folder {folder}: name one that holds {self.layouts} with --data DIR"
            )
        names, unpacked = self.members[split], (folder, folder / self.binary)
        files = [f"{name}.bin" for name in names]
        if binary := self._contents(folder, "binary", files, unpacked):
            return (self.records(content, path) for content, path in binary)
        if packed := sorted(folder.glob(f"{split}-*.bin.xz")):
            return (self.records(_unpack(path), path) for path in packed)
        if pickles := self._contents(folder, "python", names, (folder / self.python,)):
            return (self.pickled(content, path) for content, path in pickles)
        raise ValueError(
            f"{folder} holds no {self.name} {split} data: looked for {self.layouts}; "
            "name the right folder with --data DIR"
        )

    def _contents(
        self, folder: Path, version: str, names: Sequence[str], unpacked: Sequence[Path]
    ) -> Iterator[tuple[bytes, Path]] | None:
        """The contents of a version's files, with where they are; None: not there."""
        for place in unpacked:
            if (place / names[0]).is_file():
                return ((_content(place / n), place / n) for n in names)
        for path in sorted(folder.glob(f"{self.archive}-{version}*.tar.gz")):
            return ((content, path) for content in _members(path, names))
        return None

    def records(self, content: bytes, path: Path) -> tuple[Tensor, Tensor]:
        """Pixels and classes of the binary version's records; `path` is for messages."""
        if not content or len(content) % self.record:
            raise ValueError(
                f"{path} has {len(content)} bytes of records, not a multiple of {self.record}: "
                f"it is cut short or not {self.name}'s binary version, fetch it again"
            )
        rows = np.frombuffer(content, np.uint8).reshape(-1, self.record)
        table = torch.from_numpy(rows.copy())
        classes = table[:, self.labels - 1].to(torch.int64)
        pixels = table[:, self.labels :].reshape(-1, 3, 32, 32).contiguous()
        return pixels, self._checked(classes, path)

    def pickled(self, content: bytes, path: Path) -> tuple[Tensor, Tensor]:
        """Pixels and classes of the Python version; `path` is for messages."""
        try:
            entries = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
            pixels = np.asarray(entries[b"data"])
            classes = np.asarray(entries[self.key], np.int64)
        except RefusedPickle as error:
            raise ValueError(
                f"{path} asks for {error}, which no {self.name} file needs: it is not loaded"
            ) from error
        except Exception as error:  # a broken pickle raises almost anything
            raise ValueError(
                f"{path} is not {self.name}'s Python version ({type(error).__name__}: {error}): "
                "fetch it again"
            ) from error
        if pixels.dtype != np.uint8 or pixels.shape != (len(classes), self.PIXELS):
            raise ValueError(
                f"{path} holds pixels {pixels.dtype} {pixels.shape} for {len(classes)} labels, "
                f"not uint8 ({len(classes)}, {self.PIXELS}): fetch it again"
            )
        images = torch.from_numpy(np.ascontiguousarray(pixels).copy()).reshape(-1, 3, 32, 32)
        return images, self._checked(torch.from_numpy(classes.copy()), path)

    def _checked(self, classes: Tensor, path: Path) -> Tensor:
        wrong = classes[(classes < 0) | (classes >= self.classes)]
        if len(classes) == 0 or len(wrong):
            labels = "no labels" if len(classes) == 0 else f"a label {int(wrong[0])}"
            raise ValueError(
                f"{path} has {labels}, not 0 to {self.classes - 1}: it is not {self.name}, "
                "fetch it again"
            )
        return classes


CIFAR10 = Cifar(
    "CIFAR-10", classes=10, labels=1, key=b"labels", archive="cifar-10",
    members={"train": tuple(f"data_batch_{n}" for n in range(1, 6)), "test": ("test_batch",)},
    binary="cifar-10-batches-bin", python="cifar-10-batches-py",
)  # fmt: skip
CIFAR100 = Cifar(
    "CIFAR-100", classes=100, labels=2, key=b"fine_labels", archive="cifar-100",
    members={"train": ("train",), "test": ("test",)},
    binary="cifar-100-binary", python="cifar-100-python",
)  # fmt: skip


def _content(path: Path) -> bytes:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no file {path.name}: fetch the data set again")
    return path.read_bytes()


def _unpack(path: Path) -> bytes:
    try:
        return lzma.decompress(path.read_bytes())
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} is not a whole xz file ({error}): fetch it again") from error


def _members(archive: Path, names: Sequence[str]) -> list[bytes]:
    """The regular files of these names, in any folder of a tar; nothing goes to the disk."""
    try:
        with tarfile.open(archive) as tar:
            contents = _first_of_each(tar, names)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(
            f"{archive} is not a whole tar.gz file ({error}): fetch it again"
        ) from error
    missing = [name for name in names if name not in contents]
    if missing:
        raise ValueError(f"{archive} has no file {', '.join(missing)}: fetch it again")
    return [contents[name] for name in names]


def _first_of_each(tar: tarfile.TarFile, names: Sequence[str]) -> dict[str, bytes]:
    """Read no further than all are there."""
    contents: dict[str, bytes] = {}
    for member in tar:
        name = Path(member.name).name
        if member.isfile() and name in names and name not in contents:
            content = tar.extractfile(member)
            assert content is not None
            contents[name] = content.read()
        if len(contents) == len(names):
            break
    return contents


class RefusedPickle(Exception):
    """A pickle asked for something that is not plain data; the message is its name."""


_ARRAY = object()  # stands for numpy.ndarray, which a pickle only hands to `_reconstruct`


def _reconstruct(kind: object, shape: tuple[int, ...], code: object) -> Any:
    """The empty array that the pickle's next step fills."""
    if kind is not _ARRAY or shape != (0,):
        raise RefusedPickle(f"an array of {kind} {shape}")
    return np.ndarray((0,), "b")


def _encode(text: str, encoding: str | bytes = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    return text.encode("latin1")


def _dtype(code: str | bytes, *rest: Any) -> Any:
    name = code.decode() if isinstance(code, bytes) else code
    if np.dtype(name).hasobject:
        raise RefusedPickle("an array of objects")
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
            raise RefusedPickle(f"{module}.{name}") from None
