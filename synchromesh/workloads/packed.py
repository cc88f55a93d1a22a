"""A file of a data set, as it is or gzip-compressed, and the folder that it is in."""

import gzip
import zlib
from pathlib import Path


def needed(folder: Path | None, workload: str, holds: str) -> Path:
    """The folder of a workload's data; ValueError, with what a right one holds, for None."""
    if folder is None:
        raise ValueError(
            f"{workload} reads its data from a folder: name one that holds {holds} with --data DIR"
        )
    return folder


def read(folder: Path, name: str, holds: str) -> tuple[Path, bytes]:
    """The path and the unpacked bytes of `folder/name`, or of `folder/name.gz`.

    holds: what a right folder holds, for the message. ValueError where there is neither file, or
    where the packed one is cut short."""
    raw, packed = folder / name, folder / f"{name}.gz"
    path = raw if raw.is_file() else packed
    if not path.is_file():
        raise ValueError(
            f"{folder} has neither {name} nor {name}.gz"
            f"{'' if folder.is_dir() else ' (there is no such folder)'}: name the folder that "
            f"holds {holds} with --data DIR"
        )
    content = path.read_bytes()
    try:
        return path, content if path is raw else gzip.decompress(content)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is not a whole gzip file ({error}): fetch it again") from error
