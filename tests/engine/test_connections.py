"""Leaving a collective that another rank never comes to."""

import os
import socket
import threading
import time

import pytest
import torch

from synchromesh.engine.connections import Connections
from synchromesh.engine.world import World
from tests.ranks import run

SECONDS = 0.3


def waited(world: World, group: int) -> float:
    """Seconds in a collective that rank 0 does not come to, until another thread cuts it."""
    ranks = ((0, 1, 2), (1, 2))[group]
    own = world.group(ranks)
    own.all_reduce(torch.ones(2)) if own.index >= 0 else None
    cutting = threading.Timer(SECONDS, world.cut)
    began = time.monotonic()
    if world.rank:
        cutting.start()
        with pytest.raises(RuntimeError):
            if group:  # both wait for a message that nobody sends
                own.exchange([], [(1 - own.index, torch.ones(4))])
            else:
                own.all_reduce(torch.ones(1 << 16))
        cutting.join()
        assert world.lost
    return time.monotonic() - began


def left_at_once(group: int) -> float:
    return waited(World.open(), group)


@pytest.mark.parametrize("group", [0, 1])
def test_a_cut_collective_fails_at_once(group: int) -> None:
    _, *others = run(3, left_at_once, group)
    assert all(SECONDS <= seconds < 10 * SECONDS for seconds in others), "the time-out is 60 s"


def test_what_is_no_groups_stays() -> None:
    """Sockets of before, one that listens, and a file that has taken a closed one's number."""
    connections = Connections()
    own, other = socket.socketpair()
    with connections.noted():
        listener = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(listener.getsockname())
        served, _ = listener.accept()
        with connections.noted():
            first, second = socket.socketpair()
    number = first.fileno()
    first.close()
    reading, writing = os.pipe()
    os.dup2(reading, number)
    connections.cut()
    own.sendall(b"x")
    assert other.recv(1) == b"x"
    assert client.recv(1) == served.recv(1) == second.recv(1) == b""
    os.write(writing, b"y")
    assert os.read(number, 1) == b"y"
    again = socket.create_connection(listener.getsockname())
    later, _ = listener.accept()
    again.sendall(b"z")
    assert later.recv(1) == b"z"
    connections.forget()
    for each in (own, other, listener, client, served, second, again, later):
        each.close()
    for descriptor in {reading, writing, number}:
        os.close(descriptor)
