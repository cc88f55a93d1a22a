"""Runs whose hosts come and go, from end to end: `train --elastic`, `run --elastic`, `join`,
`leave` and `status`."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import synchromesh as sm
from synchromesh.cli import main
from synchromesh.workloads.target import load

TARGET = """
import time
from pathlib import Path
import torch
import synchromesh as sm
from torch import nn

class Rows:
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(22, 6, generator=generator, dtype=torch.float64)
        self.y = (self.x[:, :3]).argmax(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if Path("hold").exists():
            time.sleep(0.1)
        return self.x[index], self.y[index]

def workload():
    def model():
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
    return sm.Workload(
        model=model, loss=loss, train_data=Rows(), batch_size=4, epochs=1, name="tiny",
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
"""


STEPS = 6  # of an epoch


class Hosts:
    """Launchers of one run, on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.token = folder, folder / "token"
        (folder / "tiny.py").write_text(TARGET)
        self.hold = folder / "hold"  # while it is there steps take 0.4 s
        self.hold.touch()
        self.token.write_text("0123456789abcdef" * 2)
        self.token.chmod(0o600)
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.address = f"127.0.0.1:{server.getsockname()[1]}"
        self.made: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        several = ["--token-file", str(self.token)] if self.address in words else []
        process = subprocess.Popen(
            [sys.executable, "-m", "synchromesh", *words, *several], cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
        )  # fmt: skip
        self.made.append(process)
        return process

    def train(self, epochs: int, *words: str) -> subprocess.Popen[str]:
        more = ["--epochs", str(epochs), "--output", "run", "--plan", "data", "--json"]
        return self.start("train", "tiny.py:workload", *more, *words)

    def logged(self, event: str) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / "run" / "log.jsonl").read_text().splitlines()
        except OSError:
            return []
        return [x for x in map(json.loads, lines) if x["event"] == event]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    for process in made.made:
        process.kill()
        process.communicate()


def until(holds: Callable[[], object], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one process, of 80 epochs."""
    file = tmp_path_factory.mktemp("alone") / "tiny.py"
    file.write_text(TARGET)
    losses = sm.fit(load(f"{file}:workload"), "single", epochs=80).losses
    assert len(losses) == 80 * STEPS
    return [*losses]


@pytest.mark.timeout(300)
def test_a_host_comes_and_leaves(hosts: Hosts, undisturbed: list[float]) -> None:
    pytest.importorskip("torchft")
    epochs = 80
    words = ["--nproc", "1", "--elastic", "1:2", "--coordinator", hosts.address, "--plan", "auto"]
    train = hosts.train(epochs, *words)
    until(lambda: hosts.logged("step"))
    join = hosts.start("join", hosts.address, "--nproc", "1", "--notice-file", "notice")
    until(lambda: hosts.logged("generation"))
    shown = hosts.start("status", hosts.address, "--json").communicate(timeout=60)[0]
    assert [len(h["ranks"]) for h in json.loads(shown)["hosts"]] == [1, 1]
    (hosts.folder / "notice").touch()  # which is to it as SIGTERM
    assert join.wait(60) == 0
    until(lambda: len(hosts.logged("generation")) > 2)
    hosts.hold.unlink()
    out, told = train.communicate(timeout=120)
    assert train.returncode == 0, told
    found = json.loads(out)["generations"]
    assert [g["cause"] for g in found] == ["1 rank came", "1 rank leaves", "rank 1 has left"]
    assert (found[0]["plan"], found[0]["why"]) == ("data", "`single` was chosen for one rank")
    assert [(g["hosts"], g["ranks"]) for g in found] == [(2, 2), (2, 2), (1, 1)]
    assert all(g["lost_steps"] == 0 for g in found)
    losses = [x["loss"] for x in hosts.logged("step")]
    assert losses == pytest.approx(undisturbed, abs=1e-10)


@pytest.mark.timeout(300)
def test_a_run_of_which_all_ranks_are_killed_goes_on_with_a_checkpoint(
    hosts: Hosts, undisturbed: list[float]
) -> None:
    epochs = 40
    train = hosts.train(epochs, "--nproc", "2", "--elastic", "1:1", "--checkpoint-every", "2")
    until(lambda: len(hosts.logged("checkpoint")) > 2)
    children = Path(f"/proc/{train.pid}/task/{train.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    gone_on(hosts, train, undisturbed[: epochs * STEPS])


def gone_on(hosts: Hosts, train: subprocess.Popen[str], expected: list[float]) -> None:
    """From a checkpoint, to the end."""
    hosts.hold.unlink()
    out, told = train.communicate(timeout=120)
    assert train.returncode == 0, told
    assert "was killed by SIGKILL" in told and "resumed from" in told
    assert json.loads(out)["epochs"] * STEPS == len(expected)
    last = {x["step"]: x["loss"] for x in hosts.logged("step")}
    assert [last[s] for s in sorted(last)] == pytest.approx(expected, abs=1e-10)


def ranks_of(launcher: subprocess.Popen[str], word: str = "train") -> list[int]:
    own = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(p) for p in own if word in Path(f"/proc/{p}/cmdline").read_text()]


@pytest.fixture
def two(hosts: Hosts) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Hosts that train together, for 40 epochs."""
    pytest.importorskip("torchft")
    words = ["--nproc", "1", "--elastic", "2:2", "--coordinator", hosts.address]
    train = hosts.train(40, *words, "--checkpoint-every", "2")
    join = hosts.start("join", hosts.address, "--nproc", "1")
    until(lambda: len(hosts.logged("checkpoint")) > 2)
    return train, join


@pytest.mark.slow  # 72 s; on one host as above, which hosts they are is of the coordinator's tests
@pytest.mark.timeout(300)
def test_hosts_that_lose_all_ranks_at_once_go_on_with_a_checkpoint(
    hosts: Hosts,
    two: tuple[subprocess.Popen[str], subprocess.Popen[str]],
    undisturbed: list[float],
) -> None:
    for pid in [pid for launcher in two for pid in ranks_of(launcher)]:
        os.kill(pid, signal.SIGKILL)
    gone_on(hosts, two[0], undisturbed[: 40 * STEPS])
    assert two[1].wait(30) == 0


@pytest.mark.timeout(300)
def test_who_is_asked_to_leave_is_a_host_of_the_run(
    hosts: Hosts, two: tuple[subprocess.Popen[str], subprocess.Popen[str]]
) -> None:
    train, join = two
    asked = hosts.start("leave", hosts.address, "--host", "10.9.9.9")
    assert "host 10.9.9.9 is none of the run's" in asked.communicate(timeout=60)[1]
    assert asked.returncode == 2
    asked = hosts.start("leave", hosts.address)
    assert "is the coordinator's, with which the run ends" in asked.communicate(timeout=60)[1]
    assert join.poll() is None and train.poll() is None


@pytest.mark.timeout(300)
def test_a_run_that_waits_for_hosts_obeys_a_signal(
    hosts: Hosts, two: tuple[subprocess.Popen[str], subprocess.Popen[str]]
) -> None:
    train, join = two
    join.kill()
    errors = []
    for line in train.stderr or ():
        errors.append(line)
        if "waits 300 s for others" in line:
            break
    train.send_signal(signal.SIGTERM)
    hosts.hold.unlink()
    assert train.wait(30) == 128 + signal.SIGTERM, errors
    last = hosts.logged("checkpoint")[-1]["step"]
    assert last == hosts.logged("step")[-1]["step"]


FIT = """
import sys
import synchromesh as sm
from tiny import workload

print("begins")
result = sm.fit(
    workload(), "data", epochs=40, checkpoints="saved", checkpoint_every=2,
    on_event=lambda e: print(type(e).__name__, flush=True))
print("losses", *result.losses)
"""


@pytest.mark.timeout(300)
def test_a_script_goes_on_with_others_and_where_all_are_lost(
    hosts: Hosts, undisturbed: list[float]
) -> None:
    (hosts.folder / "fit.py").write_text(FIT)
    run = hosts.start("run", "--nproc", "2", "--elastic", "1:1", "fit.py")
    saved = hosts.folder / "saved"
    until(lambda: saved.is_dir() and len([*saved.glob("step-*")]) > 2)
    os.kill(ranks_of(run, "fit.py")[0], signal.SIGKILL)
    assert run.stdout is not None
    told = [*iter(lambda: run.stdout.readline().strip(), "Regrouped")]  # type: ignore[union-attr]
    assert told[0] == "begins" and "Started" in told
    until(lambda: len(ranks_of(run, "fit.py")) == 2)
    assert run.stdout.readline()  # of one that has become the first
    for pid in ranks_of(run, "fit.py"):
        os.kill(pid, signal.SIGKILL)
    hosts.hold.unlink()
    out, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors
    losses = [float(x) for x in out.splitlines()[-1].split()[1:]]
    expected = undisturbed[: 40 * STEPS]
    assert 0 < len(losses) < len(expected)  # from the checkpoint on
    assert losses == pytest.approx(expected[-len(losses) :], abs=1e-10)


@pytest.mark.parametrize(
    ("words", "told"),
    [("train digits/cnn --elastic 1:4", "--elastic 1:4: there is one host; others come to"),
     ("train digits/cnn --elastic 4:1", "'4:1' is no range of hosts"),
     ("train digits/cnn --coordinator h:1", "--coordinator is of an elastic run: give --elastic"),
     ("train digits/cnn --elastic 1:2 --coordinator h:1", "--coordinator needs --token-file"),
     ("train digits/cnn --keep-rows", "--keep-rows is of an elastic run: give --elastic"),
     ("train digits/cnn --elastic 1:1 --keep-rows --batch-schedule 1:x2",
      "--batch-schedule and --keep-rows exclude each other"),
     ("run --coordinator h:1 a.py", "--coordinator is of an elastic run: give --elastic MIN:MAX"),
     ("train digits/cnn --interface lo", "--token-file and --interface are of several hosts"),
     ("train digits/cnn --elastic 1:2 --coordinator 0.0.0.0:1", "is every address of a host"),
     ("join 127.0.0.1 --token-file none", "'127.0.0.1' is no address: give HOST:PORT"),
     ("join 127.0.0.1:1 --token-file none", "--token-file none: No such file or directory"),
     ("leave 127.0.0.1:1 --token-file none", "--token-file none: No such file or directory"),
     ("status 127.0.0.1:1 --interface ib7 --token-file none", "--interface ib7: this host has")],
)  # fmt: skip
def test_bad_input_gets_a_sentence(
    words: str, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    try:
        assert main(words.split()) == 2
    except SystemExit as end:
        assert end.code == 2
    assert told in capsys.readouterr().err
