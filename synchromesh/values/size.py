"""Sizes in bytes as text: `8GiB`, `16GB`, `500MB`."""

import re

SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([KMGT]?)(i?)B", re.IGNORECASE)
UNITS = ("", "K", "M", "G", "T")


def parse(text: str) -> float:
    """Bytes. ValueError where the text is no size of at least one."""
    match = SIZE.fullmatch(text)
    power = 0 if match is None else UNITS.index(match[2].upper())
    number = 0.0 if match is None else float(match[1]) * (1024 if match[3] else 1000) ** power
    if number < 1:
        raise ValueError(f"{text!r} is no size as 8GiB, 16GB or 500MB")
    return number


def show(count: int) -> str:
    """The shortest text of so many bytes: `1GiB`, `500MB`."""
    shown = [
        f"{count // base**power}{unit}{'i' * (base == 1024 and power > 0)}B"
        for base in (1024, 1000)
        for power, unit in enumerate(UNITS)
        if not count % base**power
    ]
    return min(shown, key=len)


def readable(size: float) -> str:
    """Bytes for a reader: 3.2 GB."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
