"""Tests of the launcher: the first failure once, no orphans, signals passed on."""

import gc
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from synchromesh.launcher import forks
from synchromesh.launcher import launcher as launching
from synchromesh.launcher.forks import forked
from synchromesh.launcher.launcher import Ending, launch
from synchromesh.launcher.rank import LAUNCHER, SHORTAGE

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
rank, folder = os.environ["RANK"], Path(sys.argv[2])
{body}
"""


def script(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(body=body))
    return [str(path), "first", str(tmp_path)]


def wait_for(paths: list[Path], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not all(p.exists() and p.read_text() for p in paths):
        assert time.monotonic() < deadline, f"{paths} did not appear"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_ranks_see_torchruns_environment_and_rank_0_alone_is_heard(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = script(
        tmp_path,
        'names = ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS"]\n'
        "import json\n"
        "(folder / rank).write_text(json.dumps({n: os.environ[n] for n in names}))\n"
        'print("rank", rank, sys.argv[1], int(os.environ["MASTER_PORT"]) > 0)',
    )
    before = dict(os.environ)
    assert launch(command, 3) == Ending()
    assert os.environ == before
    assert capfd.readouterr().out == "rank 0 first True\n"
    for rank in range(3):
        seen = json.loads((tmp_path / str(rank)).read_text())
        assert (seen["WORLD_SIZE"], seen["LOCAL_RANK"]) == ("3", str(rank))
        assert seen["MASTER_ADDR"] == "127.0.0.1" and seen["OMP_NUM_THREADS"]


def test_first_failure_ends_the_run_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "TUNING", launching.LaunchTuning(end=0.5))
    command = script(
        tmp_path,
        'if rank == "2":\n'
        '    while sum(p.stat().st_size > 0 for p in folder.glob("[01]")) < 2: time.sleep(0.02)\n'
        '    raise KeyError("boom\\x1b[2J")\n'
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"  # a rank that does not want to end
        "(folder / rank).write_text(str(os.getpid()))\n"
        "time.sleep(60)",
    )
    started = time.monotonic()
    ending = launch(command, 3)
    assert time.monotonic() - started < 45  # of the 60 that the others would sleep
    shown = str(ending.failure)
    assert (
        shown.startswith("Traceback (most recent call last):\n") and shown.count("Traceback") == 1
    )
    assert f'File "{command[0]}", line 7' in shown and "rank.py" not in shown
    assert shown.endswith("rank 2 of 3 failed (KeyError: 'boom\\x1b[2J'); the run ended")
    assert ending.code == 1
    assert not [p for p in tmp_path.glob("[0-9]") if alive(int(p.read_text()))]


def test_bad_input_in_a_rank_is_one_sentence(tmp_path: Path) -> None:
    body = "from synchromesh.values.layout import Layout\nLayout(0, 2)"
    ending = launch(script(tmp_path, body), 2)
    assert str(ending.failure) == ("synchromesh: degrees must be at least 1: data(0) x tensor(2)")
    assert ending.code == 2


@pytest.mark.parametrize(
    ("body", "fate", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL", 137),
        ("sys.exit(3)", "exit code 3", 3),
        ("os._exit(7)", "exit code 7", 7),
    ],
)
def test_a_rank_that_dies_without_an_error(
    tmp_path: Path, body: str, fate: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        launching, "TUNING", launching.LaunchTuning(poll=0.6)
    )  # so that both ends are seen at once
    lost = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1."
    victim = f'raise RuntimeError("{lost}")'  # what its neighbours see; later
    died = '(folder / "died").write_text("x")'
    waits = 'while not (folder / "died").exists(): time.sleep(0.02)\ntime.sleep(0.1)'
    command = script(tmp_path, f'if rank == "1":\n    {died}\n    {body}\n{waits}\n{victim}')
    ending = launch(command, 2)
    assert str(ending.failure) == f"synchromesh: rank 1 of 2 failed ({fate}); the run ended"
    assert ending.code == code


def test_a_killed_rank_is_told_with_what_was_said_of_its_memory(tmp_path: Path) -> None:
    said = "the plan 'data' is predicted to need 3.0 GB"
    body = (
        "from synchromesh.launcher.rank import report_shortage\n"
        f'report_shortage("nothing yet"); report_shortage("{said}")\n'
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    shown = str(launch(script(tmp_path, body), 1).failure)
    assert shown == (f"synchromesh: rank 0 of 1 failed (killed by SIGKILL; {said}); the run ended")
    other = str(launch(script(tmp_path, body.replace("SIGKILL", "SIGTERM")), 1).failure)
    assert said not in other


def test_a_rank_that_ended_too_early_is_named(tmp_path: Path) -> None:
    lost = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1."
    body = f'if rank == "1": sys.exit()\ntime.sleep(0.5)\nraise RuntimeError("{lost}")'
    shown = str(launch(script(tmp_path, body), 2).failure)
    assert shown.endswith(
        "rank 0 of 2 failed (lost the connection to another rank, which failed, was killed or had "
        "ended before (Connection closed by peer); ranks [1] had ended before, without an error); "
        "the run ended"
    )


def test_an_answer_of_no_is_its_sentence_alone(tmp_path: Path) -> None:
    body = (
        "from synchromesh.values.fault import Refuted\n"
        'if rank == "0":\n    raise Refuted("no: 2 != 3")'
    )
    ending = launch(script(tmp_path, body), 2)
    assert str(ending.failure) == "synchromesh: no: 2 != 3" and ending.code == 1


def test_a_stop_of_the_ranks_is_no_failure_and_has_the_signals_code(tmp_path: Path) -> None:
    body = (
        "from synchromesh.values.fault import Stopped\n"
        'time.sleep(0.3 * (rank == "0"))\n'  # nobody ends it meanwhile
        "(folder / rank).write_text(rank)\n"
        "raise Stopped(signal.SIGTERM)"
    )
    ending = launch(script(tmp_path, body), 2)
    assert ending == Ending(None, signal.SIGTERM) and ending.code == 143
    assert (tmp_path / "0").exists()


def call(command: list[str], report: Path, ahead: bool) -> None:
    """A launcher in a process of its own, which has one thread. ahead: of ranks forked ahead."""
    gc.freeze()  # stores of earlier tests, whose threads are not in this process
    with forked(2 * ahead) as forks:
        assert len(forks) == 2 * ahead
        ending = launch(command, 2, forks=forks)
    report.write_text(str(ending.failure))
    os._exit(ending.code)


@contextmanager
def start(command: list[str], report: Path, ahead: bool) -> Iterator[BaseProcess]:
    gc.collect()
    # forked: a fresh interpreter would import torch for seconds
    caller = multiprocessing.get_context("fork").Process(
        target=call, args=(command, report, ahead)
    )
    caller.start()
    try:
        yield caller
    finally:
        caller.kill()
        caller.join()
        caller.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_ranks_die_with_their_launcher(tmp_path: Path, ahead: bool) -> None:
    command = script(tmp_path, "(folder / rank).write_text(str(os.getpid()))\ntime.sleep(60)")
    files = [tmp_path / "0", tmp_path / "1"]
    with start(command, tmp_path / "report", ahead) as caller:
        wait_for(files)
        caller.kill()
        caller.join(30)
    deadline = time.monotonic() + 20
    while any(alive(int(p.read_text())) for p in files):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.02)


@pytest.mark.parametrize(("signals", "ahead"), [(1, False), (2, True)])
def test_first_signal_is_passed_on_and_the_second_ends_at_once(
    tmp_path: Path, signals: int, ahead: bool
) -> None:
    patience = 0.3 if signals == 1 else 60
    command = script(
        tmp_path,
        "def handle(number, frame):\n"
        '    (folder / f"got{rank}").write_text(str(number))\n'
        f"    time.sleep({patience})\n"
        '    (folder / f"saved{rank}").write_text("x")\n'
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, handle)\n"
        "(folder / rank).write_text(str(os.getpid()))\n"
        "time.sleep(60)",
    )
    with start(command, tmp_path / "report", ahead) as caller:
        wait_for([tmp_path / "0", tmp_path / "1"])
        os.kill(caller.pid or 0, signal.SIGTERM)
        wait_for([tmp_path / "got0", tmp_path / "got1"])
        assert (tmp_path / "got1").read_text() == str(int(signal.SIGTERM))
        if signals == 2:
            os.kill(caller.pid or 0, signal.SIGTERM)
        caller.join(45)
        assert caller.exitcode == 128 + signal.SIGTERM
    assert (tmp_path / "report").read_text() == "None"
    assert (tmp_path / "saved0").exists() == (tmp_path / "saved1").exists() == (signals == 1)
    assert not any(alive(int((tmp_path / r).read_text())) for r in "01")


def test_a_rank_forked_ahead_is_as_a_new_one(tmp_path: Path) -> None:
    body = """
import json, torch, numpy, threading
print("heard from", rank)
kept = {n: v for n, v in os.environ.items() if n not in RUN}
(folder / f"{mode}{rank}").write_text(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "main": __name__, "environment": sorted(kept.items()),
    "threads": torch.get_num_threads(), "python threads": threading.active_count(),
    "session": os.getsid(0) == os.getpid(), "launcher": int(os.environ[PARENT]) == os.getppid(),
    "interrupt": str(signal.getsignal(signal.SIGINT)), "folder": os.getcwd(),
    "buffered": sys.stdout.line_buffering or sys.stdout.write_through,
    "input": os.readlink("/proc/self/fd/0"),
    "random": numpy.random.rand() if mode == "ahead" else 0.0,
}))
while rank == "1" and not (folder / f"{mode}0").exists():
    time.sleep(0.01)
sys.exit(3 if rank == "1" else 0)
"""
    run = ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "MASTER_PORT", LAUNCHER, SHORTAGE)
    seen = {}
    for mode, ahead in (("new", False), ("ahead", True)):
        command = script(tmp_path, f"mode, PARENT, RUN = {mode!r}, {LAUNCHER!r}, {run!r}\n{body}")
        with start(command, tmp_path / "report", ahead) as caller:
            caller.join(60)
            assert caller.exitcode == 3
        assert "rank 1 of 2 failed (exit code 3" in (tmp_path / "report").read_text()
        for rank in "01":
            seen[mode, rank] = json.loads((tmp_path / f"{mode}{rank}").read_text())
    assert seen["ahead", "0"].pop("random") != seen["ahead", "1"].pop("random")
    for rank in "01":
        del seen["new", rank]["random"]
        assert seen["ahead", rank] == seen["new", rank]


def test_a_fork_that_nobody_begins_ends() -> None:
    def child() -> None:
        with forked(2) as forks:
            pids = [f.pid for f in forks]
            assert len(pids) == 2 and all(alive(pid) for pid in pids)
        os._exit(any(alive(pid) for pid in pids))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 0


def test_a_fork_that_cannot_become_a_rank_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise OSError("no such thing")

    monkeypatch.setattr(forks, "_as_new", broken)
    with start(script(tmp_path, ""), tmp_path / "report", True) as caller:
        caller.join(30)
        assert caller.exitcode == 1
    assert "OSError: no such thing" in capfd.readouterr().err


def test_nothing_is_forked_beside_a_thread_or_an_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with forked(2) as forks:
        assert not forks
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    with forked(2) as forks:
        assert not forks


def test_no_ranks() -> None:
    with pytest.raises(ValueError, match="at least one process is needed: --nproc 0"):
        launch(["x.py"], 0)
