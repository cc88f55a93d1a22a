"""Bytes that a rank sends in a collective."""

from synchromesh.values.traffic import MESSAGES, Collective, sent_bytes


def test_ring_algorithms() -> None:
    assert sent_bytes("all_reduce", 1000, 4) == 1500
    kinds = ("reduce_scatter", "all_gather", "all_to_all")
    assert [sent_bytes(kind, 1000, 4) for kind in kinds] == [750] * 3  # type: ignore[arg-type]
    assert sent_bytes("all_reduce", 1000, 1) == 0


def test_a_message_is_sent_once_each_way() -> None:
    assert [sent_bytes(kind, 1000, 2) for kind in MESSAGES] == [1000, 1000]
    assert MESSAGES == ("send", "exchange")


def test_payload_follows_the_rows() -> None:
    assert Collective("all_reduce", "forward", 2, bytes_per_row=8, fixed_bytes=5).payload(3) == 29
