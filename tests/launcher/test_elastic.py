"""The launcher of an elastic run: who is lost, who hears of it, and what ends the run."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from synchromesh.launcher import coordinator, elastic, machine
from synchromesh.launcher.launcher import Ending
from tests.launcher.test_launcher import alive, wait_for

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
from synchromesh.launcher.member import member

slot, folder, own = os.environ["LOCAL_RANK"], Path(sys.argv[1]), member()
generations, began = [own.next()], time.monotonic()

def lives(seconds):
    until = time.monotonic() + seconds
    while not own.told and time.monotonic() < until:
        time.sleep(0.01)
    if own.told:
        generations.append(own.next())

{body}
(folder / slot).write_text(json.dumps({{
    "ranks": [[g.number, g.rank, *g.before] for g in generations],
    "lost": [str(loss) for loss in own.lost], "noticed": [x.noticed_seconds for x in own.lost],
    "seconds": time.monotonic() - began, "rank": os.environ["RANK"],
}}))
"""


def ended(
    tmp_path: Path, body: str, ranks: int = 3, least: int = 1, restarts: int = 0
) -> tuple[Ending, list[str]]:
    said: list[str] = []
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(body=body))
    command = [str(path), str(tmp_path)]
    return elastic.launch(command, ranks, said.append, 2, (), least, restarts), said


def left(tmp_path: Path, slot: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((tmp_path / str(slot)).read_text())
    return found


def test_those_that_are_left_get_the_next_ranks(tmp_path: Path) -> None:
    body = (
        'if slot == "1":\n    os.kill(os.getpid(), signal.SIGKILL)\nlives(20)\n'
        'if slot == "0":\n    os.kill(os.getpid(), signal.SIGSEGV)\nlives(20)'
    )
    ending, said = ended(tmp_path, body)
    assert ending == Ending()
    assert said == ["rank 1 was killed by SIGKILL", "rank 0 was killed by SIGSEGV"]
    found = left(tmp_path, 2)
    assert found["ranks"] == [[1, 2, -1, -1, -1], [2, 1, 0, 2], [3, 0, 1]]
    assert (found["rank"], found["lost"]) == ("0", ["rank 0 was killed by SIGSEGV"])
    assert not (tmp_path / "0").exists()


def test_a_death_is_noticed_within_half_a_second(tmp_path: Path) -> None:
    ending, _ = ended(tmp_path, 'lives(20) if slot != "2" else os.kill(os.getpid(), 9)')
    assert ending == Ending()
    noticed = left(tmp_path, 0)["noticed"]
    assert isinstance(noticed, list) and 0 <= noticed[0] < 0.5


def test_a_rank_without_memory_is_not_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = machine.memory_kills()
    monkeypatch.setattr(machine, "memory_kills", lambda: kills + dead.exists())
    dead = tmp_path / "dead"
    body = 'lives(20) if slot != "2" else (folder / "dead").touch() or os.kill(os.getpid(), 9)'
    ending, said = ended(tmp_path, body, restarts=2)
    why = "rank 2 was killed by SIGKILL, as memory was short: it is not started anew"
    assert (ending, said) == (Ending(), [why])
    assert left(tmp_path, 0)["ranks"] == [[1, 0, -1, -1, -1], [2, 0, 0, 1]]


def test_a_rank_that_fails_before_it_comes_again_ends_nobody(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    fails = 'import os, sys\nos.environ["SYNCHROMESH_SLOT"] < "3" or sys.exit(3)\n'
    body = 'lives(20) if slot != "2" else os.kill(os.getpid(), 9)\ntime.sleep(2)'
    path.write_text(fails + SCRIPT.format(body=body))
    said: list[str] = []
    ending = elastic.launch([str(path), str(tmp_path)], 3, said.append, 2, (), 1, restarts=1)
    failed = (
        "a rank that was started anew failed: the others go on without it; it left an exit code "
        "alone"
    )
    assert (ending, said) == (Ending(), ["rank 2 was killed by SIGKILL", failed])
    assert left(tmp_path, 0)["ranks"] == [[1, 0, -1, -1, -1], [2, 0, 0, 1]]


def test_places_are_started_anew_as_long_as_their_steps_are_new(tmp_path: Path) -> None:
    """Two that are lost together, time and again; then in the same step."""
    none = cast(Any, None)
    here = elastic.LocalRanks("h", 2, none, none, none, 1.0, print, tmp_path, restarts=3)

    def lost(steps: int) -> set[int]:
        here.waiting.clear()
        for place in (0, 1):
            slot = elastic.Slot(0, place, none, steps=steps, marks={"model": "1"})
            here._start_again(slot)
        return {*here.waiting}

    assert [lost(10 * n) for n in range(1, 8)] == [{0, 1}] * 7
    assert [lost(70) for _ in range(3)] == [{0, 1}, {0, 1}, set()]


def test_a_host_without_a_rank_says_of_what_its_last_one_died(tmp_path: Path) -> None:
    none, leads = cast(Any, None), cast(Any, SimpleNamespace(leads=True))
    here = elastic.LocalRanks("h", 1, none, none, leads, 1.0, print, tmp_path)
    here.slots = [elastic.Slot(0, 0, none, why="was killed by SIGKILL", rank=3)]
    assert here.bare == ""  # the run has ended with it
    here.coordination = cast(Any, SimpleNamespace(leads=False))
    assert here.bare.endswith("any more, the others go on: rank 3 was killed by SIGKILL")
    here.failed = "rank 3 of host h failed"
    assert here.bare == ""


def test_a_silent_rank_is_killed_and_a_pause_is_no_fault(tmp_path: Path) -> None:
    """It is stopped: for 3 s by itself, whom another one wakes, then for good."""
    body = (
        'pid = folder / "pid"\n'
        'if slot == "1":\n'
        "    pid.write_text(str(os.getpid()))\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    time.sleep(1)\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        'elif slot == "0":\n'
        "    while not pid.exists():\n        time.sleep(0.01)\n"
        "    time.sleep(3)\n"
        "    assert not own.told\n"
        "    os.kill(int(pid.read_text()), signal.SIGCONT)\n"
        "    began = time.monotonic() + 1\n"
        "lives(20)"
    )
    ending, said = ended(tmp_path, body)
    assert (ending, said) == (Ending(), ["rank 1 has been silent for 4 s"])
    seconds = left(tmp_path, 0)["seconds"]
    assert isinstance(seconds, float) and 3.5 < seconds < 5


def test_who_does_not_come_to_the_others_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "LIMITS", coordinator.CoordinatorTuning(meet=2.0))
    body = (
        'if slot == "2":\n    os.kill(os.getpid(), signal.SIGKILL)\n'
        'if slot == "1":\n    time.sleep(60)\n'
        "lives(20)"
    )
    ending, said = ended(tmp_path, body)
    assert (ending, said) == (
        Ending(),
        ["rank 2 was killed by SIGKILL",
         "rank 1 did not come to where the others meet within 2 s"],
    )  # fmt: skip
    assert left(tmp_path, 0)["ranks"] == [[1, 0, -1, -1, -1], [2, 0, 0]]


def test_an_error_of_a_ranks_own_ends_the_run(tmp_path: Path) -> None:
    body = 'assert slot != "1", "a mistake"\nlives(60)'
    began = time.monotonic()
    ending, said = ended(tmp_path, body)
    assert ending.code == 1 and not said
    assert "AssertionError: a mistake" in str(ending.failure)
    assert str(ending.failure).endswith("the run ended")
    assert time.monotonic() - began < 20


def test_fewer_ranks_than_are_asked_for_end_the_run(tmp_path: Path) -> None:
    ending, _ = ended(tmp_path, 'os.kill(os.getpid(), 9) if slot == "0" else lives(60)', least=3)
    assert ending.code == 137
    assert str(ending.failure) == (
        "synchromesh: rank 0 of 3 failed (killed by SIGKILL); the run ended"
    )


def test_a_signal_goes_to_all_ranks(tmp_path: Path) -> None:
    body = (
        "signal.signal(signal.SIGTERM, lambda *_: (folder / ('x' + slot)).write_text('x'))\n"
        '(folder / f"ready{slot}").touch()\n'
        'while not all((folder / f"ready{n}").exists() for n in range(3)):\n    time.sleep(0.01)\n'
        'os.kill(os.getppid(), signal.SIGTERM) if slot == "0" else None\n'
        'while not (folder / ("x" + slot)).exists():\n    time.sleep(0.01)'
    )
    ending, _ = ended(tmp_path, body)
    assert ending.signal == signal.SIGTERM and ending.code == 143
    assert all((tmp_path / str(slot)).exists() for slot in range(3))


def _launch(folder: Path) -> None:
    ended(folder, '(folder / f"pid{slot}").write_text(str(os.getpid()))\ntime.sleep(120)')


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_launch, args=(tmp_path,))
    process.start()
    paths = [tmp_path / f"pid{slot}" for slot in range(3)]
    wait_for(paths)
    pids = [int(path.read_text()) for path in paths]
    process.kill()
    process.join()
    until = time.monotonic() + 2
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(alive, pids))


@pytest.mark.skipif(os.name != "posix", reason="there are no permissions")
def test_the_socket_is_the_users_own(tmp_path: Path) -> None:
    body = (
        'path = Path(os.environ["SYNCHROMESH_ELASTIC"])\n'
        '(folder / f"mode{slot}").write_text(oct(path.stat().st_mode & 0o777))'
    )
    ended(tmp_path, body, ranks=1)
    assert (tmp_path / "mode0").read_text() == "0o600"
