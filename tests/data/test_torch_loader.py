"""A torch DataLoader as it is: its order under any plan, its sampler resumed, what is refused."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from synchromesh.data.cursor import Cursor
from synchromesh.data.torch_loader import TorchLoader, drawn, same_order
from tests.ranks import run
from tests.training.test_trainer_data import one_trace, stream, trainer_of

WIDTH = 6
ROWS = TensorDataset(
    torch.randn(22, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    torch.arange(22) % 4,
)


class Twice:
    """Every second sample twice, drawn by torch's own generator."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter((torch.randperm(5) * 2).repeat(2).tolist())


def weighted() -> WeightedRandomSampler:
    weights = torch.arange(1.0, 23.0)
    return WeightedRandomSampler(weights, 18, generator=torch.Generator().manual_seed(5))  # type: ignore[arg-type]


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(ROWS, 4),
    "shuffled": lambda: DataLoader(ROWS, 4, shuffle=True, drop_last=True),
    "weighted": lambda: DataLoader(ROWS, 4, sampler=weighted()),
    "own": lambda: DataLoader(ROWS, 4, sampler=Twice()),
    "workers": lambda: DataLoader(ROWS, 4, num_workers=1, persistent_workers=True),
    "stream": lambda: DataLoader(stream("stream"), 4),
    "collate": lambda: DataLoader(ROWS, 4, collate_fn=halves),
}


def halves(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([x for x, _ in samples]) / 2, torch.stack([y for _, y in samples])


def rows(name: str) -> list[list[list[Any]]]:
    """What this rank is given of each batch of an epoch, and behind a resumption in its middle."""
    trainer = trainer_of("data")
    loader = trainer.loader(LOADERS[name]())
    epoch = [x.tolist() for x, _ in loader]
    trainer.close()
    return epoch


@pytest.mark.parametrize("name", LOADERS)
def test_ranks_together_read_what_a_plain_loop_reads(name: str) -> None:
    """In the same order where that is not drawn at random, else by the seed."""
    with one_trace():
        parts = run(2, rows, name)
    together = [[*a, *b] for a, b in zip(*parts, strict=True)]
    plain = LOADERS[name]()
    batches = [x.tolist() for x, _ in plain]
    assert [len(batch) for batch in together] == [len(batch) for batch in batches]
    if name in ("in order", "workers", "collate", "stream"):
        assert together == batches
    read = [row for batch in together for row in batch]
    index = {tuple(x.tolist()): i for i, (x, _) in enumerate(ROWS)}
    if name == "own":
        order = [index[tuple(row)] for row in read]
        assert order == drawn(Twice(), Cursor()) and order[:5] == order[5:]
    if name == "weighted":
        assert [index[tuple(row)] for row in read] == drawn(weighted(), Cursor(seed=5))
    if name == "shuffled":
        assert len({index[tuple(row)] for row in read}) == 20


def resumed(folder: str, first: bool) -> list[float]:
    trainer, losses = trainer_of("data"), []
    loader = trainer.loader(DataLoader(ROWS, 4, sampler=weighted()))
    if not first:
        trainer.resume(folder)
    while len(losses) < (7 if first else 4):
        for batch in loader:
            losses.append(float(trainer.step(batch)))
            if first and len(losses) == 3:
                trainer.save(folder)
            if len(losses) == 7 or (not first and len(losses) == 4):
                break
    trainer.close()
    return losses


def test_a_sampler_goes_on_where_it_was_on_other_ranks(tmp_path: Any) -> None:
    with one_trace():
        before = run(2, resumed, str(tmp_path / "checkpoint"), True)[0]
        for after in run(3, resumed, str(tmp_path / "checkpoint"), False):
            assert after == pytest.approx(before[3:], rel=1e-12)


def test_a_sampler_leaves_generators_as_they_were() -> None:
    sampler = weighted()
    before, own = torch.get_rng_state(), sampler.generator.get_state()
    first = drawn(sampler, Cursor())
    assert drawn(sampler, Cursor()) == first != drawn(sampler, Cursor(epoch=1))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(own, sampler.generator.get_state())


class Drawn:
    """A sampler with attributes of numpy."""

    def __init__(self, *order: int) -> None:
        self.order = np.array(order)


def test_samplers_of_equal_attributes_are_one() -> None:
    assert same_order(Drawn(1, 2), Drawn(1, 2)) and not same_order(Drawn(1, 2), Drawn(1, 3))
    assert not same_order(Drawn(1, 2), Drawn(1)) and not same_order(Drawn(1), Twice())
    assert same_order(weighted(), weighted()) and same_order(None, None)


def test_words_of_a_loader() -> None:
    seeded = DataLoader(ROWS, 4, shuffle=True, generator=torch.Generator().manual_seed(9))
    assert (TorchLoader(seeded).seed, TorchLoader(seeded).shuffle) == (9, True)
    assert TorchLoader(DataLoader(ROWS, 4, sampler=weighted())).seed == 5
    repeated = DataLoader(ROWS, 4, sampler=RandomSampler(ROWS, replacement=True))
    assert not TorchLoader(repeated).shuffle and TorchLoader(repeated).sampler is not None


class OwnWay(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_what_reads_in_another_way_is_refused() -> None:
    kinds = {
        "iterates in a way of its own": OwnWay(ROWS, 4),
        "batch_sampler": DataLoader(
            ROWS, batch_sampler=Buckets(SequentialSampler(ROWS), 4, False)
        ),
        "batch_size=None": DataLoader(ROWS, batch_size=None),
        "DistributedSampler": DataLoader(ROWS, 4, sampler=DistributedSampler(ROWS, 2, 0)),
        "no len": DataLoader(ROWS, 4, sampler=iter([1, 2])),  # type: ignore[arg-type]
    }
    for text, loader in kinds.items():
        with pytest.raises(ValueError, match=text):
            TorchLoader(loader)


class Buckets(BatchSampler):
    pass


def evaluated_within() -> list[list[float]]:
    """What is trained on of a stream that workers which stay read, evaluated after a batch."""
    trainer = trainer_of("single")
    loader = trainer.loader(
        DataLoader(stream("stream"), 4, num_workers=1, persistent_workers=True)
    )
    read = []
    for number, (x, _) in enumerate(loader):
        read.append(x[:, 0].tolist())
        if not number:
            trainer.evaluate(loader, lambda m, b: {"n": b[0].sum()})
    trainer.close()
    return read


def test_an_evaluation_leaves_the_epoch_that_it_stands_in() -> None:
    want = [x[:, 0].tolist() for x, _ in DataLoader(stream("stream"), 4)]
    with one_trace():
        assert run(1, evaluated_within)[0] == want


def once_more() -> tuple[list[Any], bool, bool, bool]:
    """Two epochs by a sampler that is made anew, and whether loaders are the same ones."""
    trainer = trainer_of("single")
    orders = []
    for _ in range(2):
        orders.append(
            [x.tolist() for x, _ in trainer.loader(DataLoader(ROWS, 4, sampler=weighted()))]
        )
    first = trainer.loader(DataLoader(ROWS, 4, sampler=weighted()))
    other = trainer.loader(DataLoader(ROWS, 4, sampler=SubsetRandomSampler(range(8))))
    another = trainer.loader(DataLoader(ROWS, 4, sampler=SubsetRandomSampler(range(8, 16))))
    plain = trainer.loader(DataLoader(ROWS, 4))
    halved = trainer.loader(DataLoader(ROWS, 4, collate_fn=halves))
    again = trainer.loader(DataLoader(ROWS, batch_sampler=BatchSampler(weighted(), 4, False)))
    same = first is trainer.loader(DataLoader(ROWS, 4, sampler=weighted())) and again is first
    trainer.close()
    return orders, same, other is another, plain is halved


def test_a_sampler_that_is_made_anew_goes_on() -> None:
    with one_trace():
        orders, same, split, collated = run(1, once_more)[0]
    assert orders[0] != orders[1] and same and not split and not collated


def same_rows() -> list[str]:
    """What is said where a plain loader gives all ranks the same rows."""
    trainer, said = trainer_of("data"), []
    plain = DataLoader(ROWS, 4)
    for use in (trainer.step, trainer.backward):
        try:
            use(next(iter(plain)))
        except ValueError as error:
            said.append(str(error))
    for batch in plain:
        trainer.step(trainer.shard(batch))
    with pytest.raises(ValueError, match="says batch_size, shuffle itself"):
        trainer.loader(plain, batch_size=4, shuffle=True)
    with pytest.raises(ValueError, match="give batch_size"):
        trainer.loader(ROWS)
    trainer.close()
    return said


def test_the_same_rows_on_all_ranks_are_refused_and_trained_on_once_sharded() -> None:
    with one_trace():
        for said in run(2, same_rows):
            assert len(said) == 2 and all("all given the same 4 rows" in text for text in said)
