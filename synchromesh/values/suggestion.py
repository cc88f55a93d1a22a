"""A suggestion for a mistyped name: what resembles it among the names that exist."""

import difflib
from collections.abc import Iterable


def near(text: str, known: Iterable[str], brackets: bool = False) -> str:
    """`; did you mean 'x' or 'y'` where known names resemble `text`, else nothing.

    In `brackets` it reads ` (did you mean x or y?)`, for sentences that go on after it."""
    if brackets:
        names = difflib.get_close_matches(text, list(known), n=2, cutoff=0.6)
        return f" (did you mean {' or '.join(names)}?)" if names else ""
    names = difflib.get_close_matches(text, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, names))}" if names else ""
