"""Rates and shares as text: what is read, how it is shown, what is refused."""

import pytest

from synchromesh.lab.quantity import bandwidth, share, show_bandwidth, show_share


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("200mbit", 200_000_000),
        ("1.5gbit", 1_500_000_000),
        ("50 Mbit/s", 50_000_000),
        (" 800kbps", None),
        ("800kbitps", 800_000),
        ("100kbit", 100_000),
        (2.5e7, 25_000_000),
    ],
)
def test_bandwidths(text: str | float, bits: int | None) -> None:
    if bits is None:  # kbps is kilobytes to some and kilobits to others
        with pytest.raises(ValueError, match="is not a bandwidth"):
            bandwidth(text)
    else:
        assert bandwidth(text) == bits and bandwidth(show_bandwidth(bits)) == bits


@pytest.mark.parametrize(
    "text", ["200", "200MB", "mbit", "-5mbit", "1e3mbit", "", "0x2mbit", True]
)
def test_what_is_no_bandwidth(text: object) -> None:
    with pytest.raises(ValueError, match=r"is not a bandwidth: write .* 200mbit"):
        bandwidth(text)


@pytest.mark.parametrize("text", ["0mbit", "99kbit", "11gbit", 1e300, float("-inf")])
def test_bandwidths_out_of_range(text: object) -> None:
    with pytest.raises(ValueError, match="is outside 100kbit to 10gbit: try 200mbit"):
        bandwidth(text)


def test_shares() -> None:
    assert share("40%", 2) == share(0.4, 2) == 0.4
    assert share("200 %", 2) == 2 and share("12.5%", 2) == 0.125
    assert [show_share(x) for x in (0.4, 0.125, 2.0)] == ["40%", "12.5%", "200%"]
    assert [show_bandwidth(x) for x in (2e8, 1.5e9, 1e5)] == ["200mbit", "1.5gbit", "100kbit"]


@pytest.mark.parametrize("text", ["40", "0.4", "%", "-40%", "forty%", None])
def test_what_is_no_share(text: object) -> None:
    with pytest.raises(ValueError, match=r"is not a share of a core: write .* 40%"):
        share(text, 2)


@pytest.mark.parametrize("value", ["9%", "201%", 0.0, float("nan")])
def test_shares_out_of_range(value: object) -> None:
    with pytest.raises(ValueError, match=r"of a core is outside 10% to 200% \(2 cores\): try 40%"):
        share(value, 2)
