"""Replays of recorded steps: what was recorded again, and what devices do that differ."""

import json
import random
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

from synchromesh import catalogue
from synchromesh.cost.step_time import Recorded, StepTime, recorded
from synchromesh.cost.timeline import RecordedSpan, RecordedTransfer
from synchromesh.planner.candidate import planned_step
from synchromesh.planning.session import PlanningSession
from synchromesh.planning.simulation import simulate
from synchromesh.simulator.replay import Replay, Variation
from synchromesh.simulator.step import simulated, trace_events
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Pattern
from tests.estimate.sessions import loss, session_of, stack


@cache
def session(devices: int) -> PlanningSession:
    return session_of(stack(64), 64, catalogue.cluster(f"v100x{devices}-ethernet25"))


def drawn(chance: random.Random) -> tuple[int, str]:
    """Devices and a plan."""
    devices = chance.choice([1, 2, 4, 8])
    stages = chance.choice([n for n in (1, 2, 4) if n <= devices])
    within = devices // stages
    words = ["data", "tensor", "sharded-data", "data:states=optimizer"] if within > 1 else ["data"]
    words += [f"hybrid:tensor={t}" for t in (2, 4) if within % t == 0 and within > t]
    word = chance.choice(words)
    if chance.random() < 0.3:
        word += ("," if ":" in word else ":") + "recompute=yes"
    if stages == 1:
        return devices, word + chance.choice(["", "", "; @micro_batches=2"])
    count = chance.choice([stages, 2 * stages])
    schedule = chance.choice(["1f1b", "gpipe"])
    return (
        devices,
        f"pipeline:stages={stages},microbatches={count}; *={word}; @schedule={schedule}",
    )


def record(devices: int, text: str) -> tuple[Recorded, list[list[int]]]:
    asked = session(devices)
    candidate, known = asked.priced(Plan.parse(text), None)
    assert candidate.time is not None and known is not None, candidate.reason
    planned = planned_step(asked.partitions, candidate.plan)
    made = recorded(planned, known, candidate.time.pieces)
    assert made.time == candidate.time  # the same walk
    return made, [[planned.ranks[p] for p in its] for its in planned.positions]


@pytest.mark.wide(14)
@pytest.mark.parametrize("seed", range(40))
def test_equal_devices_take_what_was_recorded(seed: int) -> None:
    devices, text = drawn(random.Random(seed))
    print(devices, text)
    made, ranks = record(devices, text)
    (seconds,) = Replay(made, ranks, Variation(), 1).seconds()
    assert seconds == pytest.approx(made.time.seconds, rel=1e-9)


def waiting_for_all(devices: int, count: int = 1) -> Recorded:
    """One computation of a second and its collective over all devices."""
    whole = RecordedTransfer("all_reduce", Pattern(devices), float(count), float(count))
    spans = [RecordedSpan("compute", float(i), float(i + 1)) for i in range(count)]
    end = float(count)
    spans += [RecordedSpan("come", end, end, (whole,)), RecordedSpan("wait", end, end, (whole,))]
    return Recorded((tuple(spans),), (0.0,), StepTime(end, end, 0.0, 0.0, end, 0.0, 1))


@pytest.mark.parametrize("devices", [1, 2, 64, 1024])
@pytest.mark.parametrize("count", [1, 16])
def test_all_wait_for_the_last_of_normal_devices(devices: int, count: int) -> None:
    """mean + s E[max of N], of the sum of `count` actions: s = jitter sqrt(count)."""
    jitter = 0.03
    drawn = Replay(waiting_for_all(devices, count), [range(devices)], Variation(jitter), 2000)
    x = np.linspace(-8.0, 8.0, 20_001)
    density = devices * norm.pdf(x) * norm.cdf(x) ** (devices - 1)
    expected = count + jitter * np.sqrt(count) * float(np.trapezoid(x * density, x))
    assert drawn.seconds().mean() == pytest.approx(expected, rel=0.002)


def test_a_slow_device_holds_up_those_that_meet_it() -> None:
    slow = Variation(speeds={5: 0.5})
    assert Replay(waiting_for_all(8), [range(8)], slow, 1).seconds() == pytest.approx([2.0])
    assert Replay(waiting_for_all(8), [range(8, 16)], slow, 1).seconds() == pytest.approx([1.0])
    pairs = RecordedTransfer("all_reduce", Pattern(2, 4), 1.0, 1.5)
    came, waits = (
        RecordedSpan("come", 1.0, 1.0, (pairs,)),
        RecordedSpan("wait", 1.0, 1.5, (pairs,)),
    )
    spans = (RecordedSpan("compute", 0.0, 1.0), came, waits)
    made = Recorded((spans,), (0.0,), StepTime(1.5, 1.5, 0.0, 0.0, 1.0, 0.5, 1))
    replay = Replay(made, [range(8)], slow, 1)
    assert replay.seconds() == pytest.approx([2.5])
    assert replay.clocks[0].tolist() == [[1.5, 2.5, 1.5, 1.5, 1.5, 2.5, 1.5, 1.5]]


def test_the_same_seed_draws_the_same_steps() -> None:
    made, ranks = record(4, "pipeline:stages=2,microbatches=4")
    drawn = [Replay(made, ranks, Variation(0.1, seed=s), 20).seconds() for s in (1, 1, 2)]
    assert (drawn[0] == drawn[1]).all() and (drawn[0] != drawn[2]).any()
    assert drawn[0].mean() > made.time.seconds


def test_shares_of_a_step_sum_to_one() -> None:
    for plan in ("data", "pipeline:stages=4,microbatches=4", "tensor"):
        asked = session(4)
        candidate, known = asked.priced(Plan.parse(plan), None)
        assert candidate.time is not None and known is not None
        planned = planned_step(asked.partitions, candidate.plan)
        made = recorded(planned, known, candidate.time.pieces)
        step = simulated(planned, made, Variation(0.05, {1: 0.5}))
        assert sum(step.shares.values()) == pytest.approx(1.0)
        assert min(step.shares.values()) >= 0.0 and step.shares["slower"] > 0.0
        assert (step.shares["bubble"] > 0.05) == ("pipeline" in plan)
        events = json.loads(trace_events(step, asked.problem.step.chain.names))["traceEvents"]
        ends = [1e-6 * (e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
        assert max(ends) <= made.time.seconds * (1 + 1e-9)


WORDS = ("every-step", "server:2", "stale:1", "local:8", "downpour:2", "ssp:2,stale=1", "hogwild")


def test_seconds_of_all_words_go_into_parts() -> None:
    """One device of four is at half its speed, in steps that scatter."""
    made = {
        word: simulate(
            nn.Sequential(*stack(64)), loss, torch.zeros(64, 64), cluster="v100x4-ethernet25",
            plans=[f"data; @synchronisation={word}"],
            variation=Variation(jitter=0.2, speeds={3: 0.5}),
        ).plans[0]
        for word in WORDS
    }  # fmt: skip
    for word, plan in made.items():
        assert plan.step is not None, plan.reason
        assert sum(plan.step.parts.values()) == pytest.approx(plan.step.seconds), word
        assert min(plan.step.parts.values()) >= 0.0, (word, plan.step.parts)
        document = plan.to_dict()
        apart = word.startswith(("downpour", "ssp", "hogwild"))
        assert bool(document["waiting_shares"]) == apart
        assert bool(document["staleness"]) == (apart and word != "hogwild")
    rates = {word: plan.samples_per_second for word, plan in made.items()}
    assert rates["local:8"] > rates["every-step"], "others are waited for every eighth step"
    quick = {w: p.samples_per_second_apart for w, p in made.items() if p.workers}
    assert quick["downpour:2"] > 1.2 * rates["every-step"], "nobody waits for the slow one"
    assert quick["ssp:2,stale=1"] < quick["downpour:2"] < quick["hogwild"]
