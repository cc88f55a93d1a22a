"""Training on data as users have them: streams on several ranks, resumed on others; bfloat16."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import synchromesh as sm
from synchromesh.training.events import EpochStarted, FitEvent
from synchromesh.training.trainer import Trainer
from tests.data.datasets import Sharded
from tests.ranks import run
from tests.traces import known, shared

WIDTH = 6


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def sample(index: int) -> Any:
    x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
    return x, x[:4].argmax()


class Samples(IterableDataset[Any]):
    """A stream of random rows."""

    def __iter__(self) -> Iterator[Any]:
        return map(sample, range(22))


class Files(Sharded):
    """The same of files, some longer than others, sharded by the stream itself."""

    def __iter__(self) -> Iterator[Any]:
        return (sample(int(label)) for _, label in super().__iter__())


def stream(kind: str) -> Any:
    return Samples() if kind == "stream" else Files(6, 4, 7, 5)


EXAMPLE = torch.zeros(4, WIDTH).double(), torch.zeros(4, dtype=torch.int64)


def one_trace() -> AbstractContextManager[None]:
    return shared("net of streams", net(), loss, EXAMPLE, "data")


def trainer_of(plan: str) -> Trainer:
    model = net()
    return sm.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, EXAMPLE, plan)


def steps(trainer: Trainer, data: Any, count: int) -> list[float]:
    """Losses of steps; several epochs."""
    found: list[float] = []
    while len(found) < count:
        for batch in trainer.loader(data, batch_size=4):
            found.append(float(trainer.step(batch)))
            if len(found) == count:
                break
    return found


def first_part(kind: str, folder: str) -> list[float]:
    trainer, data = trainer_of("data"), stream(kind)
    found = steps(trainer, data, 3)
    trainer.save(f"{folder}/{kind}")
    found += steps(trainer, data, 7)
    trainer.close()
    return found


def second_part(kind: str, folder: str, plan: str) -> list[float]:
    trainer = trainer_of(plan)
    trainer.resume(f"{folder}/{kind}")
    found = steps(trainer, stream(kind), 7)
    trainer.close()
    return found


@pytest.mark.parametrize(("kind", "same"), [("stream", 7), ("sharded", 4)])
def test_a_stream_is_resumed_on_other_ranks_under_another_plan(
    kind: str, same: int, tmp_path: Path
) -> None:
    """Saved on two ranks within an epoch; one and three go on with the same batches, over
    the end of the epoch; behind it a stream that shards itself does so for the ranks there are."""
    with one_trace():
        first, other = run(2, first_part, kind, str(tmp_path))
        assert first == other and len(set(first)) == 10
        for ranks, plan in ((1, "single"), (3, "data")):
            for rest in run(ranks, second_part, kind, str(tmp_path), plan):
                assert rest[:same] == pytest.approx(first[3:][:same], rel=1e-10), (ranks, plan)


@pytest.mark.parametrize("kind", ["stream", "sharded"])
def test_a_stream_is_evaluated_by_all_ranks(kind: str) -> None:
    def metric(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"sum": batch[0].sum()}

    items = [x for x, _ in stream(kind)]
    want = float(torch.stack(items).sum()) / len(items)
    with one_trace():
        for value, position in run(2, on_all, kind, metric):
            assert value == pytest.approx(want) and position == 4


def on_all(kind: str, metric: Any) -> tuple[float, int]:
    trainer = trainer_of("data")
    loader = trainer.loader(stream(kind), batch_size=4)
    for batch in loader:
        trainer.step(batch)
        break
    before = loader.cursor
    found = trainer.evaluate(loader, metric)
    assert loader.cursor == before, "training goes on where it was"
    trainer.close()
    return found["sum"], before.position


def job(kind: str) -> sm.Workload:
    return sm.Workload(
        model=net, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        train_data=stream(kind), batch_size=4, epochs=2, name="streams",
        metric=lambda m, b: {"right": (m(b[0]).argmax(-1) == b[1]).double().sum()},
        valid_data=Samples(), loading={"num_workers": 1},
    )  # fmt: skip


def test_fit_trains_on_a_stream(tmp_path: Path) -> None:
    """Of a length that nobody knows beforehand; stopped within an epoch and resumed."""
    events: list[FitEvent] = []
    with known("fit of streams"):
        entire = sm.fit(job("stream"), plan="single", on_event=events.append)
        assert (entire.steps, entire.epochs) == (12, 2) and 0 <= entire.metrics["right"] <= 1
        assert [(e.done, e.length) for e in events if isinstance(e, EpochStarted)] == [
            (0, None), (0, None),
        ]  # fmt: skip
        part = sm.fit(job("stream"), plan="single", steps=8, checkpoints=tmp_path)
        assert part.losses == entire.losses[:8] and part.checkpoint == tmp_path / "step-8"
        rest = sm.fit(job("stream"), plan="single", resume=tmp_path)
        assert rest.losses == entire.losses[8:] and rest.steps == 12


def test_a_workload_of_a_stream_has_an_example() -> None:
    x, y = job("stream").example(3, seed=1)
    assert x.shape == (3, WIDTH) and y.shape == (3,)
    job("stream").check_batch()
    with pytest.raises(ValueError, match=r"train_data \(map\) can be read only once"):
        sm.Workload(net, loss, torch.optim.SGD, map(sample, range(9)), 4)
    with pytest.raises(ValueError, match="loading must be a dictionary, not int"):
        sm.Workload(net, loss, torch.optim.SGD, Samples(), 4, loading=3)  # type: ignore[arg-type]


def options() -> str:
    trainer = trainer_of("single")
    data: Any = [sample(i) for i in range(8)]

    def stacked(samples: list[Any]) -> Any:
        x, y = zip(*samples, strict=True)
        return torch.stack(x), torch.stack(y) * 0

    ((_, first), _) = trainer.loader(data, 4, collate_fn=stacked)
    assert not first.any()
    try:
        trainer.loader(data, 4, shuffle=True, sampler=[1, 2])  # type: ignore[call-arg]
    except TypeError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


def test_words_of_torch() -> None:
    with one_trace():
        (sentence,) = run(1, options)
    assert sentence.startswith("loader() has no argument sampler; it has num_workers, timeout")


# A model that was cast


def cast_steps(plan: str) -> tuple[list[float], dict[str, Tensor], str]:
    model = net().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = rows(0)
    trainer = sm.prepare(model, optimizer, loss, example, plan)
    found = [float(trainer.step(trainer.shard(rows(i)))) for i in range(4)]
    state, reason = trainer.state_dict(), trainer.traced.reason
    trainer.close()
    return found, state, reason


def rows(seed: int) -> Any:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x.to(torch.bfloat16), x[:, :4].argmax(1)


def test_a_model_that_was_cast_to_bfloat16_trains_under_every_plan() -> None:
    model = net().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    want = []
    for i in range(4):
        optimizer.zero_grad()
        value = loss(model, rows(i))
        value.backward()
        optimizer.step()
        want.append(float(value.detach()))
    plans = ("data", "tensor", "data; 2=tensor")
    with shared("net in bfloat16", net().to(torch.bfloat16), loss, rows(0), *plans):
        for plan in plans:
            for found, state, reason in run(2, cast_steps, plan):
                assert not reason and found == pytest.approx(want, rel=1e-2), plan
                for name, x in model.state_dict().items():
                    assert state[name].dtype is torch.bfloat16
                    torch.testing.assert_close(state[name], x, rtol=2e-2, atol=1e-2)
