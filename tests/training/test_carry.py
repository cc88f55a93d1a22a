"""The carry in training: under any plan, across switches, checkpoints and epochs, it is that of a
plain loop."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import synchromesh as sm
from synchromesh.trace.capture.batch import take
from synchromesh.trace.capture.carry import Carrying, joined
from synchromesh.training.trainer import Trainer
from synchromesh.values.plan import Plan
from synchromesh.verify.verify import verify
from tests.ranks import run
from tests.recurrent import ROWS, Recurrent, batches, beginning, loss, metric, plain, workload
from tests.traces import known, remembered

PAIRS = "data; @stages=0-1:embedding/2-3:second; @micro_batches=2"
UNEVEN = "data; @stages=0:embedding/1-3:second"
TWO = "data; @stages=0:embedding/1:second"


@pytest.fixture(autouse=True, scope="module")
def traces() -> Iterator[None]:
    """Those that ranks need, made once; of `known`, ranks find them."""
    torch.manual_seed(0)
    for stacked, cuts in ((False, ()), (True, ("embedding", "second"))):
        job = workload(stacked)
        function, batch = joined(loss, batches()[0], job.carry)
        model = job.build()
        remembered(stacked, model, function, batch, training=True, cuts=cuts)
        if not cuts:
            remembered(stacked, model, Carrying(metric), batch, training=False, cuts=cuts)
    yield


def prepared(plan: str, stacked: bool = False, seed: int = 0) -> Trainer:
    torch.manual_seed(seed)
    job = workload(stacked)
    model = job.build()
    optimizer = job.build_optimizer(model.parameters())
    return sm.prepare(model, optimizer, loss, batches()[0], plan=plan, carry=job.carry)


def trained(stacked: bool, plans: dict[int, str], rows: int = ROWS) -> list[float]:
    """Losses under the plan of each step, of the first rows; under `data` the text's mean loss."""
    losses: list[float] = []
    with known(stacked), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LSTM layers are not cut by tensor degrees
        trainer, job = prepared(plans[0], stacked), workload(stacked)
        loader = trainer.loader(job.train_data, ROWS, continuing=True)
        given = loader if rows == ROWS else (trainer.shard(take(b, 0, rows)) for b in batches())
        for step, batch in enumerate(given, 1):
            losses.append(trainer.step(batch).item())
            if step in plans:
                trainer.switch(plans[step])
        if trainer.plan == Plan.parse("data") and rows == ROWS:
            held_out = trainer.loader(job.valid_data, ROWS, continuing=True)
            losses.append(trainer.evaluate(held_out, metric)["loss"])
        trainer.close()
    return losses


@pytest.mark.parametrize(
    ("ranks", "stacked", "plans"),
    [
        (3, False, {0: "tensor; @ranks=0-1", 2: "data; @ranks=2", 4: "data"}),
        (4, True, {0: PAIRS, 3: UNEVEN}),  # the later stage makes what both read
    ],
)
def test_every_plan_has_the_losses_of_a_plain_loop(ranks: int, stacked: bool, plans: Any) -> None:
    curve, held_out = plain()
    for found in run(ranks, trained, stacked, plans):
        assert found[:6] == pytest.approx(curve, rel=1e-12)
        assert found[6:] == (
            [pytest.approx(held_out, rel=1e-12)] if "data" in plans.values() else []
        )


def test_ranks_without_rows_have_nothing_of_the_carry() -> None:
    for found in run(4, trained, True, {0: PAIRS}, 1):
        assert found == pytest.approx(plain(rows=1)[0], rel=1e-12)


def half(path: Path, plan: str, begins: bool) -> list[float]:
    with known(True):
        trainer = prepared(plan, stacked=True, seed=0 if begins else 1)
        loader = trainer.loader(workload().train_data, ROWS, continuing=True)
        if not begins:
            trainer.resume(path)
        losses = []
        for batch in loader:
            losses.append(trainer.step(batch).item())
            if begins and len(losses) == 3:
                trainer.save(path)
                break
        trainer.close()
    return losses


def test_a_checkpoint_has_the_carry_for_any_plan_and_number_of_ranks(tmp_path: Path) -> None:
    curve, _ = plain()
    run(2, half, tmp_path / "c", TWO, True)
    assert half(tmp_path / "c", "single", False) == pytest.approx(curve[3:], rel=1e-12)


def test_each_epoch_each_accumulation_and_each_forgetting() -> None:
    with known(False):
        trainer = prepared("single")
    loader = trainer.loader(workload().train_data, ROWS, continuing=True)
    with pytest.raises(
        ValueError, match="a carry goes from row i of a batch to row i of the next"
    ):
        trainer.loader(workload().train_data, ROWS, shuffle=True)
    with known(False):
        losses = [trainer.step(batch).item() for _ in range(2) for batch in loader]
    assert losses == pytest.approx(plain(epochs=2)[0], rel=1e-12)
    first, second = batches()[:2]
    with torch.no_grad():  # of both as one goes on behind the other, and as it does not
        module = workload().build().requires_grad_(False)
        module.load_state_dict(trainer.state_dict())
        a, carry = loss(module, first, beginning(ROWS))
        b, alone = (loss(module, second, c)[0] for c in (carry, beginning(ROWS)))
    with pytest.raises(ValueError, match="the batch has 2 rows, but the carry is of 6"):
        trainer.step(take(first, 0, 2))
    trainer.forget_carry()
    trainer.backward(first, last=False)
    assert trainer.backward(second).item() == pytest.approx(float(a + b) / 2)
    trainer.update()
    trainer.model.module.load_state_dict(module.state_dict())
    trainer.forget_carry()
    assert trainer.backward(second).item() == pytest.approx(float(alone))
    trainer.close()


def test_fit_begins_each_epoch_and_each_validation_anew_and_resumes(tmp_path: Path) -> None:
    curve, held_out = plain(epochs=2)
    with known(False):
        first = sm.fit(workload(), plan="single", steps=4, checkpoints=tmp_path)
        rest = sm.fit(workload(), plan="single", epochs=2, resume=first.checkpoint)
    assert (*first.losses, *rest.losses) == pytest.approx(curve, rel=1e-12)
    assert rest.metrics["loss"] == pytest.approx(held_out, rel=1e-12)
    with pytest.raises(ValueError, match=r"train_data must be read by index .* for the carry"):
        workload(train_data=iter(()))


class Asking(Recurrent):
    """Cannot be traced: it branches on its state."""

    def forward(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        assert float(state["first"][0].sum()) < 1e9
        return super().forward(ids, state)


def untraced() -> list[float]:
    torch.manual_seed(0)
    model, job = Asking().double(), workload()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = sm.prepare(
            model, job.build_optimizer(model.parameters()), loss, batches()[0], plan="data",
            carry=job.carry,
        )  # fmt: skip
    assert trainer.traced.opaque
    losses = [trainer.step(trainer.shard(batch)).item() for batch in batches()]
    trainer.close()
    return losses


def test_a_model_that_cannot_be_traced_carries_too() -> None:
    for found in run(2, untraced):
        assert found == pytest.approx(plain()[0], rel=1e-12)


def verified(plan: str) -> dict[str, Any]:
    with known(True):
        return verify(workload(True), plan, steps=3)


def test_verify_compares_carrying_models_and_the_bytes_of_their_carry() -> None:
    found = run(2, verified, TWO)[0]
    assert found["passed"] and found["sent_bytes_compared"], found


def test_what_begins_a_carry_is_a_function() -> None:
    model = workload().build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="prepare: carry should be a function of the number of"):
        sm.prepare(model, optimizer, loss, batches()[0], plan="single", carry=3)
