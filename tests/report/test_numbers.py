"""Numbers as a reader wants them."""

import pytest

from synchromesh.report import numbers
from synchromesh.results.groups import Spread


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123456, "0.0123"), (12.3456, "12.3"), (1234.5, "1,230"), (0, "0"), (None, "–"),
        (9.996, "10.0"), (-0.5, "−0.500"), (float("nan"), "–"), (1e-9, "1.00e−09"),
    ],
)  # fmt: skip
def test_three_significant_digits(value: float | None, text: str) -> None:
    assert numbers.plain(value) == text


def test_units() -> None:
    times = (2e-6, 0.0123, 1.5, 119.0, 600.0, 9000.0, 0.0, None)
    assert [numbers.seconds(t) for t in times] == [
        "2.00 µs", "12.3 ms", "1.50 s", "119 s", "10.0 min", "2.50 h", "0 s", "–",
    ]  # fmt: skip
    assert [numbers.size(b) for b in (12, 2048, 3 * 2**20, 2**33, None)] == [
        "12 B", "2.00 KiB", "3.00 MiB", "8.00 GiB", "–",
    ]  # fmt: skip
    assert numbers.share(0.1234) == "12.3 %" and numbers.dollars(0.035) == "$0.0350"
    assert numbers.spread(Spread(0.9123, 0.0041, 3)) == "0.9123 ± 0.0041"
    assert numbers.spread(Spread(0.9123, 0.0, 1)) == "0.9123"


def test_words() -> None:
    assert numbers.listed(["a"]) == "a" and numbers.listed(["a", "b", "c"]) == "a, b and c"
    assert numbers.listed([]) == ""
    assert numbers.short("a\nb" + "x" * 20, 8) == "a bxxxx…"
    assert (numbers.devices(1), numbers.devices(4)) == ("1 device", "4 devices")
    assert numbers.counted(1, "run") == "1 run" and numbers.counted(0, "run") == "0 runs"
