"""Timelines drawn by hand: a character a second."""

import re

from synchromesh.runs.spans import Recording, Span


def drawn(rank: int, ranks: tuple[int, ...] = (0, 1), **lanes: str) -> Recording:
    """A recording whose step is the whole picture.

    compute="##..##"   computations
    all_reduce=".aabb"  a letter for each communication of that name; `send` and `receive` are
    between `ranks` in that order
    """
    spans = []
    for lane, picture in lanes.items():
        if lane == "compute":
            found = [("computation", "mm", m, ()) for m in re.finditer("#+", picture)]
        else:
            found = [
                ("communication", lane, m, ranks) for m in re.finditer(r"([a-z])\1*", picture)
            ]
        spans += [
            Span(float(m.start()), float(m.end()), kind, name, lane, members)  # type: ignore[arg-type]
            for kind, name, m, members in found
        ]
    return Recording(rank, ((0.0, float(max(map(len, lanes.values())))),), tuple(spans))
