"""Runs that go on without ranks that are killed: every later loss, and the parameters at the end,
are those of a run that nobody has disturbed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.local_kills import apart
from synchromesh.launcher import elastic
from synchromesh.launcher.forks import Fork
from synchromesh.launcher.launcher import Ending

NEAR, EPOCHS, STEPS = 1e-10, 3, 5  # of an epoch


def launched(
    file: Path, plan: str, *words: str, ranks: int = 4, restarts: int = 0
) -> tuple[Ending, list[str]]:
    """Of `tests.elastic_run`, whose faults are `words`: its end, and what the launcher said."""
    forks: list[Fork] = []
    said: list[str] = []
    try:
        for _ in range(ranks):
            forks.append(Fork([fork.pipe for fork in forks]))
        command = ["-m", "tests.elastic_run", str(file), plan, str(EPOCHS), *words]
        return elastic.launch(command, ranks, said.append, forks=forks, restarts=restarts), said
    finally:
        for fork in forks:
            fork.close()


def gone_on(ending: Ending, file: Path, undisturbed: dict[str, Any]) -> list[dict[str, Any]]:
    """The generations of a run that has ended as the undisturbed one."""
    assert ending.code == 0, ending.failure
    found = json.loads(file.read_text())
    assert apart(found, undisturbed) < NEAR and found["metrics"] == undisturbed["metrics"]
    generations: list[dict[str, Any]] = found["generations"]
    return generations


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("undisturbed") / "found.json"
    ending, said = launched(file, "data", ranks=2)
    assert (ending.code, said) == (0, [])
    found: dict[str, Any] = json.loads(file.read_text())
    assert len(found["losses"]) == EPOCHS * STEPS and not found["generations"]
    return found


CASES = {  # plan, faults, the steps behind which ranks go on, how many there are then
    "data": ("data", "1:2:sum 0:7:update", [2, 8], [3, 2]),
    "data, at the edges": ("data", "0:0:step 2:5:evaluate 3:10:save", [0, 5, 10], [3, 2, 1]),
    "in a recovery": ("data", "1:3:step 2:3:regroup", [3], [2]),
    "one alone loses its connections": ("data", "2:5:update!", [6], [3]),
    "one is behind": ("data", "2:5:update! 3:6:behind", [6], [3]),
    "one is ahead": ("data", "0:5:update! 2:5:update! 3:6:behind", [6], [3]),
    "tensor, behind": ("hybrid:tensor=2", "0:5:agree-all! 3:6:behind", [6], [3]),
    "one is behind, at an epoch's end": ("data", "2:4:update! 3:5:behind", [5], [3]),
    "before they meet": ("hybrid:tensor=2", "0:4:step 3:4:enter", [4], [2]),
    "idle ranks": ("data; @ranks=0-2", "1:4:update", [5], [3]),
    "two at once": ("data", "1:6:agree 3:6:agree", [6], [2]),
    "tensor": ("hybrid:tensor=2", "1:4:step 2:9:behind", [4, 9], [3, 2]),
    "sums at different moments": ("hybrid:stages=2", "1:5:agree-all! 0:6:behind", [6], [3]),
    "stages": ("hybrid:stages=2", "3:5:update", None, [3]),
    "servers": ("data; @synchronisation=server:2", "2:4:step 3:9:update", [4, 9], [3, 2]),
    "a server of its own": (
        "data; @synchronisation=server:1; @servers=1", "0:4:update 3:9:agree", [4, 9], [3, 2],
    ),
}  # fmt: skip


@pytest.mark.wide(3)
@pytest.mark.parametrize("case", CASES)
def test_a_run_without_its_lost_ranks_is_the_run(
    case: str, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    plan, words, steps, ranks = CASES[case]
    file = tmp_path / "found.json"
    ending, said = launched(file, plan, *words.split())
    generations = gone_on(ending, file, undisturbed)
    assert [g["ranks"] for g in generations] == ranks
    assert steps in (None, [g["from_step"] for g in generations])
    assert all(g["lost_steps"] == 0 for g in generations)
    told = [cause for g in generations for cause in g["cause"].split("; ")]
    assert sorted(told) == sorted(text for line in said for text in line.split("; "))


def test_a_rank_that_hangs_is_named_and_the_others_go_on(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    ending, said = launched(file, "data", "2:6:hang", ranks=3)
    (generation,) = gone_on(ending, file, undisturbed)
    assert (generation["from_step"], generation["ranks"]) == (6, 2)
    (text,) = said
    assert text.startswith("rank 2 stood still for 10 s (elastic_run.py:") and "take)" in text


OWN = {  # how a loop of its own gets its rows, plan, faults
    "loader": ("loader", "data", "1:2:sum 0:7:update"),
    "shard": ("shard", "data", "1:2:sum 3:9:behind"),
    "first step": ("loader", "data", "0:0:step"),
    "one is behind": ("loader", "data", "2:6:update! 3:7:behind"),
    "one is behind, at an epoch's end": ("loader", "data", "2:4:update! 3:5:behind"),
    "one is ahead": ("loader", "data", "0:5:update! 2:5:update! 3:6:behind"),
    "last step of an epoch": ("loader", "data", "1:4:sum"),
    "evaluate and save": ("shard", "data", "2:5:evaluate 3:10:save"),
    "tensor": ("loader", "hybrid:tensor=2", "0:5:agree-all! 3:6:behind"),
    "in a recovery": ("loader", "data", "1:3:step 2:3:regroup"),
    "evaluates before its steps": ("between", "data", "1:2:sum"),
    "a batch ahead": ("ahead", "data", "1:2:sum 2:4:sum 3:10:sum"),
    "a batch ahead, and a call": ("ahead", "data", "2:5:update! 3:6:behind"),
    "a batch twice": ("twice", "data", "1:2:sum 2:5:sum"),
    "a sampler and workers": ("sampler", "data", "1:2:sum 0:7:update"),
    "tensor, behind, at an epoch's end": (
        "loader",
        "hybrid:tensor=2",
        "0:4:agree-all! 3:5:behind",
    ),
}


@pytest.mark.wide(3)
@pytest.mark.parametrize("case", OWN)
def test_a_loop_of_its_own_goes_on(case: str, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    kind, plan, words = OWN[case]
    file = tmp_path / "found.json"
    ending, said = launched(file, plan, f"own={kind}", *words.split(), restarts=1)
    assert ending.code == 0, ending.failure
    found = json.loads(file.read_text())
    if kind in ("twice", "sampler"):
        alone = tmp_path / "alone.json"
        assert launched(alone, "single", f"own={kind}", ranks=1)[0].code == 0
        undisturbed = json.loads(alone.read_text())
    assert apart(found, undisturbed) < NEAR
    assert found["metrics"]["accuracy"] == undisturbed["metrics"]["accuracy"]
    assert len([text for line in said for text in line.split("; ")]) == len(
        words.split()
    ) - words.count("!")


@pytest.mark.wide(2)
@pytest.mark.parametrize(
    ("kind", "told"),
    [("once", "what it evaluates is no `trainer.loader`, and may have the rows of ranks before"),
     ("rows", "a batch is neither as `trainer.loader` or `trainer.shard` has handed it out nor"),
     ("changed", "a batch is neither as `trainer.loader` or `trainer.shard` has handed it out"),
     ("parts", "its steps are made of `backward` and `update`; those of `trainer.step` alone")],
)  # fmt: skip
def test_a_loop_of_its_own_that_cannot_go_on_says_so(kind: str, told: str, tmp_path: Path) -> None:
    fault = "1:5:evaluate" if kind == "once" else "1:3:sum"
    ending, said = launched(tmp_path / "f.json", "data", f"own={kind}", fault, ranks=3)
    assert told in str(ending.failure) and "go on with a checkpoint" in str(ending.failure)
    assert any(told in text for text in said)


@pytest.mark.wide(2)
@pytest.mark.parametrize(("room", "plan"), [(9_000, "data"), (4_500, "sharded-data"), (500, "")])
def test_the_plan_behind_a_loss_has_room_for_the_state(
    room: int, plan: str, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """Of tensor ranks three are left; parameters, gradients and AdamW's states are 6.7 kB."""
    file = tmp_path / "found.json"
    ending, _ = launched(file, "hybrid:tensor=2", f"room={room}", "1:6:step")
    if plan:
        (generation,) = gone_on(ending, file, undisturbed)
        assert (generation["ranks"], generation["plan"]) == (3, plan)
    else:
        assert "is predicted to need" in str(ending.failure)
        assert "which has memory for 500 bytes: go on with the newest" in str(ending.failure)


def test_ranks_keep_their_rows(tmp_path: Path) -> None:
    """Against one process whose batches have other rows behind the same steps: 12 of four ranks,
    9 of three, and the scheduler goes on by rows."""
    file = tmp_path / "found.json"
    words = "batches=ranks", "1:3:sum", "0:7:step", "0:8:wait3"
    ending, _ = launched(file, "data", *words, restarts=1)
    assert ending.code == 0, ending.failure
    found = json.loads(file.read_text())
    changed = [(g["from_step"], g["ranks"]) for g in found["generations"]]
    assert changed[0] == (3, 3) and {3, 4} & {ranks for _, ranks in changed[1:]}
    rows = ",".join(f"{step}={3 * ranks}" for step, ranks in changed)
    alone = tmp_path / "alone.json"
    assert launched(alone, "single", f"rows={rows}", ranks=1)[0].code == 0
    assert apart(found, json.loads(alone.read_text())) < NEAR


COPIES = {  # plan, K, faults, the steps behind which ranks go on, and how many there are then
    "sharded states": ("sharded-data", 1, "1:3:step 2:8:update", [3, 8], [3, 2]),
    "zero1": ("zero1", 1, "0:3:step", [3], [3]),
    "every third step": ("sharded-data", 3, "1:3:step 3:9:behind", [1, 8], [3, 2]),
    "over an epoch's end": ("sharded-data", 4, "2:6:step", [5], [3]),
    "behind an epoch's end": ("sharded-data", 4, "2:5:evaluate 1:12:update", [5, 10], [3, 2]),
    "stages": ("pipeline:stages=2; @ranks=0-1", 2, "1:4:update", [3], [3]),
    "tensor": ("hybrid:tensor=4", 2, "0:4:update", [3], [3]),
    "while they are made": ("sharded-data", 2, "1:5:copy", [3], [3]),
    "in the exchange of one": ("sharded-data", 2, "3:5:send", [3], [3]),
    "servers": ("data; @synchronisation=server:2", 1, "0:4:step", [4], [3]),
    "a server of its own": (
        "data; @synchronisation=server:1; @servers=2", 1, "2:4:step", [4], [3],
    ),
    "when they are back": ("sharded-data", 2, "1:4:step 3:4:restored", [3], [2]),
}  # fmt: skip


@pytest.mark.wide(3)
@pytest.mark.parametrize("case", COPIES)
def test_what_one_rank_alone_had_comes_from_copies(
    case: str, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    plan, every, words, steps, ranks = COPIES[case]
    file = tmp_path / "found.json"
    ending, _ = launched(file, plan, f"replicate={every}", *words.split())
    generations = gone_on(ending, file, undisturbed)
    assert [(g["from_step"], g["ranks"]) for g in generations] == [*zip(steps, ranks, strict=True)]
    assert all(g["state_from"] == "peers" for g in generations)
    assert all(g["lost_steps"] <= every for g in generations)
    taken, predicted = json.loads(file.read_text())["copies"]
    assert (predicted > 0) == (generations[-1]["plan"] != "data")  # where twins have all of it
    assert taken == pytest.approx(predicted, rel=0.05) or every > 1  # of two, at the end


SWITCHES = {  # plan, another one, the place where a rank is lost, whether copies are taken
    "before": ("data", "hybrid:tensor=2", "1:4:copy", False),
    "in the move": ("data", "hybrid:tensor=2", "1:4:move", None),
    "behind it": ("data", "hybrid:tensor=2", "1:4:moved", None),
    "from parts": ("hybrid:tensor=2", "sharded-data", "2:4:move", True),
    "to the whole": ("sharded-data", "data", "3:4:move", True),
    "to a trace that is cut": ("hybrid:tensor=2", "data; first=sharded-data", "1:4:move", None),
    "to stages": ("hybrid:tensor=2", "data; @stages=0-1:first/2-3:last", "2:4:moved", None),
    "from parts to others": ("sharded-data", "hybrid:stages=2", "3:4:moved", None),
}  # fmt: skip


@pytest.mark.wide(2)
@pytest.mark.parametrize("case", SWITCHES)
def test_a_rank_that_is_lost_in_a_switch_leaves_one_state(
    case: str, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    plan, other, fault, copied = SWITCHES[case]
    file = tmp_path / "found.json"
    ending, _ = launched(file, plan, "replicate=99", fault, f"switch@4={other}")
    (generation,) = gone_on(ending, file, undisturbed)
    assert (generation["from_step"], generation["ranks"]) == (4, 3)
    assert copied is None or (generation["state_from"] == "peers") == copied


def test_nobody_comes_under_a_plan_that_takes_nobody(tmp_path: Path) -> None:
    file, words = tmp_path / "found.json", "1:4:step *:7:sleep10 *:10:wait4 switch@9=data"
    switch = "switch@5=data; @compression=int8"
    ending, said = launched(file, "data", switch, *words.split(), restarts=2)
    assert ending.code == 0, (said, ending.failure)
    first, then = json.loads(file.read_text())["generations"]
    assert (first["from_step"], first["ranks"], then["ranks"]) == (4, 3, 4)
    assert then["from_step"] >= 9 and then["cause"] == "1 rank came"


@pytest.mark.parametrize(
    ("freezes", "waits"), [("freeze@5", "*:7:sleep12"), ("freeze@7", "*:7:wait4")]
)
def test_nobody_comes_to_a_model_that_is_another_than_it_was(
    freezes: str, waits: str, tmp_path: Path
) -> None:
    """What a callback has frozen one that comes does not know, also if it is to come just then."""
    files = tmp_path / "found.json", tmp_path / "undisturbed.json"
    for file, faults in zip(files, (["1:4:step", waits], []), strict=True):
        ending, said = launched(file, "data", freezes, *faults, restarts=2)
        assert ending.code == 0, (said, ending.failure)
    found, other = (json.loads(file.read_text()) for file in files)
    assert {g["ranks"] for g in found["generations"]} == {3} and apart(found, other) < NEAR


COMES = {  # plan, faults and where those that are left wait for so many ranks, the ranks then
    "data": ("data", "1:4:step *:7:wait4", [3, 4]),
    "the first": ("data", "0:4:sum *:10:wait4", [3, 4]),
    "twice": ("data", "2:3:step 4:8:sum *:7:wait4 *:12:wait4", [3, 4, 3, 4]),
    "before an epoch's checkpoint": ("data", "compare=3 1:4:step *:5:best4", [3, 4]),
    "it alone is left": (
        "data", "1:3:step *:6:wait4 0:8:step 2:8:step 3:8:step *:11:wait4", [3, 4, 1, 2, 3, 4],
    ),
    "tensor": ("hybrid:tensor=2", "1:4:step *:7:wait4", [3, 4]),
    "stages": ("hybrid:stages=2", "1:4:step *:11:wait4", [3, 4]),
    "idle ranks": ("data; @ranks=0-2", "1:4:update *:12:wait4", [3, 4]),
    "servers": ("data; @synchronisation=server:1; @servers=2", "1:4:step *:7:wait4", [3, 4]),
    "one is lost as another comes": ("data", "1:4:step *:7:wait4 0:7:move *:10:wait4", None),
    "cut for one layout": ("data; first=sharded-data", "1:4:step *:7:wait4", [3, 4]),
    "traced twice": ("data", "data=cased 1:4:step *:7:wait4", [3, 4]),
    "cut again": ("data; first=hybrid:tensor=2", "1:4:step *:7:wait4", [3, 4]),
    "stages that are given": (
        "data; @stages=0-1:first/2-3:last", "1:4:step *:11:wait4", [3, 4],
    ),
}  # fmt: skip


@pytest.mark.wide(2)
@pytest.mark.parametrize("case", COMES)
def test_a_rank_that_is_lost_comes_back(
    case: str, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    plan, words, ranks = COMES[case]
    file = tmp_path / "found.json"
    ending, _ = launched(file, plan, *words.split(), restarts=2)
    generations = gone_on(ending, file, undisturbed)
    counts = [g["ranks"] for g in generations]
    if ranks is not None and case != "it alone is left":  # they may come at once
        assert counts == ranks
    assert counts[-1] == 4 and (generations[-1]["plan"] == "data") == (plan == "data")


APART = {  # plan, faults; the steps of each lost worker whose gradients its server has
    "downpour": ("data; @synchronisation=downpour:1", "2:4:step", [4]),
    "one behind another": ("data; @synchronisation=downpour:1", "1:3:fetch 3:11:step", [4, 11]),
    "a server of its own": ("data; @synchronisation=downpour:1; @servers=1", "2:6:fetch", [7]),
    "ssp": ("data; @synchronisation=ssp:1,stale=2", "3:7:step", [7]),
    "shat": ("data; @synchronisation=shat:1", "1:6:fetch", [7]),
    "two at once": ("data; @synchronisation=downpour:1", "1:5:step 3:5:step", [5, 5]),
    "at an epoch's end": ("data; @synchronisation=downpour:1", "2:5:drain", [5]),
    "it comes back": ("data; @synchronisation=downpour:1; @servers=3", "1:4:step *:7:wait4", [4]),
}  # fmt: skip


@pytest.mark.wide(3)
@pytest.mark.parametrize("case", APART)
def test_workers_go_on_without_a_lost_one_and_say_what_is_left_out(
    case: str, tmp_path: Path
) -> None:
    """A server has stepped once by each gradient of the workers that there were, but for those
    that are told to be left out, and those that a lost worker was ahead."""
    plan, words, done = APART[case]
    file, comes = tmp_path / "found.json", "wait" in words
    ending, said = launched(file, plan, *words.split(), restarts=2 * comes)
    assert ending.code == 0, ending.failure
    found = json.loads(file.read_text())
    told = [text for line in said for text in line.split("; ")]
    assert comes or len(told) == sum(len(g["culprit"]) for g in found["generations"])
    assert all(math.isfinite(x) for x in found["losses"])
    own = plan.count("@servers")
    workers, behind, expected = 4 - own, 0, 0
    lost = iter(done)
    for g in found["generations"]:
        expected += workers * (g["from_step"] - behind) - g["left_out"]
        expected += sum(max(0, next(lost) - g["from_step"]) for _ in g["culprit"])
        workers, behind = g["ranks"] - own, g["from_step"]
        assert g["plan"].partition("; @servers")[0] == plan.partition("; @servers")[0]
    assert next(lost, None) is None
    assert found["updates"] == expected + workers * (EPOCHS * STEPS - behind)


def test_an_epoch_is_validated_where_ranks_go_back_in_a_recovery(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """One rank is lost in its validation, another one while parts move behind that."""
    file = tmp_path / "found.json"
    ending, _ = launched(file, "hybrid:tensor=2", "replicate=99", "1:5:evaluate", "2:5:move")
    (generation,) = gone_on(ending, file, undisturbed)
    assert (generation["from_step"], generation["ranks"]) == (5, 2)
    epochs = json.loads(file.read_text())["epochs"]
    assert [epoch for epoch, _ in epochs] == [1, 2, 3]


DISK = {  # plan, faults, the steps behind which ranks go on, how many there are, those made again
    "before an epoch has ended": ("sharded-data", "1:3:step", [0], [3], [3]),
    "sharded states": ("sharded-data", "1:8:step", [5], [3], [3]),
    "a whole epoch": ("sharded-data", "2:10:evaluate", [5], [3], [5]),
    "tensor": ("hybrid:tensor=4", "2:11:sum", [10], [3], [1]),
    "stages": ("pipeline:stages=2; @ranks=0-1", "1:7:update", [5], [3], [2]),
    "when they have room for it": ("sharded-data", "1:8:step 3:8:room", [5], [2], [3]),
    "a server": ("data; @synchronisation=server:2", "0:12:step", [10], [3], [2]),
    "parts of it are read": (
        "sharded-data", "1:8:step 2:8:loaded! 3:8:loaded", [5, 5], [3, 2], [3, 0],
    ),
    "one has read all of it": (
        "hybrid:tensor=4", "2:11:sum 1:11:loaded! 3:11:loaded", [10, 10], [3, 2], [1, 0],
    ),
}  # fmt: skip


@pytest.mark.wide(2)
@pytest.mark.parametrize("case", DISK)
def test_what_nobody_has_in_memory_comes_from_the_newest_checkpoint(
    case: str, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    plan, words, steps, ranks, again = DISK[case]
    file = tmp_path / "found.json"
    ending, _ = launched(file, plan, "replicate=off", *words.split())
    generations = gone_on(ending, file, undisturbed)
    assert [(g["from_step"], g["ranks"]) for g in generations] == [*zip(steps, ranks, strict=True)]
    assert [g["lost_steps"] for g in generations] == again
    sources = {"disk", "survivors"} if case == "one has read all of it" else {"disk"}
    assert {g["state_from"] for g in generations} == sources
    epochs = json.loads(file.read_text())["epochs"]  # none of them twice
    assert [epoch for epoch, _ in epochs] == [1, 2, 3]
    expected = [loss for _, loss in undisturbed["epochs"]]
    assert [loss for _, loss in epochs] == pytest.approx(expected, abs=NEAR)


@pytest.mark.wide(1)
@pytest.mark.parametrize(
    ("data", "plan"),
    [
        ("shards", "data"),
        ("stated", "data"),
        ("shards", "sharded-data"),
        ("stated", "hybrid:tensor=3"),
    ],
)
def test_a_stream_of_which_a_lost_rank_has_read_a_part(
    data: str, plan: str, tmp_path: Path
) -> None:
    """In the last epoch, as others would divide it for as many ranks as there are then."""
    files = [tmp_path / f"{n}.json" for n in range(2)]
    assert launched(files[0], plan, f"data={data}", "9:99:step", ranks=3)[0].code == 0
    ending, _ = launched(files[1], plan, f"data={data}", "replicate=1", "1:12:update", ranks=3)
    generations = gone_on(ending, files[1], json.loads(files[0].read_text()))
    assert [g["ranks"] for g in generations] == [2] and generations[0]["from_step"] >= 11


TIED = {
    "data": "1:7:update",
    "sharded-data": "2:7:behind",
    "hybrid:tensor=2": "3:7:agree",
    "hybrid:stages=2": "1:7:update",
    "hybrid:tensor=2,states=parameters": "2:7:step",
}


@pytest.mark.wide(1)
@pytest.mark.parametrize("plan", TIED)
def test_shared_frozen_and_unused_weights(plan: str, tmp_path: Path) -> None:
    files = [tmp_path / f"{n}.json" for n in range(2)]
    assert launched(files[0], "data", "data=tied", ranks=2)[0].code == 0
    ending, _ = launched(files[1], plan, "data=tied", TIED[plan])
    generations = gone_on(ending, files[1], json.loads(files[0].read_text()))
    assert [g["ranks"] for g in generations] == [3]


FLIPS = {  # faults, the steps behind which ranks go on, those made again
    "between two looks": ("compare=2 2:7:behind~", 5, 3),
    "before a checkpoint": ("compare=4 1:14:behind~", 10, 5),
    "before the first one": ("compare=2 1:1:behind~", 0, 2),
    "rank 0, and another one is killed in the recovery": (
        "compare=2 0:7:behind~ 3:8:regroup",
        5,
        3,
    ),
}


@pytest.mark.wide(1)
@pytest.mark.parametrize("case", FLIPS)
def test_a_rank_with_a_bit_that_flips_is_lost(
    case: str, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    words, step, again = FLIPS[case]
    file = tmp_path / "found.json"
    ending, said = launched(file, "data", *words.split())
    generations = gone_on(ending, file, undisturbed)
    assert [(g["from_step"], g["lost_steps"]) for g in generations] == [(step, again)]
    assert generations[0]["state_from"] == "disk" and "differs from its replicas" in said[0]


BACKS = {  # of a roll back from step 10 to step 5: plan, fault, whether it is over
    "before it is read": ("data", "1:10:load", False),
    "in the middle": ("sharded-data", "2:10:loaded", False),
    "one has read it": ("data", "1:10:loaded", True),
    "behind it": ("hybrid:tensor=2", "3:6:update", True),
}


@pytest.mark.wide(1)
@pytest.mark.parametrize("case", BACKS)
def test_a_rank_that_is_lost_in_a_roll_back(
    case: str, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """Where it is not over all go back to that checkpoint, and on with the data of then."""
    plan, fault, over = BACKS[case]
    files = [tmp_path / f"{n}.json" for n in range(2)]
    assert launched(files[0], "data", "spike=8", ranks=2)[0].code == 0
    rolled = json.loads(files[0].read_text())
    assert len(rolled["losses"]) == 10
    ending, _ = launched(files[1], plan, "spike=8", "replicate=1", fault)
    (generation,) = gone_on(ending, files[1], rolled if over else undisturbed)
    assert generation["ranks"] == 3


def test_one_of_two_with_a_bit_that_flips_ends_a_run(tmp_path: Path) -> None:
    words = "compare=2", "1:7:behind~"
    ending, _ = launched(tmp_path / "found.json", "data", *words, ranks=2)
    assert ending.code and ending.failure is not None and ending.failure.fault is not None
    assert "one of ranks [0, 1] differs behind step 8" in ending.failure.fault.sentence


def test_a_loss_behind_the_loss_of_all(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    """The ranks that have begun anew know losses of their own steps."""
    file, words = tmp_path / "found.json", "0:7:step 1:7:step 2:7:step 3:8:step"
    ending, _ = launched(
        file, "sharded-data", "replicate=off", *words.split(), ranks=3, restarts=2
    )
    assert ending.code == 0, ending.failure
    found = json.loads(file.read_text())
    anew, lost = found["generations"]
    assert anew["state_from"] == lost["state_from"] == "disk"
    assert (anew["from_step"], anew["ranks"], len(anew["culprit"])) == (5, 3, 3)
    assert anew["lost_steps"] <= 2 and 0 < anew["recovered_seconds"] < 60
    expected = {**undisturbed, "losses": undisturbed["losses"][STEPS:]}
    assert apart(found, expected) < NEAR


@pytest.mark.wide(1)
@pytest.mark.parametrize("batches", ["1:x2", "auto:6-24"])
def test_batches_that_change_go_on_from_disk(batches: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    ending, _ = launched(file, "data", f"batches={batches}", "1:6:step")
    assert ending.code == 0, ending.failure
    found = json.loads(file.read_text())
    assert [g["state_from"] for g in found["generations"]] == ["disk"]
    assert all(math.isfinite(loss) for loss in found["losses"])


def test_a_resumed_run_goes_on_from_where_it_began(tmp_path: Path) -> None:
    plan, files = "data; @synchronisation=local:2", [tmp_path / f"{n}.json" for n in range(3)]
    assert launched(files[0], plan, "9:99:step", ranks=3)[0].code == 0
    resume = f"resume={files[0].with_suffix('.saved') / 'epoch-1'}"
    assert launched(files[1], plan, resume, ranks=2)[0].code == 0
    ending, _ = launched(files[2], plan, resume, "1:7:step", ranks=3)
    assert ending.code == 0, ending.failure
    found, expected = (json.loads(file.read_text()) for file in (files[2], files[1]))
    (generation,) = found["generations"]
    assert (generation["from_step"], generation["lost_steps"]) == (5, 2)
    assert apart(found, expected) < NEAR and found["metrics"] == expected["metrics"]


BACK = {  # plan, fault, ranks at first, the plan that goes on
    "local": ("data; @synchronisation=local:2", "1:8:step", 4, ""),
    "diloco": ("data; @synchronisation=diloco:3", "0:7:step", 4, ""),
    "stale": ("data; @synchronisation=stale:1", "2:9:update", 4, ""),
    "int8": ("data; @compression=int8", "2:6:behind", 3, ""),
    "powersgd": ("data; @compression=powersgd:2", "1:9:agree", 4, ""),
    "tensor": ("hybrid:tensor=2; @compression=topk:0.1", "2:6:step", 4, "data"),
    "no flush": ("pipeline:stages=2,microbatches=2; @schedule=pipedream", "1:7:step", 2, "data"),
}  # fmt: skip


@pytest.mark.wide(2)
@pytest.mark.parametrize("case", BACK)
def test_what_a_lost_rank_alone_owed_is_of_the_newest_checkpoint(
    case: str, tmp_path: Path
) -> None:
    """Against a run that is resumed from that checkpoint, on as many ranks as are left."""
    plan, fault, ranks, then = BACK[case]
    file, again = tmp_path / "found.json", tmp_path / "again.json"
    ending, _ = launched(file, plan, "replicate=off", fault, ranks=ranks)
    assert ending.code == 0, ending.failure
    found = json.loads(file.read_text())
    (generation,) = found["generations"]
    assert (generation["from_step"], generation["state_from"]) == (STEPS, "disk")
    saved = file.with_suffix(".saved") / "epoch-1"
    resumed, _ = launched(again, then or plan, f"resume={saved}", ranks=ranks - 1)
    assert resumed.code == 0, resumed.failure
    expected = json.loads(again.read_text())
    expected["losses"] = found["losses"][:STEPS] + expected["losses"]
    assert apart(found, expected) < NEAR and found["metrics"] == expected["metrics"]


@pytest.mark.parametrize(("fault", "step"), [("0:12:step", 10), ("0:4:step", 0)])
def test_a_lost_server_of_workers_without_each_other_comes_from_disk(
    fault: str, step: int, tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    ending, _ = launched(file, "data; @synchronisation=downpour:1", fault)
    assert ending.code == 0, ending.failure
    found = json.loads(file.read_text())
    (generation,) = found["generations"]
    assert (generation["from_step"], generation["state_from"]) == (step, "disk")
    assert found["updates"] == 3 * (EPOCHS * STEPS - step)  # of the server that there is now


def test_a_loop_of_its_own_of_workers_without_each_other_ends(tmp_path: Path) -> None:
    plan, words = "data; @synchronisation=downpour:1", ("own=loader", "1:4:step")
    ending, _ = launched(tmp_path / "found.json", plan, *words)
    told = "workers of a loop of a script's own are at different steps (downp"
    assert ending.code != 0 and told in str(ending.failure)
