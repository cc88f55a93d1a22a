"""How launchers hear of each other, and what strangers can say."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from synchromesh.launcher import lighthouse
from synchromesh.launcher.coordinator import Coordinator, HostRanks, Orders, RankState, Seat
from synchromesh.launcher.lighthouse import Lighthouse, Sealed, reaching, token_of
from synchromesh.launcher.machine import linked

TOKEN = b"0123456789abcdef"
HOST = "127.0.0.1"


def test_what_is_said_is_proved_and_said_once() -> None:
    a, b = Sealed(TOKEN, "a"), Sealed(TOKEN, "b")
    data = a.seal(state=[1, "x"])
    said = b.opened("a", data)
    assert said is not None and said["state"] == [1, "x"]
    assert b.opened("a", data) is None  # a second time
    later, latest = a.seal(), a.seal()
    assert b.opened("a", latest) is not None and b.opened("a", later) is None
    assert TOKEN.decode() not in json.dumps(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: {**d, "text": d["text"].replace('"x"', '"y"')},
        lambda d: {**d, "proof": d["proof"][:-1]},
        lambda d: {**d, "proof": "\u00e9"},
        lambda d: {"text": d["text"]},
        lambda d: {**d, "text": d["text"][:-9]},
        lambda d: {**d, "text": 5},
        lambda d: Sealed(b"another token 16", "a").seal(state="x"),
        lambda d: Sealed(TOKEN, "c").seal(state="x"),  # by another name
        lambda d: Sealed(TOKEN, "a").seal(state="x" * Sealed.MOST),
        lambda d: [d],
        lambda d: None,
    ],
)
def test_what_is_not_proved_is_passed_over(change: Callable[[dict[str, str]], object]) -> None:
    data = Sealed(TOKEN, "a").seal(state="x")
    assert Sealed(TOKEN, "b").opened("a", change(data)) is None


def test_a_token_is_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ValueError, match="No such file"):
        token_of(file)
    file.write_bytes(TOKEN + b"\n")
    file.chmod(0o640)
    with pytest.raises(ValueError, match=r"may be read by others \(mode 640\): chmod 600"):
        token_of(file)
    file.chmod(0o600)
    assert token_of(file) == TOKEN
    file.write_bytes(b"short")
    with pytest.raises(ValueError, match="has 5 bytes, at least 16 are needed"):
        token_of(file)


def test_the_interface_is_that_by_which_the_coordinator_is_reached() -> None:
    assert reaching(HOST, 1) == (HOST, "lo")
    assert reaching("198.51.100.1", 1, "lo") == (HOST, "lo")
    with pytest.raises(ValueError, match=r"--interface ib7: this host has .*lo.* with an address"):
        reaching(HOST, 1, "ib7")


class Run:
    """A coordinator's Lighthouse, and those of others."""

    def __init__(self) -> None:
        with socket.create_server((HOST, 0)) as server:
            self.port = server.getsockname()[1]
        self.own = Coordinator("a", HOST, lambda _: None, (2, 2))
        self.first = Lighthouse.serve(HOST, self.port, Sealed(TOKEN, "a"), self.own, ["train"])
        self.made = [self.first.start()]

    def other(self, name: str, token: bytes = TOKEN) -> Lighthouse:
        self.made.append(Lighthouse(f"http://{HOST}:{self.port}", Sealed(token, name)).start())
        return self.made[-1]

    def until(self, holds: Callable[[], bool], seconds: float = 15.0, **rank: Any) -> bool:
        """Or the time is over; rank: of the first host."""
        end = time.monotonic() + seconds
        while not holds() and time.monotonic() < end:
            self.first(state("a", **rank))
            time.sleep(0.02)
        return holds()


def state(host: str, **rank: Any) -> HostRanks:
    return HostRanks(host, (RankState(0, 0, **rank),))


@pytest.fixture
def run() -> Iterator[Run]:
    pytest.importorskip("torchft")
    made = Run()
    yield made
    for one in reversed(made.made):
        one.close()


def test_hosts_hear_what_is_decided(run: Run) -> None:
    b = run.other("b")
    assert run.until(lambda: b(state("b")).number == 1)
    assert b.words == ("train",) and [s.host for s in b.orders.seats] == ["a", "b"]
    run.other("c", b"another token 16")
    assert not run.until(lambda: len(run.own._hosts) > 2, 1.5)
    b.close()  # and says nothing any more
    began = time.monotonic()
    assert run.until(lambda: bool(run.first.orders.lost))
    assert 3 < time.monotonic() - began < 6
    assert str(run.first.orders.lost[0]) == "rank 1 is of host b, which is gone"


def test_a_host_whose_connections_are_closed_is_missed_sooner(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lighthouse, "linked", lambda port: None)  # the kernel does not tell
    b, of_c = run.other("b"), {"met": 1, "parted": "b"}
    assert run.until(lambda: b(state("b")).number == 1)
    assert not run.until(lambda: bool(run.first.orders.lost), 1.5, **of_c)  # b speaks
    assert not run.until(lambda: bool(run.first.orders.lost), 0.9, met=0, parted="b")
    b._closed.set()
    b._thread.join()
    began = time.monotonic()
    assert run.until(lambda: bool(run.first.orders.lost), **of_c)
    assert time.monotonic() - began < 1.5 and run.first.orders.lost[0].rank == 1


def test_a_host_without_a_connection_is_missed_at_once(run: Run) -> None:
    name = "127.0.0.2/b"
    link = socket.create_connection((HOST, run.port), source_address=("127.0.0.2", 0))
    b, of_c = run.other(name), {"met": 1, "parted": "127.0.0.2"}  # whose client has none there
    assert run.until(lambda: b(state(name)).number == 1)
    assert not run.until(lambda: bool(run.first.orders.lost), 1.5, **of_c)  # b speaks
    b._closed.set()
    b._thread.join()
    assert not run.until(lambda: bool(run.first.orders.lost), 1.5, **of_c)  # it stands still
    link.close()
    assert not run.until(lambda: bool(run.first.orders.lost), 0.1, **of_c)
    link = socket.create_connection((HOST, run.port), source_address=("127.0.0.2", 0))
    assert not run.until(lambda: bool(run.first.orders.lost), 0.5, **of_c)  # it has called anew
    link.close()
    began = time.monotonic()
    assert run.until(lambda: bool(run.first.orders.lost), **of_c)
    assert time.monotonic() - began < 0.5 and run.first.orders.lost[0].rank == 1


def test_ranks_that_meet_anew_miss_no_connection() -> None:
    seats = Seat("a", 0), Seat("b", 3)
    own = Lighthouse("http://127.0.0.1:1", Sealed(TOKEN, "a"))

    def changing(number: int, here: int, there: int, leave: bool = False) -> bool:
        own.orders = Orders(number, seats, leave=leave)
        own._state = state("a", settled=here)
        other = HostRanks("b", (RankState(3, settled=there), RankState(4)))  # which builds
        own._others["b"] = "", 0.0, other
        return own._changing

    assert changing(2, 2, 1) and changing(2, 1, 2) and changing(2, 2, 2, leave=True)
    assert not changing(2, 2, 2) and not changing(1, 0, 0)  # a run begins


def test_connections_from_an_address() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        assert linked(port) == set()
        with socket.create_connection((HOST, port), source_address=("127.0.0.3", 0)):
            assert linked(port) == {"127.0.0.3"}
        assert linked(port) == set()


def test_without_the_coordinator_a_host_ends(run: Run) -> None:
    b = run.other("b")
    assert run.until(lambda: b(state("b")).number == 1)
    run.first.close()
    began = time.monotonic()
    while not b(state("b")).end and time.monotonic() < began + 10:
        time.sleep(0.02)
    assert b.orders.end.endswith("is not reached any more")
    assert time.monotonic() - began < 2


def test_a_host_that_stood_still_hears_first_what_has_become(run: Run) -> None:
    b = run.other("b")
    assert run.until(lambda: b(state("b")).number == 1)
    b._heard -= 8.0
    b._looked -= 8.0  # as behind a freeze: it has not looked since
    assert not b(state("b")).apart
    assert run.until(lambda: not b._excused)
    b._closed.set()  # it hears no more
    b._thread.join()
    b._heard -= 8.0
    b._looked -= 8.0
    assert not b(state("b")).apart
    b._heard -= 8.0
    b._looked -= 8.0  # a second time, and it has not heard anything meanwhile
    assert b(state("b")).apart


def test_strangers_change_nothing(run: Run) -> None:
    from torchft.coordination import LighthouseClient

    b = run.other("b")
    assert run.until(lambda: b(state("b")).number == 1)
    idle = [socket.create_connection((HOST, run.port)) for _ in range(200)]
    for link in idle[:20]:
        link.sendall(os.urandom(64))
    idle[20].sendall(b"\xff" * 9)  # a frame of 2^24 bytes that never comes
    client = LighthouseClient(f"http://{HOST}:{run.port}", timedelta(seconds=1))
    for data in (
        {"text": "[" * 500, "proof": "x"},
        {"state": "killed"},
        Sealed(TOKEN[::-1], "b").seal(state={}),
    ):
        client.quorum("stranger", timedelta(seconds=5), "", "", 0, 1, False, data)
    numbers = [b(state("b")).number]
    assert not run.until(lambda: bool(run.first.orders.lost or b.orders.end), 3.0)
    numbers.append(b(state("b")).number)
    assert numbers == [1, 1] and {s.host for s in run.first.orders.seats} == {"a", "b"}
    for link in idle:
        link.close()


def test_a_port_in_use_is_told() -> None:
    pytest.importorskip("torchft")
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=rf"cannot listen at {HOST}:{port} \(Address already"):
            own = Coordinator("a", HOST, lambda _: None)
            Lighthouse.serve(HOST, port, Sealed(TOKEN, "a"), own, ["train"])


def test_it_listens_at_one_address(run: Run) -> None:
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", run.port), 1)
