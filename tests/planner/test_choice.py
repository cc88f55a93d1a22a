"""Which of the candidates is taken."""

from dataclasses import replace

from synchromesh.cost.alive_bytes import PeakMemory
from synchromesh.cost.step_time import StepTime
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.choice import Choice, decided
from synchromesh.planner.decision.memory import Shortage
from synchromesh.values.allowance import Allowance
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


def test_what_is_not_exact_is_taken_where_it_is_allowed_and_much_quicker() -> None:
    exact, near, quick = (
        candidate("data", 1.0), candidate("data; @compression=fp16", 0.85),
        candidate("data; @compression=int8", 0.5),
    )  # fmt: skip
    allowed = Allowance.parse("compression")
    assert decided([near, exact], allowed)[0].plan == exact.plan, "accuracy would pay for it"
    assert decided([quick, near, exact], allowed)[0].plan == quick.plan
    slow = candidate("data; head=tensor", 1.02)
    assert decided([near, slow, exact], allowed)[0].plan == exact.plan
    told = decided([quick, exact])
    assert [c.reason for c in told] == [
        "least time of those that fit and are exact", "50% quicker, not exact"
    ]  # fmt: skip
    server = candidate("data; @synchronisation=server:2", 0.5)
    assert decided([server, exact], allowed)[0].plan == exact.plan, "nobody asked for servers"
    assert decided([quick, candidate("data", 0.1, fits=False)], allowed)[0].plan == quick.plan
    assert Choice((exact, slow), Profile(4), 0.0).of_accuracy == ""
    assert "(2): what that costs in accuracy is not in their times" in (
        Choice((exact, quick), Profile(4), 0.0).of_accuracy
    )


def timed(plan: str, seconds: float, waited: float, lacks: str = "") -> Candidate:
    time = StepTime(seconds, 0.0, 0.0, 0.0, 0.0, waited, 1)
    return Candidate(Plan.parse(plan), time, (), not lacks, lacks)


def why(*found: Candidate, devices: int = 4) -> str:
    return Choice(tuple(decided(found)), Profile(devices), 0.0).why


def test_it_says_why() -> None:
    quickest, plain = candidate("data; head=tensor", 0.98), candidate("tensor", 1.0)
    told = decided([quickest, plain, timed("data", 1.2, 0.05), timed("zero1", 1.5, 0.3)])
    assert [c.reason for c in told] == [
        "fewest words within 3% of the least time of those that fit", "2% quicker",
        "20% slower: computes 150.0 ms more", "50% slower: waits 300.0 ms more",
    ]  # fmt: skip
    assert decided([quickest])[0].reason == "least time of those that fit"
    assert decided([plain, candidate("data", 0.999)])[1].reason == "as quick"
    nothing = Candidate(plain.plan, None, (), False, "it was not measured")
    assert decided([quickest, nothing])[1].reason == "it was not measured"


def test_what_decides_is_a_sentence() -> None:
    best, next_ = candidate("data; head=tensor", 1.0), timed("data", 1.2, 0.2)
    lacking = timed("data:recompute=yes", 0.9, 0.0, "rank 3 lacks 1.2 GB")
    assert why(next_, best, lacking) == (
        "plan 1 has the least time of those that fit; plan 2 is 20% slower: waits 200.0 ms more; "
        "plan 3 would be 10% quicker, but rank 3 lacks 1.2 GB"
    )
    slow = timed("tensor", 2.0, 1.0, "rank 3 lacks 1.2 GB")
    assert why(best, slow) == "plan 1 has the least time of those that fit"
    assert why(best) == why(lacking, slow) == "", "there is nothing to choose from"


def test_one_device_that_wins_leaves_others_idle() -> None:
    alone, two, all_ = (
        candidate(p, s) for p, s in [("single", 1.0), ("data; @ranks=0,1", 1.5), ("data", 2.0)]
    )
    assert why(alone, two, all_) == (
        "plan 1 has the least time of those that fit, and leaves 3 of 4 devices idle; plan 2 is "
        "50% slower: computes 500.0 ms more"
    )
    other = candidate("single; @ranks=1", 1.1)
    assert "; plan 3 is 50% slower" in why(alone, other, two), "it leaves fewer idle"
    near = why(alone, candidate("data", 0.98))
    assert near.startswith("plan 1 has the fewest words within 3% of the least time of those that")
    assert near.endswith("leaves 3 of 4 devices idle; plan 2 is 2% quicker")
    assert "idle" not in why(alone, candidate("tensor", 2.0), devices=1)


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
