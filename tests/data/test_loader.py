"""A loader of samples by index: the order under any plan, resumption, workers, errors."""

import time
from typing import Any

import pytest
import torch

from synchromesh.data.cursor import Cursor
from synchromesh.data.fetch import Loading
from synchromesh.data.loader import Batching, Loader
from synchromesh.data.reading import OwnRows, Ranges, SampleError
from synchromesh.values.plan import Plan
from tests.data.datasets import FULL, IN_ORDER, Numbers, Stream


def rows_of(rank: int, ranks: int, plan: str = "data") -> OwnRows:
    return lambda rows: Plan.parse(plan).own_rows(rows, ranks, rank)


def everything(rows: int) -> Ranges:
    return ((0, rows),)


def labels(loader: Loader) -> list[list[int]]:
    return [label.tolist() for _, label in loader]


def test_ranks_together_read_the_global_order() -> None:
    order = Cursor(seed=3).order(10).tolist()
    assert sorted(order) == list(range(10)) and order != list(range(10))
    data = [Numbers(10) for _ in range(3)]
    parts = [labels(Loader(data[r], 4, rows_of(r, 3), Cursor(seed=3))) for r in range(3)]
    joined = [[row for part in parts for row in part[k]] for k in range(3)]
    assert joined == [order[:4], order[4:8], order[8:]]
    assert [len(part[2]) for part in parts] == [1, 1, 0], "a short batch, without rows on rank 2"
    assert [len(d.read) for d in data] == [5, 3, 3], "only this rank's rows, one for the shape"


def test_a_rank_without_rows_gets_tensors_of_zero_rows() -> None:
    batch = list(Loader(Numbers(3), 2, lambda _: ((0, 0),)))[1]
    assert batch[0].shape == (0, 2) and batch[1].dtype == torch.int64 and batch[1].shape == (0,)


def test_resumption_under_another_number_of_ranks() -> None:
    order = Cursor(seed=1).order(11).tolist()
    loader = Loader(Numbers(11), 4, everything, Cursor(seed=1))
    first = next(iter(loader))[1].tolist()
    saved = Cursor.from_dict(loader.cursor.to_dict())
    assert saved == Cursor(1, 0, 4)
    parts = [labels(Loader(Numbers(11), 3, rows_of(r, 2), saved)) for r in (0, 1)]
    rest = [row for pair in zip(*parts, strict=True) for part in pair for row in part]
    assert first + rest == order


def test_epochs_follow_each_other() -> None:
    loader = Loader(Numbers(6), 4, everything, Cursor(seed=2))
    assert len(loader) == 2
    for epoch in range(2):
        assert [row for batch in labels(loader) for row in batch] == Cursor(2, epoch).order(
            6
        ).tolist()
    assert loader.cursor == Cursor(2, 2, 0)


def test_drop_last() -> None:
    loader = Loader(Numbers(10), 4, everything, batching=Batching(drop_last=True))
    assert len(loader) == 2 and [len(x) for x in labels(loader)] == [4, 4]
    assert loader.cursor == Cursor(0, 1, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_switch_in_the_middle_of_an_epoch(workers: int) -> None:
    """From two ranks to one after the second batch: no row twice, none left out."""
    order = Cursor().order(16).tolist()
    ranks = [2]
    loader = Loader(
        Numbers(16), 4, lambda n: rows_of(0, ranks[0])(n), loading=Loading(num_workers=workers)
    )
    seen = []
    for k, (_, label) in enumerate(loader):
        seen.append(label.tolist())
        if k == 1:
            ranks[0] = 1
    assert seen == [order[0:2], order[4:6], order[8:12], order[12:16]]


STARTS, COUNTS = [0, 4, 8, 14, 20, 23, 26], [4, 4, 6, 6, 3, 3, 1]


def resized(loader: Loader) -> list[list[int]]:
    """Batches of 4 rows, after the second of 6, after the fourth of 3; STARTS and COUNTS."""
    sizes, seen, rows = {1: 6, 3: 3}, [], []
    loader.chosen = True
    for k, (_, label) in enumerate(loader):
        seen.append(label.tolist())
        rows.append(loader.rows)
        loader.batch_size = sizes.get(k, loader.batch_size)
    assert rows == COUNTS and (loader.cursor.epoch, loader.cursor.position) == (1, 0)
    return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_batch_size_that_changes_in_the_middle_of_an_epoch(workers: int, rank: int) -> None:
    """Each row is seen once, in the seed's order."""
    cursor, loading = Cursor(seed=5), Loading(num_workers=workers)
    seen = resized(Loader(Numbers(27), 4, rows_of(rank, 2), cursor, loading=loading))
    order = cursor.order(27).tolist()
    own = (rows_of(rank, 2)(n)[0] for n in COUNTS)
    assert seen == [order[s + a : s + b] for s, (a, b) in zip(STARTS, own, strict=True)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_size_that_changes_in_the_middle_of_a_stream(workers: int) -> None:
    loading = Loading(num_workers=workers)
    seen = resized(Loader(Stream(27), 4, everything, Cursor(seed=5), IN_ORDER, loading))
    assert sorted(row for batch in seen for row in batch) == list(range(27))
    assert workers or seen[2] == list(range(8, 14))


def test_a_rest_that_no_longer_fills_a_batch_is_left_out() -> None:
    for first, later, seen in ((4, 8, [4, 8]), (8, 3, [8, 3, 3])):
        loader = Loader(Numbers(14), first, everything, batching=Batching(drop_last=True))
        loader.chosen, found = True, []
        for _, label in loader:
            found += [len(label)]
            loader.batch_size = later
        assert found == seen and loader.cursor == Cursor(0, 1, 0)


def test_a_batch_size_that_is_set_by_hand_holds_from_the_next_epoch_on() -> None:
    loader = Loader(Numbers(12), 4, everything, batching=Batching(continuing=True, shuffle=False))
    first = labels(loader)
    seen = []
    for _, label in loader:
        seen.append(label.tolist())
        loader.batch_size = 6
    assert seen == first and [len(x) for x in labels(loader)] == [6, 6]


def test_a_chosen_batch_size_is_in_a_checkpoint() -> None:
    loader = Loader(Numbers(9), 4, everything, Cursor(seed=1))
    assert "batch_size" not in loader.said.to_dict()
    loader.chosen = True
    saved = loader.said.to_dict()
    assert saved["batch_size"] == 4 and Cursor.from_dict(saved) == Cursor(1, 0, 0, None, 9, 4)
    with pytest.raises(ValueError, match="batch_size"):
        Cursor.from_dict({**saved, "batch_size": 0})


def test_workers_read_what_one_process_reads() -> None:
    here = labels(Loader(Numbers(9), 4, rows_of(1, 2)))
    before = torch.get_rng_state()
    assert labels(Loader(Numbers(9), 4, rows_of(1, 2), loading=Loading(num_workers=2))) == here
    assert torch.equal(torch.get_rng_state(), before), "the user's generator is left alone"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_names_the_sample(workers: int) -> None:
    loader = Loader(
        Numbers(5, bad=3), 5, everything, batching=IN_ORDER, loading=Loading(num_workers=workers)
    )
    with pytest.raises(
        SampleError, match=r"^sample 3 of the data set cannot be read: OSError: disk"
    ):
        list(loader)


def test_a_worker_that_hangs_is_given_up() -> None:
    class Slow(Numbers):
        def __getitem__(self, index: int) -> Any:
            time.sleep(1.6)

    loader = Loader(Slow(4), 2, everything, loading=Loading(num_workers=1, timeout=1))
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        list(loader)


def test_custom_collate_and_its_rows() -> None:
    def stack(samples: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack([x for x, _ in samples]), "scale": torch.tensor(2.0), "name": "n"}

    batch = next(iter(Loader(Numbers(4), 3, everything, batching=Batching(collate=stack))))
    assert batch["x"].shape == (3, 2) and batch["scale"] == 2.0
    for collate, rows in (
        (lambda s: torch.cat([x for x, _ in s]), "6"),
        (lambda s: torch.tensor(1), "no"),
    ):
        loader = Loader(Numbers(4), 3, everything, batching=Batching(collate=collate))
        with pytest.raises(ValueError, match=f"collate made {rows} rows of 3 samples"):
            next(iter(loader))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Loader(Numbers(0), 2, everything), "the data set is empty"),
        (
            lambda: Loader(Numbers(3), 4, everything),
            r"batch size \(4\) is larger than .* \(3 samp",
        ),
        (
            lambda: Loader(Numbers(3), 4, everything, batching=FULL),
            "larger than the data set",
        ),
        (lambda: Loader(Numbers(3), 0, everything), "should be at least 1, not 0"),
        (lambda: Loader(3, 2, everything), r"\(int\) should have __len__ and __getitem__"),
        (
            lambda: Loader({"train": Numbers(3), "test": Numbers(1)}, 2, everything),
            r"is a mapping \(train, test\): .* give one of its splits",
        ),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_evaluation_may_use_a_batch_larger_than_the_data_set() -> None:
    assert labels(Loader(Numbers(3), 4, everything, batching=IN_ORDER)) == [[0, 1, 2]]


class Together(Numbers):
    """Reads many samples at once, as a table on disk does better."""

    def __init__(self, count: int, bad: int | None = None) -> None:
        super().__init__(count, bad)
        self.asked: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(indices)
        return [self[i] for i in indices]


def test_samples_are_read_at_once_where_the_data_set_can() -> None:
    data = Together(5)
    assert labels(Loader(data, 3, everything, batching=IN_ORDER)) == [[0, 1, 2], [3, 4]]
    assert data.asked == [[0, 1, 2], [3, 4]] and data.read == [0, 1, 2, 3, 4]
    with pytest.raises(SampleError, match="sample 4 of the data set cannot be read"):
        labels(Loader(Together(5, bad=4), 3, everything, batching=IN_ORDER))


class Careless(Together):
    """Gives no sample twice, and does not read at once what begins with sample 3."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if indices[0] == 3:
            raise KeyError("row group")
        return super().__getitems__(sorted({i // 2 * 2 for i in indices}))


def test_samples_that_are_not_read_at_once_are_no_fewer_and_no_slower_ones() -> None:
    many = r"^3 samples of the data set at once \(__getitems__\) cannot be read: "
    with pytest.raises(SampleError, match=f"{many}ValueError: it gave 2 samples"):
        labels(Loader(Careless(6), 3, everything, batching=IN_ORDER))
    with pytest.raises(SampleError, match=f"{many}KeyError: 'row group'"):
        labels(Loader(Careless(6), 3, everything, Cursor(position=3), batching=IN_ORDER))


def test_rows_of_the_batch_in_use() -> None:
    loader = Loader(Numbers(5), 3, rows_of(0, 2))
    assert [loader.rows for _ in loader] == [3, 2]
    assert (loader.batches, loader.done) == (2, 0)


def test_continuing_rows_are_streams_and_resume_in_their_middle() -> None:
    streams = Batching(shuffle=False, continuing=True)
    read = Loader(Numbers(10), 3, everything, batching=streams)
    assert labels(read) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]] and len(read) == 3
    again = Loader(Numbers(10), 3, everything, Cursor(position=3), streams)
    assert labels(again) == [[1, 4, 7], [2, 5, 8]] and "each row a stream" in again.place
    with pytest.raises(ValueError, match=r"reads samples by index, .* not shuffled"):
        Loader(Numbers(10), 3, everything, batching=Batching(continuing=True))
    with pytest.raises(ValueError, match=r"batch size \(11\) is larger than the data set"):
        Loader(Numbers(10), 11, everything, batching=streams)
