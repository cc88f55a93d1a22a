"""Tests of `train` and `verify` from end to end: logs, checkpoints, resuming, a clean stop."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from synchromesh.adapt.decision import Decision
from synchromesh.checkpoint import checkpoint
from synchromesh.checkpoint.manifest import CheckpointError
from synchromesh.cli import main, training
from synchromesh.runs.run_folder import RunFolder
from synchromesh.training.events import StepDone
from synchromesh.training.fit import fit
from tests.profiling.hurried import hurried
from tests.ranks import run
from tests.traces import known

# 22 rows in batches of 4: six steps an epoch, the last one short. SIGTERM arrives with sample
# number $SIGNAL_AT; $PAUSE slows the samples down.
TARGET = """
import os, signal, time
import torch
import synchromesh as sm
from torch import nn

class Rows:
    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(22, 6, generator=generator, dtype=torch.float64)
        self.y = (self.x[:, :3]).argmax(1)
        self.read = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.read += 1
        chosen = os.environ.get("SIGNAL_RANK", os.environ["RANK"]) == os.environ["RANK"]
        if chosen and self.read == int(os.environ.get("SIGNAL_AT", 0)):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(float(os.environ.get("PAUSE", 0)))
        return self.x[index], self.y[index]

def build():
    def model():
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
    def metric(model, batch):
        return {"accuracy": (model(batch[0]).argmax(-1) == batch[1]).double().sum()}
    return sm.Workload(
        model=model, loss=loss, metric=metric, train_data=Rows(0), valid_data=Rows(1),
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), batch_size=4, epochs=3, name="tiny",
        scheduler=lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=10))
"""


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """This process is the only rank of a group, which traces the model of all tests once and
    measures in a hurry; its signal handlers come back."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("SYNCHROMESH_LAUNCHER", "SIGNAL_AT", "PAUSE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    (tmp_path / "tiny.py").write_text(TARGET)
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    with known("tiny"), hurried():
        yield
    for number, handler in before.items():
        signal.signal(number, handler)


def events(folder: str, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(x) for x in (Path(folder) / "log.jsonl").read_text().splitlines()]
    return [x for x in lines if x["event"] == kind]


def losses(folder: str) -> dict[int, float]:
    return {x["step"]: x["loss"] for x in events(folder, "step")}


def train(words: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert main(["train", "tiny.py:build", *words.split(), "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    document: dict[str, Any] = json.loads(out)
    return document


def test_a_run_leaves_its_log_plan_and_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    document = train("--output run --checkpoint-every 4", capsys)
    assert document["steps"] == 18 and document["epochs"] == 3 and document["stopped"] is None
    assert list(losses("run")) == list(range(1, 19))
    assert [(x["epoch"], x["step"]) for x in events("run", "epoch")] == [(1, 6), (2, 12), (3, 18)]
    accuracies = [x["accuracy"] for x in events("run", "epoch")]
    assert document["metrics"]["accuracy"] == accuracies[-1] and document["best"] == max(
        accuracies
    )
    assert document["compression"] == "none"
    assert document["synchronisation"] == "every-step" and document["sent_bytes_per_step"] == [0]
    assert all(0 <= a <= 1 and round(a * 22) == pytest.approx(a * 22) for a in accuracies)
    assert {p.name for p in Path("run/checkpoints").iterdir()} >= {
        "step-4", "step-8", "step-16", "epoch-1", "epoch-2", "epoch-3", "best",
    }  # fmt: skip
    assert not Path("run/checkpoints/step-12").exists()  # an epoch's end has its own
    assert Path("run/plan.yaml").read_text() == "{default: single}\n"
    log = Path("run/log.jsonl").read_bytes()
    assert main(["train", "tiny.py:build", "--output", "run", "--nproc", "1"]) == 2
    assert "--output run holds a run already: --resume run goes on" in capsys.readouterr().err
    assert Path("run/log.jsonl").read_bytes() == log


def test_the_noise_scale_is_in_log_and_result(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--plan", "single; @micro_batches=2", "--noise-scale", "--output", "run", "--json"]
    assert main(["train", "tiny.py:build", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    measured = document["noise_scale"]
    assert measured["steps"] >= 1 and measured["trace"] > 0 and measured["measured_share"] == 1
    logged = events("run", "noise scale")
    assert [(x["epoch"], x["step"]) for x in logged] == [(1, 6), (2, 12), (3, 18)]
    assert (
        {k: logged[-1][k] for k in measured} == measured == events("run", "end")[0]["noise_scale"]
    )
    words[1] = "single"
    assert main(["train", "tiny.py:build", *words[:3], "--output", "other"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "noise scale not known: steps have had one block of rows each" in shown
    assert train("--output third", capsys)["noise_scale"] is None


def test_learning_rates_for_another_batch_are_kept_by_a_resumed_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "--output run --plan single --batch-size 8 --lr-rule linear --warm-up 1 --steps 2"
    assert main(f"train tiny.py:build {words}".split()) == 0
    assert "times the workload's (linear, reached in" in capsys.readouterr().err
    begun = events("run", "start")[0]
    assert begun["lr_rule"] == "linear" and begun["lr_factor"] > 1.0
    assert (
        main(["train", "tiny.py:build", "--resume", "run", "--plan", "single", "--steps", "4"])
        == 0
    )
    again = events("run", "start")[1]
    names = ("lr_rule", "lr_factor", "warm_up_steps")
    assert [again[n] for n in names] == [begun[n] for n in names] and begun["warm_up_steps"] > 0
    capsys.readouterr()
    assert main(["train", "tiny.py:build", "--output", "other", "--warm-up", "1"]) == 2
    assert "a warm-up goes with a rule" in capsys.readouterr().err


def test_the_last_epoch_is_not_counted_before_it_is_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, line, row in (
        ("--steps 15", "epoch 3 (3 of 6 steps)  step 15", "2 and 3 steps of the next (15 steps)"),
        ("--epochs 3", "epoch 3  step 18", "3 (18 steps)"),
    ):
        resumed = "--resume run" if Path("run").exists() else "--output run"
        command = f"train tiny.py:build --plan single {resumed} {words}"
        assert main(command.split()) == 0
        out, err = capsys.readouterr()
        assert line in err and row in out


def test_a_log_without_room_ends_no_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RunFolder, event: str, **values: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "log", full)
    words = "train tiny.py:build --output run --steps 4 --plan single"
    assert main(words.split()) == 0
    err = capsys.readouterr().err
    assert err.count("run cannot be written to (No space left on device): training goes on") == 1
    assert Path("run/checkpoints/step-4").is_dir()


def test_resuming_continues_the_same_curve(capsys: pytest.CaptureFixture[str]) -> None:
    train("--output whole", capsys)
    train("--output part --steps 9", capsys)
    assert train("--resume part", capsys)["run_directory"] == str(Path("part"))
    assert losses("part") == losses("whole")  # bit for bit
    train("--resume part/checkpoints/epoch-1 --output again --plan tensor", capsys)
    assert losses("again") == {k: v for k, v in losses("whole").items() if k > 6}
    whole, part = (events(f, "epoch")[-1] for f in ("whole", "part"))
    assert whole["accuracy"] == part["accuracy"]


@pytest.mark.filterwarnings("ignore:the model runs whole")  # NaN equals nothing, its trace's too
def test_numbers_that_json_does_not_have_and_a_metric_named_as_the_loss(
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = Path("tiny.py").read_text()
    held_out = '{"loss": model(batch[0]).square().sum() * (batch[1] * float("nan")).sum()}'
    target = target.replace('{"accuracy": (model(batch[0]).argmax(-1) == batch[1]).double().sum()}', held_out)  # fmt: skip  # noqa: E501
    target = target.replace("(model(batch[0]), batch[1])", "(model(batch[0]) / 0, batch[1])")
    Path("tiny.py").write_text(target)
    document = train("--output run --epochs 1", capsys)
    assert document["loss"] is None and document["metrics"]["valid_loss"] is None
    assert document["best"] is None and not Path("run/checkpoints/best").exists()
    lines = Path("run/log.jsonl").read_text().splitlines()
    assert not [x for x in lines if "NaN" in x] and losses("run") == dict.fromkeys(range(1, 7))


def test_a_run_that_is_over_says_what_to_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    train("--output run --epochs 2", capsys)
    for words, sentence in {
        "--epochs 2": "2 epochs were asked for; ask for --epochs above 2, or --steps\n",
        "--steps 12": "--steps 12 were asked for; ask for --steps above 12\n",
    }.items():
        assert main(["train", "tiny.py:build", "--resume", "run", *words.split(), "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["steps"] == 12
        told = "nothing is left to do: the resumed run has done 12 steps and 2 epochs, and "
        assert told + sentence in err
    train("--resume run --steps 13", capsys)
    assert "nothing is left" not in capsys.readouterr().err


def test_a_resumed_run_keeps_its_seed_and_workload(capsys: pytest.CaptureFixture[str]) -> None:
    train("--output run --steps 2 --seed 5 --batch-size 8", capsys)
    assert main(["train", "tiny.py:build", "--resume", "run", "--seed", "6"]) == 2
    assert "--seed 6: the resumed run has seed 5" in capsys.readouterr().err
    assert main(["train", "digits/cnn", "--resume", "run"]) == 2
    assert "that run trained tiny, not digits/cnn" in capsys.readouterr().err
    document = train("--resume run", capsys)
    assert document["steps"] == 9  # three epochs of three batches of eight


def test_a_resumed_run_keeps_its_precision(capsys: pytest.CaptureFixture[str]) -> None:
    def precise(words: str) -> bool:
        train(words, capsys)
        return bool(json.loads(Path("run/run.json").read_text())["bf16"])

    assert precise("--output run --steps 2 --bf16")
    assert precise("--resume run --steps 3"), "not float32 from here on, without a word"
    assert not precise("--resume run --steps 4 --no-bf16")


def test_a_run_that_is_resumed_on_other_ranks_says_that_its_plan_is_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train("--output run --steps 2 --plan data", capsys)
    assert main(["train", "tiny.py:build", "--resume", "run", "--steps", "3"]) == 0
    assert "is chosen" not in capsys.readouterr().err
    asked = json.loads(Path("run/run.json").read_text())
    Path("run/run.json").write_text(json.dumps({**asked, "ranks": 2}))
    assert main(["train", "tiny.py:build", "--resume", "run", "--steps", "4"]) == 0
    told = "the plan 'data' was that of 2 ranks: on 1 one is chosen (auto); give --plan"
    assert told in capsys.readouterr().err


def test_a_folder_without_a_checkpoint_is_refused_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("nothing").mkdir()
    assert main(["train", "tiny.py:build", "--resume", "nothing"]) == 2
    assert "--resume nothing: no checkpoint lies in it" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_named_and_the_one_before_offered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train("--output run --epochs 2", capsys)
    shard = next(Path("run/checkpoints/epoch-2").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert main(["train", "tiny.py:build", "--resume", "run"]) == 2
    told = capsys.readouterr().err
    assert "run/checkpoints/epoch-2" in told and "newest good one beside it is" in told
    assert "Traceback" not in told and told.count("\n") == 1


def test_training_outlives_a_checkpoint_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save, full = checkpoint.save, {"epoch-1"}

    def on_a_full_disk(path: Path, *rest: Any) -> None:
        if path.name in full:
            raise CheckpointError(f"{path}: no space left")
        save(path, *rest)

    monkeypatch.setattr(checkpoint, "save", on_a_full_disk)
    assert train("--output run --epochs 2", capsys)["steps"] == 12
    (unsaved,) = events("run", "unsaved")
    assert unsaved["step"] == 6 and "no space left" in unsaved["reason"]
    full.add("epoch-2")
    assert main(["train", "tiny.py:build", "--output", "again", "--epochs", "2"]) == 2
    assert capsys.readouterr().err.endswith("again/checkpoints/epoch-2: no space left\n")


def test_a_signal_checkpoints_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--output whole", capsys)
    monkeypatch.setenv("SIGNAL_AT", "30")  # in the second epoch
    document = train("--output run", capsys, code=143)
    assert document["stopped"] == "SIGTERM" and 7 <= document["steps"] <= 9
    (stop,) = events("run", "stop")
    assert Path(f"run/checkpoints/step-{stop['step']}").is_dir()
    monkeypatch.delenv("SIGNAL_AT")
    train("--resume run", capsys)
    assert losses("run") == losses("whole")


def command(words: str, **environment: str) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | environment
    return subprocess.Popen(
        [sys.executable, "-m", "synchromesh", *words.split()],
        env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_two_ranks_stop_at_the_same_step_and_one_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = Path("run/log.jsonl")
    words = "train tiny.py:build --nproc 2 --plan tensor --output run --checkpoint-every 1 --json"
    with command(words, PAUSE="0.02") as process:
        try:
            deadline = time.monotonic() + 60
            while not (log.exists() and events("run", "checkpoint")):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM, err
    document = json.loads(out)
    assert document["stopped"] == "SIGTERM" and document["ranks"] == 2
    assert document["steps"] < 18 and "go on with --resume" in err
    assert train("--resume run --plan data", capsys)["steps"] == 18
    train("--output whole", capsys)
    assert losses("run") == pytest.approx(losses("whole"), rel=1e-11)


def test_verify_on_two_ranks_passes_and_says_so() -> None:
    with command("verify tiny.py:build --nproc 2 --plan tensor --steps 3 --json") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    document = json.loads(out)
    assert document["passed"] and document["ranks"] == 2 and document["steps"] == 3
    assert max(document[f"max_{x}_deviation"] for x in ("loss", "gradient", "parameter")) < 1e-10
    assert len(document["sent_bytes_per_step"]) == len(document["parameter_bytes_per_rank"]) == 2


def told_to_one() -> tuple[int, str, str]:
    """A rank of a run of which rank 1 alone gets a signal: its exit code, what it says."""
    os.environ.update(SIGNAL_AT="9", SIGNAL_RANK="1")
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["train", "tiny.py:build", "--output", "run", "--json"])
    return code, out.getvalue(), err.getvalue()


def test_a_signal_to_one_rank_stops_all_and_is_no_success() -> None:
    (code, out, err), (other, _, _) = run(2, told_to_one)  # the plan is found, as none is given
    assert code == other == 143, err
    assert json.loads(out)["stopped"] == "SIGTERM" and "rank 1 of 2" not in err
    assert "go on with --resume" in err and events("run", "stop")


def test_verify_says_what_deviates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worst = {"name": "0.weight", "step": 2, "rank": 1, "deviation": 1e-7, "noise_floor": 3e-15}
    endless = sys.float_info.max
    document = {
        "plan": "tensor", "ranks": 2, "steps": 5, "dtype": "float64", "tolerance": 1e-10,
        "autocast": None,
        "faults": [
            {"kind": "gradient", **worst},
            {"kind": "loss", **worst, "name": "", "deviation": endless},
        ],
        "parameter_bytes_per_rank": [8, 1600], "explained_parameter_bytes_per_rank": [8, 800],
        "sent_bytes_per_step": [4, 4], "explained_sent_bytes_per_step": [5, 5],
        "sent_bytes_compared": False, "passed": False,
    }  # fmt: skip
    monkeypatch.setattr("synchromesh.verify.verify.verify", lambda *a: document)
    assert main(["verify", "tiny.py:build", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == document
    assert err == (
        "synchromesh: tiny.py:build under plan tensor on 2 ranks is not what one process "
        "computes: the gradient 0.weight deviates by 1.00e-07 of its value on rank 1 in step 2 "
        "(at most 1e-10 in float64; rounding alone does 3e-15); the loss deviates by more than "
        "any number on rank 1 in step 2 (at most 1e-10 in float64; rounding alone does 3e-15); "
        "parameter bytes of rank 1 are 1,600 (explained are 800)\n"
    )
    monkeypatch.setenv("RANK", "1")  # one rank says it, and not before rank 0 has printed
    monkeypatch.setattr(os, "dup2", lambda *a: None)
    assert main(["verify", "tiny.py:build", "--json"]) == 0


def test_verify_tells_a_reader(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "tiny.py:build", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "tiny.py:build under single on 1 rank against one process, 2 steps in float64" in out
    assert "dropout is set to zero in both, batch norm is synchronised" in out
    assert out.count("(rounding alone ") == 4
    assert out.rstrip().endswith("passed")


def test_a_run_logs_all_that_a_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    train("--output run --trace-steps 8-9 --tensorboard", capsys)
    (start,), (layout,) = events("run", "start"), events("run", "layout")
    assert start["ranks"] == len(start["machines"]) == 1 and start["machines"][0]["cores"] > 0
    assert start["parameter_bytes"] == 8 * (6 * 8 + 8 + 8 * 4 + 4)
    assert sum(c["parameter_bytes"] for c in layout["components"]) == start["parameter_bytes"]
    steps = events("run", "steps")
    assert [n for x in steps for n in range(x["first"], x["first"] + len(x["seconds"]))] == [
        *range(1, 19)
    ]
    assert all(len(x["seconds"]) == len(x["loading"]) == len(x["waited"]) for x in steps)
    assert [n for x in steps for n in x["rows"]] == [4, 4, 4, 4, 4, 2] * 3
    assert [n for x in steps for n in x["special"]] == [8, 9, 10]
    (recording,), (memory,) = events("run", "recording"), events("run", "memory")
    assert recording["steps"] == [8, 9] and recording["sent_bytes_per_step"] == [0]
    mean = recording["mean"]
    assert mean["computation"] + mean["exposed"] + mean["other"] == pytest.approx(1.0)
    assert memory["step"] == 10 and memory["peak_bytes"][0]["optimizer"] > 0
    assert memory["peak_bytes"][0]["parameters"] == start["parameter_bytes"]
    trained = [x["trained_seconds"] for x in events("run", "epoch")]
    assert trained == sorted(trained)
    assert all(x["trained_seconds"] <= x["elapsed_seconds"] for x in events("run", "epoch"))
    assert any(Path("run/tensorboard").iterdir())


def test_a_run_without_a_recorded_step_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny.py:build", "--steps", "3", "--trace-steps", "3-4"]) == 0
    assert "--trace-steps 3-4: nothing was recorded" in capsys.readouterr().err


def test_a_switch_is_logged_with_the_layout_that_it_leads_to(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = Decision(4, "links are slow", True, "it pays", "data", "single", 0.2, 0.2, 0.1, 1.0)

    def with_a_switch(*args: Any, on_event: Any, **options: Any) -> Any:
        def take(event: Any) -> None:
            if isinstance(event, StepDone) and event.step == 4:
                on_event(switch)
            on_event(event)

        return fit(*args, on_event=take, **options)

    monkeypatch.setattr(training, "fit", with_a_switch)
    train("--output run --steps 6", capsys)
    first, second = events("run", "layout")
    assert (first["step"], second["step"]) == (0, 4)
    assert second["reason"] == "links are slow: it pays" and "pause_seconds" in second
    assert [n for x in events("run", "steps") for n in x["special"]] == [4]


def test_batches_that_grow_are_in_log_and_result_and_in_a_resumed_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--plan", "single", "--batch-schedule", "1:x2,2:x1000"]
    assert (
        main(["train", "tiny.py:build", *words, "--output", "run", "--steps", "8", "--json"]) == 0
    )
    shown = capsys.readouterr()
    (change,) = json.loads(shown.out)["batch_sizes"]
    assert (change["step"], change["to"]) == (6, 2 * change["from"])
    assert set(change) == {
        "step", "from", "to", "reason", "goodput_before", "goodput_after", "learning_rate",
        "plan_from", "plan_to", "seconds",
    }  # fmt: skip
    text = f"step 6: behind epoch 1; batches of {change['to']} rows, {change['from']} before"
    assert text in shown.err
    (logged,) = events("run", "batch size")
    assert {k: logged[k] for k in change} == change
    assert main(["train", "tiny.py:build", "--resume", "run", "--plan", "single", "--json"]) == 0
    shown = capsys.readouterr()
    again = json.loads(shown.out)["batch_sizes"]
    assert again[0]["to"] == change["to"] and "do not fit" in again[-1]["reason"]


def test_a_chosen_batch_has_the_rule_of_its_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--plan", "single; @micro_batches=2", "--batch-size", "auto:2-16", "--json"]
    assert main(["train", "tiny.py:build", *words, "--output", "run"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["noise_scale"]["steps"] >= 10
    assert all(2 <= change["to"] <= 16 for change in document["batch_sizes"])
    assert events("run", "start")[0]["lr_rule"] == "sqrt"
    for odd, message in {
        "--batch-size auto --batch-schedule 1:x2": "exclude each other",
        "--batch-size auto:99999-999999": "of data that has",
    }.items():
        assert main(["train", "tiny.py:build", *odd.split(), "--output", "odd"]) == 2
        assert message in capsys.readouterr().err
    for words in (["--batch-size", "auto:16-2"], ["--batch-schedule", "1:2"]):
        with pytest.raises(SystemExit):
            main(["train", "tiny.py:build", *words])
    said = capsys.readouterr().err
    assert "MIN is at least 1, and at most MAX" in said and "no schedule of batches" in said
