"""The campaign of faults: acts that follow a trace, and which host a rank is on."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.campaign import acts_of, main, trace
from benchmarks.faults import Act, Stage, perform
from benchmarks.hosts import Run
from benchmarks.troubles import TROUBLE, Rows


def test_hosts_follow_a_third_of_the_instances(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("seconds,instances\n0,4\n60,12\n120,7\n180,0\n6000,12\n")
    there = trace(file, minutes=1)
    assert there == [(0, 1), (1, 4), (2, 2), (3, 1)]  # the coordinator's host is always there
    assert acts_of(there) == [
        Act(1, "join", 1), Act(1, "join", 2), Act(1, "join", 3),
        Act(2, "kill", 2), Act(2, "kill", 3), Act(3, "kill", 1),
    ]  # fmt: skip


def stage(*changes: tuple[str, int]) -> Stage:
    """Of a run of four hosts with these causes and numbers of ranks."""
    logged = [{"cause": c, "ranks": n, "from_step": 7, "plan": "data"} for c, n in changes]
    events: dict[str, list[Any]] = {"generation": logged, "step": []}
    run = SimpleNamespace(
        logged=events.__getitem__, step=0,
        launchers={0: SimpleNamespace(process=SimpleNamespace(poll=lambda: None))},
        lab=SimpleNamespace(states=lambda: [SimpleNamespace(address=f"10.77.0.{n}") for n in
                                            range(1, 5)]),
    )  # fmt: skip
    return Stage(cast(Run, run), random.Random(0))


def test_who_is_lost_and_who_comes() -> None:
    seen = stage(("rank 1 is of host 10.77.0.2/12-ab, which is gone", 3), ("1 rank came", 4))
    seen.look()
    assert seen.order == [0, 2, 3, 1] and seen.named == {1} and not seen.wrong
    seen = stage(("rank 2 was killed by SIGKILL", 3))
    seen.look()
    assert seen.order == [0, 1, 3] and seen.named == {2}


def test_who_has_joined_comes() -> None:
    seen = stage(("rank 1 is of host 10.77.0.2/12-ab, which is gone", 3), ("rank 2 has left", 2))
    seen.look()
    seen.acts, seen.gone = [Act(1, "kill", 1), Act(2, "leave", 3), Act(9, "join", 3)], {1}
    seen.run.logged("generation").append(
        {"cause": "1 rank came", "ranks": 3, "from_step": 9, "plan": "data"}
    )
    seen.look()
    assert seen.order == [0, 2, 3]


def test_who_leaves_comes_last() -> None:
    seen = stage(("1 rank leaves", 4), ("rank 3 has left", 3), ("1 rank came", 4))
    seen.left = [1]
    seen.look()
    assert seen.order == [0, 2, 3, 1] and seen.named == {1} and not seen.wrong


def test_ranks_that_do_not_add_up_are_told() -> None:
    seen = stage(("rank 1 was killed by SIGKILL", 2))
    seen.look()
    assert len(seen.wrong) == 1


def test_a_row_is_not_finite_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TROUBLE, str(tmp_path / "trouble-2"))
    rows = Rows([(torch.ones(3), 0), (torch.ones(3), 1)])
    perform(cast(Run, SimpleNamespace(folder=tmp_path)), "nan", 1)
    assert rows[0][0].tolist() == [1, 1, 1]  # of another host
    perform(cast(Run, SimpleNamespace(folder=tmp_path)), "nan", 2)
    assert rows[0][0].isnan().all() and rows[1][1] == 1
    assert rows[0][0].tolist() == [1, 1, 1]


def test_faults_have_names_and_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--faults", "F5,F999"])
    assert "no fault F999: there are kill (F2), rank (F1), " in capsys.readouterr().err
