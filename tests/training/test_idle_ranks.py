"""Ranks without rows beside one that works alone: they know each loss, their stop requests and
faults reach it, and none waits for ever."""

from typing import Any

import pytest
import torch
from torch import nn

import synchromesh as sm
from tests.ranks import run

ROWS = (6, 6, 6, 4, 6, 6, 6, 6)  # of each step's batch


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def made() -> tuple[nn.Module, torch.optim.Optimizer, list[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.0), nn.Tanh(), nn.Linear(9, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    shapes = [(torch.randn(n, 5).double(), torch.randn(n, 2).double()) for n in ROWS]
    return model, optimizer, shapes


def changed(model: nn.Module, step: int) -> None:
    """What a script may do between two steps, on all ranks alike."""
    if step == 5:
        model[0].weight.requires_grad_(False)
    if step == 6:
        model[0].bias.requires_grad_(False)


def plain() -> list[float]:
    model, optimizer, batches = made()
    losses = []
    for step, batch in enumerate(batches):
        changed(model, step)
        optimizer.zero_grad()
        loss = mean_square(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def beside(carried: int) -> tuple[list[float], list[int], bool]:
    """Losses and stop requests that this rank sees, and whether loss and rows came at once at the
    end. carried: as how many micro-batches."""
    model, optimizer, batches = made()
    trainer = sm.prepare(model, optimizer, mean_square, batches[0], plan="single")
    losses, requests = [], []
    for step, batch in enumerate(batches):
        changed(model, step)
        trainer.stop_request = 7 * (trainer.rank == 1 and step in (2, 3))
        losses.append(trainer.step(trainer.shard(batch), micro_batches=carried).item())
        requests.append(trainer.agreed_stop_request)
    agree = trainer._execution.active.agree
    once = agree._usual == agree._asked != (0, 0) if trainer.rank == 0 else carried == 1
    trainer.close()
    return losses, requests, once


@pytest.mark.parametrize("parts", [1, 2])
def test_idle_ranks_know_losses_and_are_heard(parts: int) -> None:
    expected = plain()
    for losses, requests, once in run(3, beside, parts):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert requests == [0, 0, 7, 7, 0, 0, 0, 0]
        assert once == (parts == 1), "not with backwards before all forwards are done"


def failing() -> list[str]:
    """The loss fails where the worker alone runs it, in a step that all know already."""
    model, optimizer, batches = made()
    trainer = sm.prepare(model, optimizer, mean_square, batches[0], plan="single")
    said = []
    for step in range(5):
        program = next(iter(trainer._execution.programs._made.values()), (None, None))[1]
        if step == 3 and program is not None:
            program.run = fail  # type: ignore[method-assign,assignment]
        elif program is not None:
            vars(program).pop("run", None)
        try:
            trainer.step(trainer.shard(batches[0]))
            said.append("")
        except (ZeroDivisionError, RuntimeError) as error:
            said.append(str(error))
    trainer.close()
    return said


def fail(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("of this rank")


def test_a_failure_of_the_working_rank_is_one_of_all_and_the_next_step_runs() -> None:
    working, idle = run(2, failing)
    assert working == ["", "", "", "of this rank", ""]
    assert idle[3].startswith("rank 0, which works alone, has failed") and not any(idle[:3])
    assert not idle[4]


def elsewhere(method: str) -> str:
    model, optimizer, batches = made()
    trainer = sm.prepare(model, optimizer, mean_square, batches[0], plan="single")
    for _ in range(3):
        trainer.step(trainer.shard(batches[0]))
    try:
        if trainer.rank and method == "buffers":
            trainer.buffers()
        elif trainer.rank:  # another batch, of a loader of its own
            trainer.step(tuple(x[:0, :1] for x in batches[0]))
        else:
            trainer.step(batches[0])
        return ""
    except ValueError as error:
        return str(error)
    finally:
        trainer.close()


def test_an_idle_rank_in_another_method_is_a_sentence_on_all() -> None:
    for said in run(2, elsewhere, "buffers"):
        assert "rank 0 is in step or backward, rank 1 in buffers" in said


def backward_again() -> str:
    model, optimizer, batches = made()
    trainer = sm.prepare(model, optimizer, mean_square, batches[0], plan="single")
    for _ in range(3):
        trainer.step(trainer.shard(batches[0]))
    trainer.backward(trainer.shard(batches[0]))
    with pytest.raises(ValueError, match="after the last one of an accumulation"):
        trainer.backward(trainer.shard(batches[0]))
    trainer.update()
    value = trainer.step(trainer.shard(batches[0])).item()
    trainer.close()
    return f"{value:.9f}"


def test_a_call_too_many_is_an_error_on_all_and_the_next_step_runs() -> None:
    one, other = run(2, backward_again)
    assert one == other


def accumulated(fails: int, plan: str) -> tuple[list[str], list[float], dict[str, torch.Tensor]]:
    """The second of three backward calls of an accumulation fails: on rank 0 its loss does, or
    rank 1 has a batch that none can run. All ranks catch it and go on."""
    model, optimizer, batches = made()
    trainer = sm.prepare(model, optimizer, mean_square, batches[0], plan=plan)
    said, losses = [], []
    for _ in range(3):
        trainer.step(trainer.shard(batches[0]))
    trainer.backward(trainer.shard(batches[1]), last=False)
    own = trainer.shard(batches[2])
    try:
        if trainer.rank == 1 == fails:
            own = (own[0], own[1][:1] if len(own[1]) else batches[2][1])
        with pytest.MonkeyPatch.context() as patch:
            if trainer.rank == 0 == fails:
                program = next(iter(trainer._execution.programs._made.values()))[1]
                patch.setattr(program, "run", fail, raising=False)
            trainer.backward(own, last=False)
    except (ZeroDivisionError, RuntimeError, ValueError) as error:
        said.append(str(error))
    losses.append(trainer.backward(trainer.shard(batches[4])).item())
    trainer.update()
    losses.append(trainer.step(trainer.shard(batches[5])).item())
    state = trainer.state_dict()
    trainer.close()
    return said, losses, state


def accumulated_alone(*groups: tuple[int, ...]) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer, batches = made()
    losses = []
    for group in groups:
        optimizer.zero_grad()
        x, y = (torch.cat([batches[i][part] for i in group]) for part in (0, 1))
        loss = mean_square(model, (x, y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[3:], model.state_dict()


@pytest.mark.parametrize(("fails", "plan"), [(1, "single"), (1, "data"), (0, "single")])
def test_a_backward_that_fails_in_an_accumulation_leaves_all_ranks_alike(
    fails: int, plan: str
) -> None:
    """A batch that is refused was never part of it; of a forward that failed, nothing is left."""
    kept = (1, 4) if fails else (4,)
    losses, state = accumulated_alone((0,), (0,), (0,), kept, (5,))
    for said, found, trained in run(2, accumulated, fails, plan):
        assert len(said) == 1 and found == pytest.approx(losses, rel=1e-12), said
        for name, value in state.items():
            assert torch.allclose(trained[name], value, rtol=1e-12, atol=1e-14), name
