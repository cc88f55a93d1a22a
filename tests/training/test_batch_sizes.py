"""Batches that change while training: against one process that is told their sizes."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import synchromesh as sm
from synchromesh.cost.efficiency import gain, goodput
from synchromesh.data.cursor import Cursor
from synchromesh.engine.noise_averages import NoiseScale
from synchromesh.engine.noise_scale import NoiseMeter
from synchromesh.training.batch_sizes import BatchSizes
from synchromesh.training.events import EpochEnded, FitEvent, FitResult, Started, StepDone
from synchromesh.training.learning_rate import scaled
from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from synchromesh.values.plan import Plan
from synchromesh.workloads.workload import Workload
from tests.ranks import RankFailed, run
from tests.traces import known
from tests.training.test_loop import accuracy, loss

ROWS, BATCH = 90, 8


def rows(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(1))


TINY = Workload(
    model=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double(),
    loss=loss, metric=accuracy, train_data=rows(0), valid_data=rows(1), batch_size=BATCH,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), epochs=3, name="tiny",
    scheduler=lambda o: StepLR(o, 10, 0.5),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with known("tiny of batches"):
        yield


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise scale grows with each step that is measured, and with it the best batch."""
    monkeypatch.setattr(
        NoiseMeter, "between",
        lambda self, errors: (8.0 * self.measured, inf) if self.measured else None,
    )  # fmt: skip
    monkeypatch.setattr(BatchSizes, "_worth", worth)


def worth(self: BatchSizes, noise: float) -> dict[int, float]:
    best = 8 if noise < 16 else 16 if noise < 60 else 24 if noise < inf else self.loader.batch_size
    return {n: 100.0 + 50.0 * (n == best) for n in (8, 16, 24) if n <= self._sizes[-1]}


def of_steps(events: list[FitEvent]) -> list[int]:
    return [event.rows for event in events if isinstance(event, StepDone)]


def trained(plan: str, rule: str = "linear", **how: Any) -> tuple[FitResult, list[int]]:
    workload, _ = scaled(TINY, rule, BATCH, changes=True)
    events: list[FitEvent] = []
    result = sm.fit(workload, plan, batches="auto:8-24", on_event=events.append, **how)
    return result, of_steps(events)


def asked(result: FitResult, first: int = BATCH) -> list[int]:
    """Rows that the batch of each step was to have: the last one of an epoch may have fewer."""
    sizes, changes = [], list(result.batch_sizes)
    for step in range(result.steps - len(result.losses), result.steps):
        while changes and changes[0].step <= step:
            first = changes.pop(0).after
        sizes.append(first)
    return sizes


def plainly(sizes: list[int], factor: Any) -> list[float]:
    """Losses of a plain loop over such batches. factor: (rows) -> what the rate is multiplied by
    and by how many updates the schedule goes on."""
    torch.manual_seed(0)
    model = TINY.build()
    optimizer = TINY.build_optimizer(model.parameters())
    x, y = TINY.train_data.tensors  # type: ignore[attr-defined]
    losses, updates, epoch, start = [], 0.0, 0, 0
    for size in sizes:
        own = Cursor(seed=0, epoch=epoch).order(ROWS)[start : start + size]
        times, progress = factor(size)
        progress = progress if len(own) == size else ceil(len(own) / BATCH)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * 0.5 ** (int(updates) // 10) * times
        optimizer.zero_grad()
        value = loss(model, (x[own], y[own]))
        value.backward()
        optimizer.step()
        updates, start = updates + progress, start + size
        losses.append(float(value.detach()))
        if start >= ROWS:
            epoch, start = epoch + 1, 0
    return losses


def linear(n: int) -> tuple[float, float]:
    return n / BATCH, n / BATCH


@pytest.mark.usefixtures("growing")
def test_batch_rate_and_schedule_change_at_one_step() -> None:
    result, sizes = run(2, trained, "data")[0]
    first, second = result.batch_sizes
    assert (first.before, first.after, second.before, second.after) == (8, 16, 16, 24)
    assert sizes[: first.step] == [8] * first.step and sizes[first.step] == 16
    assert sizes[second.step] == 24 and sum(sizes) == 3 * ROWS
    assert (first.goodput_before, first.goodput_after) == (100.0, 150.0)
    assert first.reason == "the noise scale is 16 rows or more" and first.step == 3
    assert first.learning_rate == pytest.approx(0.1) and first.plan_from == first.plan_to == "data"
    assert list(first.to_dict()) >= ["from", "to"] and first.to_dict()["to"] == 16
    assert list(result.losses) == pytest.approx(plainly(asked(result), linear), abs=1e-12)


def other_plan(self: BatchSizes, rows: int, to_come: int) -> Plan:
    return Plan.parse("tensor" if rows == 16 else "data")


@pytest.mark.usefixtures("growing")
def test_the_plan_changes_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchSizes, "_taken", other_plan)
    result, sizes = (
        run(2, trained, "data", "sqrt", adapt=True)[0] if False else run(2, adapting)[0]
    )
    first, *_ = result.batch_sizes
    assert (first.after, first.plan_from, first.plan_to) == (16, "data", "tensor")
    assert sizes[first.step - 1 : first.step + 1] == [8, 16] and sum(sizes) == 3 * ROWS
    expected = plainly(asked(result), lambda n: ((n / BATCH) ** 0.5, n / BATCH))
    assert list(result.losses) == pytest.approx(expected, abs=1e-12)


def adapting() -> tuple[FitResult, list[int]]:
    return trained("data", "sqrt", adapt=True)


def test_adascale_follows_the_noise_that_it_measures() -> None:
    """On one rank in two micro-batches, 24 rows all the time."""
    workload, _ = scaled(replace(TINY, batch_size=24, scheduler=None), "adascale", BATCH)
    seen: list[tuple[float, float | None]] = []

    def note(event: FitEvent) -> None:
        if isinstance(event, StepDone):
            scheduler, noise = trainers[0].scheduler, trainers[0].noise_scale
            assert noise is not None and scheduler is not None
            seen.append((scheduler.get_last_lr()[0], noise.known))
        elif not isinstance(event, EpochEnded) and hasattr(event, "trainer"):
            trainers.append(event.trainer)

    trainers: list[Trainer] = []
    sm.fit(workload, "single; @micro_batches=2", epochs=6, on_event=note)
    unknown, found = [r for r, noise in seen if noise is None], [x for x in seen if x[1]]
    assert len(unknown) >= 10 and set(unknown) == {0.05}
    assert found and all(0.05 < rate <= 0.15 for rate, _ in found)
    for rate, noise in found:
        assert noise is not None and rate == pytest.approx(0.05 * gain(noise, 24, 8))


class Normed(nn.Module):
    """Norms see the rows of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 4).double(), nn.BatchNorm1d(4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def noise_of(model: Any, size: int) -> tuple[NoiseScale | None, list[float]]:
    """After an epoch under `single`, whose last batch may have one row; and losses."""
    torch.manual_seed(0)
    model = model()
    optimizer = TINY.build_optimizer(model.parameters())
    trainer = prepare(model, optimizer, loss, TINY.example(), "single")
    batches = trainer.loader(TINY.train_data, f"auto:{size}-{size}")
    losses = [float(trainer.step(batch)) for batch in batches]
    known = trainer.noise_scale
    trainer.close()
    return known, losses


def test_a_step_of_one_block_is_cut_where_batches_follow_the_noise() -> None:
    for size in (8, 89):
        known, losses = noise_of(TINY.model, size)
        assert known is not None and known.steps >= min(10, len(losses)) - 1
        torch.manual_seed(0)
        model = TINY.build()
        optimizer = TINY.build_optimizer(model.parameters())
        x, y = TINY.train_data.tensors  # type: ignore[attr-defined]
        for own, found in zip(torch.arange(ROWS).split(size), losses, strict=True):
            optimizer.zero_grad()
            value = loss(model, (x[own], y[own]))
            value.backward()
            optimizer.step()
            assert found == pytest.approx(float(value.detach()), abs=1e-12)


def costs() -> list[bool]:
    """Which of 12 steps under `single` on two ranks say what a step takes."""
    model = TINY.build()
    optimizer = TINY.build_optimizer(model.parameters())
    trainer = prepare(model, optimizer, loss, TINY.example(), "single")
    trainer.adapt()
    trainer._execution.noise.cuts = trainer._execution.noise.asked = True
    told = []
    for _ in range(12):
        trainer.step(trainer.shard(TINY.example()))
        told.append(any(trainer.adaptation.cost))
    trainer.close()
    return told


def test_a_step_that_was_cut_says_nothing_of_the_plan() -> None:
    told = run(2, costs)[0]
    assert told[:10] == [False] * 10 and any(told[10:])


def test_norms_of_a_batch_are_not_cut() -> None:
    known, _ = noise_of(Normed, 9)
    assert known is not None and known.steps == 0 and "one block of rows each" in known.reason


def test_goodputs_are_of_the_predicted_steps() -> None:
    model = TINY.build()
    trainer = prepare(
        model, TINY.build_optimizer(model.parameters()), loss, TINY.example(),
        "single; @micro_batches=2",
    )  # fmt: skip
    loader = trainer.loader(TINY.train_data, "auto:4-32", shuffle=True)
    assert trainer.loader(TINY.train_data, "auto:4-32", shuffle=True) is loader
    assert loader.batch_size == BATCH
    for batch in loader:
        trainer.step(batch)
    sizes = trainer.adaptation.batches
    assert sizes is not None and trainer.noise_scale is not None
    found, step = sizes._worth(50.0), trainer.traced
    assert sorted(found) == [4, 8, 16, 32]
    best = max(found, key=found.__getitem__)
    trainer.planning.rows = best
    session = trainer.planning.session(step)
    candidate, profile = session.priced(trainer.plan, trainer.planning.profile)
    assert trainer.planning.profile is not None
    assert profile.compute == trainer.planning.profile.compute, "the best one is measured"
    assert found[best] == pytest.approx(goodput(best / candidate.seconds, 50.0, best, BATCH))
    trainer.close()


# A schedule, and what is left


def scheduled(words: str, plan: str = "single", **how: Any) -> tuple[FitResult, list[int]]:
    events: list[FitEvent] = []
    result = sm.fit(
        replace(TINY, scheduler=None), plan, batches=words, on_event=events.append, **how
    )
    return result, of_steps(events)


def test_batches_grow_behind_epochs_and_then_rates_fall() -> None:
    """x 20 of 8 rows would be 160, of 90 that there are."""
    result, sizes = scheduled("1:x2.5,2:x8", epochs=4)
    assert sizes == [8] * 11 + [2] + [20] * 4 + [10] + [90] * 2
    first, second = result.batch_sizes
    assert (first.step, first.before, first.after, first.reason) == (
        12,
        8,
        20,
        "behind epoch 1",
    )
    assert first.learning_rate == 0.05 and second.after == 90 and second.goodput_after is None
    assert second.reason.endswith("160 rows do not fit, learning rates are divided by 1.778")
    assert second.learning_rate == pytest.approx(0.05 * 90 / 160)


def test_batches_grow_as_far_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = BatchSizes._price
    monkeypatch.setattr(
        BatchSizes, "_price",
        lambda self, rows, *how: replace(ask(self, rows, *how), fits=rows <= 20),
    )  # fmt: skip
    result, sizes = scheduled("1:x5", epochs=2)
    assert sizes == [8] * 11 + [2] + [20] * 4 + [10]
    assert result.batch_sizes[0].learning_rate == pytest.approx(0.025)


@pytest.mark.parametrize("stop", [14, 15])
def test_a_schedule_goes_on_in_a_resumed_run(stop: int) -> None:
    entire, _ = scheduled("1:x2.5,2:x8")
    scheduled("1:x2.5,2:x8", steps=stop, checkpoints="saved")
    rest, _ = scheduled("1:x2.5,2:x8", resume="saved")
    assert rest.losses == entire.losses[stop:]


@pytest.mark.usefixtures("growing")
@pytest.mark.parametrize("stop", [2, 5, 12])
def test_a_chosen_batch_goes_on_in_a_resumed_run(stop: int) -> None:
    """Noise is measured anew, so that the next change comes later than without a stop."""
    plan = "single; @micro_batches=2"
    result, sizes = trained(plan, steps=stop, checkpoints="saved")
    rest, later = trained(plan, resume="saved")
    before = result.batch_sizes[-1].after if result.batch_sizes else BATCH
    assert sum(sizes) + sum(later) == 3 * ROWS
    losses = [*result.losses, *rest.losses]
    sizes = [*asked(result), *asked(rest, before)]
    assert losses == pytest.approx(plainly(sizes, linear), abs=1e-12)


def test_a_first_batch_of_another_size_has_its_rates() -> None:
    workload, _ = scaled(replace(TINY, scheduler=None), "sqrt", BATCH, changes=True)
    seen: list[tuple[int, float]] = []

    def note(event: FitEvent) -> None:
        if isinstance(event, Started):
            trainers.append(event.trainer)
        elif isinstance(event, StepDone):
            scheduler = trainers[0].scheduler
            assert scheduler is not None
            seen.append((event.rows, scheduler.get_last_lr()[0]))

    trainers: list[Trainer] = []
    sm.fit(workload, "single", steps=3, batches="auto:32-64", on_event=note)
    assert seen[0] == (32, pytest.approx(0.1))


@pytest.mark.usefixtures("growing")
def test_a_resumed_run_keeps_to_the_sizes_that_it_is_asked_for() -> None:
    plan = "single; @micro_batches=2"
    result, _ = trained(plan, steps=12, checkpoints="saved")
    assert result.batch_sizes[-1].after == 24
    workload, _ = scaled(TINY, "linear", BATCH, changes=True)
    events: list[FitEvent] = []
    sm.fit(workload, plan, batches="auto:8-16", resume="saved", steps=15, on_event=events.append)
    assert max(of_steps(events)) == 16
    plain: list[FitEvent] = []
    sm.fit(TINY, plan, resume="saved", steps=15, on_event=plain.append)
    assert max(of_steps(plain)) == 8, "without changes the workload's own"


def test_stages_say_themselves_into_how_many_parts_a_batch_is_cut() -> None:
    run(2, staged)


def staged() -> None:
    known = sm.fit(TINY, "data; @stages=0:0/1:2", batches="auto:8-16", steps=4).noise_scale
    assert known is not None and known.steps == 0


def carried(model: nn.Module, batch: Any, carry: Any) -> Any:
    return loss(model, batch) + 0 * carry.sum(), carry


def test_what_is_carried_keeps_its_rows() -> None:
    for batches in ("auto", "1:x2"):
        with pytest.raises(ValueError, match="cannot change where a carry goes"):
            sm.fit(
                replace(TINY, loss=carried, metric=None, carry=lambda n: torch.zeros(n, 1)),
                "single", batches=batches, epochs=2, best="loss",
            )  # fmt: skip


def test_what_cannot_be_priced_is_not_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = BatchSizes._price
    monkeypatch.setattr(
        BatchSizes, "_price",
        lambda self, *how: replace(ask(self, *how), fits=False, time=None),
    )  # fmt: skip
    assert scheduled("1:x2.5", epochs=2)[1] == [8] * 11 + [2] + [20] * 4 + [10]


class Centred(nn.Module):
    """Each row depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y - y.mean(0)


def test_rows_that_depend_on_each_other_have_no_batch_to_choose() -> None:
    with pytest.raises(
        ValueError, match=r"batch_size='auto': rows depend on each other.*give a n"
    ):
        sm.fit(replace(TINY, model=Centred), "single", batches="auto")


def test_only_one_loader_chooses() -> None:
    model = TINY.build()
    trainer = prepare(model, TINY.build_optimizer(model.parameters()), loss, TINY.example())
    trainer.loader(TINY.train_data, "auto")
    with pytest.raises(ValueError, match="batches of one loader change"):
        trainer.loader(TINY.valid_data, "auto")
    trainer.close()


def differing() -> None:
    rank = torch.distributed.get_rank()
    sm.fit(TINY, "data", batches=f"auto:8-{16 + rank}")


def test_ranks_choose_among_the_same() -> None:
    with pytest.raises(RankFailed, match="the batches"):
        run(2, differing)
