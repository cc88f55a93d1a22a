"""A file of a data set, plain or gzip-compressed: its bytes, or its text in UTF-8."""

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
    """The path and unpacked bytes of `folder/name` or `folder/name.gz`. holds: what a right folder
    holds, for messages. ValueError for neither file, or a packed one that is cut short."""
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


def read_lines(folder: Path, name: str, holds: str) -> tuple[Path, list[str]]:
    """The path and the lines, without their ends, of `folder/name` or `folder/name.gz`. A line
    ends with a line feed, also after a carriage return, and with nothing else that Unicode calls a
    break: pairs of files stay side by side. holds and errors as in `read_text`."""
    path, text = read_text(folder, name, holds)
    return path, [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def read_text(folder: Path, name: str, holds: str) -> tuple[Path, str]:
    """Path and text of `folder/name` or `folder/name.gz`; holds as in `read`. ValueError, with
    file and line, for bytes that are no UTF-8, and for a file without text."""
    path, content = read(folder, name, holds)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line}: the byte 0x{content[error.start]:02x} is no UTF-8 "
            f"({error.reason}); convert the file to UTF-8 or fetch it again"
        ) from error
    if not text.strip():
        raise ValueError(f"{path} has no text: fetch it again")
    return path, text
