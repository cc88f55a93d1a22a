"""The noise scale's averages and interval, against rows that are drawn from known distributions;
how often is measured."""

import struct

import pytest
import torch
from torch import Tensor

from synchromesh.engine import noise_scale
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.noise_averages import MEASURING, NoiseAverages
from synchromesh.engine.noise_scale import NoiseMeter
from synchromesh.values.plan import Plan

BLOCKS, ROWS, DIMS = 2, 32, 12  # of a step; of a block; of a gradient


def steps(count: int, mean: float, spread: float, seed: int) -> Tensor:
    """(count, 2): estimates of |G|^2 and tr S from blocks of rows ~ N(mean, spread^2)."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, BLOCKS, DIMS, generator=g, dtype=torch.float64) / ROWS**0.5
    blocks = mean + spread * noise
    whole = blocks.mean(1).square().sum(-1)
    block = blocks.square().sum(-1).mean(-1)
    squared = (BLOCKS * whole - block) / (BLOCKS - 1)
    return torch.stack([squared, BLOCKS * ROWS * (block - whole) / (BLOCKS - 1)], 1)


def averaged(estimates: Tensor, window: int = MEASURING.window) -> NoiseAverages:
    averages = NoiseAverages(window)
    for squared, trace in estimates.tolist():
        averages.add(squared, trace)
    return averages


@pytest.mark.parametrize(("mean", "spread"), [(1.0, 3.0), (0.5, 5.0), (0.1, 0.1)])
def test_the_interval_holds_the_true_value_in_19_of_20_cases(mean: float, spread: float) -> None:
    true = (spread / mean) ** 2
    held = 0
    for seed in range(200):
        scale = averaged(steps(60, mean, spread, seed)).scale()
        assert scale.low is not None and scale.high is not None and scale.value is not None
        assert scale.low <= scale.value <= scale.high
        held += scale.low <= true <= scale.high
    assert 180 <= held <= 199


def test_more_steps_tell_more() -> None:
    scales = [averaged(steps(count, 1.0, 3.0, 0)).scale() for count in (30, 300, 3000)]
    widths = [s.high - s.low for s in scales if s.high is not None and s.low is not None]
    assert widths[0] > 2 * widths[1] > 2 * widths[2]
    # of 3,000 steps those of the window count
    assert scales[2].value == pytest.approx(9.0, rel=0.05) and scales[2].steps == 3000


def test_a_gradient_that_is_noise_alone_has_no_upper_bound() -> None:
    for seed in range(20):
        scale = averaged(steps(60, 0.0, 1.0, seed)).scale()
        if scale.high is None:
            assert "not told apart" in scale.reason
            assert scale.low is not None and scale.low > 10
            break
    else:
        raise AssertionError("noise had an upper bound in 20 cases of 20")
    # |G|^2 may come out negative: there is no value then, and none that is negative
    values = [averaged(steps(60, 0.0, 1.0, seed)).scale().value for seed in range(20)]
    assert None in values and all(value is None or value >= 0 for value in values)


def test_averages_follow_what_changes_and_are_drawn_to_no_zero() -> None:
    averages = averaged(torch.tensor([[1.0, 8.0]] * 3))
    assert averages.scale().value == 8.0  # from the first step on
    averages = averaged(torch.tensor([[1.0, 8.0]] * 100 + [[1.0, 80.0]] * 100), window=20)
    assert averages.scale().value == pytest.approx(80.0, rel=0.01)


def test_few_steps_have_no_interval() -> None:
    assert NoiseAverages().interval(1.0) == (None, None) and NoiseMeter(True).between(1.0) is None
    assert NoiseAverages().scale().reason == "no step has been measured yet"
    scale = averaged(steps(MEASURING.least - 1, 1.0, 3.0, 0)).scale(0.5)
    assert scale.value is not None and scale.low is scale.high is None
    assert scale.measured_share == 0.5 and "needs 10 measured steps, and 9 were" in scale.reason


def test_gradients_without_noise() -> None:
    scale = averaged(torch.tensor([[4.0, 0.0]] * 20)).scale()
    assert (scale.value, scale.low, scale.high, scale.reason) == (0.0, 0.0, 0.0, "")


# How often is measured


def sent(measured: bool, of_time: float, squared: float, trace: float) -> tuple[int, ...]:
    return struct.unpack("4q", struct.pack("4d", float(measured), of_time, squared, trace))


def began(meter: NoiseMeter, steps: int) -> bool:
    meter.abandon()
    meter.begin(steps)
    return meter._open


def test_the_slowest_rank_says_how_often() -> None:
    meter = NoiseMeter(asked=True)
    meter._entries = {2: 1}  # a parameter somewhere
    assert all(began(meter, step) for step in range(3 - MEASURING.least, 3))  # the first ones
    meter.collect([sent(True, 0.1 * MEASURING.share, 0, 0), sent(True, 4 * MEASURING.share, 0, 0)])
    assert [step for step in range(2, 15) if began(meter, step)] == [6, 10, 14]
    assert began(meter, 3)  # after `resume` steps may have gone back
    for count in range(MEASURING.latest):
        meter.collect([sent(True, 0.9, 0, count)])
    assert [step for step in range(4, 500) if began(meter, step)] == [103, 203, 303, 403]


def test_what_a_cut_step_takes_longer_is_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One second as it is, two in two micro-batches: half of its time."""
    now = [0.0]
    monkeypatch.setattr(noise_scale, "perf_counter", lambda: now[0])
    meter = NoiseMeter(asked=True)
    meter._entries, meter._begun, meter._last, meter._every, meter.cuts = {1: 1}, 10, 0, 2, True
    for step, micro_batches in ((1, 1), (2, 2)):
        assert meter.parts(step, Plan.parse("single")) == micro_batches
        meter.begin(step)
        meter.count([GlobalRows((4,), Plan.parse("single"))] * micro_batches)
        now[0] += micro_batches
        meter.finish(1.0)
    measured, cost, *_ = struct.unpack("4d", struct.pack("4q", *meter.take()))
    assert (measured, cost) == (1.0, 0.5)
    for plan in ("single; @micro_batches=2", "pipeline:stages=2"):
        assert meter.parts(4, Plan.parse(plan)) == 1, "of a plan that says how many itself"


def test_what_ranks_have_measured_adds_up() -> None:
    meter = NoiseMeter(asked=True)
    meter.collect([sent(True, 0.1, 1.0, 5.0), sent(True, 0.1, -0.5, 1.0), (0, 0, 0, 0)])
    known = meter._averages.scale()
    assert (known.squared_gradient, known.trace, known.steps) == (0.5, 6.0, 1)
    meter.collect([sent(True, 0.1, float("nan"), 5.0)])  # of a gradient that overflowed
    meter.collect([sent(False, 0.1, 1.0, 1.0)])  # of other parameters
    meter.collect([(0, 0, 0, 0)] * 2)  # nothing was measured
    assert meter._averages.steps == 1


def test_one_that_was_not_asked_for_does_nothing() -> None:
    meter = NoiseMeter()
    assert not began(meter, 0) and meter.take() == () and meter.scale() is None
    meter.collect([(), ()])


def test_numbers_that_are_seen_again_count_once() -> None:
    """As where one rank works alone, which asks for them a step later."""
    meter = NoiseMeter(asked=True)
    for measured in ((1.0, 0.01, 2.0, 3.0), (1.0, 0.02, 4.0, 5.0), (0.0,) * 4):
        for _ in range(2):
            meter.collect([sent(bool(measured[0]), *measured[1:])])
    found = meter.scale()
    assert found is not None and found.steps == 2
    assert (found.squared_gradient, found.trace) == (3.0, 4.0)
