"""Leaving a collective that another rank never comes to."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

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


MEETS = """
import sys, threading, time
from datetime import timedelta
from types import SimpleNamespace
import torch
from synchromesh.engine.world import World
from synchromesh.launcher.generation import Generation

rank, port = int(sys.argv[1]), int(sys.argv[2])
world = World(0, 1, torch.device("cpu"), timedelta(minutes=5), owner=False)
world.member = SimpleNamespace(told=False)
print("there", flush=True)
sys.stdin.readline()
began = time.monotonic()

def tell():
    world.member.told = True
    world.cut()

if rank != 1:
    threading.Timer(1.0, tell).start()
try:
    before = (0, 1, 2)
    world.enter(Generation(1, rank, before, "127.0.0.1", port, ("h",) * 3, 3, (), 0.0, 0.0, 0))
except RuntimeError:  # gloo's, of the refused connection, or the world's, once a loss was told
    print(time.monotonic() - began, flush=True)
"""


def test_ranks_leave_one_that_dies_while_they_meet(tmp_path: Path) -> None:
    """It has said where others reach it, and has not reached them."""
    script = tmp_path / "meets.py"
    script.write_text(MEETS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False,
            master_listen_fd=server.detach(),
        )  # fmt: skip
    words = [sys.executable, str(script)]
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen([*words, str(n), str(port)], stdin=pipe, stdout=pipe, text=True)
        for n in range(3)
    ]
    said = [(p.stdin, p.stdout) for p in ranks]
    assert all(out is not None and out.readline() == "there\n" for _, out in said)

    def go(rank: int) -> None:
        into = said[rank][0]
        assert into is not None
        into.write("\n")
        into.flush()

    go(1)
    published, limit = ["generation/1/0//cpu//0/1"], time.monotonic() + 60
    while not (store.check(published) or store.check([f"/{published[0]}"])):
        assert time.monotonic() < limit
        time.sleep(0.005)
    ranks[1].kill()
    go(0)
    go(2)
    try:
        first, last = (float(ranks[rank].communicate(timeout=60)[0]) for rank in (0, 2))
        assert 0.0 < first < 5.0 and 0.0 < last < 5.0  # refused, or told after 1 s
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        for end in (end for pair in said for end in pair if end is not None):
            end.close()
