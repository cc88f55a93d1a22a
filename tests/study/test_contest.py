"""A study's turns, failures and restarts, with threads as contestants that compute nothing."""

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from synchromesh.results.run import RunResult
from synchromesh.runs.events import (
    EpochMeasured,
    RankPrepared,
    RunEnded,
    StepPredicted,
    TurnEnded,
)
from synchromesh.study import turns
from synchromesh.study.cell import CellJob, StudyCell
from synchromesh.study.channel import Channel, Listener
from synchromesh.study.contest import Common, Contest, Progress, Trained
from synchromesh.study.folder import StudyFolder
from synchromesh.study.meter import Meter
from synchromesh.study.record import RunRecord
from synchromesh.study.target import Target

STEP = {"single": 0.004, "data": 0.003, "ddp": 0.002}  # seconds that a step is said to take
GROUP = [
    StudyCell("w", "single", 1, 8, 0),
    StudyCell("w", "data", 2, 8, 0),
    StudyCell("w", "ddp", 2, 8, 0),
]


class Threads:
    """A contestant whose ranks are threads; `failing` may end one of them at a step."""

    begun: list[str]
    order: list[str]

    def __init__(self, ranks: int, job: Path, log: Path) -> None:
        self.job, self.log = CellJob.load(str(job)), log
        self.failed, self.steps = False, 0
        type(self).begun.append(self.job.cell.strategy)
        self._ranks = [threading.Thread(target=self._run, args=(r,)) for r in range(ranks)]
        for rank in self._ranks:
            rank.start()

    def _run(self, rank: int) -> None:
        channel = Channel(self.job.socket, self.job.cell.key, rank)
        name, meter = self.job.cell.strategy, Meter(channel, self.job.cell.batch)
        tried = trials.get(name, 0)
        meter.settled = lambda: self.steps >= tried
        channel.say(RankPrepared(device="cpu"))
        for seconds, peak in ((0.9, 9), (0.5, 7)):  # as after a switch
            channel.say(StepPredicted(step_seconds=seconds, memory_bytes=(peak,)))
        meter.begin()
        for step in range(1, 10_000):
            if meter.over or step > 60 * (self.job.epochs or 1000):
                break
            if failing(name, step):
                self.log.write_text("Traceback ...\nsynchromesh: out of memory: 3 GB lacking\n")
                self.failed = True
                return
            if rank == 0 and type(self).order[-1:] != [name]:
                type(self).order.append(name)
            self.steps = step
            meter.step(STEP[name] * (1 + rank / 10), 0.001, 8)
            if step % 60 == 0 and self.job.epochs:
                meter.epoch(step // 60, step, 1.0, {"accuracy": 0.4 * step / 60})
        meter.finish(name)

    def code(self) -> int | None:
        if any(rank.is_alive() for rank in self._ranks):
            return None
        return 1 if self.failed else 0

    def end(self) -> None:
        for rank in self._ranks:
            rank.join(5)


def never(name: str, step: int) -> bool:
    return False


failing: Callable[[str, int], bool] = never
trials: dict[str, int] = {}  # steps in which a strategy tries what is quicker


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    Threads.begun, Threads.order = [], []
    monkeypatch.setitem(globals(), "failing", never)
    monkeypatch.setitem(globals(), "trials", {})
    monkeypatch.setattr("synchromesh.study.contest.Contest.POLL_SECONDS", 0.02)


def study(folder: Path, seen: list[Progress] | None = None, **changes: object) -> list[RunResult]:
    common = Common(**{"workloads": {"w": Trained("t", None, 80)}, "start": Threads, **changes})  # type: ignore[arg-type]
    kept = StudyFolder(folder)
    kept.open({"asked": "this"})
    return Contest(common, kept, (seen if seen is not None else []).append).run([GROUP])


def test_contestants_take_turns_there_and_back(tmp_path: Path) -> None:
    seen: list[Progress] = []
    single, data, ddp = study(tmp_path / "s", seen, steps=30)
    a, b, c = "single", "data", "ddp"
    assert Threads.begun == [a, b, c]
    assert Threads.order[:10] == [a, b, c, a, b, c, b, a, b, c]  # ABC, ABC CBA: neighbours join
    assert [r.status for r in (single, data, ddp)] == ["done"] * 3
    assert single.timed_steps == data.timed_steps == 30
    assert data.step_seconds is not None and single.step_seconds is not None
    assert single.step_seconds.median == pytest.approx(0.004)
    assert data.step_seconds.median == pytest.approx(0.0033), "the slowest rank's"
    assert data.samples_per_second == pytest.approx(8 / 0.0043)
    assert data.data_waiting_share == pytest.approx(0.001 / 0.0043)
    assert data.seconds_per_epoch == pytest.approx(10 * 0.0033)
    assert (data.plan, data.predicted_step_seconds, data.predicted_peak_bytes) == ("data", 0.5, 7)
    assert [p.done for p in seen if p.stays][-1] == 3 and any(p.left for p in seen)


def test_nobody_is_timed_while_another_one_warms_up(tmp_path: Path) -> None:
    globals()["trials"] = {"data": 12, "ddp": 10_000}
    seen: list[Progress] = []
    study(tmp_path / "s", seen, steps=3)
    turns_of = [(p.doing.split(" steps of w: ")[0], p.doing.split()[4]) for p in seen
                if " steps of " in p.doing]  # fmt: skip
    count = 5 + turns.TUNING.warm_up_turns
    warm_up = [("3", "single"), *[("3", "data")] * 4, *[("3", "ddp")] * turns.TUNING.warm_up_turns]
    assert sorted(turns_of[:count]) == sorted(warm_up), "ddp never settles: not waited for"
    timed = {("4", name) for name in ("single", "data", "ddp")}
    assert set(turns_of[count : count + 3]) == timed


def test_slow_runs_have_fewer_timed_steps(tmp_path: Path) -> None:
    runs = study(tmp_path / "s", steps=30, at_most=0.0331)
    assert [r.timed_steps for r in runs] == [8, 10, 15]
    assert turns.timed_steps(30, 1.0, 10.0) == turns.TUNING.least
    assert turns.timed_steps(3, 1.0, 9.0) == 3


def test_a_step_begins_when_the_last_rank_has_its_data() -> None:
    record = RunRecord(GROUP[1], [1.0, 1.0])
    for rank, (seconds, waited) in enumerate([(0.4, 0.1), (0.49, 0.01)]):
        turn = TurnEnded(
            first=1, mode="timed", wall=1.0, seconds=(9.0, seconds), loading=(9.0, waited),
            rows=(8, 8),
        )  # fmt: skip
        for said in (RankPrepared(device="cpu"), turn, RunEnded(plan="data")):
            record.add(rank, said)
    result = record.result((), None, 10)
    assert result.seconds == pytest.approx(10 * 0.4), "of as many steps as were asked for"
    assert result.step_seconds is not None
    assert result.step_seconds.median == pytest.approx(0.4)
    assert result.data_waiting_share == pytest.approx(0.2)


def test_epochs_end_by_themselves_and_targets_are_found(tmp_path: Path) -> None:
    targets = (Target.parse("accuracy=0.7"), Target.parse("accuracy=0.9"))
    results = study(tmp_path / "s", epochs=2, targets=targets)
    for result in results:
        assert [e.epoch for e in result.metrics] == [1, 2]
        first, second = result.to_target, result.further_targets[0]
        assert first is not None and (first.epochs, first.seconds) == (2, result.seconds)
        assert (second.epochs, second.seconds) == (None, None)
        seconds = 60 * (STEP[result.strategy] + 0.001)
        assert result.seconds_per_epoch == pytest.approx(seconds)
    assert len(list((tmp_path / "s").glob("runs/*/tensorboard/events.*"))) == 3


def test_time_left_is_known_by_steps_and_by_epochs(tmp_path: Path) -> None:
    for i, length in enumerate(({"steps": 10}, {"epochs": 2})):
        seen: list[Progress] = []
        study(tmp_path / str(i), seen, **length)
        left = [p.left for p in seen if not p.stays]
        assert left[:3] == [None] * 3, "before each has had a turn"
        assert None not in left[3:] and left[-1] is not None and 0 <= left[-1] < 1


@pytest.mark.parametrize(
    ("loss", "accuracy", "said"),
    [
        (math.inf, 0.1, "training diverged: loss is inf after epoch 2: a smaller"),
        (math.nan, math.nan, "training diverged: loss is nan after epoch 2: a smaller"),
        (0.5, math.nan, "metric gave accuracy=nan after epoch 2, though the epoch's mean loss is"),
    ],
)
def test_a_loss_or_metric_that_is_no_number_is_told_as_such(
    loss: float, accuracy: float, said: str
) -> None:
    record = RunRecord(GROUP[0], [1.0])
    record.add(0, RunEnded(plan="single"))
    record.add(0, EpochMeasured(epoch=2, step=9, loss=loss, metrics={"accuracy": accuracy}))
    with pytest.raises(ValueError, match=said):
        record.result((), 5)


def test_a_run_that_fails_is_a_row_and_others_go_on(tmp_path: Path) -> None:
    globals()["failing"] = lambda name, step: name == "data" and step == 12
    seen: list[Progress] = []
    single, data, ddp = study(tmp_path / "s", seen, steps=5)
    assert (single.status, data.status, ddp.status) == ("done", "failed", "done")
    assert data.reason == "out of memory: 3 GB lacking" and data.step_seconds is None
    assert any("data on 2 devices" in p.doing and "out of memory" in p.doing for p in seen)


def test_a_strategy_without_a_plan_here_is_a_row_that_says_why(tmp_path: Path) -> None:
    kept = StudyFolder(tmp_path / "s")
    kept.open({})
    common = Common({"w": Trained("t")}, Threads, steps=2)
    (result,) = Contest(common, kept, [].append).run([[StudyCell("w", "hybrid", 2, 8, 0)]])
    assert result.status == "failed" and "hybrid needs at least 4 devices" in result.reason
    assert not Threads.begun


def test_what_has_ended_is_not_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    globals()["failing"] = lambda name, step: name == "single" and step == 2
    first = study(folder, steps=5)
    (StudyFolder(folder).run(GROUP[2]) / "run.json").unlink()  # as if it had been killed
    Threads.begun, Threads.order = [], []
    again = study(folder, steps=5)
    assert Threads.begun == ["ddp"] and [r.status for r in again] == ["failed", "done", "done"]
    assert first[:2] == again[:2]


def test_another_study_is_not_mixed_in(tmp_path: Path) -> None:
    kept = StudyFolder(tmp_path / "s")
    kept.open({"steps": 30, "seeds": [0]})
    kept.open({"steps": 30, "seeds": [0]})
    with pytest.raises(ValueError, match="holds another study, which differs in steps: name"):
        kept.open({"steps": 10, "seeds": [0]})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ValueError, match="is no folder of a study and not empty"):
        StudyFolder(tmp_path / "other").open({})
    assert json.loads((tmp_path / "s" / "study.json").read_text())["steps"] == 30
    for text, said in (("[1]", "not a list"), ('{"steps"', "Expecting")):
        (tmp_path / "s" / "study.json").write_text(text)
        with pytest.raises(ValueError, match=rf"study.json: .*{said}.*; .* name another folder"):
            kept.open({"steps": 30})


def test_a_folder_that_cannot_be_made_is_told() -> None:
    with pytest.raises(
        ValueError, match=r"/proc/x cannot be made \(.*\): name another with --out"
    ):
        StudyFolder(Path("/proc/x")).open({})


def test_a_study_is_run_once_at_a_time(tmp_path: Path) -> None:
    kept = StudyFolder(tmp_path / "s")
    kept.open({})
    with (
        kept.alone(),
        pytest.raises(ValueError, match=r"another `compare` is running the study in .*/s: wait"),
        StudyFolder(tmp_path / "s").alone(),
    ):
        pass
    with kept.alone():
        pass


def test_damaged_results_of_a_run_say_how_to_go_on(tmp_path: Path) -> None:
    kept = StudyFolder(tmp_path / "s")
    kept.open({})
    (kept.begin(GROUP[0]) / "run.json").write_text('{"workload": ')
    with pytest.raises(ValueError, match=r"run.json: .*; remove .*seed0 and the run is made anew"):
        kept.ended(GROUP[0])


def test_a_temporary_folder_with_a_long_name_is_told(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with pytest.raises(ValueError, match=r"cannot be a socket .*: set TMPDIR to a folder with"):
        Listener(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="who waits is suspended on Linux alone")
def test_who_waits_is_suspended_until_it_is_resumed(tmp_path: Path) -> None:
    tells = (
        "import sys; from synchromesh.study.channel import Channel; "
        "Channel(sys.argv[1], 'cell', 0).turn()"
    )
    with closing(Listener(tmp_path)) as listener:
        process = subprocess.Popen([sys.executable, "-c", tells, listener.path])
        heard = (listener.messages("cell", 1.0) for _ in range(60))
        assert any(heard), process.poll()
        listener.suspend("another")
        assert state(process.pid) != "T"
        listener.suspend("cell")
        assert state(process.pid, "T") == "T"
        listener.resume("cell")
        assert state(process.pid, "S") == "S"
        listener.suspend("cell")
    assert process.wait(10) == 0, "a study that ends lets go on what it has suspended"


def state(process: int, wanted: str = "") -> str:
    """Of a process: T where it is stopped, S where it waits; that wanted within a second."""
    for _ in range(100):
        found = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        if not wanted or found == wanted:
            break
        time.sleep(0.01)
    return found


def test_short_batches_count_where_they_are_trained() -> None:
    data, dropping = StudyCell("w", "data", 2, 8, 0), StudyCell("w", "torch-pipeline", 2, 8, 0)
    assert [Trained("t", None, 20).steps_of_epoch(c) for c in (data, dropping)] == [3, 2]
    assert Trained("t", None, 20, carries=True).steps_of_epoch(data) == 2
    assert Trained("t", None, 16).steps_of_epoch(dropping) == 2
    assert Trained("t").steps_of_epoch(data) is None


def test_turns_time_as_many_steps_as_were_asked_for() -> None:
    for steps, rounds in ((1, 1), (2, 1), (5, 2), (7, 3), (30, 5)):
        timed = turns.timed(steps)
        assert sum(t.steps - 1 for t in timed) == steps and len(timed) == rounds
    assert turns.steps_in(5.0, 0.1) == 50 and turns.steps_in(5.0, 60.0) == 2
