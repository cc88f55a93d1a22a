"""The optimizer's step measured on a twin: the original is left alone."""

import pytest
import torch
from torch import nn

from synchromesh.programs import optimizer as module
from synchromesh.programs.optimizer import update
from synchromesh.values.optimizer import twin_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "factor"),
    [(torch.optim.SGD, 0.0), (torch.optim.AdamW, 2.0), (torch.optim.Adagrad, 1.0)],
)
def test_state_and_work(kind: type, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRIAL", module.StateTrial(bytes=1 << 18))
    parameter = nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], lr=0.1)
    state = {k: dict(v) for k, v in optimizer.state.items()}
    found = update(optimizer, CPU, torch.float32)
    assert found.state_factor == pytest.approx(factor, abs=0.01)
    assert found.copy_byte > 0 and found.byte + found.tensor > 0
    # one denominator and its square root at once, of one tensor after the other
    assert 0 <= found.work_byte + found.work_largest <= 4
    assert torch.equal(parameter, torch.ones(3)) and parameter.grad is None
    assert {k: dict(v) for k, v in optimizer.state.items()} == state


def test_one_that_takes_sparse_gradients_alone_has_a_state_too() -> None:
    optimizer = torch.optim.SparseAdam([nn.Parameter(torch.ones(3))])
    assert module.state_factor(optimizer, CPU, torch.float32) == 2.0


def test_a_schedulers_step_and_hooks_are_not_the_twins() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_pre_hook(lambda *args: calls.append(args))
    other = nn.Parameter(torch.ones(2))
    twin = twin_of(optimizer, [other])
    other.grad, parameter.grad = torch.ones(2), torch.ones(3)
    twin.step()
    assert torch.equal(other, torch.zeros(2)), "the twin steps its own parameters"
    assert torch.equal(parameter, torch.ones(3)) and not calls
    optimizer.step()
    assert torch.equal(parameter, torch.zeros(3)) and len(calls) == 1
