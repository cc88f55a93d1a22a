"""`synchromesh compare`, and the tutorial: its commands run as they stand there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from synchromesh.cli import main, parser
from synchromesh.cli.asked_study import AskedStudy
from synchromesh.study.folder import StudyFolder

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()


def commands() -> list[str]:
    """The commands of the tutorial, in their order."""
    blocks = re.findall(r"```sh\n(.*?)```", TUTORIAL, re.DOTALL)
    joined = "".join(blocks).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tutorial_works_as_it_stands(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n# mine.py\n(.*?)```", TUTORIAL, re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "SYNCHROMESH_CACHE": str(tmp_path / "cache")}
    for command in commands():
        ran = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert ran.returncode == 0, f"{command}\n{ran.stderr[-3000:]}"
    results = json.loads((tmp_path / "study" / "results.json").read_text())
    runs = {(r["strategy"], r["predicted"]): r for r in results["runs"]}
    assert all(r["status"] == "done" for r in runs.values())
    ours = {(s, False) for s in ("single", "data", "auto", "ddp")}
    assert set(runs) == ours | {(s, True) for s in ("single", "data", "auto")}
    for strategy in ("single", "data", "auto", "ddp"):
        run = runs[strategy, False]
        assert run["timed_steps"] > 10
        # of the device that has most: `auto` may leave any of them idle
        assert max(kinds["parameters"] for kinds in run["peak_memory_bytes"]) > 0
        shares = run["communication_share"]
        assert 0 <= shares["exposed"] <= 1 - run["computation_share"] + 1e-9
        assert (tmp_path / "study" / run["trace"]).exists()
    sent = runs["data", False]["sent_bytes_per_step"]
    # counted by the loopback interface, on which other tests send meanwhile
    assert runs["ddp", False]["sent_bytes_per_step"][0] >= 0.9 * sent[0]
    losses = []
    for strategy in ("single", "data", "auto", "ddp"):
        run = runs[strategy, False]
        assert [e["epoch"] for e in run["metrics"]] == [1, 2, 3] and run["dollars"] > 0
        reached = run["to_target"]
        assert reached["target"] == "accuracy=0.6" and reached["epochs"] is not None
        losses.append(run["metrics"][0]["loss"])
    assert losses == pytest.approx([losses[0]] * 4, 1e-3)
    for page in ("first.html", "study/report.html"):
        assert (tmp_path / page).read_text().startswith("<!doctype html>")


def test_a_file_that_has_changed_makes_another_study(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n# mine.py\n(.*?)```", TUTORIAL, re.DOTALL)
    file, asked = tmp_path / "mine.py", []
    for text in (code, code, code.replace("lr=3e-3", "lr=1e-3")):
        file.write_text(text)
        words = ["compare", f"{file}:workload", "--strategies", "single"]
        asked.append(AskedStudy(parser().parse_args(words)).document())
    assert asked[0] == asked[1] != asked[2]
    kept = StudyFolder(tmp_path / "study")
    kept.open(asked[0])
    with pytest.raises(ValueError, match=r"another study, which differs in file .*mine\.py: name"):
        kept.open(asked[2])


def test_a_metric_that_fails_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n# mine.py\n(.*?)```", TUTORIAL, re.DOTALL)
    file = tmp_path / "mine.py"
    file.write_text(re.sub(r"(def right\(.*\n)", r"\1    raise KeyError('oops')\n", code))
    words = ["compare", f"{file}:workload", "--epochs", "1", "--target", "accuracy=0.5"]
    assert main([*words, "-o", str(tmp_path / "study")]) == 2
    error = capsys.readouterr().err
    assert re.search(
        r"the metric of .* fails on 32 rows \(KeyError: .*oops.*mine.py, line ", error
    )
    assert error.count("\n") == 1 and not (tmp_path / "study").exists()


def test_more_processes_than_the_memory_holds_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("synchromesh.study.processes.most_processes", lambda workloads, devices: 1)
    words = ["compare", "digits/cnn", "--strategies", "hybrid", "--nproc", "2"]
    with pytest.warns(UserWarning, match="--nproc 2 is more processes than the memory"):
        assert main([*words, "-o", str(tmp_path / "study")]) == 1


def test_a_metric_that_gives_means_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n# mine.py\n(.*?)```", TUTORIAL, re.DOTALL)
    file = tmp_path / "mine.py"
    file.write_text(code.replace("== labels).sum()", "== labels).float().mean()"))
    words = ["compare", f"{file}:workload", "--epochs", "1", "--target", "accuracy=0.5"]
    assert main([*words, "-o", str(tmp_path / "study")]) == 2
    error = capsys.readouterr().err
    assert "gives a mean: accuracy of 32 rows is" in error and "give the sum over" in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategies", "dpd"], "'dpd' is no strategy (did you mean ddp?)"),
        (["--target", "acuracy=0.9", "--epochs", "1"], "the workload's metric gives accuracy"),
        (["--target", "accuracy=0.9", "--steps", "3"], "--target needs validation"),
        (["--instance", "p3.2xlrge"], "there is no price of an instance 'p3.2xlrge'"),
        (["--instance", "p3.2xlarge", "--region", "mars"], "for mars: the table has us-east-1"),
        (["--region", "us-east-1"], "--region and --price-date are those of an --instance"),
        (["--batch-sizes", "64,5000"], "batch_size(5000) > 1437 items"),
        (["--predict", "v10"], "the catalogue has no cluster 'v10x1'"),
        (["--at-most", "9", "--epochs", "1"], "--at-most limits the steps that are timed"),
        (["--lab", "none.yaml"], "none.yaml: cannot be read"),
        (["--data", "/nowhere"], "digits come with scikit-learn and read no folder"),
        (["--strategies", "data,ddp", "--nproc", "1"], "--strategies data,ddp need more than one"),
        (["--plan", "data; nosuch=tensor"], "'nosuch' matches no module of digits/cnn"),
        (["--plan", "data; clasifier=tensor"], "digits/cnn; did you mean 'classifier'"),
        (["--nproc", "2,99", "--batch-sizes", "8,64"], "--nproc 99 is more than the rows of any"),
        (["digits/cnn"], "the workload digits/cnn is there twice"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_made(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "digits/cnn", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("synchromesh: ") and error.count("\n") == 1
    assert not any(tmp_path.iterdir())
