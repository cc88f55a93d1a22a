"""Which of the candidates is taken."""

from dataclasses import replace

from synchromesh.cost.peak_memory import PeakMemory
from synchromesh.cost.step_time import StepTime
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.choice import Choice, decided
from synchromesh.planner.shortage import Shortage
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


def candidate(plan: str, seconds: float, fits: bool = True) -> Candidate:
    time = StepTime(seconds, 0.0, 0.0, 0.0, 0.0, 0.0, 1)
    return Candidate(Plan.parse(plan), time, (), fits, "")


PLAINER = (  # than those that follow, by words: 1 1 1 1 3 3 3 4 5 9
    "single", "data", "tensor", "zero1", "hybrid:tensor=2", "data; head=tensor",
    "sharded-data:recompute=yes", "data; @ranks=0,1", "data; a.0-7=tensor; head=tensor",
    "data; @stages=0:a/1:b; @micro_batches=2",
)  # fmt: skip


def test_of_plans_that_are_near_the_one_of_fewest_words_is_taken() -> None:
    near = [candidate(plan, 1.0 - 0.003 * n) for n, plan in enumerate(PLAINER)]
    for n, plan in enumerate(PLAINER):
        assert str(decided(near[n:])[0].plan) == plan, "predictions are not that exact"
    mixed, plain = candidate("data; head=tensor", 0.98), candidate("tensor", 1.0)
    assert decided([mixed, plain])[0].plan == plain.plan
    assert decided([candidate("data; head=tensor", 0.96), plain])[0].plan == mixed.plan
    assert decided([mixed, candidate("tensor", 1.0, fits=False)])[0].plan == mixed.plan
    assert decided([candidate("single", 1.04), near[1]])[0].plan == near[1].plan


def test_what_is_written_of_micro_batches_makes_no_plan_longer() -> None:
    interleaved, other = candidate("data; @pieces=4", 1.0), candidate("tensor", 0.99)
    assert decided([other, interleaved])[0].plan == interleaved.plan


def test_it_says_why() -> None:
    quickest, plain = candidate("data; head=tensor", 0.98), candidate("tensor", 1.0)
    told = decided([quickest, plain])
    assert told[0].reason == "plainest within 3% of the least"
    assert told[1].reason == "-2% time"
    assert decided([quickest])[0].reason == "least predicted time"


def test_one_device_that_wins_is_a_sentence() -> None:
    found = (candidate("single", 1.0), candidate("data; @ranks=0,1", 1.5), candidate("data", 2.0))
    told = Choice(found, Profile(4), 0.0)
    assert told.alone == (
        "one device wins, the other 3 stay idle: 1000.0 ms a step are predicted, and 1500.0 ms "
        "for the best plan on more, 'data; @ranks=0,1'"
    )
    assert replace(told, candidates=found[:1]).alone == "one device wins, the other 3 stay idle"
    misfit = replace(found[2], fits=False)
    assert replace(told, candidates=(found[0], misfit)).alone.endswith("3 stay idle"), "it cannot"
    near = replace(told, candidates=(found[0], candidate("data", 0.97)))
    assert near.alone.startswith("one device is as good as more, the other 3 stay idle: 1000.0 ms")
    assert replace(told, candidates=found[1:]).alone == ""
    assert Choice(found[:1], Profile(1), 0.0).alone == "", "there is no other"


def test_what_a_given_plan_lacks_is_said_with_a_remedy() -> None:
    memory = PeakMemory(400, 700), PeakMemory(400, 1000)
    given = replace(candidate("data", 1.0), memory=memory)
    assert Shortage.of(given, (700.0, 1000.0), 8) is None
    assert Shortage.of(given, (), 8) is None, "no limit is known"
    assert Shortage.of(candidate("data", 1.0), (1.0, 1.0), 8) is None, "nothing is known of it"
    told = Shortage.of(given, (650.0, 700.0), 8)
    assert told is not None and told.clause == (
        "the plan 'data' is predicted to need 1.0 KB of tensors on rank 1, which has memory for "
        "700 bytes"
    )
    assert "A global batch of about 4 rows instead of 8 would fit" in told.remedy
    larger = Shortage.of(given, (300.0, 300.0), 8)
    assert larger is not None and "optimizer state alone are 400 bytes" in larger.remedy
    assert str(larger).endswith("the plan 'auto' takes one that fits, where there is one")
