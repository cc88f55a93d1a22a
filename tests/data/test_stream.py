"""Streams: the same global batches under any number of ranks, resumed anywhere, ended together."""

import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from synchromesh.data.cursor import Cursor
from synchromesh.data.fetch import Loading
from synchromesh.data.loader import Batching, Loader
from synchromesh.data.reading import OwnRows, SampleError
from synchromesh.data.stream import bounds, division
from synchromesh.values.plan import Plan
from tests.data.datasets import FULL, IN_ORDER, Sharded, Sized, Stateful, Stream, item
from tests.ranks import run

Batches = list[list[int]]
SHARDED = (5, 9, 7, 3)  # items of four files


class Meeting:
    """Threads that stand for ranks, each of which learns the values of all."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=20)
        self.values: list[Any] = [None] * ranks

    def agree(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self.values[rank] = value
            self.barrier.wait()
            found = list(self.values)
            self.barrier.wait()
            return found

        return gather


def rows_of(rank: int, ranks: int, plan: str = "data") -> OwnRows:
    return lambda rows: Plan.parse(plan).own_rows(rows, ranks, rank)


def on_ranks(
    datasets: Sequence[Any], work: Callable[[Loader], Any], size: int = 4, **settings: Any
) -> list[Any]:
    """What `work` does with the loader of each rank, or how it failed."""
    meeting = Meeting(len(datasets))

    def rank(r: int) -> Any:
        try:
            loader = Loader(
                datasets[r], size, rows_of(r, len(datasets)), agree=meeting.agree(r),
                **{"batching": IN_ORDER, **settings},
            )  # fmt: skip
            return work(loader)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(datasets)) as pool:
        return list(pool.map(rank, range(len(datasets))))


def labels(loader: Loader) -> Batches:
    return [label.tolist() for _, label in loader]


def merged(parts: Sequence[Batches]) -> Batches:
    """The global batches of the ranks' parts."""
    assert all(isinstance(p, list) for p in parts), parts
    assert len({len(p) for p in parts}) == 1, "all ranks end at the same batch"
    return [[row for p in parts for row in p[k]] for k in range(len(parts[0]))]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_a_stream(ranks: int) -> None:
    data = [Stream(10) for _ in range(ranks)]
    assert merged(on_ranks(data, labels)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_reads_the_shards_of_its_rows(ranks: int) -> None:
    data = [Sharded(6, 6, 6, 6) for _ in range(ranks)]
    batches = merged(on_ranks(data, labels))
    assert sorted(x for b in batches for x in b) == sorted(
        100 * file + j for file in range(4) for j in range(6)
    )
    assert all(len(d.read) == 24 // ranks for d in data), "nobody reads another's shards"


def both(loader: Loader) -> tuple[Batches, Cursor]:
    """Two batches, and the cursor behind them."""
    found: Batches = []
    for _, label in loader:
        found.append(label.tolist())
        if len(found) == 2:
            break
    return found, loader.cursor


KINDS: dict[str, Callable[[], Any]] = {
    "stream": lambda: Stream(23),
    "with a length": lambda: Sized(23),
    "stateful": lambda: Stateful(23),
    "sharded": lambda: Sharded(*SHARDED),
    "sharded, without states": lambda: Sharded(*SHARDED, states=False),
}


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("kind", list(KINDS))
def test_resumption_on_other_ranks_is_exact(kind: str, ranks: int) -> None:
    """Two ranks read all, or stop after two batches; others go on from the saved cursor."""
    all_of_it = merged(on_ranks([KINDS[kind]() for _ in range(2)], labels))
    answers = on_ranks([KINDS[kind]() for _ in range(2)], both)
    cursors = [cursor for _, cursor in answers]
    saved = joined_states([c.to_dict() for c in cursors])
    data = [KINDS[kind]() for _ in range(ranks)]
    rest = on_ranks(data, labels, cursor=Cursor.from_dict(saved))
    assert merged([found for found, _ in answers]) + merged(rest) == all_of_it
    if kind in ("stateful", "sharded"):
        assert sum(len(d.read) for d in data) <= 16 * ranks, "what was read is not read again"


def joined_states(places: list[dict[str, Any]]) -> dict[str, Any]:
    """As `Loaders.to_list` saves them: each rank knows the states of what it reads."""
    first, *others = places
    for other in others:
        for row, more in zip(first["stream"]["states"], other["stream"]["states"], strict=True):
            row[:] = [a if a is not None else b for a, b in zip(row, more, strict=True)]
    return first


def test_shards_of_different_length_end_together() -> None:
    """One rank's shards end long before the other's; every item comes once."""
    data = [Sharded(2, 12), Sharded(2, 12)]
    parts = on_ranks(data, labels)
    assert merged(parts)[:2] == [[0, 1, 100, 101], [102, 103]]
    assert parts[0][1:] == [[]] * 5 and parts[1][-1] == [110, 111]
    left_out = merged(on_ranks(data, labels, batching=FULL))
    assert left_out == [[0, 1, 100, 101]]


class Shuffled(Sized):
    """Shuffled by Python's own generator when it begins, and changed by torch's."""

    def __iter__(self) -> Iterator[Any]:
        order = random.sample(range(self.count), self.count)
        return ((item(n)[0] + torch.rand(()), item(n)[1]) for n in order)


def test_what_a_stream_draws_is_resumed() -> None:
    def rest(loader: Loader) -> Any:
        return [(x.tolist(), y.tolist()) for x, y in loader]

    def start(loader: Loader) -> Cursor:
        next(iter(loader))
        return loader.cursor

    before = random.getstate()
    whole = on_ranks([Shuffled(16)], rest)[0]
    cursor = on_ranks([Shuffled(16)], start)[0]
    assert on_ranks([Shuffled(16)], rest, cursor=cursor)[0] == whole[1:]
    assert sorted(n for _, y in whole for n in y) == list(range(16))
    assert random.getstate() == before, "the user's generator is left alone"


def test_epochs_of_a_stream() -> None:
    loader = Loader(Stream(6), 4, lambda n: ((0, n),), batching=IN_ORDER)
    assert [labels(loader) for _ in range(2)] == [
        [[0, 1, 2, 3], [4, 5]], [[100, 101, 102, 103], [104, 105]],
    ]  # fmt: skip
    assert loader.cursor == Cursor(0, 2)


def test_a_stream_of_a_round_number_of_batches() -> None:
    loader = Loader(Sized(8), 4, lambda n: ((0, n),), batching=IN_ORDER)
    assert (len(loader), loader.batches, loader.done) == (2, 2, 0)
    assert labels(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]] and loader.cursor == Cursor(0, 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_switch_in_the_middle_of_an_epoch(workers: int) -> None:
    """From two ranks to one after the second batch: no row twice, none left out."""
    ranks = [2]
    loader = Loader(
        Stream(15), 4, lambda n: rows_of(0, ranks[0])(n), batching=IN_ORDER,
        loading=Loading(num_workers=workers), agree=lambda x: [x],
    )  # fmt: skip
    seen = []
    for k, (_, label) in enumerate(loader):
        seen.append(label.tolist())
        if k == 1:
            ranks[0] = 1
    assert seen == [[0, 1], [4, 5], [8, 9, 10, 11], [12, 13, 14]]


def test_a_rank_without_rows_gets_tensors_of_zero_rows() -> None:
    def agree(value: Any) -> list[Any]:
        """Rank 0 has all rows, and has read three items to the end."""
        return [[None, [3], 0], value] if len(value) == 3 else [[[0, 4]], value]

    loader = Loader(Stream(3), 4, lambda n: ((0, 0),), batching=IN_ORDER, agree=agree)
    (x, y), *_ = loader
    assert x.shape == (0, 2) and y.dtype == torch.int64 and y.shape == (0,)


# Workers


def gathered(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def by_workers(make: Callable[[], Any], workers: int, epochs: int) -> list[Batches]:
    """The batches of this rank in each epoch."""
    loading = Loading(num_workers=workers, persistent_workers=True)
    own = rows_of(dist.get_rank(), dist.get_world_size())
    loader = Loader(make(), 4, own, batching=IN_ORDER, loading=loading, agree=gathered)
    return [labels(loader) for _ in range(epochs)]


def test_workers_divide_a_stream_and_its_order_is_theirs() -> None:
    """As torch has it: a batch of each worker in turn. Both ranks see the same batches."""
    want = [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10], [9]]
    for ranks in (1, 2):
        answers = run(ranks, by_workers, lambda: Stream(11), 2, 1)
        assert merged([first for (first,) in answers]) == want


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_of_a_stream_that_shards_itself(workers: int) -> None:
    """It does not shard itself once more for the worker; workers stay for the next epoch."""
    first, second = zip(*run(2, by_workers, lambda: Sharded(4, 4, 4, 4), workers, 2), strict=True)
    everything = sorted(100 * file + j for file in range(4) for j in range(4))
    assert sorted(x for b in merged(first) for x in b) == everything, "each item once"
    assert sorted(x - 1000 for b in merged(second) for x in b) == everything, "the next epoch"


def test_resumption_with_workers() -> None:
    loading = Loading(num_workers=2)
    loader = Loader(Stream(23), 4, lambda n: ((0, n),), batching=IN_ORDER, loading=loading)
    entire = labels(loader)
    loader = Loader(Stream(23), 4, lambda n: ((0, n),), batching=IN_ORDER, loading=loading)
    first = [label.tolist() for _, (_, label) in zip(range(3), loader, strict=False)]
    saved = Cursor.from_dict(loader.cursor.to_dict())
    assert saved.stream is not None and saved.stream.worker == 1
    again = Loader(Stream(23), 4, lambda n: ((0, n),), saved, batching=IN_ORDER, loading=loading)
    assert first + labels(again) == entire
    with pytest.raises(ValueError, match="was read by 2 in this epoch: go on with num_workers=2"):
        labels(Loader(Stream(23), 4, lambda n: ((0, n),), saved, batching=IN_ORDER))


# What goes wrong


def test_an_error_ends_all_ranks() -> None:
    data = [Stream(9), Stream(9, bad=6)]
    answers = on_ranks(data, labels)
    assert all(isinstance(a, SampleError) for a in answers), answers
    assert str(answers[1]) == ("the stream from item 4 on cannot be read: OSError: disk on fire")
    assert str(answers[0]) == f"rank 1: {answers[1]}"


def test_ranks_that_read_different_streams_do_not_wait_for_each_other() -> None:
    answers = on_ranks([Stream(9), Stream(6)], labels)
    for answer in answers:
        assert isinstance(answer, ValueError) and "rank 0 got 4 items, rank 1 got 2" in str(answer)


class OfRank(IterableDataset[Any]):
    """Divides itself by rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        return map(item, range(self.rank, 16, 2))


def test_a_stream_that_is_divided_by_rank_is_warned_of() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks([OfRank(0), OfRank(1)], labels)
    assert any("ranks read different items at the same place" in str(w.message) for w in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert merged(on_ranks([OfRank(0), OfRank(0)], labels)) == [[0, 2, 4, 6], [8, 10, 12, 14]]


class Open(IterableDataset[Any]):
    """Its state is an open file."""

    def __iter__(self) -> Iterator[Any]:
        return map(item, count())

    def state_dict(self) -> dict[str, Any]:
        return {"file": object()}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("never saved")


def once() -> Iterator[Any]:
    yield from map(item, range(6))


class OneShot(IterableDataset[Any]):
    def __init__(self) -> None:
        self.items = once()

    def __iter__(self) -> Iterator[Any]:
        return self.items


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        (Stream(9), {"batching": Batching()}, "read in its own order: leave shuffle=True out"),
        (once(), {}, r"\(generator\) can be read only once"),
        (Stream(0), {}, r"the stream \(Stream\) gave nothing in epoch 1: each iter\(\)"),
        (Stream(3), {"batching": FULL}, "gave less than one batch in epoch 1"),
        (Sized(3), {"batching": FULL}, r"batch size \(4\) is larger than .* \(3 samples"),
        (OneShot(), {"twice": True}, "gave nothing in epoch 2"),
        (Open(), {}, "state_dict of the data set holds a object, which has no form"),
        (
            Sharded(9, 9),
            {"cursor": Cursor.from_dict(
                {"seed": 0, "epoch": 0, "position": 8,
                 "stream": {"read": [[40, 40]], "worker": 0, "states": [[None, None]]}}
            )},
            "the stream ends after 9 items, of which 40 were read before",
        ),
        (
            Sharded(9, 9),
            {"cursor": Cursor.from_dict(
                {"seed": 0, "epoch": 0, "position": 8,
                 "stream": {"read": [[1] * 5], "worker": 0, "states": [[None] * 5]}}
            )},
            r"batch size \(4\) is smaller than the number of parts .* \(5\)",
        ),
    ],
)  # fmt: skip
def test_bad_input(data: Any, settings: dict[str, Any], message: str) -> None:
    twice = settings.pop("twice", False)
    with pytest.raises(ValueError, match=message):
        loader = Loader(data, 4, lambda n: ((0, n),), **{"batching": IN_ORDER, **settings})
        labels(loader)
        if twice:
            labels(loader)


def test_a_stream_without_a_length() -> None:
    loader = Loader(Stream(9), 4, lambda n: ((0, n),), batching=IN_ORDER)
    assert loader.samples is None and loader.batches is None
    with pytest.raises(TypeError, match=r"\(Stream\) is a stream without a length"):
        len(loader)


# How it is divided


@pytest.mark.parametrize(
    ("data", "workers", "ranks", "want"),
    [
        (Stream(1), 1, 4, (1, 1)), (Stream(1), 3, 4, (3, 1)), (Sharded(*[1] * 8), 1, 4, (1, 4)),
        (Sharded(*[1] * 8), 3, 4, (2, 4)), (Sharded(*[1] * 8), 2, 3, (2, 1)),
        (Sharded(1, 1), 4, 2, (1, 2)),
    ],
)  # fmt: skip
def test_division(data: Any, workers: int, ranks: int, want: tuple[int, int]) -> None:
    assert division(data, workers, ranks) == want


def test_blocks_tile_a_batch() -> None:
    assert bounds(10, 4) == [(0, 2), (2, 5), (5, 7), (7, 10)]
