"""The command `synchromesh lab` from up to down, as a user types it, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from synchromesh.cli import main
from synchromesh.lab import cgroup, requirements
from synchromesh.lab.record import Tag
from synchromesh.values.cluster import Cluster
from tests.lab.hosts import needs_hosts, python, traces, until

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
    "PYTHONPATH": str(ROOT),
}
NAME = f"test-{os.getpid()}"


def begin(*arguments: str) -> "subprocess.Popen[str]":
    command, *rest = arguments
    return subprocess.Popen(
        [sys.executable, "-m", "synchromesh", "lab", command, "--name", NAME, *rest],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip


def lab(*arguments: str, code: int = 0) -> tuple[str, str]:
    """Standard output and standard error of `synchromesh lab WORDS`."""
    process = begin(*arguments)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    return out, err


@pytest.fixture(scope="module")
def up() -> Iterator[dict[str, object]]:
    """A lab of two hosts; the document of `up`."""
    out, _ = lab("up", "--hosts", "2", "--bandwidth", "100mbit", "--cpu", "50%", "--json")
    yield json.loads(out)
    out, _ = lab("down", "--json")
    assert json.loads(out)["name"] == NAME and NAME in json.loads(out)["removed"]
    assert "there is no lab" in lab("down", code=2)[1]


def hosts() -> list[dict[str, object]]:
    (shown,) = json.loads(lab("status", "--json")[0])["labs"]
    assert shown["emulated"] is True
    found: list[dict[str, object]] = shown["hosts"]
    return found


@needs_hosts
def test_a_lab_stays_between_commands(up: dict[str, object]) -> None:
    assert up["name"] == NAME and hosts() == up["hosts"]
    assert [h["bandwidth"] for h in hosts()] == [100_000_000] * 2
    assert Cluster.load(str(up["cluster"])).emulated
    assert "a lab 'test-" in (said := lab("up", code=2)[1]) and "is up already" in said
    table, _ = lab("status")
    assert "2 emulated hosts" in table and "10.77.0.2" in table and "100mbit" in table


@needs_hosts
def test_one_host_is_changed_and_its_cluster_with_it(up: dict[str, object]) -> None:
    assert "memory" not in lab("status")[0]
    assert "4GiB" in lab("set", "--host", "1", "--memory", "4GiB")[0]
    table, _ = lab("set", "--host", "1", "--bandwidth", "20mbit", "--cpu", "10%")
    assert "20mbit" in table and "10%" in table
    assert [(h["bandwidth"], h["cpu"]) for h in hosts()] == [(10**8, 0.5), (2 * 10**7, 0.1)]
    link = Cluster.load(str(up["cluster"])).link("host0", "host1")
    assert link.bytes_per_second == 20e6 / 8
    lab("set", "--bandwidth", "100mbit", "--cpu", "50%")
    assert [(h["bandwidth"], h["cpu"]) for h in hosts()] == [(10**8, 0.5)] * 2


@needs_hosts
def test_faults_come_and_go(up: dict[str, object]) -> None:
    assert lab("freeze", "--host", "0")[0] == f"host 0 of lab {NAME} is frozen\n"
    lab("cut", "--host", "0")
    assert [h["state"] for h in hosts()] == ["frozen and cut", "up"]
    assert "host 0 of lab" in lab("run", "--", "true", code=2)[1]
    lab("heal", "--host", "0")
    lab("thaw", "--host", "0", "--json")
    assert [h["state"] for h in hosts()] == ["up", "up"]


@needs_hosts
def test_output_of_host_0_is_the_commands_own(up: dict[str, object]) -> None:
    program = "import os, sys; print(os.environ['RANK']); print('e', file=sys.stderr)"
    out, err = lab("run", "--", *python(program))
    assert out == "0\n"
    assert sorted(err.splitlines()) == ["[host 0] e", "[host 1] 1", "[host 1] e"]
    out, err = lab("run", "--json", "--timeout", "30", "--", "echo", "--json")
    document = json.loads(out)
    assert document["exit_code"] == 0 and document["command"] == ["echo", "--json"]
    assert document["emulated"] is True and document["hosts"] == 2
    assert sorted(err.splitlines()) == ["[host 0] --json", "[host 1] --json"]


@needs_hosts
def test_a_command_runs_on_some_hosts(up: dict[str, object]) -> None:
    lab("cut", "--host", "0")  # which it does not need
    program = "import os; e = os.environ; print(e['RANK'], e['WORLD_SIZE'], e['MASTER_ADDR'])"
    assert lab("run", "--hosts", "1", "--", *python(program)) == ("0 1 10.77.0.2\n", "")
    assert (
        "host 1 of 1 ended with code 7\n"
        in lab("run", "--hosts", "1", "--", "sh", "-c", "exit 7", code=7)[1]
    )
    lab("heal", "--host", "0")
    assert "host 2" in lab("run", "--hosts", "1-2", "--", "true", code=2)[1]


@needs_hosts
def test_the_exit_code_is_that_of_the_host_that_failed(up: dict[str, object]) -> None:
    program = "import os, time; os.environ['RANK'] == '1' and os._exit(7); time.sleep(30)"
    start = time.monotonic()
    _, err = lab("run", "--", *python(program), code=7)
    assert "synchromesh: host 1 of 2 ended with code 7\n" in err
    assert "did not finish in 0.5 s" in lab("run", "--timeout", "0.5", "sleep", "9", code=124)[1]
    assert time.monotonic() - start < 25


PATIENT = """
import signal, sys, time
def stop(number, frame):
    print("stopped", flush=True)
    time.sleep(0.2)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""


@needs_hosts
def test_a_signal_reaches_every_host_once(up: dict[str, object]) -> None:
    run = begin("run", "--", *python(PATIENT))
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    assert run.stderr is not None and run.stderr.readline() == "[host 1] ready\n"
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=20)
    assert (out, err, run.returncode) == ("stopped\n", "[host 1] stopped\n", 128 + signal.SIGTERM)


@needs_hosts
def test_what_runs_dies_with_the_command_that_started_it(up: dict[str, object]) -> None:
    run = begin("run", "--", *python("print('ready', flush=True); import time; time.sleep(60)"))
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    run.kill()
    run.communicate()
    assert until(lambda: [h["processes"] for h in hosts()] == [0, 0])


@needs_hosts
def test_real_training_runs_in_a_lab(up: dict[str, object], tmp_path: Path) -> None:
    program = (
        "import torch, torch.distributed as dist; dist.init_process_group('gloo'); "
        "x = torch.ones(3); dist.all_reduce(x); print(x.tolist()); dist.destroy_process_group()"
    )
    lab("set", "--cpu", "100%", code=0)
    out, _ = lab("run", "--timeout", "60", "--", sys.executable, "-c", program)
    assert out == "[2.0, 2.0, 2.0]\n"
    lab("set", "--cpu", "50%")


@needs_hosts
def test_a_lab_whose_keeper_was_killed_is_removed_by_the_next_command(
    tmp_path: Path, alone: None
) -> None:
    name = f"{NAME}-dead"
    file = tmp_path / "lab.yaml"
    file.write_text("hosts: [{bandwidth: 1gbit, cpu: 20%}]")
    arguments = [sys.executable, "-m", "synchromesh", "lab"]

    def run(*rest: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*arguments, *rest, "--name", name], capture_output=True, text=True, env=ENVIRONMENT
        )

    assert run("up", "--file", str(file), "--json").returncode == 0
    (shown,) = json.loads(run("status", "--json").stdout)["labs"]
    tag = Tag.of(shown["keeper"])
    assert tag is not None
    os.kill(tag.pid, signal.SIGKILL)
    assert until(lambda: not tag.alive) and traces(tag)
    down = run("down")
    assert down.returncode == 0 and traces(tag) == []
    assert f"removed lab {name}: its keeper was no longer alive\n" in down.stderr


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "SYNCHROMESH_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("lab", "the following arguments are required: COMMAND; see synchromesh lab --help"),
        ("lab upp", "invalid choice: 'upp'"),
        ("lab up --hosts 0", "--hosts: '0' is not a whole number of at least 1"),
        ("lab up --bandwidth 200", "'200' is not a bandwidth: write a number with kbit, mbit or"),
        (
            "lab up --cpu 40",
            "'40' is not a share of a core: write per cent of one core, as in 40%",
        ),
        ("lab up --cpu 1%", "a share of 1% of a core is outside 2% to"),
        ("lab up --hosts 201", "the number of emulated hosts must be 1 to 200, not 201"),
        ("lab up --file lab.yaml", "lab.yaml: cannot be read"),
        ("lab up --file lab.yaml --hosts 2 --cpu 10%", "leave --hosts and --cpu out"),
        ("lab freeze", "the following arguments are required: --host"),
        ("lab cut --host one", "--host: 'one' is not a whole number"),
        ("lab run --hosts 3-1 -- true", "'3-1' names no hosts: give numbers, as 0-2,4"),
        ("lab run --timeout never -- true", "'never' is not a number of seconds above 0"),
        ("lab run", "what shall the hosts run? synchromesh lab run -- COMMAND ..."),
    ],
)
def test_bad_input(
    arguments: str, sentence: str, outside: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in message_of(arguments, capsys)


def message_of(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence on standard error."""
    try:
        code: object = main(arguments.split())
    except SystemExit as error:  # argparse
        code = error.code
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.count("\n") == 1 and "Traceback" not in err, err
    return str(err).strip()


@pytest.mark.parametrize(
    "arguments", ["up", "status", "down", "set --cpu 10%", "kill --host 0", "run -- true"]
)
def test_without_root(
    arguments: str,
    outside: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(requirements.os, "geteuid", lambda: 1000)
    assert message_of(f"lab {arguments}", capsys) == (
        "synchromesh: emulated hosts need root (user id 1000): run the command with sudo"
    )


def test_what_else_a_machine_can_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.os, "geteuid", lambda: 0)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert "need Linux network namespaces, and this is darwin" in why()
    with monkeypatch.context() as patch:
        patch.setattr(requirements, "_missing_capabilities", lambda: ["CAP_SYS_ADMIN"])
        assert "need CAP_SYS_ADMIN, which this container's root lacks: start it with" in why()
    monkeypatch.setattr(requirements, "_missing_capabilities", list)
    with monkeypatch.context() as patch:
        patch.setattr(requirements.importlib.util, "find_spec", lambda name: None)
        assert "need the package pyroute2: pip install pyroute2" in why()
    monkeypatch.setattr(cgroup, "detect", lambda: None)
    assert "need the cpu controller of cgroup v1 or v2, writable below /sys/fs/cgroup" in why()


def why() -> str:
    return requirements.reason_unavailable() or ""
