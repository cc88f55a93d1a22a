"""Verification of workers that go on without each other: one process replays what servers did."""

from typing import Any

import pytest

from synchromesh.engine.update_server import Server
from synchromesh.verify.replay import OrderReplay
from synchromesh.verify.verify import verify
from tests.ranks import run
from tests.targets import target
from tests.verify.test_workers import document

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")
WORDS = ("downpour:2", "ssp:2,stale=2", "shat:2")
PLANS = ("data", "hybrid:tensor=2")
CASES = [  # all of one model, and each word with some of the others
    *(("cnn", plan, word) for plan in PLANS for word in WORDS),
    ("bert", "hybrid:tensor=2", "downpour:2"), ("bert", "data", "ssp:2,stale=2"),
    ("lstm", "data", "shat:2"), ("lstm", "hybrid:tensor=2", "ssp:2,stale=2"),
    ("vit", "data", "downpour:2"), ("vit", "hybrid:tensor=2", "shat:2"),
]  # fmt: skip


def passed(found: dict[str, Any]) -> None:
    assert found["passed"], found["faults"]
    assert not found["exact"] and found["oracle"] == "replay"
    assert "when it comes" in found["reason"]
    stale = found["staleness"]
    assert sum(stale["histogram"]) > 0 and len(stale["histogram"]) == stale["max"] + 1
    assert 0 <= stale["mean"] <= stale["max"]


@pytest.mark.wide(6)
@pytest.mark.parametrize(("name", "plan", "word"), CASES)
def test_a_replay_computes_the_same(name: str, plan: str, word: str) -> None:
    found = document(name, f"{plan}; @synchronisation={word}", 5)
    passed(found)
    if "stale" in word:
        assert found["staleness"]["lead"] <= 2
        assert not found["sent_bytes_compared"]
    else:
        assert found["sent_bytes_compared"]
    assert found["updates"] == 5 * (4 if plan == "data" else 2)


@pytest.mark.wide(1)
@pytest.mark.parametrize("word", ["downpour:1", "shat:2", "ssp:1,stale=1"])
def test_stages_go_on_together(word: str) -> None:
    found = document("cnn", f"pipeline:stages=2,microbatches=3; @synchronisation={word}", 5)
    passed(found)


@pytest.mark.parametrize(("ranks", "servers"), [(2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 4)])
def test_it_sends_what_is_explained(ranks: int, servers: int) -> None:
    word = f"downpour:{servers},push=2,fetch=3"
    found = document("cnn", f"data; @synchronisation={word}", 6, ranks)
    passed(found)
    assert found["sent_bytes_compared"]


@pytest.mark.parametrize(
    ("word", "own", "ranks"),
    [("downpour:1", "2", 3), ("ssp:1,stale=1", "0", 3), ("shat:2", "3,0", 4)],
)
def test_servers_of_their_own_step_by_the_gradients_of_others(
    word: str, own: str, ranks: int
) -> None:
    found = document("cnn", f"data; @synchronisation={word}; @servers={own}", 5, ranks)
    passed(found)
    assert found["updates"] == 10
    assert found["sent_bytes_compared"] == ("ssp" not in word)


def test_an_update_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Server._update

    def lossy(self: Server, worker: int, request: Any) -> None:
        if request.step == 2:  # noted, but not made
            for p in self.replica.parameters.values():
                p.grad = None
        usual(self, worker, request)

    monkeypatch.setattr(Server, "_update", lossy)
    found = document("cnn", "data; @synchronisation=downpour:1", 5, 2)
    assert not found["passed"]
    assert {fault["kind"] for fault in found["faults"]} >= {"gradient", "parameter"}


def aged(plan: str) -> dict[str, Any]:
    return verify(target("cnn"), plan, 5, by_age=True)


@pytest.mark.parametrize(
    "plan", ["data; @synchronisation=downpour:2,push=2,fetch=3",
             "hybrid:tensor=2; @synchronisation=ssp:1,stale=2"]
)  # fmt: skip
def test_rates_over_a_gradients_age_are_proved(plan: str) -> None:
    found = run(4, aged, plan, timeout=110)[0]
    passed(found)
    assert "hybrid" in plan or found["staleness"]["max"] > 1, "no rate was divided"


def test_rates_of_other_ages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OrderReplay, "_age", lambda *_: 1)
    found = run(4, aged, "data; @synchronisation=shat:2", timeout=110)[0]
    assert {fault["kind"] for fault in found["faults"]} >= {"gradient", "parameter"}
