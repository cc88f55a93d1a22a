"""`python -m benchmarks.claims` in a repository of its own, with rows that take no time."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.claims.record import alone

ROOT = Path(__file__).parents[2]
ROWS = """
from benchmarks.claims import measure
from benchmarks.claims.claim import Claim, Form, Reading, at_least
from benchmarks.claims.run import Run

measure.LOOK = 0.02

def read(document):
    words = {"rounds": document["rounds"]}
    return Reading((at_least(document["value"], 0.5, document["each"]),), words)

def row(name, **how):
    run = Run("fake", name, 1.0, **how)
    return Claim(name, name + " of {rounds} rounds", run, read, Form(".2f", ".1f"), ROOMS)

ROOMS = ("synchromesh/engine",)
CLAIMS = (row("quick"), row("slow"), row("behind"), row("broken"), row("absent", data="nowhere"))
"""
FAKE = """
import json, os, pathlib, sys, time

name = sys.argv[1]
with open("runs.log", "a") as log:
    print(name, os.getpid(), file=log)
if name == "slow" and not pathlib.Path("hurry").exists():
    time.sleep(60)
if name == "broken":
    sys.exit("no device is left")
value = 0.4 if name == "behind" else 0.9
print(json.dumps({"value": value, "rounds": 2, "each": [value, 0.95]}))
"""


class Repository:
    """A repository with the command, rows that need no machine, and a file of the package."""

    def __init__(self, path: Path) -> None:
        self.path = path
        kept = shutil.ignore_patterns("rows.py", "__pycache__")
        shutil.copytree(ROOT / "benchmarks" / "claims", path / "benchmarks/claims", ignore=kept)
        for name, text in {
            "benchmarks/__init__.py": "", "benchmarks/claims/rows.py": ROWS,
            "benchmarks/fake.py": FAKE, "benchmarks/picture.py": "def main() -> None: ...",
            "benchmarks/machine.py": "def hardware() -> str: return '2 x Abacus'",
            "synchromesh/engine/groups.py": "", "synchromesh/cost/price.py": "",
            "README.md": "# Title\n<!-- claims: written by `make claims` from "
            "benchmarks/claims.json -->\nold\n<!-- end of claims -->\nthe rest\n",
        }.items():  # fmt: skip
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
        self.git("init", "-q")
        self.commit("first")

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", *who, *words], cwd=self.path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(self, subject: str) -> None:
        self.git("add", "benchmarks", "synchromesh", "README.md")
        self.git("commit", "-q", "-m", subject)

    def start(self, *words: str) -> "subprocess.Popen[str]":
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "SYNCHROMESH_DATA": str(self.path),
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.claims", *words], cwd=self.path, text=True,
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            # what is begun in the background inherits that an interrupt is ignored
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def claims(self, *words: str) -> tuple[int, str]:
        """Exit code and what it said."""
        process = self.start(*words)
        out, error = process.communicate(timeout=60)
        return process.returncode, out + error

    def hurry(self) -> None:
        """From now on `slow` is not."""
        (self.path / "hurry").touch()

    @property
    def runs(self) -> list[str]:
        log = self.path / "runs.log"
        return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []

    @property
    def last_process(self) -> int:
        return int((self.path / "runs.log").read_text().split()[-1])

    @property
    def records(self) -> dict[str, dict[str, object]]:
        found: dict[str, dict[str, object]] = json.loads(
            (self.path / "benchmarks/claims.json").read_text()
        )
        return found


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "not within 30 s"
        time.sleep(0.02)


def gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{process}/stat").read_text().split()[2] == "Z"  # nobody reaps it here


def test_a_killed_run_goes_on_where_it_was_and_leaves_nothing_running(
    repository: Repository,
) -> None:
    process = repository.start()
    until(lambda: repository.runs == ["quick", "slow"])
    process.kill()
    process.communicate()
    until(lambda: gone(repository.last_process))
    assert list(repository.records) == ["quick"]
    repository.hurry()
    code, told = repository.claims()
    assert code == 1, "not all rows reach their goals"
    assert repository.runs == ["quick", "slow", "slow", "behind", "broken"]
    assert "1 rows have figures of commit" in told
    assert "2 of 5 rows reach their goals" in told
    assert "1 failed (broken); 1 skipped (absent); 1 behind (behind)" in told
    lines = [line.split(",")[0] for line in told.splitlines()]
    assert "slow              0.90 (goal 0.5)" in lines
    assert "behind            0.40 (goal 0.5" in lines
    assert any(line.startswith("broken            FAILED after") for line in lines)


def test_an_interrupt_keeps_what_was_measured(repository: Repository) -> None:
    process = repository.start()
    until(lambda: repository.runs == ["quick", "slow"])
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=30)
    assert process.returncode == 130 and "the same command goes on" in out and not error
    assert gone(repository.last_process) and list(repository.records) == ["quick"]


def test_what_has_failed_or_lacks_data_is_tried_again_and_what_is_named(
    repository: Repository,
) -> None:
    repository.hurry()
    repository.claims()
    first = repository.records
    assert first["absent"]["unmeasured"] and "values" not in first["absent"]
    (repository.path / "nowhere").mkdir()
    repository.claims()
    assert repository.runs[4:] == ["broken", "absent"]
    now = repository.records["absent"]
    assert now["values"] and "unmeasured" not in now
    repository.claims("--only", "quick", "--only", "slow")
    assert repository.runs[6:] == ["quick", "slow"]
    (repository.path / "nowhere").rmdir()
    _, told = repository.claims("--only", "absent")
    kept = repository.records["absent"]
    assert kept["values"] and "no folder 'nowhere'" in str(kept["unmeasured"])
    assert "0 of 1 rows reach their goals; 1 skipped (absent)" in told


def test_a_change_makes_stale_what_depends_on_it(repository: Repository) -> None:
    repository.hurry()
    repository.claims()
    (repository.path / "README.md").write_text("another page")
    repository.commit("docs: a page")
    assert repository.claims("--stale") == (1, "absent: never measured\n")
    repository.claims("--only", "quick")
    commit = repository.git("rev-parse", "--short", "HEAD~1")
    assert repository.records["quick"]["commit"] == commit, "pages are not what is measured"
    (repository.path / "synchromesh/cost/price.py").write_text("PRICE = 1")
    repository.commit("cost: a price")
    assert repository.claims("--stale") == (1, "absent: never measured\n")
    (repository.path / "synchromesh/engine/groups.py").write_text("GROUPS = 1")
    repository.commit("engine: groups")
    _, told = repository.claims("--stale")
    change = repository.git("log", "-1", "--format=%h %as engine: groups")
    day = repository.records["quick"]["date"]
    lines = [f"{n}: measured at {commit} ({day}), then {change}" for n in ("quick", "slow")]
    assert told.splitlines()[:2] == lines and len(told.splitlines()) == 5
    repository.claims("--only", "quick")
    assert not repository.claims("--stale", "--only", "quick")[1]
    (repository.path / "benchmarks/fake.py").write_text(FAKE + "# another benchmark\n")
    repository.commit("benchmarks: another")
    assert "quick: measured" in repository.claims("--stale")[1]


def test_code_without_a_commit_is_not_measured(repository: Repository) -> None:
    (repository.path / "synchromesh/engine/groups.py").write_text("GROUPS = 2")
    code, told = repository.claims()
    assert code == 1 and not repository.runs
    expected = "a figure belongs to a commit: commit or stash synchromesh/engine/groups.py first\n"
    assert told == expected


def test_code_that_changes_meanwhile_stops_it(repository: Repository) -> None:
    process = repository.start()
    until(lambda: repository.runs == ["quick", "slow"])
    (repository.path / "synchromesh/engine/groups.py").write_text("GROUPS = 3")
    os.kill(repository.last_process, signal.SIGTERM)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 1 and "commit or stash" in error
    assert list(repository.records) == ["quick"]


def test_two_do_not_measure_at_once(repository: Repository) -> None:
    with alone(repository.path / "benchmarks/claims.json") as free:
        assert free
        code, told = repository.claims()
    assert (code, told) == (1, "another process measures these rows already\n")


def test_a_name_that_is_not_there(repository: Repository) -> None:
    assert repository.claims("--only", "quik") == (1, "no row 'quik': did you mean quick?\n")


def test_the_page_is_made_without_measuring(repository: Repository) -> None:
    repository.hurry()
    repository.claims()
    runs = repository.runs
    assert repository.claims("--render") == (0, "")
    page = (repository.path / "README.md").read_text()
    assert repository.runs == runs
    assert page.startswith("# Title\n<!-- claims") and page.endswith("claims -->\nthe rest\n")
    assert "| quick of 2 rounds | 0.90 | 0.5 | `quick` |" in page
    assert "| **behind of 2 rounds** | **0.40** | 0.5 | `behind` |" in page
    assert "| **broken of ? rounds** | **failed** |  | `broken` |" in page
    assert "`broken` failed: exit code 1: no device is left." in page
    assert "`absent` was not measured with the others: no folder 'nowhere'" in page
    assert "2 x Abacus" in page and "`quick` 0.9 to 0.9" in page
