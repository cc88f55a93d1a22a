"""Fetching: worker processes read ahead of the step, and as torch's own knobs say."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from synchromesh.data.cursor import Cursor
from synchromesh.data.fetch import Loading, ahead
from synchromesh.data.loader import Loader
from tests.data.datasets import IN_ORDER, Numbers

SECONDS = 0.08  # of a step


class Slow(Dataset[Any]):
    """Reading takes a while; a sample is when it began to be read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        began = time.monotonic()
        time.sleep(SECONDS / 4)
        return torch.tensor([began], dtype=torch.float64)


def read_ahead(loading: Loading) -> int:
    """How many of 11 batches began to be read before the step on the one before them ended."""
    ended, early = 0.0, 0
    for batch in Loader(Slow(), 1, lambda n: ((0, n),), batching=IN_ORDER, loading=loading):
        early += float(batch) < ended
        time.sleep(SECONDS)  # the step
        ended = time.monotonic()
    return early


def test_loading_runs_ahead_of_the_step() -> None:
    assert read_ahead(Loading()) == 0
    assert read_ahead(Loading(num_workers=1)) >= 9


def test_what_comes_is_made_one_ahead_while_the_last_is_used() -> None:
    """As a batch is moved to the device while the step runs."""
    moved: list[int] = []

    def move(x: int) -> int:
        time.sleep(SECONDS)
        moved.append(x)
        return -x

    began = time.perf_counter()
    seen = []
    for x in ahead(iter(range(1, 7)), move):
        time.sleep(2 * SECONDS)  # the step
        assert moved == list(range(1, min(len(seen) + 2, 6) + 1)), "one further, never two"
        seen.append(x)
    assert seen == [-1, -2, -3, -4, -5, -6]
    assert time.perf_counter() - began < 16 * SECONDS, "18 where nothing overlaps"


def test_a_fault_ahead_comes_where_its_batch_would() -> None:
    def some() -> Iterator[int]:
        yield 1
        raise OSError("disk on fire")

    batches = ahead(some(), abs)
    assert next(batches) == 1
    with pytest.raises(OSError, match="disk on fire"):
        next(batches)
    endless = ahead(count(), abs)
    assert next(endless) == 0
    endless.close()  # its thread ends, too


class Drawn(Dataset[Any]):
    """What a worker draws, of each kind, and which process it is."""

    def __init__(self, count: int = 4) -> None:
        self.count, self.offset = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        drawn = (torch.rand(()).item(), random.random(), float(np.random.rand()))
        return torch.tensor([*drawn, os.getpid(), self.offset], dtype=torch.float64)


def drawn(loading: Loading, rows: tuple[int, int] = (0, 4), epochs: int = 2, seed: int = 0) -> Any:
    data = Drawn()
    loader = Loader(
        data,
        4,
        lambda n: (rows,) if n == 4 else ((0, n),),
        Cursor(seed),
        batching=IN_ORDER,
        loading=loading,
    )
    return [batch for _ in range(epochs) for batch in loader]


def test_what_workers_draw() -> None:
    """Other numbers in each epoch, for each seed and for other rows; the same for the same."""
    loading = Loading(num_workers=1)
    first, second = (x[:, :3] for x in drawn(loading))
    assert not (first == second).any(), "an epoch's augmentation is not that of the one before"
    assert torch.equal(drawn(loading, epochs=1)[0][:, :3], first)
    assert not (drawn(loading, epochs=1, seed=1)[0][:, :3] == first).any()
    other = drawn(loading, rows=(2, 4), epochs=1)[0][:, :3]
    assert not (other == first[:2]).any(), "ranks do not draw the same for different rows"


@pytest.mark.parametrize("workers", [0, 2])
def test_draws_are_those_of_the_place(workers: int) -> None:
    """Whoever reads, and wherever the run was resumed; ranks with other rows draw others."""

    def epoch(loading: Loading, start: int = 0, rank: int = 0) -> list[Any]:
        rows_of = lambda n: ((rank * n // 2, (rank + 1) * n // 2),)  # noqa: E731
        loader = Loader(
            Drawn(12), 4, rows_of, Cursor(0, 0, start), batching=IN_ORDER, loading=loading
        )
        return [batch[:, :3] for batch in loader]

    kept = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    whole = epoch(Loading())
    again = epoch(Loading(num_workers=workers), start=4)
    assert all(map(torch.equal, again, whole[1:])), "as if it had not been interrupted"
    other = epoch(Loading(num_workers=workers), rank=1)
    assert not any((a == b).any() for a, b in zip(other, whole, strict=True))
    assert torch.equal(torch.get_rng_state(), kept[0]), "the user's generators are left alone"
    assert (np.random.get_state()[1].tolist(), random.getstate()) == kept[1:]


def pids(loading: Loading) -> list[set[float]]:
    return [set(batch[:, 3].tolist()) for batch in drawn(loading)]


def test_workers_stay_where_they_are_to() -> None:
    first, second = pids(Loading(num_workers=1, persistent_workers=True))
    assert first == second != {float(os.getpid())}
    first, second = pids(Loading(num_workers=1))
    assert first != second


def begin(worker: int) -> None:
    info = get_worker_info()
    assert info is not None and isinstance(info.dataset, Drawn)
    info.dataset.offset = 10 + worker  # as torch's own pages do it


def test_the_other_knobs_reach_the_workers() -> None:
    loading = Loading(
        num_workers=1, worker_init_fn=begin, multiprocessing_context="fork", prefetch_factor=1,
        timeout=30,
    )  # fmt: skip
    assert drawn(loading, epochs=1)[0][:, 4].tolist() == [10.0] * 4


class Stuck(Numbers):
    """The second sample is not read before a file is there; the first tells who reads."""

    def __init__(self, file: Path) -> None:
        super().__init__(2)
        self.file = file

    def __getitem__(self, index: int) -> Any:
        while index and not self.file.exists():
            time.sleep(0.01)
        return torch.tensor([os.getpid()])


def test_a_signal_that_stops_the_run_leaves_its_workers_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers send it to the processes of a rank, and the run reads on until it stops."""
    file, loading = tmp_path / "file", Loading(num_workers=1)
    loader = Loader(Stuck(file), 1, lambda n: ((0, n),), batching=IN_ORDER, loading=loading)
    batches = iter(loader)
    worker = int(next(batches))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        os.kill(worker, number)
    file.touch()
    assert [int(batch) for batch in batches] == [worker]
    file.unlink()
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # seconds
    batches = iter(loader)
    worker = int(next(batches))
    del batches  # a worker that hangs then is ended all the same
    assert worker not in {child.pid for child in multiprocessing.active_children()}


def test_a_signal_that_meets_workers_as_they_begin() -> None:
    begin = [True]
    os.register_at_fork(after_in_child=lambda: begin and os.kill(os.getpid(), signal.SIGTERM))
    try:
        loader = Loader(Numbers(2), 1, lambda n: ((0, n),), loading=Loading(num_workers=2))
        assert len([*loader]) == 2
    finally:
        begin.clear()  # what is registered stays so


STAYING = """
from synchromesh.data.fetch import Loading
from synchromesh.data.loader import Loader
from tests.data.datasets import Numbers

persistent = Loading(num_workers=1, persistent_workers=True)
loaders = [Loader(Numbers(4), 1, lambda n: ((0, n),), loading=x) for x in (
    persistent, Loading(num_workers=1)
)]
print(len([*loaders[0]]))
begun = iter(loaders[1])
next(begun)
"""


def test_python_ends_while_workers_stay() -> None:
    """Those that persist, and those of an epoch that was left in its middle."""
    ended = subprocess.run(
        [sys.executable, "-c", STAYING], timeout=60, capture_output=True, text=True, check=True
    )
    assert (ended.stdout, ended.stderr) == ("4\n", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, r"num_workers \(-1\) should not be negative"),
        (
            {"prefetch_factor": 2, "persistent_workers": True},
            "prefetch_factor, persistent_workers need workers: give num_workers=1",
        ),
        ({"num_workers": 1, "prefetch_factor": 0}, r"prefetch_factor \(0\) should be at least 1"),
        ({"num_worker": 2}, "has no argument num_worker; it has num_workers, timeout"),
    ],
)
def test_bad_input(options: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Loading.of(options)


def test_samples_come_on_the_device() -> None:
    loader = Loader(Numbers(3), 2, lambda n: ((0, n),), device=torch.device("meta"))
    assert {x.device.type for x, _ in loader} == {"meta"}
