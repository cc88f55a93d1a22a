"""Learning rates for other batches, against products by hand."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import IterableDataset, TensorDataset

from synchromesh.cost.efficiency import gain
from synchromesh.training.learning_rate import RateFactor, ScaledRate, advance, resume, scaled
from synchromesh.values.optimizer import step_aged
from synchromesh.workloads.workload import Workload


def workload(batch: int = 64, scheduler: Any = None) -> Workload:
    return Workload(
        model=lambda: nn.Linear(2, 1), loss=lambda model, x: model(x[0]).mean(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=batch,
        train_data=TensorDataset(torch.zeros(1000, 2)), scheduler=scheduler,
    )  # fmt: skip


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(1))


def rates(of: Workload, steps: int, again: int | None = None) -> list[float]:
    """Before each step. again: after so many, all of it is made anew from its state."""
    optimizer = of.build_optimizer(of.build().parameters())
    scheduler = of.build_scheduler(optimizer)
    found = []
    for step in range(steps):
        if step == again:
            state = optimizer.state_dict(), scheduler.state_dict()
            optimizer = of.build_optimizer(of.build().parameters())
            scheduler = of.build_scheduler(optimizer)
            optimizer.load_state_dict(state[0])
            scheduler.load_state_dict(state[1])
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return found


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
@pytest.mark.parametrize("scheduler", [
    None, lambda o: CosineAnnealingLR(o, 7), lambda o: LambdaLR(o, lambda n: 1 / (1 + n)),
])  # fmt: skip
@pytest.mark.parametrize("again", [None, 0, 3])
def test_what_the_scheduler_says_is_multiplied(
    rule: str, factor: float, scheduler: Any, again: int | None
) -> None:
    """The scheduler's updates are those of 64 rows: four of them are one of 256."""
    alone = rates(workload(256, scheduler), 33)[::4]
    made, rate = scaled(workload(256, scheduler), rule, base=64)
    assert rate == RateFactor(rule, 64, 256) and rate.factor == factor
    assert rates(made, 9, again) == pytest.approx([factor * x for x in alone])


@pytest.mark.parametrize("again", [None, 5])
def test_a_scheduler_has_as_many_epochs_with_parts_of_a_batch(again: int | None) -> None:
    """48 rows are three quarters of an update: of every four one leaves the schedule."""
    alone = rates(workload(48, lambda o: LambdaLR(o, lambda n: 1 / (1 + n))), 9)
    made, _ = scaled(workload(48, lambda o: LambdaLR(o, lambda n: 1 / (1 + n))), "linear", 64)
    places = [3 * n // 4 for n in range(9)]
    assert rates(made, 9, again) == pytest.approx([0.75 * alone[at] for at in places])


def test_adascale_multiplies_by_its_gain_and_goes_on_by_it() -> None:
    """phi = 192, B_0 = 64, B = 192: r = (3 + 1) / (1 + 1) = 2, of at most 3."""
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    inner = LambdaLR(optimizer, lambda n: 1 / (1 + n))
    rate = ScaledRate(optimizer, inner, RateFactor("adascale", 64, 192))
    assert rate.factor == 1.0  # nothing is known
    rate.noise_scale = lambda: 192.0
    optimizer.step()
    rate.step()
    assert inner.last_epoch == 2 and rate.get_last_lr() == pytest.approx([2 * 0.1 / 3])
    rate.resize(64)
    assert rate.factor == 1.0 and rate.get_last_lr() == pytest.approx([0.1 / 3])


@pytest.mark.parametrize("noise", [0.0, 1e-3, 5.0, 1e3, 1e12])
def test_gains_lie_between_one_and_the_growth_of_the_batch(noise: float) -> None:
    for base in (1, 7, 64):
        assert gain(noise, base, base) == pytest.approx(1.0, abs=1e-15)
        for times in (2, 5, 64):
            trace, squared = noise, 1.0
            r = (trace / base + squared) / (trace / (times * base) + squared)  # the paper's
            assert gain(noise, times * base, base) == pytest.approx(r, rel=1e-12)
            assert 1.0 - 1e-12 <= r <= times


def test_rates_follow_a_batch_that_changes_and_can_be_lowered() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    rate = ScaledRate(optimizer, None, RateFactor("linear", 64, 64))
    rate.resize(256)
    assert rate.get_last_lr() == pytest.approx([0.4])
    rate.resize(256, lowered=2.5)
    assert rate.get_last_lr() == pytest.approx([0.16])


def test_a_resumed_run_has_the_rates_of_the_batch_that_it_is_asked_for() -> None:
    """Also from or to a run whose batches do not change."""

    def made(batch: int = 0) -> tuple[Any, Any, Any]:
        optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
        inner = LambdaLR(optimizer, lambda n: 1 / (1 + n))
        rate = ScaledRate(optimizer, inner, RateFactor("linear", 64, batch)) if batch else inner
        return optimizer, inner, rate

    def resumed(first: int, later: int) -> tuple[float, int]:
        optimizer, inner, rate = made(first)
        optimizer.step()
        advance(rate, first or 64)
        states = optimizer.state_dict(), rate.state_dict()
        optimizer, inner, rate = made(later)
        optimizer.load_state_dict(states[0])
        resume(rate, states[1])
        return optimizer.param_groups[0]["lr"], inner.last_epoch

    assert resumed(128, 256) == (pytest.approx(4 * 0.1 / 3), 2)
    assert resumed(0, 256) == (pytest.approx(4 * 0.1 / 2), 1)
    assert resumed(64, 0) == (pytest.approx(0.1 / 2), 1)


def test_a_short_batch_counts_as_whole_updates_of_the_first_size() -> None:
    """1,437 rows: 23 updates of 64 rows, and three of 512."""
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    inner = LambdaLR(optimizer, lambda n: 1.0)
    rate = ScaledRate(optimizer, inner, RateFactor("sqrt", 64, 512))
    optimizer.step()
    for rows in (512, 512, 413):
        advance(rate, rows)
    assert inner.last_epoch == 23


def test_a_warm_up_grows_evenly_from_the_rate_that_was_chosen() -> None:
    """1,000 rows in batches of 250: four steps an epoch, six in one and a half."""
    made, rate = scaled(workload(250), "linear", base=50, warm_up=1.5)
    assert rate == RateFactor("linear", 50, 250, 6, 1.5)
    assert "5 times the workload's (linear, reached in 6 steps)" in str(rate)
    expected = [0.1 * (1 + 4 * n / 6) for n in range(7)] + [0.5]
    assert rates(made, 8) == pytest.approx(expected)


def test_without_a_rule_the_workload_is_as_it_was() -> None:
    asked = workload(256)
    assert scaled(asked, "none", base=64) == (asked, RateFactor("none", 64, 256))
    same, rate = scaled(workload(64), "linear", base=64)
    assert rate.factor == 1.0 and rates(same, 3) == [0.1] * 3


def test_a_rate_may_be_a_tensor() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(nn.Linear(2, 1).parameters(), lr=rate, foreach=False)
    ScaledRate(optimizer, None, RateFactor("linear", 1, 2)).step()
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(0.2)


def test_bad_input_has_its_sentence() -> None:
    with pytest.raises(ValueError, match="'cubic' is no rule of learning rates: none, linear"):
        scaled(workload(), "cubic", base=64)
    with pytest.raises(ValueError, match="goes with a rule"):
        scaled(workload(), "none", base=64, warm_up=1.0)
    with pytest.raises(ValueError, match="number of epochs from 0"):
        scaled(workload(), "sqrt", base=64, warm_up=-1.0)
    with pytest.raises(ValueError, match="this is a stream"):
        scaled(replace(workload(), train_data=Endless()), "sqrt", base=64, warm_up=1.0)


def test_a_step_by_an_old_gradient_is_one_of_a_lower_rate() -> None:
    """Of momentum and decay too; the scheduler's rate stays, and what it counts."""
    found = []
    for age, rate in ((4, 0.4), (1, 0.1), (0, 0.1)):
        p = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([p], lr=rate, weight_decay=0.5)
        scheduler = LambdaLR(optimizer, lambda n: 1.0)
        for step in range(3):
            p.grad = torch.full((3,), 1.0 + step)
            step_aged(optimizer, age)
        assert optimizer.param_groups[0]["lr"] == rate and scheduler.last_epoch == 0
        found.append(p.detach().clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    job, rate = scaled(workload(64), "staleness", base=64)
    assert rates(job, 5) == [0.1] * 5 and "a gradient's age" in str(rate)
