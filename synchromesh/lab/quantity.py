"""Quantities of the lab as text: a link's rate (`200mbit`) and a share of a core (`40%`).

bandwidth   NUMBER UNIT, UNIT one of kbit, mbit, gbit, in any case, `/s` or `ps` after it or not:
            10^3, 10^6, 10^9 bits a second in each direction, from 100kbit to 10gbit
share       NUMBER%, per cent of one core, from 10% to all cores
memory      NUMBER UNIT, as 1GiB or 500MB, from 16MiB to 1024TiB"""

import re

from synchromesh.values import size

BANDWIDTH = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmg])bit(?:/s|ps)?", re.IGNORECASE)
SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?%")
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
# Less, and one burst of the shaper (64 KB) lasts longer than 5 s; more, and the kernel's timers
# and the two ends on one machine are the limit.
LEAST_BANDWIDTH, MOST_BANDWIDTH = 10**5, 10**10
LEAST_SHARE = 0.1  # 1 ms of a 10 ms period: the kernel takes no smaller quota
# Bytes; an interpreter needs 8 MB, torch 300 (measured), and above the kernel sees no limit.
LEAST_MEMORY, MOST_MEMORY = 2**24, 2**50


def bandwidth(value: object) -> int:
    """Bits a second of text, or of a number that says bits a second already."""
    if isinstance(value, str):
        found = BANDWIDTH.fullmatch(value.strip())
        if found is None:
            raise ValueError(
                f"{value!r} is not a bandwidth: write a number with kbit, mbit or gbit, as in "
                "200mbit"
            )
        bits = round(float(found[1]) * UNITS[found[2].lower()])
    elif isinstance(value, int | float) and not isinstance(value, bool):
        bits = round(value) if abs(value) < 2**60 else 2**60
    else:
        raise ValueError(f"{value!r} is not a bandwidth: write text as 200mbit")
    if not LEAST_BANDWIDTH <= bits <= MOST_BANDWIDTH:
        raise ValueError(f"a bandwidth of {value} is outside 100kbit to 10gbit: try 200mbit")
    return bits


def share(value: object, cores: int) -> float:
    """Cores of text such as `40%`, or of a number that counts cores already (0.4)."""
    if isinstance(value, str):
        found = SHARE.fullmatch(value.strip())
        if found is None:
            raise ValueError(
                f"{value!r} is not a share of a core: write per cent of one core, as in 40%"
            )
        part = float(found[1]) / 100
    elif isinstance(value, int | float) and not isinstance(value, bool):
        part = float(value)
    else:
        raise ValueError(f"{value!r} is not a share of a core: write text as 40%")
    if not LEAST_SHARE <= part <= cores:
        raise ValueError(
            f"a share of {show_share(part)} of a core is outside 10% to {cores * 100}% "
            f"({cores} cores): try 40%"
        )
    return part


def memory(value: object) -> int:
    """Bytes of text such as `1GiB`, or of a number of bytes."""
    if isinstance(value, str):
        bytes_ = int(size.parse(value.strip()))
    elif isinstance(value, int) and not isinstance(value, bool):
        bytes_ = value
    else:
        raise ValueError(f"{value!r} is no size: write text as 1GiB")
    if not LEAST_MEMORY <= bytes_ <= MOST_MEMORY:
        least, most = size.show(LEAST_MEMORY), size.show(MOST_MEMORY)
        raise ValueError(f"a host's memory of {value} is outside {least} to {most}: try 1GiB")
    return bytes_


def show_bandwidth(bits: float) -> str:
    """`200mbit` of 200,000,000."""
    unit = next((u for u in "gm" if bits >= UNITS[u]), "k")
    return f"{bits / UNITS[unit]:.6g}{unit}bit"


def show_share(part: float) -> str:
    """`40%` of 0.4."""
    return f"{part * 100:.4g}%"
