"""Gradients that are not finite, replicas that differ, losses that jump."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import synchromesh as sm
from synchromesh.data.cursor import Cursor
from synchromesh.data.loader import Batching, Loader
from synchromesh.training.events import Finished, FitEvent, Started, StepDone
from synchromesh.training.integrity import Spikes
from tests.ranks import run

PLANS = ("data", "hybrid:tensor=2", "sharded-data", "hybrid:stages=2")


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, x[:, :3].argmax(1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4)).double()


def prepared(plan: str, skips: int = 0, every: int = 0) -> sm.Trainer:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    trainer = sm.prepare(made, optimizer, loss, rows(8), plan=plan)
    trainer.survival.integrity.require(skips, every)
    return trainer


def one_is_not_finite(plan: str, value: float) -> list[dict[str, Tensor]]:
    trainer, states = prepared(plan, skips=3), list[dict[str, Tensor]]()
    for step in range(4):
        trainer.backward(trainer.shard(rows(8, step)))
        if step == 2 and trainer.rank == 1:
            gradient = next(iter(trainer.workers.leaves.values())).grad
            if gradient is None:  # of another stage
                leaves = trainer.workers.leaves.values()
                gradient = next(p.grad for p in leaves if p.grad is not None)
            gradient.view(-1)[0] = value
        trainer.update()
        states.append(trainer.state_dict())
    assert trainer.survival.integrity.skipped == [3] and trainer.steps == 4
    trainer.close()
    return states


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_with_gradients_that_are_not_finite_is_left_out_on_all(plan: str) -> None:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    for step in (0, 1, 3):
        optimizer.zero_grad()
        loss(made, rows(8, step)).backward()
        optimizer.step()
    for value in (float("nan"), float("inf")):
        for states in run(4, one_is_not_finite, plan, value):
            for name, x in states[1].items():
                assert x.equal(states[2][name]) and not x.equal(states[3][name])
            torch.testing.assert_close(states[3], made.state_dict(), rtol=1e-12, atol=1e-12)


def never_finite(plan: str) -> str:
    trainer = prepared(plan, skips=2)
    x, y = rows(8)
    x[5] = float("nan")
    for step in range(3):
        try:
            trainer.step(trainer.shard((x, y)))
        except RuntimeError as error:
            assert step == 1
            return str(error)
    return ""


@pytest.mark.parametrize("plan", PLANS[:2])
def test_too_many_such_steps_in_a_row_end_the_run(plan: str) -> None:
    for said in run(2, never_finite, plan):
        assert "not finite in 2 steps in a row, up to step 2 (rank 0 of 0.weight, rank 1" in said


def one_bit(plan: str, of: str) -> str:
    trainer = prepared(plan, every=2)
    for step in range(6):
        trainer.step(trainer.shard(rows(8, step)))
        if step == 2 and trainer.rank == 2:
            parameter = trainer.model.parameters["0.weight"]
            tensor = parameter.data if of == "weight" else trainer.optimizer.state[parameter][of]
            tensor.view(-1).view(torch.int64)[0] ^= 1 << 30  # of the mantissa
        try:
            trainer.survival.integrity.replicas(trainer.steps)
        except RuntimeError as error:
            assert step == 3
            return str(error)
    return ""


@pytest.mark.parametrize("of", ["weight", "exp_avg"])
@pytest.mark.parametrize("plan", ["data", "hybrid:tensor=2", "sharded-data"])
def test_a_replica_of_which_a_bit_has_changed_is_found(plan: str, of: str) -> None:
    for said in run(4, one_bit, plan, of):
        if plan == "sharded-data":  # each has a part alone
            assert said == ""
            continue
        rank = "that of rank 2 differs" if plan == "data" else "one of ranks [0, 2] differs"
        assert "0.weight, or its optimizer state, is not the same" in said
        assert f"{rank} behind step 4 (all were equal behind step 2)" in said


def fitted(folder: Path) -> tuple[tuple[int, ...], int]:
    x, y = rows(24)
    x[3] = float("nan")
    w = sm.Workload(
        model=model, loss=loss, train_data=[*zip(x, y, strict=True)], batch_size=4,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), epochs=2, name="odd",
    )  # fmt: skip
    steps = 0

    def take(event: FitEvent) -> None:
        nonlocal steps
        steps += isinstance(event, StepDone)

    result = sm.fit(w, "data", skip_non_finite=3, check_replicas=1, on_event=take)
    return result.skipped_steps, steps


def test_fit_leaves_out_the_batch_of_a_corrupt_sample(tmp_path: Path) -> None:
    for skipped, steps in run(2, fitted, tmp_path):
        assert len(skipped) == 2 and steps == 12  # one in each epoch


def test_plans_under_which_parts_step_by_themselves_refuse() -> None:
    def asked(plan: str, skips: int, every: int) -> None:
        with pytest.raises(ValueError, match="leave it out, or take another plan"):
            prepared(plan, skips, every)

    run(2, asked, "data; @synchronisation=downpour:1", 3, 0)
    run(2, asked, "data; @synchronisation=local:4", 0, 3)


def test_a_loss_far_above_those_before_is_a_spike() -> None:
    generator = torch.Generator().manual_seed(0)
    falling = [
        2 * 0.99**step + 0.05 * float(torch.randn((), generator=generator)) for step in range(300)
    ]
    spikes = Spikes()
    for first in range(0, 300, 10):
        assert not spikes.look(first + 1, falling[first : first + 10])
    (spike,) = spikes.look(301, [*falling[-5:], 40.0, *falling[-5:], float("nan")])
    assert (spike.step, spike.loss) == (306, 40.0) and "306, 40, is" in str(spike)


def test_spikes_of_a_run_are_in_its_result() -> None:
    x, y = rows(40)
    started: list[sm.Trainer] = []
    w = sm.Workload(
        model=model, loss=lambda m, b: loss(m, b) * b[0].abs().max().clamp(min=10.0) / 10.0,
        train_data=[*zip(x, y, strict=True), (x[0] * 1e4, y[0])], batch_size=1,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-9), epochs=1, name="jump",
    )  # fmt: skip

    def take(event: FitEvent) -> None:
        if isinstance(event, Started):
            started.append(event.trainer)

    result = sm.fit(w, "single", on_event=take, seed=1)
    most = max(range(41), key=lambda n: result.losses[n])
    assert [s.step for s in result.loss_spikes] in ([most + 1], []) and started
    assert result.loss_spikes or most < Spikes.LEAST


def jumping(count: int) -> sm.Workload:
    """Of which row 150 makes the loss jump."""
    x, y = rows(200)
    x[150] *= 1e5

    def jumps(m: nn.Module, b: Any) -> Tensor:
        of_rows = nn.functional.cross_entropy(m(b[0]), b[1], reduction="none")
        return (of_rows * b[0].abs().amax(1).clamp(min=10.0)).mean()

    return sm.Workload(
        model=model, loss=jumps,
        train_data=[*zip(x[:count], y[:count], strict=True)], batch_size=2,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), epochs=2, name="jump",
        scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.999),
    )  # fmt: skip


def rolled(plan: str, folder: Path, every: int) -> tuple[Any, ...]:
    states: list[dict[str, Tensor]] = []

    def take(event: FitEvent) -> None:
        if isinstance(event, Finished):
            states.append(event.trainer.state_dict())

    result = sm.fit(
        jumping(200), plan, on_event=take, checkpoints=folder, checkpoint_every=every, seed=2,
        roll_back_spikes=True,
    )  # fmt: skip
    spikes = [(spike.step, spike.back_to) for spike in result.loss_spikes]
    return spikes, result.steps, result.losses, states[0]


def rolled_by_hand(every: int) -> tuple[Any, ...]:
    """In plain PyTorch."""
    w = jumping(200)
    torch.manual_seed(2)
    made = w.build()
    optimizer = w.build_optimizer(made.parameters())
    scheduler = w.build_scheduler(optimizer)
    assert scheduler is not None
    loader = Loader(w.train_data, 2, lambda n: ((0, n),), Cursor(2), Batching(True))
    kept: dict[int, Any] = {}
    losses, spikes, read, at = list[float](), list[tuple[int, int]](), Spikes(), 0

    def look() -> None:
        """Reads new losses; goes back behind a spike."""
        nonlocal at
        found = read.look(at + 1, losses[at:])
        at = len(losses)
        if found:
            back = max(n for n in kept if n < found[0].step)
            for owner, state in zip((made, optimizer, scheduler), kept[back], strict=True):
                owner.load_state_dict(copy.deepcopy(state))
            spikes.extend((spike.step, back) for spike in found)
            del losses[back:]
            at = back

    def keep() -> None:
        owners = made, optimizer, scheduler
        kept[len(losses)] = [copy.deepcopy(owner.state_dict()) for owner in owners]

    keep()
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            value = w.loss(made, batch)
            value.backward()
            optimizer.step()
            scheduler.step()
            losses.append(float(value.detach()))
            step = len(losses)
            if step % 10 == 0 or step % every == 0:
                look()
            if step % every == 0 and len(losses) == step and not loader.last:
                keep()
        look()
        keep()
    return spikes, len(losses), tuple(losses), made.state_dict()


@pytest.mark.wide(1)
@pytest.mark.parametrize(
    ("plan", "every"), [("data", 10), ("hybrid:tensor=2", 3), ("sharded-data", 4)]
)
def test_behind_a_spike_the_state_goes_back_and_the_data_does_not(
    plan: str, every: int, tmp_path: Path
) -> None:
    spikes, steps, losses, state = rolled_by_hand(every)
    assert len(spikes) == 2 and steps < 200  # one in each epoch
    for found in run(2, rolled, plan, tmp_path, every):
        assert found[:2] == (spikes, steps)
        assert found[2] == pytest.approx(losses, abs=1e-10)
        for name, value in state.items():
            torch.testing.assert_close(found[3][name], value, atol=1e-10, rtol=0.0)


def test_what_does_not_roll_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="roll_back_spikes needs a folder: checkpoints="):
        sm.fit(jumping(20), "single", roll_back_spikes=True)

    def refused(plan: str, folder: Path) -> None:
        with pytest.raises(ValueError, match="losses are known late, or of one rank alone"):
            sm.fit(jumping(20), plan, roll_back_spikes=True, checkpoints=folder)

    run(2, refused, "data; @synchronisation=downpour:1", tmp_path)
