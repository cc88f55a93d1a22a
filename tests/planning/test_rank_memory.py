"""What is said of memory before training: of a plan that will not fit, of a trace that was not
compared.
"""

import gc
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from synchromesh.engine import heap
from synchromesh.launcher.rank import SHORTAGE
from synchromesh.planner.choice import Choice
from synchromesh.planner.problem import Headroom
from synchromesh.planning import rank_memory
from synchromesh.planning.rank_memory import TUNING
from synchromesh.programs.memory import process_bytes
from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from synchromesh.values.profile import Profile

WIDTH = 1024  # 4 MiB of parameters in a layer, 16 MiB with gradients and states of AdamW
MIB = 2**20


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def prepared(
    device: str = "cpu", said: list[str] | None = None, headroom: str | None = None
) -> Trainer:
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    say = None if said is None else said.append
    example = torch.ones(2, WIDTH)
    return prepare(model, optimizer, squares, example, "single", say=say, headroom=headroom)


def leave(monkeypatch: pytest.MonkeyPatch, mebibytes: int) -> None:
    """This process may use so much besides what it has now and does not owe to garbage."""
    gc.collect()  # trainers before hold themselves: freed later, they would leave more
    heap.release()
    share = process_bytes() + mebibytes * MIB
    monkeypatch.setattr(rank_memory, "memory_share", lambda world: share)


def test_a_plan_that_takes_more_memory_than_there_is_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(SHORTAGE, str(tmp_path / "said"))
    prepared("meta").close()  # what tracing imports stays
    leave(monkeypatch, 20)
    with pytest.warns(UserWarning, match=r"to need 67\.1 MB .* optimizer state alone") as w:
        prepared("meta").close()
    assert len(w) == 1
    assert str(w[0].message).startswith((tmp_path / "said").read_text())
    for plenty in (100, 1000):
        leave(monkeypatch, plenty)
        prepared("meta").close()  # warnings are errors here
        assert (tmp_path / "said").read_text() == ""


def test_a_given_plan_that_eats_into_the_headroom_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared("meta").close()
    leave(monkeypatch, 400)
    said: list[str] = []
    trainer = prepared("meta", said, headroom="90%")
    found = trainer.predict()  # warnings are errors here
    assert not found.fits and said[-1] == f"the plan 'single' fits, but {found.reason}"
    assert re.fullmatch(r"rank 0 takes \d\d\.\d MB of its headroom", found.reason)
    trainer.close()
    told = prepared("meta", said, headroom="10%")
    assert told.predict().fits
    told.close()


def test_a_headroom_that_is_none_is_refused() -> None:
    for wrong in ("a lot", 0.1):
        with pytest.raises(ValueError, match=f"headroom '{wrong}': no part, as 10%, and no size"):
            prepared(headroom=wrong)  # type: ignore[arg-type]


def test_what_is_no_tensor_is_kept_of_a_small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 400)
    trainer = prepared()
    (room,) = trainer.planning.memory.headrooms
    assert (
        room.kept == Headroom.RESERVE
        and room.usable == trainer.planning.memory.limits[0] - Headroom.RESERVE
    )
    trainer.close()


def test_large_tensors_leave_no_holes_where_a_plan_needs_much_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(heap, "keep_small", lambda: asked.append(1))
    for mebibytes, short in ((2000, False), (85, True)):  # 64 MiB are held
        leave(monkeypatch, mebibytes)
        prepared("meta").close()
        assert bool(asked) == short
    leave(monkeypatch, 2000)
    trainer = prepared("meta")
    chosen = trainer.predict()
    asked.clear()
    trainer.planning.memory.limits = (2.0 * chosen.memory[0].peak,)
    trainer.planning.choice = Choice((chosen,), Profile(1), 0.0)
    trainer.planning.check_held(chosen.plan, {})
    assert asked, "the chosen plan is known to need more than it holds"
    trainer.close()


def test_a_trace_that_was_not_compared_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    prepared(said=said).close()
    assert not said
    prepared("meta", said).close()
    assert said.pop().startswith(
        "the trace was not compared with the model, neither losses nor gradients: it is on the "
        "meta device; "
    )
    leave(monkeypatch, 20)  # the model, and one gradient of it
    with pytest.warns(UserWarning, match="'single' is predicted to need"):
        prepared(said=said).close()
    (told,) = said
    assert "that takes about 67.1 MB besides the parameters, and this rank has" in told


def test_what_steps_leave_free_is_given_back_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, released = prepared(), list[int]()
    monkeypatch.setattr(heap, "release", lambda: released.append(trainer.steps))
    monkeypatch.setattr(heap, "keep_small", lambda: released.append(-1))
    trainer.step(torch.ones(2, WIDTH))
    assert not released, "there is plenty"
    monkeypatch.setattr(trainer.planning.memory, "_share", process_bytes())
    for _ in range(2 * TUNING.seldom):
        trainer.step(torch.ones(2, WIDTH))
    assert released[:4] == [-1, TUNING.seldom, -1, TUNING.seldom + 1], (
        "from then on after each step"
    )
    trainer.close()
