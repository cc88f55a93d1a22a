"""Workers that write one set of parameters without locks (`@synchronisation=hogwild`)."""

import math

import pytest
import torch

from tests.ranks import run
from tests.traces import shared
from tests.training.test_asynchronous import STAGES, refused, train, trainer_of
from tests.training.test_workers import ROWS, batch, loss, model
from tests.verify.test_workers import document

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")
WORD = "@synchronisation=hogwild"


@pytest.mark.parametrize("name", ["cnn", "lstm"])
def test_one_worker_is_exact(name: str) -> None:
    found = document(name, f"data; {WORD}", 4, 1)
    assert found["passed"] and found["exact"] and found["oracle"] == "one device"


@pytest.mark.parametrize("plan", ["data", "pipeline:stages=2,microbatches=2"])
def test_of_several_losses_are_finite(plan: str) -> None:
    found = document("cnn", f"{plan}; {WORD}", 5, 4)
    assert found["passed"] and not found["exact"] and found["oracle"] is None
    assert "without locks" in found["reason"] and found["staleness"] is None
    assert found["sent_bytes_per_step"] == found["explained_sent_bytes_per_step"]
    assert plan != "data" or found["sent_bytes_per_step"] == [0] * 4


def turns() -> tuple[list[dict[str, float]], list[float], bool]:
    """One rank after the other makes a step: each begins where the one before has ended."""
    trainer = trainer_of(f"data; {WORD}")
    trainer.steps = 1  # behind the first one, for which all meet
    seen = []
    for turn in range(trainer.world.size):
        if turn == trainer.rank:
            trainer.step(batch(4, turn))
        trainer.world.everyone.barrier()
        seen.append({n: float(p.detach().sum()) for n, p in trainer.model.parameters.items()})
        trainer.world.everyone.barrier()
    losses = train(trainer, ROWS)
    trainer.switch("data")
    before = {n: p.detach().clone() for n, p in trainer.model.parameters.items()}
    trainer.world.everyone.barrier()
    if trainer.rank == 0:  # a parameter of one rank alone now
        for p in trainer.model.parameters.values():
            p.data.add_(1.0)
    trainer.world.everyone.barrier()
    own = trainer.rank == 0
    apart = all(torch.equal(p, before[n]) != own for n, p in trainer.model.parameters.items())
    trainer.close()
    return seen, losses, apart


def test_all_write_one_set_of_parameters() -> None:
    with shared("hogwild turns", model(), loss, batch(12, 0), "data"):
        first, *others = run(3, turns, timeout=60)
    assert all(seen == first[0] for seen, *_ in others)
    assert len({s["head.weight"] for s in first[0]}) == 3
    for _, losses, apart in (first, *others):
        assert apart and all(math.isfinite(x) for x in losses if not math.isnan(x))


def plain_turns() -> list[float]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    value, weight = loss(net, batch(4, 0))
    (value / weight).backward()
    optimizer.step()
    return [float(p.detach().sum()) for p in net.parameters()]


def test_a_step_is_the_optimizers_own() -> None:
    with shared("hogwild turns", model(), loss, batch(12, 0), "data"):
        seen = run(2, turns, timeout=60)[0][0]
    names = [n for n, _ in model().named_parameters()]
    assert [seen[0][n] for n in names] == pytest.approx(plain_turns(), abs=1e-12)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (f"hybrid:tensor=3; {WORD}", "over tensor ranks"),
        (f"data; @ranks=0,1; {WORD}", "1 ranks would be idle"),
        (f"zero1; {WORD}", "leave sharded states"),
        (f"{STAGES.replace('2-3', '2')}; {WORD}", "several data degrees"),
    ],
)
def test_what_cannot_be_asked_for(plan: str, why: str) -> None:
    for text in run(3, refused, plan, False):
        assert why in text
