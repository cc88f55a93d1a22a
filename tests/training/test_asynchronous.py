"""Workers that go on without each other: evaluation, switches, checkpoints, clipping, faults."""

import math
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synchromesh.engine.asynchronous import share
from synchromesh.training.fit import fit
from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from tests.ranks import RankFailed, run
from tests.targets import target
from tests.traces import shared
from tests.training.test_workers import ROWS, adamw, batch, loss, model

WORDS = ("downpour:1", "downpour:2,push=2,fetch=3", "ssp:2,stale=1", "shat:2")
STAGES = "data; @stages=0-1:body.0/2-3:head"


def trainer_of(plan: str) -> Trainer:
    net = model()
    return prepare(net, adamw(net), loss, batch(12, 0), plan)


def train(trainer: Trainer, rows: Sequence[int]) -> list[float]:
    given = (batch(n, seed) for seed, n in enumerate(rows))
    return [float(trainer.step(trainer.shard(b))) for b in given]


def one_worker(word: str) -> tuple[list[float], dict[str, Tensor]]:
    trainer = trainer_of(f"data; @synchronisation={word}")
    found = train(trainer, ROWS), trainer.state_dict()
    trainer.close()
    return found


@pytest.mark.parametrize("word", ["downpour:1", "ssp:1,stale=2"])
def test_one_worker_is_a_plain_loop(word: str) -> None:
    net = model()
    optimizer, losses = adamw(net), []
    for seed, rows in enumerate(ROWS):
        value, weight = loss(net, batch(rows, seed))
        optimizer.zero_grad()
        (value / weight).backward()
        optimizer.step()
        losses.append(float((value / weight).detach()))
    (found, state), = run(1, one_worker, word)  # fmt: skip
    assert found == pytest.approx(losses, abs=1e-12)
    for name, expected in net.state_dict().items():
        assert torch.allclose(state[name], expected, atol=1e-12)


def normed(plan: str) -> int:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    trainer = prepare(body, adamw(body), loss, batch(12, 0), plan)
    train(trainer, (12, 12, 12, 2))
    found = int(trainer.state_dict()["1.num_batches_tracked"])
    trainer.close()
    return found


@pytest.mark.parametrize("servers", ["", "; @servers=0"])
def test_counters_are_those_of_a_worker_with_rows(servers: str) -> None:
    found = run(3, normed, f"data; @synchronisation=downpour:1{servers}")
    assert found == [4, 4, 4]


def without_rows(plan: str) -> tuple[list[float], Any, int]:
    trainer = trainer_of(plan)
    found = train(trainer, ROWS)
    trainer.buffers()
    result = found, trainer.workers.staleness(), trainer.workers.updates() or 0
    trainer.close()
    return result


@pytest.mark.parametrize("plan", ["data", "hybrid:tensor=2", STAGES])
@pytest.mark.parametrize("word", WORDS)
def test_a_worker_without_rows_makes_no_update(plan: str, word: str) -> None:
    workers = 4 if plan == "data" else 2
    with shared(f"asynchronous {plan}", model(), loss, batch(12, 0), plan):
        found = run(4, without_rows, f"{plan}; @synchronisation={word}", timeout=60)
    for losses, stale, _ in found:
        assert len(losses) == len(ROWS) and any(map(math.isfinite, losses))
        assert 0 <= stale["lead"] <= (1 if "ssp" in word else len(ROWS))
    assert sum(math.isnan(x) for x in found[-1][0]) == 1  # the batch of one row
    pushes = "push=2" in word
    assert pushes or found[0][2] == len(ROWS) * workers - (workers - 1)


def switched(words: Sequence[str]) -> list[float]:
    """How far a switch moves parameters; each plan trains some steps."""
    trainer, moved = trainer_of(words[0]), []
    for word in words[1:]:
        train(trainer, (12, 12, 5))
        before = trainer.state_dict()
        trainer.switch(word)
        after = trainer.state_dict()
        moved.append(max(float((before[n] - after[n]).abs().max()) for n in before))
        assert all(bool(x.isfinite().all()) for x in after.values())
    train(trainer, (12, 12))
    ends = trainer.world.everyone.all_gather_json(
        [float(x.double().sum()) for x in trainer.state_dict().values()]
    )
    assert all(end == ends[0] for end in ends)
    trainer.close()
    return moved


def test_any_word_is_left_for_any_other() -> None:
    of = "data; @synchronisation="
    words = [
        "data", f"{of}downpour:2", f"{of}server:1", f"{of}ssp:1,stale=2", f"{of}local:3",
        f"{of}shat:4", "hybrid:tensor=2; @synchronisation=downpour:1", f"{of}diloco:2",
        f"{STAGES}; @synchronisation=shat:2", "zero1", f"{of}downpour:4", "tensor",
        f"{of}ssp:1,stale=1; @servers=2", f"{of}server:2; @servers=3,0",
    ]  # fmt: skip
    with shared("switching words", model(), loss, batch(12, 0), "data"):
        for moved in run(4, switched, words, timeout=110):
            assert moved == [0.0] * len(moved)


def saved(plan: str, folder: str) -> dict[str, Tensor]:
    trainer = trainer_of(plan)
    train(trainer, (12, 12, 5))
    trainer.save(folder)
    state = trainer.state_dict()
    state |= {f"m{i}": s["exp_avg"].clone() for i, s in _states(trainer).items()}
    trainer.close()
    return state


def resumed(plan: str, folder: str) -> dict[str, Tensor]:
    trainer = trainer_of(plan)
    trainer.resume(folder)
    state = trainer.state_dict()
    state |= {f"m{i}": s["exp_avg"].clone() for i, s in _states(trainer).items()}
    train(trainer, (12, 5))
    trainer.close()
    return state


def _states(trainer: Trainer) -> dict[int, Any]:
    states: dict[int, Any] = trainer.state.optimizer_state_dict()["state"]
    return states


@pytest.mark.parametrize("word", ["downpour:2", "shat:1"])
def test_another_word_and_number_of_workers_resumes(word: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    before = run(4, saved, f"data; @synchronisation={word}", folder)[0]
    for ranks, plan in ((2, "data"), (3, "data; @synchronisation=ssp:2,stale=1"), (1, "single")):
        after = run(ranks, resumed, plan, folder)[0]
        assert before.keys() == after.keys()
        assert all(torch.equal(before[n], after[n]) for n in before)


def clipped() -> tuple[float, float]:
    trainer = trainer_of("data; @synchronisation=downpour:1")
    given = trainer.shard(batch(12, 3))
    trainer.backward(given)
    net = model()
    value, weight = loss(net, given)
    (value / weight).backward()
    norm = float(trainer.clip(0.1))
    expected = float(nn.utils.clip_grad_norm_(net.parameters(), 0.1))
    trainer.update()
    trainer.close()
    return norm, expected


def test_each_worker_clips_by_its_own_norm() -> None:
    found = run(2, clipped)
    assert all(norm == pytest.approx(expected, rel=1e-9) for norm, expected in found)
    assert found[0][0] != found[1][0]


def fitted(plan: str) -> tuple[dict[str, float], Any, Any, float | None]:
    result = fit(target("cnn"), plan, epochs=1)
    return result.metrics, result.staleness, result.updates, result.loss


@pytest.mark.parametrize("own", ["", "; @servers=0"])
def test_fit_evaluates_what_servers_have(own: str) -> None:
    plan = f"data; @synchronisation=downpour:1{own}"
    with shared("cnn", target("cnn").model(), target("cnn").loss, target("cnn").example(), plan):
        first, *others = run(3, fitted, plan, timeout=90)
    assert all(of == first for of in others)
    assert first[1]["max"] >= 0 and first[2] > 0


def paced(word: str) -> bool:
    """A rank that only serves, while one of two workers takes longer than a collective may."""
    net = model()
    plan, patience = f"data; @servers=0; @synchronisation={word}", timedelta(seconds=4)
    trainer = prepare(net, adamw(net), loss, batch(12, 0), plan, timeout=patience)
    for step in range(6):
        trainer.step(trainer.shard(batch(12, step)))
        time.sleep(1.2 * (trainer.rank == 2))
    done = [*trainer.workers.served.server._done] if trainer.rank == 0 else []  # type: ignore[union-attr]
    trainer.buffers()
    trainer.close()
    return not done or min(done) >= 6


@pytest.mark.parametrize("word", ["downpour:1", "ssp:1,stale=10", "downpour:1,push=2"])
def test_a_rank_that_only_serves_keeps_pace_with_the_workers(word: str) -> None:
    assert all(run(3, paced, word, timeout=60))


def stopped() -> None:
    net = model()
    plan, patience = "data; @servers=0; @synchronisation=downpour:1", timedelta(seconds=0.2)
    trainer = prepare(net, adamw(net), loss, batch(12, 0), plan)
    trainer.world.timeout = patience
    for step in range(4):
        if trainer.rank and step == 2:
            time.sleep(20)
        trainer.step(trainer.shard(batch(12, step)))


def test_a_rank_that_only_serves_does_not_wait_for_ever() -> None:
    with pytest.raises(RankFailed, match=r"for 2 s, and ranks \[1, 2\] have not done step 3"):
        run(3, stopped, timeout=60)


def failing() -> None:
    trainer = trainer_of("data; @synchronisation=ssp:1,stale=1")
    for step in range(50):
        if trainer.rank == 1 and step == 3:
            raise RuntimeError("out of something")
        trainer.step(trainer.shard(batch(12, step)))


def test_a_worker_that_fails_ends_the_others() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match="out of something"):
        run(3, failing, timeout=60)
    assert time.monotonic() - began < 30


def left_open() -> bool:
    trainer = trainer_of("data; @synchronisation=downpour:1")
    train(trainer, (12, 12))
    trainer.close()
    return True


def test_a_trainer_is_closed_in_the_middle() -> None:
    assert run(3, left_open, timeout=30) == [True] * 3


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Linear(6, 4), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale  # type: ignore[no-any-return]


def refused(plan: str, scaled: bool) -> str:
    net = Scaled().double() if scaled else model()
    try:
        prepare(net, adamw(net), loss, batch(12, 0), plan)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("plan", "scaled", "why"),
    [
        ("data; @synchronisation=downpour:1", True, "scale is one number without dimensions"),
        ("data; @ranks=0,1; @synchronisation=shat:1", False, "1 ranks would be idle"),
        ("data; @synchronisation=downpour:4", False, "take at most 3 servers"),
        ("data; @synchronisation=shat:3; @servers=0-2", False, "leaves none of 3 ranks to comp"),
        ("data; @synchronisation=server:1; @servers=3", False, "names rank 3, but there are 3"),
        ("data; @synchronisation=server:1; @servers=2; @rows=1,1,1", False, "degree is 2"),
        ("zero1; @synchronisation=downpour:1", False, "leave sharded states"),
        ("data; body.0=tensor; @synchronisation=downpour:1", False, "several data degrees"),
        ("data; @synchronisation=ssp:1", False, "lacks stale="),
        ("data; @synchronisation=downpour:0", False, "from 1 to 999999"),
        ("data; @synchronisation=downpour:1,stale=3", False, "write downpour:S[,push=N]"),
    ],
)
def test_what_cannot_be_asked_for(plan: str, scaled: bool, why: str) -> None:
    for text in run(3, refused, plan, scaled):
        assert why in text


def test_how_far_a_worker_goes() -> None:
    """Ko and Kim 2022: a = 1 - s / log2 n, s = n / c."""
    assert share(0, 8) == 0.0 and share(5, 1) == 0.0
    assert share(7, 8) == pytest.approx(1 - 8 / 7 / 3)
    assert share(1, 8) == 0.0 and share(10**9, 8) == pytest.approx(1.0)
    for workers in (2, 4, 8, 24):
        shares = [share(c, workers) for c in range(1, 200)]
        assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] < 1


class Odd(torch.optim.SGD):
    """An optimizer with an attribute of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.factor = 0.5

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = 0.1 * self.factor
        super().step(closure)


def drained(word: str) -> tuple[Any, int, bool]:
    """A drain behind each step: no gradient is older than those of one step."""
    net = model()
    trainer = prepare(net, Odd(net.parameters()), loss, batch(12, 0), f"data; {AT}{word}")
    for seed in range(8):
        trainer.step(trainer.shard(batch(12, seed)))
        trainer.state_dict()
    trainer.switch(f"data; {AT}downpour:1")
    trainer.step(trainer.shard(batch(12, 0)))
    trainer.buffers()
    none = all(p.grad is None for p in trainer.model.parameters.values())
    found = trainer.workers.staleness(), trainer.workers.updates() or 0, none
    trainer.close()
    return found


AT = "@synchronisation="


@pytest.mark.filterwarnings("ignore:it is not known")
@pytest.mark.parametrize("word", ["downpour:1", "ssp:1,stale=3", "shat:1"])
def test_what_is_fetched_at_a_drain_is_new(word: str) -> None:
    with shared("drained", model(), loss, batch(12, 0), "data"):
        for stale, updates, none in run(3, drained, word, timeout=60):
            assert stale["max"] <= 2 and stale["mean"] <= 2
            assert sum(stale["histogram"]) == updates == 3 * 9  # of both plans
            assert none  # gradients of servers are none of the user's


def taken_back(folder: str) -> float:
    trainer = trainer_of(f"data; {AT}downpour:1,push=4")
    train(trainer, (12, 12, 12))
    trainer.save(folder)
    before = trainer.state_dict()
    train(trainer, (12, 12, 12))  # not pushed yet
    trainer.resume(folder)
    after = trainer.state_dict()
    trainer.close()
    return max(float((before[n] - after[n]).abs().max()) for n in before)


def test_gradients_that_were_not_pushed_end_with_a_resume(tmp_path: Path) -> None:
    assert run(2, taken_back, str(tmp_path / "saved")) == [0.0, 0.0]


def breaking(rank: int) -> None:
    def stop(event: Any) -> None:
        if type(event).__name__ == "StepDone" and event.step == 3:
            raise RuntimeError("an event's function has failed")

    trainer_rank = int(os.environ["RANK"])
    fit(target("cnn"), f"data; {AT}downpour:1", epochs=3,
        on_event=stop if trainer_rank == rank else None)  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_a_servers_rank_that_fails_ends_the_run(rank: int) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match="an event's function has failed"):
        run(3, breaking, rank, timeout=60)
    assert time.monotonic() - began < 40


def alike(what: str) -> str:
    net = model()
    optimizer = adamw(net)
    trainer = prepare(net, optimizer, loss, batch(12, 0), f"data; {AT}downpour:1")
    given = batch(12, 0)
    if what == "rates":
        given = trainer.shard(given)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + trainer.rank)
    try:
        trainer.step(given)
    except ValueError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


@pytest.mark.parametrize(
    ("what", "why"), [("rows", "all given the same 12 rows"), ("rates", "other settings")]
)
def test_workers_compare_rows_and_settings(what: str, why: str) -> None:
    assert all(why in text for text in run(2, alike, what))
