"""The control channel: what the group's own all-gather gives, in whatever order exchanges end, and
errors in the place of waits for ever."""

import os
import socket
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from synchromesh.engine import control_channel
from synchromesh.engine.world import World
from tests.ranks import run


def same_as_a_ring(ranks: tuple[int, ...], connected: bool) -> bool:
    world = World.open("cpu")
    assert world.control is not None
    if not connected:
        world.control.close()
        world.control = None
    group = world.group(ranks)
    if world.rank not in ranks:
        world.close()
        return True
    own = torch.tensor([[world.rank, 7 * world.rank, -(2**62)]])
    first = control_channel.start_all_gather(group, own)
    other = control_channel.start_all_gather(group, own[0, :2].double() / 3)
    numbers = control_channel.all_gather_numbers(group, own[0].tolist())
    found = first(), other()
    ring = group.all_gather(own, counted=False)
    world.close()
    assert numbers == [tuple(row[0]) for row in ring.tolist()]
    assert torch.equal(found[1], ring[:, 0, :2].double() / 3)
    return torch.equal(found[0], ring) and found[0].dtype is own.dtype


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("ranks", [(0,), (1, 0), (0, 1, 2, 3), (3, 1, 2)])
def test_it_gives_what_a_ring_gives(ranks: tuple[int, ...], connected: bool) -> None:
    assert run(4, same_as_a_ring, ranks, connected) == [True] * 4


def ends_in_another_order() -> list[list[int]]:
    """As where norms are gathered in a backward while the loss is under way."""
    world = World.open("cpu")
    loss = control_channel.start_all_gather(world.everyone, torch.tensor([world.rank]))
    norms = [
        control_channel.all_gather_numbers(world.everyone, [10 + world.rank]) for _ in range(3)
    ]
    found = [[n for (n,) in norms[-1]], loss().flatten().tolist()]
    world.close()
    return found


def test_exchanges_may_end_after_later_ones() -> None:
    assert run(3, ends_in_another_order) == [[[10, 11, 12], [0, 1, 2]]] * 3


def while_the_first_rank_is_busy() -> tuple[list[int], float]:
    """Each rank's numbers, and when it had them all. The first one has other work meanwhile."""
    world = World.open("cpu")
    earlier = control_channel.start_numbers(world.everyone, [0])
    finish = control_channel.start_all_gather(world.everyone, torch.tensor([world.rank]))
    assert world.control is not None
    if world.rank == 0:
        time.sleep(0.2)
        world.control.advance()  # it is not the first that is open
        assert world.control._open == {1, 2}
        earlier([0])
        for _ in range(20):
            time.sleep(0.05)
            world.control.advance()
        assert world.control._open == set()
        world.control.advance()
    else:
        earlier([0])
    began = time.monotonic()
    found = finish().flatten().tolist()
    took = time.monotonic() - began
    assert control_channel.all_gather_numbers(world.everyone, [3]) == [(3,)] * world.size
    world.close()
    return found, took


def test_others_need_not_wait_for_a_first_rank_that_has_other_work() -> None:
    for found, took in run(3, while_the_first_rank_is_busy):
        assert found == [0, 1, 2]
        assert took < 0.7  # of a second that its work takes behind `earlier`


def after_a_failure() -> list[tuple[int, ...]]:
    world = World.open("cpu")
    for _ in range(3 * control_channel.LIMITS.under_way):
        control_channel.start_all_gather(world.everyone, torch.tensor([world.rank]))  # of no use
    found = control_channel.all_gather_numbers(world.everyone, [world.rank, 5])
    assert (
        world.control is not None
        and len(world.control._early) <= 2 * control_channel.LIMITS.under_way
    )
    world.close()
    return found


def test_what_was_given_up_is_no_answer() -> None:
    assert run(3, after_a_failure) == [[(0, 5), (1, 5), (2, 5)]] * 3


def at_another_call(rank: int) -> str:
    world = World.open("cpu", timeout=timedelta(seconds=5))
    numbers = [1, 2] if world.rank == rank else [1]
    try:
        control_channel.all_gather_numbers(world.everyone, numbers)
    except RuntimeError as error:
        return str(error)
    finally:
        world.close()
    return ""


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_in_other_calls_are_an_error(rank: int) -> None:
    found = run(2, at_another_call, rank)
    assert found[0].startswith("connection with rank 1 lost: it is in another call: ranks call")
    assert "connection with rank 0 lost" in found[1]


def alone(gone: int) -> tuple[str, float]:
    world = World.open("cpu")
    control_channel.all_gather_numbers(world.everyone, [1])
    assert world.control is not None
    if world.rank == gone:
        world.control.close()  # as the system does for a process that ends
        return "", 0.0
    began = time.monotonic()
    try:
        control_channel.all_gather_numbers(world.everyone, [1])
    except RuntimeError as error:
        world.control.close()
        return str(error), time.monotonic() - began
    return "nothing", 0.0


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_ends_is_an_error_at_once(gone: int) -> None:
    found = run(3, alone, gone)
    texts = [text for text, _ in found]
    # the first rank sees who is gone, the others that the first one is
    expected = ["", *["connection with rank 0 lost"] * 2]
    if gone:
        expected = ["connection with rank 1 lost", "", "connection with rank 0 lost"]
    assert all(e in t for e, t in zip(expected, texts, strict=True)), texts
    assert "nothing" not in texts and max(seconds for _, seconds in found) < 5.0


def stranger() -> bool:
    """Somebody else connects first, and says what is no key."""
    if os.environ["RANK"] == "0":
        made = socket.create_server

        def server(*args: Any, **named: Any) -> socket.socket:
            found = made(*args, **named)
            other = socket.create_connection(found.getsockname())
            other.sendall(b"\xff" * 40)
            return found

        socket.create_server = server  # type: ignore[assignment]
    world = World.open("cpu")
    numbers = control_channel.all_gather_numbers(world.everyone, [world.rank])
    connected = world.control is not None
    world.close()
    return connected and numbers == [(0,), (1,)]


def test_who_does_not_know_the_key_is_no_rank() -> None:
    assert run(2, stranger) == [True, True]


def silent() -> str:
    world = World.open("cpu", timeout=timedelta(seconds=1))
    if world.rank:
        time.sleep(2.5)
        return ""
    try:
        control_channel.all_gather_numbers(world.everyone, [1])
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_says_nothing_is_an_error_in_time() -> None:
    assert run(2, silent)[0] == (
        "connection with rank 1 lost: it sent nothing in time (`timeout` of prepare)"
    )


UNREACHED = r"ranks \[1\] did not connect to rank 0 at 192.0.2.1 port \d+ within 0 s"


def unreachable() -> bool:
    control_channel.LIMITS = replace(control_channel.LIMITS, connecting=0.2)
    os.environ["MASTER_ADDR"] = "192.0.2.1"
    control_channel.namespace = lambda: f"of rank {os.environ['RANK']}"  # type: ignore[assignment]
    expected = nullcontext() if os.environ["RANK"] == "1" else pytest.warns(match=UNREACHED)
    with expected:
        world = World.open("cpu")
    missing = world.control is None
    numbers = control_channel.all_gather_numbers(world.everyone, [world.rank])
    world.close()
    return missing and numbers == [(0,), (1,)]


def test_hosts_that_do_not_reach_the_first_do_without() -> None:
    assert run(2, unreachable) == [True, True]


def between_hosts(address: str) -> bool:
    os.environ["MASTER_ADDR"] = address
    control_channel.namespace = lambda: f"of rank {os.environ['RANK']}"  # type: ignore[assignment]
    world = World.open("cpu")
    connected = world.control is not None
    numbers = control_channel.all_gather_numbers(world.everyone, [world.rank])
    world.close()
    return connected and numbers == [(0,), (1,)]


@pytest.mark.parametrize(
    ("address", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
)
def test_hosts_meet_by_either_protocol(address: str, family: socket.AddressFamily) -> None:
    try:
        socket.create_server((address, 0), family=family).close()
    except OSError:
        pytest.skip(f"this host has no address {address}")
    assert run(2, between_hosts, address) == [True, True]
