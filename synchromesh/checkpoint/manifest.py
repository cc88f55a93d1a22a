"""A manifest: the files of a finished checkpoint with sizes and SHA-256; how it is put in place.

torch's checkpoints have no integrity check: a flipped bit loads in silence, and a crash in the
middle of overwriting one loses it or leaves a mixture. So a checkpoint is written to a hidden
folder beside its place, listed in MANIFEST.json, synchronised to the disk, and then renamed:

    .last.new-1f3a/  ->  last/        and what was there before   last/  ->  last.previous/

The exchange of two folders is one system call on Linux. Elsewhere there is a moment between two
renames; a process killed in it leaves only `last.previous`, which `newest` finds."""

import ctypes
import errno
import glob
import hashlib
import json
import os
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from synchromesh.values import document
from synchromesh.values.fields import Within, of_plain, to_plain

NAME = "MANIFEST.json"
FORMAT = "synchromesh checkpoint 1"


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or should not be read; the message names the file.
    Control characters in names are escaped: a name from a file must not steer the terminal."""

    def __init__(self, message: str) -> None:
        shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        super().__init__("".join(shown))


@dataclass(frozen=True)
class FileEntry:
    """One file: its bytes and their SHA-256 in hexadecimal digits."""

    bytes: Annotated[int, Within(0, 2**62)]
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint by name, and when it was finished (seconds since 1970)."""

    files: Mapping[str, FileEntry]
    created: float

    def write(self, folder: Path) -> None:
        """Writes MANIFEST.json and sees to it that folder and file are on the disk."""
        files = to_plain(dict(sorted(self.files.items())))
        value = {"format": FORMAT, "created": self.created, "files": files}
        write_durably(folder / NAME, json.dumps(value, indent=1).encode())
        sync(folder)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest of a checkpoint folder; CheckpointError where it is none of ours."""
        path = folder / NAME
        if folder.is_file():
            raise CheckpointError(
                f"{folder}: is a file, and a checkpoint is a folder that trainer.save writes: "
                "prepare(..., weights=) begins with a safetensors file, and weights of torch.save "
                "are loaded into the model before prepare"
            )
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: there is no such checkpoint folder")
        if not path.is_file() or path.is_symlink():
            raise CheckpointError(
                f"{folder}: is no finished checkpoint of Synchromesh: it has no {NAME}"
            )
        try:
            value = document.read_json(path.read_text(encoding="utf-8"), str(path))
            item = document.mapping(value, str(path), ("format", "created", "files"), ("files",))
            if item.get("format") != FORMAT:
                raise ValueError(f"{path}: the format is {document.kind(item.get('format'))}")
            known = document.mapping(item["files"], f"{path}: files", item["files"])
            files = {name: _entry(entry, name, str(path)) for name, entry in known.items()}
            created = document.number(item.get("created", 0), f"{path}: created")
            return cls(files, created)
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{error}: the manifest is damaged or foreign") from None


def _entry(value: Any, name: str, path: str) -> FileEntry:
    if not plain(name):
        raise ValueError(f"{path}: {name[:80]!r} is no plain file name")
    return of_plain(FileEntry, value, f"{path}: {name}")


def plain(name: str) -> bool:
    """Whether `name` names a file of the folder itself and nothing else."""
    return name not in ("", ".", "..") and os.path.basename(name) == name and "\\" not in name


def digest(path: Path) -> FileEntry:
    """Size and hash of a file as it is now."""
    with path.open("rb") as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(os.fstat(file.fileno()).st_size, sha)


def faults(folder: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """A sentence for each of `files` that is not as the manifest says. Reads them to the end."""
    wrong = []
    for name, entry in files.items():
        path = folder / name
        try:
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode):
                wrong.append(f"{path} is not a regular file")
                continue
            size = path.stat().st_size
            if size != entry.bytes:
                short = ": it is truncated" if size < entry.bytes else ""
                wrong.append(f"{path} has {size} bytes instead of {entry.bytes}{short}")
            elif digest(path) != entry:
                wrong.append(f"{path} is damaged: its contents do not have the recorded SHA-256")
        except FileNotFoundError:
            wrong.append(f"{path} is missing")
        except OSError as error:
            wrong.append(f"{path} cannot be read: {error.strerror}")
    return wrong


def verify(folder: str | Path) -> Manifest:
    """The manifest, if every file is as it says. CheckpointError with all faults."""
    folder = Path(folder)
    manifest = Manifest.read(folder)
    damaged = faults(folder, manifest.files)
    if damaged:
        raise CheckpointError("; ".join(damaged))
    return manifest


def by_age(folder: str | Path, since: float = 0.0) -> list[Path]:
    """The finished checkpoints in `folder`, the newest first by what their manifests say. since:
    seconds since 1970, before which none counts."""
    try:
        visible = [p for p in Path(folder).iterdir() if not p.name.startswith(".")]
        folders = (p for p in visible if p.is_dir() and not p.is_symlink())
        finished = [p for p in folders if (p / NAME).is_file() and _created(p) >= since]
        return sorted(finished, key=lambda p: (_created(p), p.name), reverse=True)
    except OSError:
        return []


def newest(
    folder: str | Path, besides: str | Path | None = None, passed_over: list[str] | None = None,
    since: float = 0.0,
) -> Path | None:  # fmt: skip
    """The newest undamaged checkpoint in `folder`; `passed_over` gets the faults of newer ones.
    since: as of `by_age`."""
    skipped = Path(besides).absolute() if besides is not None else None
    for path in by_age(folder, since):
        if path.absolute() == skipped:
            continue
        try:
            verify(path)
            return path
        except CheckpointError as error:
            if passed_over is not None:
                passed_over.append(str(error))
    return None


def _created(folder: Path) -> float:
    """When it was finished; of a damaged one what its folder says, which a copy does not keep."""
    try:
        return Manifest.read(folder).created
    except CheckpointError:
        return folder.stat().st_mtime


def offer(folder: str | Path) -> str:
    """What to say after a refusal: the newest good checkpoint beside the refused one."""
    other = newest(Path(folder).absolute().parent, besides=folder)
    if other is None:
        return "no other good checkpoint lies beside it"
    return f"the newest good one beside it is {other}"


def check_writable(folder: str | Path) -> None:
    """Makes `folder` and writes a file in it: an error now instead of at the first save."""
    folder = Path(folder)
    probe = folder / f".writable-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(probe, b"x")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"{folder}: checkpoints cannot be written there: {error.strerror}; "
            "choose another folder or make room"
        ) from None


def begin(path: Path) -> Path:
    """A new hidden folder beside `path` to write to; what killed runs left is removed."""
    parent = path.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    for stale in parent.glob(f".{glob.escape(path.name)}.new-*"):
        shutil.rmtree(stale, ignore_errors=True)
    fresh = parent / f".{path.name}.new-{uuid.uuid4().hex[:8]}"
    fresh.mkdir()
    return fresh


def put_in_place(fresh: Path, path: Path) -> None:
    """Renames the finished folder `fresh` to `path`; what was there becomes `path.previous`."""
    previous = path.with_name(f"{path.name}.previous")
    there = path.exists()
    if there and not (path / NAME).is_file():
        raise CheckpointError(
            f"{path}: something that is no checkpoint lies there and is not overwritten"
        )
    swapped = there and exchange(fresh, path)
    if there:
        shutil.rmtree(previous, ignore_errors=True)
        (fresh if swapped else path).rename(previous)
    if not swapped:
        fresh.rename(path)
    sync(path.absolute().parent)


def exchange(a: Path, b: Path) -> bool:
    """Swaps two names in one step; False where the system cannot."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    exchanged, here = 2, -100  # RENAME_EXCHANGE and AT_FDCWD of linux/fs.h and fcntl.h
    if rename(here, os.fsencode(a), here, os.fsencode(b), exchanged) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(a))


def write_durably(path: Path, data: bytes) -> None:
    """Writes a file whose bytes are on the disk when this returns."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Sees to it that the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def manifest_of(entries: Iterable[tuple[str, FileEntry]], folder: Path) -> Manifest:
    """A manifest that is newer than all others in `folder`, whatever this host's clock says."""
    latest = max(map(_created, by_age(folder)), default=0.0)
    return Manifest(dict(entries), max(time.time(), latest + 1e-3))
