"""Sizes as text."""

import pytest

from synchromesh.values import size


@pytest.mark.parametrize(
    ("text", "count"),
    [("1GiB", 2**30), ("500MB", 5 * 10**8), ("1KiB", 1024), ("7B", 7), ("1TB", 10**12)],
)
def test_sizes_are_read_as_they_are_shown(text: str, count: int) -> None:
    assert size.parse(text) == count and size.show(count) == text


@pytest.mark.parametrize("text", ["", "1G", "GiB", "-1GiB", "0B", "1e3MB", "1 PiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size as 8GiB, 16GB or 500MB"):
        size.parse(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 KB"), (3.2e9, "3.2 GB"), (5e15, "5000.0 TB")],
)
def test_readable(count: float, text: str) -> None:
    assert size.readable(count) == text
