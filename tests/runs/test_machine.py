"""How many processes a machine holds."""

import torch
from torch import nn

from synchromesh.runs import machine
from synchromesh.workloads.workload import Workload


class Reading(nn.Module):
    """Reads a value while it is built, as stochastic depth does: not possible without data."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.inner = nn.Linear(1000, 1000, bias=False)


def test_memory_divided_by_what_a_process_needs(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(machine, "device_bytes", lambda device: 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for model in (Reading, lambda: nn.Linear(1000, 1000, bias=False)):
        workload = Workload(
            model=model,
            loss=lambda m, batch: m(batch).sum(),
            train_data=[torch.zeros(1)],
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch_size=1,
        )
        assert machine.most_processes([workload], 2) == 10**9 // (250_000_000 + 8 * 4_000_000)
