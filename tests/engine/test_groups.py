"""Groups of ranks: collectives against the definition, the ledger, start-up and its errors."""

import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from synchromesh.engine import reduce_scatter
from synchromesh.engine.ledger import Ledger
from synchromesh.engine.reduce_scatter import PLAIN, WAYS, quickest
from synchromesh.engine.world import World
from synchromesh.launcher import rendezvous
from synchromesh.values.fault import Fault
from tests.ranks import run


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in type and value; not every type can be compared as it is."""
    exact = torch.complex128
    return a.dtype is b.dtype and torch.equal(a.to(exact), b.to(exact))


def _lazy() -> None:
    """A conjugate is sent as it reads, not as it lies in memory; so is its imaginary part."""
    world = World.open("cpu")
    group, r, n = world.everyone, world.rank, world.size
    whole = torch.complex(torch.full((n, 2), 1.0), torch.full((n, 2), r + 1.0))
    signs = torch.view_as_real(whole)[..., 1].contiguous()
    for x in (whole.conj(), torch._neg_view(signs)):
        others = [x + (i - r) * (-1j if x.is_complex() else -1) for i in range(n)]
        total = sum(others[1:], others[0])
        assert x.is_contiguous()
        assert same(group.all_gather(x), torch.stack(others))
        assert same(group.start_all_reduce(x)(), total)
        mine = x.conj().clone().conj() if x.is_complex() else torch._neg_view(x.neg())
        assert mine.is_conj() or mine.is_neg()
        group.all_reduce(mine)
        assert same(mine, total)
        for way in WAYS if group.ring is not None else PLAIN:
            world.choices[group.ranks] = way
            assert same(group.start_reduce_scatter(x)(), total[r]), way
        assert same(
            torch.stack(group.start_all_to_all(list(x))()), torch.stack([o[r] for o in others])
        )
        group.exchange([((r + 1) % n, x)], [((r - 1) % n, got := torch.empty_like(x))])
        assert same(got, others[(r - 1) % n])
    world.close()


def test_lazy_conjugates_are_sent_as_they_read() -> None:
    run(2, _lazy)


def _collectives() -> dict:
    world = World.open("cpu")
    group, r, n = world.everyone, world.rank, world.size
    own = torch.arange(6.0, dtype=torch.float64).view(2, 3).t() + 10 * r  # not contiguous
    reduced, largest = own.clone(memory_format=torch.preserve_format), torch.tensor(r)
    group.all_reduce(reduced)
    group.all_reduce(largest, "max")
    assert torch.equal(reduced, sum(own - 10 * r + 10 * i for i in range(n)))
    assert largest == n - 1
    work = group.all_reduce(shared := torch.ones(3), asynchronous=True)
    work.wait()
    assert torch.equal(shared, torch.full((3,), float(n)))

    gathered = group.all_gather(own)
    assert all(torch.equal(gathered[i], own - 10 * r + 10 * i) for i in range(n))
    for dtype in (
        torch.int16, torch.bool, torch.bfloat16, torch.int64, torch.uint16, torch.uint32,
        torch.uint64, torch.float8_e4m3fn, torch.complex128,
    ):  # fmt: skip
        x = torch.tensor([[r, 1], [0, 3]]).to(dtype)
        other = torch.tensor([[1, 1], [0, 3]]).to(dtype)
        assert same(group.all_gather(x)[1], other)
        assert same(group.all_gather(x[0, 0])[1], other[0, 0])
        halves = group.start_all_to_all([x[0], x[1], *(x[1] for _ in range(n - 2))])()
        assert same(halves[1], other[min(r, 1)])
    group.all_reduce(short := torch.tensor([r, 1], dtype=torch.int16))
    assert short.tolist() == [n * (n - 1) // 2, n]

    world.add_ring(group.ranks)
    assert (group.ring is not None) == (n > 2)
    whole = torch.stack([torch.full((2, 2), float(10 * i + r)) for i in range(n)])
    for way in WAYS if n > 2 else PLAIN:
        world.choices[group.ranks] = way
        mine = group.start_reduce_scatter(whole)()
        assert torch.equal(mine, torch.full((2, 2), 10.0 * r * n + n * (n - 1) / 2)), way
    assert torch.equal(
        group.start_all_to_all([torch.tensor([r, i]) for i in range(n)])()[1], torch.tensor([1, r])
    )
    # rank r sends r + i numbers to rank i, so that one message is empty
    parts = [torch.full((r + i,), r, dtype=torch.int16) for i in range(n)]
    got = group.start_all_to_all(parts, [(i + r,) for i in range(n)])()
    assert [p.tolist() for p in got] == [[i] * (i + r) for i in range(n)]

    ring = torch.empty(2, r + 1)
    kept = torch.empty(1)
    sends = [((r + 1) % n, torch.full((2, (r + 1) % n + 1), float(r))), (r, torch.tensor([7.0]))]
    group.exchange(sends, [((r - 1) % n, ring), (r, kept)])
    assert torch.equal(ring, torch.full((2, r + 1), float((r - 1) % n))) and kept == 7

    assert group.all_gather_json({"rank": r, "text": "é" * r}) == [
        {"rank": i, "text": "é" * i} for i in range(n)
    ]
    assert group.broadcast_json([r, None], root=1) == [1, None]
    world.close()
    return {"initialized": dist.is_initialized()}


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_are_what_they_say_and_the_callers_group_survives(size: int) -> None:
    assert run(size, _collectives) == [{"initialized": True}] * size


def _rings() -> bool:
    """Two at once, which go on at other moments on each rank, beside other collectives."""
    world = World.open("cpu")
    group, r, n = world.everyone, world.rank, world.size
    world.add_ring(group.ranks)
    world.add_ring(group.ranks)  # once
    world.choices[group.ranks] = "ring"
    for step in range(20):
        xs = [torch.full((n, 3), float(r + 10 * i + step)) for i in range(3)]
        finishes = [group.start_reduce_scatter(x) for x in xs[:2]]
        for _ in range((r * 7 + step) % 5):
            world.advance()
        gathered = group.start_all_gather(xs[0][0])
        finishes.append(group.start_reduce_scatter(xs[2]))
        if r % 2:
            time.sleep(0.001 * (step % 3))
            world.advance()
        assert gathered()[:, 0].tolist() == [float(i + step) for i in range(n)]
        order = [2, 0, 1] if step % 2 else [0, 1, 2]
        for i in order:
            want = sum(q + 10 * i + step for q in range(n))
            assert finishes[i]().tolist() == [float(want)] * 3
        assert group.rings == []
    world.close()
    return True


@pytest.mark.parametrize("size", [3, 4])
def test_rings_go_on_at_any_moment(size: int) -> None:
    assert run(size, _rings, timeout=30.0) == [True] * size


def _ledger() -> tuple[int, dict]:
    world = World.open("cpu")
    group = world.everyone
    quickest(group, 100)
    group.broadcast_json("control messages do not count")
    assert world.ledger.sent == 0
    group.all_reduce(torch.zeros(8))  # 2 x 3/4 x 32
    group.all_gather(torch.zeros(2))  # 3/4 x 32
    group.start_reduce_scatter(torch.zeros(4, 2))()  # 3/4 x 32
    group.start_all_to_all([torch.zeros(2)] * 4)()  # 3/4 x 32
    group.exchange(
        [((world.rank + 1) % 4, torch.zeros(3))], [((world.rank - 1) % 4, torch.zeros(3))]
    )
    assert world.choices[group.ranks] in WAYS
    alone = (
        world.group((world.rank,)) if world.rank == 0 else world.groups([(0,), (1,), (2,), (3,)])
    )
    if world.rank == 0:
        world.groups([(0,), (1,), (2,), (3,)])
    for x in (alone.all_gather(torch.zeros(3)), alone.start_reduce_scatter(torch.zeros(1, 3))()):
        assert x.numel() == 3
    result = world.ledger.sent, dict(world.ledger.calls)
    world.ledger.reset()
    assert world.ledger.sent == 0 and not world.ledger.calls
    world.close()
    return result


def test_the_ledger_counts_the_operation_whichever_way_it_is_done() -> None:
    calls = {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "send": 1}
    assert run(4, _ledger) == [(48 + 24 * 3 + 12, calls)] * 4


def _spent(ledger: Ledger) -> None:
    ledger.add("all_reduce", 8, 2)
    ledger.add("all_gather", 100, 4)
    ledger.add("send", 5, 2)


def test_a_paused_ledger_counts_nothing_and_goes_on_after() -> None:
    ledger = Ledger()
    _spent(ledger)
    before = ledger.sent, dict(ledger.calls), dict(ledger.payload)
    assert before[0] == 8 + 75 + 5
    with ledger.paused():
        _spent(ledger)
        with ledger.paused():
            ledger.reset()  # of what is under way inside; nothing of what was counted before
        _spent(ledger)
    assert (ledger.sent, ledger.calls, ledger.payload) == before
    with pytest.raises(OSError, match="lost"), ledger.paused():
        _spent(ledger)
        raise OSError("a peer was lost while measuring")
    assert (ledger.sent, ledger.calls, ledger.payload) == before
    _spent(ledger)
    assert ledger.sent == 2 * before[0] and ledger.calls["send"] == 2


def _order() -> tuple:
    world = World.open("cpu")
    pairs = world.groups([(2, 0), (3, 1)])  # groups keep the order they are given
    assert world.group(pairs.ranks) is pairs
    gathered = pairs.all_gather(torch.tensor(world.rank)).tolist()
    received = torch.empty(1, dtype=torch.int64)
    other = 1 - pairs.index
    pairs.exchange([(other, torch.tensor([world.rank]))], [(other, received)])
    answer = pairs.broadcast_json(world.rank, root=0)
    world.close()
    return pairs.index, gathered, int(received), answer


def test_a_group_keeps_the_order_of_its_ranks() -> None:
    assert run(4, _order) == [
        (1, [2, 0], 2, 2),
        (1, [3, 1], 3, 3),
        (0, [2, 0], 0, 2),
        (0, [3, 1], 1, 3),
    ]


def test_one_process_is_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = World.open("cpu")
    assert (world.rank, world.size, world.everyone.index) == (0, 1, 0)
    x = torch.arange(4.0)
    world.everyone.all_reduce(x)
    assert x.tolist() == [0, 1, 2, 3]
    assert world.everyone.all_gather_json([1]) == [[1]]
    assert world.everyone.broadcast_json("a") == "a"
    world.close()
    assert not dist.is_initialized()


GOOD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"RANK": "2"}, r"RANK must be from 0 to WORLD_SIZE - 1 = 1 \(it is 2\)"),
        ({"RANK": "-1"}, r"RANK must be from 0 .* \(it is -1\)"),
        ({"WORLD_SIZE": "0"}, r"WORLD_SIZE must be at least 1 \(it is 0\)"),
        ({"RANK": "one", "WORLD_SIZE": ""}, "RANK is not a whole number.*; WORLD_SIZE is not set"),
        ({"MASTER_PORT": "70000"}, r"MASTER_PORT must be from 1 to 65535 \(it is 70000\)"),
        ({"MASTER_PORT": "-1"}, r"MASTER_PORT must be from 1 to 65535 \(it is -1\)"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "99999"}, r"65535 \(it is 99999\)"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "x"}, "MASTER_PORT is not a whole"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
)
def test_a_wrong_environment_is_refused_before_connecting(changes: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        rendezvous.place(GOOD | changes)


def test_the_environment_of_torchrun_is_understood() -> None:
    assert rendezvous.place({}) is None
    elastic = {"TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert rendezvous.place(GOOD | elastic) == rendezvous.Place(1, 2, "127.0.0.1", 29501, 3, True)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_a_port_in_use_and_a_foreign_listener_get_their_sentence_in_time() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        soon = timedelta(seconds=1)
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 is in use"):
            rendezvous.meet(rendezvous.Place(0, 2, "127.0.0.1", port), soon)
        with pytest.raises(TimeoutError, match=r"another program may use the port|cannot reach"):
            rendezvous.meet(rendezvous.Place(1, 2, "127.0.0.1", port), soon)


def test_a_listener_that_never_answers_is_a_sentence_long_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "TIMEOUTS", rendezvous.Timeouts(answer=0.2))
    started = time.monotonic()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        here = rendezvous.Place(1, 2, "127.0.0.1", listener.getsockname()[1])
        with pytest.raises(TimeoutError) as caught:
            rendezvous.meet(here, timedelta(seconds=60))
    assert time.monotonic() - started < 30
    fault = Fault.of(caught.value)
    assert str(fault).startswith("synchromesh: ") and "\n" not in str(fault) and fault.code == 2


def test_a_late_rank_0_is_waited_for() -> None:
    port, stores = _free_port(), []
    soon = timedelta(seconds=20)
    late = rendezvous.Place(1, 2, "127.0.0.1", port)
    thread = threading.Thread(target=lambda: stores.append(rendezvous.meet(late, soon)))
    thread.start()
    time.sleep(0.3)
    store = rendezvous.meet(rendezvous.Place(0, 2, "127.0.0.1", port), soon)
    thread.join()
    assert len(stores) == 1 and store.get("here/1") == b"2"


def test_missing_ranks_and_disagreeing_sizes_are_named() -> None:
    port = _free_port()
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] of 3 did not start within 1 s"):
        rendezvous.meet(rendezvous.Place(0, 3, "127.0.0.1", port), timedelta(seconds=1))

    port, errors = _free_port(), []

    def second() -> None:
        try:
            rendezvous.meet(rendezvous.Place(1, 3, "127.0.0.1", port), timedelta(seconds=2))
        except (ValueError, OSError) as error:
            errors.append(str(error))

    thread = threading.Thread(target=second)
    thread.start()
    with pytest.raises(ValueError, match="different WORLD_SIZE"):
        rendezvous.meet(rendezvous.Place(0, 2, "127.0.0.1", port), timedelta(seconds=30))
    thread.join()
    assert len(errors) == 1


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from synchromesh.engine.world import World
for opening in range(3):
    world = World.open("cpu")
    x = torch.ones(2)
    world.everyone.all_reduce(x)
    pair = world.groups([(0,), (1,)])
    world.close()
print(int(x[0]), torch.distributed.is_initialized())
"""


def test_processes_meet_by_environment_twice_and_end_cleanly() -> None:
    port = str(_free_port())
    processes = []
    for rank in range(2):
        env = os.environ | GOOD | {"RANK": str(rank), "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT],
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    try:
        results = [p.communicate(timeout=110) for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [
        (p.returncode, out.strip()) for p, (out, _) in zip(processes, results, strict=True)
    ] == [(0, "2 False")] * 2, results


@pytest.mark.parametrize(
    ("ring", "others", "taken"),
    [
        ([4.0] * 5, 8.0, "ring"),
        ([7.2] * 5, 8.0, "native"),  # hardly quicker
        ([4.0, 90.0, 4.0, 4.0, 60.0], 8.0, "ring"),  # pauses
        ([9.0, 1.0, 9.0, 9.0, 1.0], 8.0, "native"),  # luck
    ],
)
def test_a_way_is_taken_that_is_clearly_quicker_in_most_runs(
    ring: list[float], others: float, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    runs = iter([0.0, *ring])  # the first one does not count

    def begin(_: Any, __: torch.Tensor, way: str) -> Any:
        clock[0] += next(runs) if way == "ring" else others
        return lambda: None

    group: Any = SimpleNamespace(
        size=4, world=SimpleNamespace(device="cpu"), ring=object(),
        barrier=lambda: None, broadcast_json=lambda x: x,
    )  # fmt: skip
    monkeypatch.setattr(reduce_scatter, "begin", begin)
    monkeypatch.setattr(reduce_scatter, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert quickest(group, 1 << 20) == taken
