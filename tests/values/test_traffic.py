"""Bytes that a rank sends in a collective."""

from synchromesh.values.traffic import MESSAGES, Collective, Servers, exchanges, sent_bytes


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


def test_servers_send_what_rings_do_in_all() -> None:
    """Every gradient comes to its server, and every part to all others."""
    for ranks in (2, 3, 4, 8):
        for servers in range(1, ranks + 1):
            sent = [Servers(servers).sent(60, index, ranks) for index in range(ranks)]
            assert sum(push for push, _ in sent) == sum(fetch for _, fetch in sent)
            assert sum(map(sum, sent)) == 2 * (ranks - 1) * 60 * servers
            own = [
                Servers(servers, True).sent(60, i, ranks + servers) for i in range(ranks + servers)
            ]
            assert own == [(0, 60 * ranks)] * servers + [(60 * servers, 0)] * ranks


def test_rings_and_servers_side_by_side() -> None:
    four = {e.word: (e.server, e.worker) for e in exchanges(1200, 4)}
    assert four == {
        "every-step": (None, 1800),
        "server:1": (3600, 1200),
        "server:2": (2400, 1200),
        "server:4": (1800, None),
        "server:1; @servers": (4800, 1200),
        "server:2; @servers": (2400, 1200),
    }
    words = ["every-step", "server:1", "server:2", "server:1; @servers", "server:2; @servers"]
    assert [e.word for e in exchanges(1200, 2)] == words
