"""Tests of what the command says to bad input: one sentence, exit code 2, no process started."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from synchromesh import __version__
from synchromesh.cli import main, ranks
from synchromesh.cli.console import summary
from synchromesh.cli.ranks import hush


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No rank of a group; a folder of its own; any process that is started is a failure."""
    for name in ("RANK", "WORLD_SIZE", "SYNCHROMESH_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(ranks, "start", lambda *a: pytest.fail("processes were started"))


def told(words: str | list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence on standard error."""
    try:
        code = main(words.split() if isinstance(words, str) else words)
    except SystemExit as error:  # argparse
        code = error.code
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.count("\n") == 1 and "Traceback" not in err, err
    return err.strip()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("frob", "invalid choice: 'frob' (choose from"),
        ("trian", "; did you mean 'train'"),
        ("train", "the following arguments are required: TARGET; see synchromesh train --help"),
        (
            "train digits/cnn -o x",
            "synchromesh train: unrecognized arguments: -o x; see synchromesh train --help",
        ),
        (
            "lab up --what",
            "synchromesh lab up: unrecognized arguments: --what; see synchromesh lab",
        ),
        ("train digits/cnn --nproc 0", "--nproc: '0' is not a whole number of at least 1"),
        ("train digits/cnn --batch-size x", "--batch-size: 'x' is not a whole number"),
        ("doctor --port 65536", "--port: 65536 is no port: ports are 1 to 65535"),
        ("train digits/cnn --seed -1", "--seed: '-1' is not a whole number from 0"),
        ("train digits/cnn --epochs 1 --steps 1", "--steps: not allowed with argument --epochs"),
        ("verify digits/cnn --nproc 1 --plan data --lr-rule staleness", "no server steps by"),
        ("train digits/cnn --plan dtaa", "unknown layout 'dtaa'; did you mean 'data'"),
        ("train digits/cnn --plan nowhere.yaml", "nowhere.yaml: cannot be read"),
        ("train digits/cnn --nproc 2 --plan pipeline:stages=3", "do not divide 2 devices"),
        ("explain digits/cnn --plan auto", "explain describes a given plan"),
        ("train digits/cnn --nproc 2 --plan data;@ranks=0,5", "rank 5, but there are 2 ranks"),
        (
            "train digits/cnn --nproc 3 --plan hybrid:tensor=2",
            "hybrid:tensor=2: data(1) x tensor(2) != 3 devices",
        ),
        (
            "train digits/cnn --nproc 3 --plan data;a=hybrid:tensor=2;b=hybrid:data=2",
            "data(1) x tensor(2) != 3 devices: degrees that divide 3 are 1, 3; @ranks=... leaves "
            "devices idle; hybrid:data=2: data(2) x tensor(1) != 3 devices",
        ),
        ("verify digits/cnn --nproc 2 --plan data;a=hybrid:tensor=3", "tensor(3) != 2 devices"),
        (
            "verify digits/cnn --bf16 --dtype float64",
            "--bf16 leaves float64 as it is: leave --dtype",
        ),
        ("explain digits/cnn --nproc 2 --plan data;a=hybrid:tensor=3", "tensor(3) != 2 devices"),
        ("train digits/cn", "there is no bundled workload 'digits/cn' (did you mean digits/cnn"),
        ("train digits/cnn --data .", "digits come with scikit-learn"),
        ("train digits/cnn --batch-size 1438", "batch_size(1438) > 1437 items"),
        ("train mnist/vgg11 --data nowhere", "nowhere has neither train-images-idx3-ubyte"),
        ("train digits/cnn --resume nowhere", "--resume nowhere: there is no such folder"),
        ("train nowhere.py:build", "there is no file nowhere.py"),
        ("train digits/cnn --output /proc/none", "/proc/none cannot be written to"),
        ("verify digits/cnn --dtype int8", "--dtype: invalid choice: 'int8'"),
        (
            "explain digits/cnn --nproc 3 --plan hybrid:tensor=2",
            "data(1) x tensor(2) != 3 devices",
        ),
        ("explain digits/cnn --plan data;clasifier=tensor", "pattern 'clasifier' matches no"),
        ("run nowhere.py", "there is no script nowhere.py"),
    ],
)
def test_bad_input(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in told(words, capsys)


def test_a_refused_run_leaves_no_folder_and_takes_none_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ranks, "start", lambda words, count, forks: 2)
    words = ["train", "digits/cnn", "--nproc", "2", "--plan", "data; nope=tensor"]
    assert main(words) == 2 and not [*tmp_path.iterdir()]
    (tmp_path / "mine").mkdir()
    assert main([*words, "--output", "mine"]) == 2 and [*tmp_path.iterdir()] == [tmp_path / "mine"]

    def start(words: list[str], count: int, forks: object) -> int:
        (Path(words[-1]) / "run.json").write_text("{}")
        return 1

    monkeypatch.setattr(ranks, "start", start)
    assert main(words) == 1
    (run,) = (tmp_path / "runs").iterdir()
    assert [p.name for p in run.iterdir()] == ["run.json"]


def test_an_empty_data_set_is_refused_before_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "import synchromesh as sm\ndef build():\n"
        "    return sm.Workload(model=list, loss=max, optimizer=list, train_data=[], batch_size=1)"
    )
    assert "mine.py:build failed: line 3 (" in (sentence := told("train mine.py:build", capsys))
    assert "train_data is empty (0 items)" in sentence


def test_names_with_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["train", "\x1b[2J"],
        ["frob\x1b[2J"],
        ["explain", "digits/cnn", "--plan", "\x1b]0;x"],
    ):
        assert "\x1b" not in told(words, capsys)


def test_run_inside_a_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "`run` starts ranks and this process is one already" in told("run x.py", capsys)


def test_a_rank_in_a_world_without_a_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    sentence = told("train digits/cnn", capsys)
    assert "WORLD_SIZE is not a whole number ('two')" in sentence


def test_closed_standard_streams(tmp_path: Path) -> None:
    command = f"{sys.executable} -m synchromesh plan --clusters"
    script = f"{command} >&- && {command} <&- 2>&- | head -1"
    found = subprocess.run(script, shell=True, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "") and found.stdout.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_a_sentence() -> None:
    command = [sys.executable, "-m", "synchromesh", "plan", "--clusters"]
    with open("/dev/full", "w") as full:
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    sentence = "synchromesh: No space left on device: standard output\n"
    assert (found.returncode, found.stderr) == (2, sentence)


def test_a_reader_who_leaves_early_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        summary("x", {"loss": "1"})  # rich's own console would end the process with 1
        summary("x", {"loss": "2"})


def test_a_metric_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    summary("x", {"\x1b[31m": "1"})
    assert "\x1b" not in capsys.readouterr().out


def test_version_and_help_need_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--version"], ["--help"], ["train", "--help"]):
        with pytest.raises(SystemExit) as error:
            main(words)
        assert error.value.code == 0
    assert __version__ in capsys.readouterr().out


def test_ranks_get_the_same_words_and_an_output_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[tuple[list[str], int]] = []

    def start(words: list[str], count: int, forks: object) -> int:
        output = Path(words[words.index("--output") + 1]) if "--output" in words else None
        assert output is None or (tmp_path / output / "checkpoints").is_dir()
        started.append((words, count))
        return 7

    monkeypatch.setattr(ranks, "start", start)
    assert main(["train", "digits/cnn", "--nproc", "3", "--plan", "tensor", "--steps", "2"]) == 7
    words, count = started[0]
    assert count == 3 and words[:4] == ["-m", "synchromesh", "train", "digits/cnn"]
    output = Path(words[words.index("--output") + 1])
    assert output.parent == Path("runs") and output.name.startswith("digits-cnn-")
    assert not (tmp_path / "runs").exists()  # nothing was written to it
    assert main(["verify", "digits/cnn", "--nproc", "2"]) == 7
    assert started[1] == (["-m", "synchromesh", "verify", "digits/cnn", "--nproc", "2"], 2)


def test_a_script_gets_its_own_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[tuple[list[str], int]] = []
    monkeypatch.setattr(ranks, "start", lambda words, count: started.append((words, count)) or 5)
    (tmp_path / "mine.py").write_text("")
    assert main(["run", "--nproc", "3", "mine.py", "--nproc", "9", "--json", "x"]) == 5
    assert started == [(["mine.py", "--nproc", "9", "--json", "x"], 3)]


def test_what_a_target_prints_is_not_in_the_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from synchromesh.workloads.target import load\n"
        "def build():\n    print('loading')\n    return load('digits/cnn', synthetic=True)"
    )
    assert main(["explain", "mine.py:build", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["plan"] == "data" and "loading" in err
    assert main(["explain", "mine.py:build"]) == 0
    assert capsys.readouterr().out.startswith("loading")


def test_explain_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "digits/cnn", "--plan", "data;classifier.0=tensor", "--nproc", "4"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {c["name"]: (c["data"], c["tensor"]) for c in document["components"]} == {
        "features.0": (4, 1), "features.2": (4, 1), "features.5": (4, 1),
        "classifier.0": (1, 4), "classifier.2": (4, 1),
    }  # fmt: skip
    (linear,) = [c for c in document["components"] if c["name"] == "classifier.0"]
    assert linear["parameter_bytes"] == 4 * (256 * 128 + 128) and linear["collectives"]
    assert {"kind", "direction", "bytes"} <= set(linear["collectives"][0])
    assert all({"from", "to", "bytes", "collective"} <= set(e) for e in document["edges"])
    assert main([*words, "--bf16", "--json"]) == 0
    mixed = json.loads(capsys.readouterr().out)
    assert (document["bf16"], mixed["bf16"]) == (False, True)
    (plain, narrow) = (
        next(e["bytes"] for e in d["edges"] if e["to"] == "classifier.0")
        for d in (document, mixed)
    )
    assert narrow * 2 == plain, "features between layouts are sent in bfloat16"
    (same,) = (c for c in mixed["components"] if c["name"] == "classifier.0")
    assert same["parameter_bytes"] == linear["parameter_bytes"], "parameters keep their type"
    assert main(["explain", "digits/cnn", "--plan", "tensor", "--nproc", "2"]) == 0
    assert "data(1) x tensor(2)" in capsys.readouterr().out


def test_warnings_are_one_line_and_rank_0_alone_warns(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hush()
    ours = warnings.formatwarning("no\x1b[2J", UserWarning, ranks.__file__, 3)
    assert ours == "synchromesh: warning: no\\x1b[2J\n"
    assert (
        warnings.formatwarning("old", DeprecationWarning, "a.py", 3)
        == "a.py:3: DeprecationWarning: old\n"
    )
