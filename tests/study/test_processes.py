"""The processes of a contestant: on the hosts of a lab, what fails says why, and
how many a machine holds."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from synchromesh.cli import main
from synchromesh.study import processes
from synchromesh.study.processes import reason
from synchromesh.workloads.workload import Workload
from tests.lab.hosts import needs_hosts

LAB = "hosts: [{bandwidth: 50mbit, cpu: 80%, count: 2}]"
MINE = """
import os, socket
import torch
from synchromesh import Workload
from torch import nn

class Net(nn.Linear):
    def forward(self, x):
        if os.environ.get("GLOO_SOCKET_IFNAME") != "eth0" or len(socket.if_nameindex()) != 2:
            raise RuntimeError("this is no host of a lab")
        if torch.get_num_threads() != 1:
            raise RuntimeError("more threads than a part of a core serves")
        return super().forward(x)

def loss(model, batch):
    if os.environ["RANK"] == "1" and os.environ.get("WORLD_SIZE") == "2":
        raise RuntimeError("rank 1 does not like its batch")
    return model(batch[0]).square().mean()

def lonely():
    data = torch.utils.data.TensorDataset(torch.randn(64, 8))
    return Workload(lambda: Net(8, 8), loss, torch.optim.SGD, data, 8, name="lonely")
"""


def test_the_reason_is_the_last_sentence_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert reason(3, log) == "it ended with code 3"
    log.write_text("Traceback ...\nsynchromesh: rank 1 of 2 failed (OSError: no); the run ended\n")
    assert reason(1, log) == "rank 1 of 2 failed (OSError: no); the run ended"
    log.write_text("synchromesh: warning: slow\n")
    assert reason(-9, log).startswith("killed by SIGKILL")


@needs_hosts
def test_ranks_run_on_the_hosts_of_a_lab_and_their_failures_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    (tmp_path / "lab.yaml").write_text(LAB)
    (tmp_path / "mine.py").write_text(MINE)
    words = ["--strategies", "single,ddp", "--nproc", "2", "--steps", "2"]
    words += ["--lab", str(tmp_path / "lab.yaml"), "-o", str(tmp_path / "study")]
    assert main(["compare", f"{tmp_path}/mine.py:lonely", *words]) == 0
    document = json.loads((tmp_path / "study/results.json").read_text())
    single, ddp = document["runs"]
    assert single["status"] == "done" and single["step_seconds"]["median"] > 0
    assert single["emulated"] and single["cluster"] == "hosts of 50mbit, 80% of a core"
    assert len(document["cluster"]["hosts"]) == 2
    assert ddp["status"] == "failed" and "rank 1 does not like its batch" in ddp["reason"]


class Reading(nn.Module):
    """Reads a value while it is built, as stochastic depth does: not possible without data."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.inner = nn.Linear(1000, 1000, bias=False)


def test_memory_divided_by_what_a_process_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "device_bytes", lambda device: 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for model in (Reading, lambda: nn.Linear(1000, 1000, bias=False)):
        workload = Workload(
            model=model,
            loss=lambda m, batch: m(batch).sum(),
            train_data=[torch.zeros(1)],
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch_size=1,
        )
        assert processes.most_processes([workload], 2) == 10**9 // (250_000_000 + 8 * 4_000_000)
