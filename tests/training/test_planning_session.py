"""What is said of memory before training: of a plan that will not fit, of a trace that was not
compared.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from synchromesh.engine import heap
from synchromesh.launch.forewarning import FILE
from synchromesh.profiling import planning
from synchromesh.profiling.memory import process_bytes
from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer

WIDTH = 1024  # 4 MiB of parameters in a layer, 16 MiB with gradients and states of AdamW
MIB = 2**20


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def prepared(device: str = "cpu", said: list[str] | None = None) -> Trainer:
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    say = None if said is None else said.append
    return prepare(model, optimizer, squares, torch.ones(2, WIDTH), "single", say=say)


def leave(monkeypatch: pytest.MonkeyPatch, mebibytes: int) -> None:
    """This process may use so much besides what it has now."""
    heap.release()
    share = process_bytes() + mebibytes * MIB
    monkeypatch.setattr(planning, "memory_share", lambda world: share)


def test_a_plan_that_takes_more_memory_than_there_is_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(FILE, str(tmp_path / "said"))
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
    trainer.step(torch.ones(2, WIDTH))
    assert not released, "there is plenty"
    monkeypatch.setattr(trainer.planning, "_share", process_bytes())
    trainer.step(torch.ones(2, WIDTH))
    assert released == [2]
    trainer.close()
