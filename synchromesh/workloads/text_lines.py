"""A text file of a data set, plain or gzip-compressed, in UTF-8: its lines, or all of it."""

from pathlib import Path

from synchromesh.workloads import packed


def read(folder: Path, name: str, holds: str) -> tuple[Path, list[str]]:
    """The path and the lines, without their ends, of `folder/name` or `folder/name.gz`.

    A line ends with a line feed, also after a carriage return, and with nothing else that Unicode
    calls a break: pairs of files stay side by side. holds and errors as in `read_text`."""
    path, text = read_text(folder, name, holds)
    return path, [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def read_text(folder: Path, name: str, holds: str) -> tuple[Path, str]:
    """The path and the text of `folder/name` or `folder/name.gz`.

    holds: what a right folder holds, for the message. ValueError, with file and line, for bytes
    that are no UTF-8, and for a file without text."""
    path, content = packed.read(folder, name, holds)
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
