"""Complex parameters, buffers and values train exactly: sums, clipping, checkpoints, switches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synchromesh.checkpoint.manifest import CheckpointError
from synchromesh.training.prepare import prepare
from synchromesh.verify.verify import cast_model, verify
from synchromesh.workloads.workload import Workload
from tests.ranks import run
from tests.targets import Rows
from tests.traces import shared

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")
ROWS = (8, 8, 5)


class Spectral(nn.Module):
    """Layers between which values pass through Fourier transforms and complex weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.mixing = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) * 0.3)
        self.filter = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.register_buffer("shift", torch.randn(8, dtype=torch.complex64))
        self.third, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        h = h + torch.fft.fft(self.second(h)).real
        z = torch.fft.fft(h) @ self.mixing * self.filter + self.shift
        h = self.third(h + z.conj().imag * z.abs())
        h = h + torch.fft.irfft(torch.fft.rfft(h) * self.filter[:5], n=8)
        spread = torch.view_as_real((z * self.mixing[0].conj()).resolve_conj()).sum(-1)
        return self.head(h + spread)  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Any) -> Tensor:
    value: Tensor = (model(batch[0]) - batch[1]).square().mean()
    return value


def make(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=g).double(), torch.randn(rows, 4, generator=g).double()


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = cast_model(Spectral(), torch.float64)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def alone() -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = built()
    values = []
    for i, rows in enumerate(ROWS):
        optimizer.zero_grad()
        value = loss(model, make(rows, i))
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        values += [value.item(), float(norm)]
    return values, model.state_dict()


def planned(plan: str, then: str, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Clipped steps; the last after a save, a resumption and a switch."""
    model, optimizer = built()
    trainer = prepare(model, optimizer, loss, make(8), plan)
    assert not trainer.traced.opaque, trainer.traced.reason
    values = []
    for i, rows in enumerate(ROWS):
        if i == len(ROWS) - 1:
            trainer.save(folder)
            trainer.step(trainer.shard(make(6, 9)))  # forgotten
            trainer.resume(folder)
            trainer.switch(then)
        batch = trainer.shard(make(rows, i))
        if len(batch[0]) >= 4:
            value = trainer.backward(tuple(x[:3] for x in batch), last=False)
            batch = tuple(x[3:] for x in batch)
        value = trainer.backward(batch)
        norm = trainer.clip(0.5)
        trainer.update()
        values += [float(value), float(norm)]
    with pytest.raises(CheckpointError, match=r"no such type: .*complex128"):
        trainer.export(f"{folder}.safetensors")
    state = trainer.state_dict()
    trainer.close()
    return values, state


@pytest.mark.parametrize(
    ("plan", "then"),
    [("data", "tensor"), ("tensor", "data"), ("data; second=tensor", "tensor; third=data")],
)
def test_complex_models_train_exactly(plan: str, then: str, tmp_path: Path) -> None:
    expected, weights = alone()
    with shared("spectral", built()[0], loss, make(8), plan, then, ranks=2):
        answers = run(2, planned, plan, then, str(tmp_path / "saved"))
    for values, state in answers:
        assert values == pytest.approx(expected, rel=1e-10)
        for name, tensor in weights.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


class Coarse(Spectral):
    """Computes in single precision, whatever its parameters are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(torch.complex64).real.to(x.dtype)


def compared(model: Any, plan: str) -> dict[str, Any]:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)

    data = Rows(tuple(x.float() for x in make(16)))
    return verify(Workload(model, loss, optimizer, data, batch_size=8, name="spectral"), plan)


def test_verification_of_complex_models() -> None:
    for kind in (Spectral, Coarse):
        with shared(kind, cast_model(kind(), torch.float64), loss, make(8), "tensor", ranks=2):
            documents = run(2, compared, kind, "tensor")
        for document in documents:
            assert document["passed"], document
            noise = document["noise_floor"]["gradient"]
            assert noise < 1e-12 if kind is Spectral else noise > 1e-10, document
