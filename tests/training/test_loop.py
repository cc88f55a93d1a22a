"""`fit`: the loop of a library's user; the same as `synchromesh train`, resumable, stoppable."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import synchromesh as sm
from synchromesh.checkpoint import checkpoint
from synchromesh.checkpoint.manifest import CheckpointError
from synchromesh.cli import main
from synchromesh.training.events import (
    EpochEnded,
    EpochStarted,
    Finished,
    FitEvent,
    Interrupted,
    Losses,
    NotSaved,
    Saved,
    Started,
    StepDone,
)
from synchromesh.workloads.target import load
from tests.ranks import run
from tests.traces import known

ROWS, BATCH = 22, 4  # six steps an epoch, the last one short


def rows(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(1))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"accuracy": (model(batch[0]).argmax(-1) == batch[1]).double().sum()}


TINY = sm.Workload(
    model=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double(),
    loss=loss, metric=accuracy, train_data=rows(0), valid_data=rows(1), batch_size=BATCH,
    optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), epochs=3, name="tiny",
)  # fmt: skip


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One process, no launcher; one trace of the model for all tests."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with known("tiny of fit"):
        yield


def seen(of: type, events: list[FitEvent]) -> list[Any]:
    return [event for event in events if isinstance(event, of)]


def test_a_run_reports_its_epochs_and_leaves_checkpoints() -> None:
    events: list[FitEvent] = []
    result = sm.fit(
        TINY, plan="single", checkpoints="saved", checkpoint_every=4, on_event=events.append
    )
    assert isinstance(result, sm.FitResult)
    assert (result.steps, result.epochs, len(result.losses), result.stopped) == (18, 3, 18, "")
    assert result.loss == pytest.approx(sum(result.losses[-6:]) / 6) and result.seconds > 0
    assert result.losses[-1] < result.losses[0] and str(result.plan) == "single"
    ended = seen(EpochEnded, events)
    assert [(e.epoch, e.step) for e in ended] == [(1, 6), (2, 12), (3, 18)]
    assert result.metrics == ended[-1].metrics
    assert result.best == max(e.metrics["accuracy"] for e in ended)
    assert {p.name for p in Path("saved").iterdir()} >= {
        "step-4", "step-8", "step-16", "epoch-1", "epoch-2", "epoch-3", "best",
    }  # fmt: skip
    assert not Path("saved/step-12").exists(), "an epoch's end has a checkpoint of its own"
    assert result.checkpoint == Path("saved/epoch-3") == seen(Saved, events)[-1].path
    assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
    assert [(e.done, e.length) for e in seen(EpochStarted, events)] == [(0, 6)] * 3
    assert [e.step for e in seen(StepDone, events)] == list(range(1, 19))
    assert sum(e.rows for e in seen(StepDone, events)) == 3 * len(TINY.train_data)  # type: ignore[arg-type]
    assert all(e.seconds > 0 and e.waited >= 0 for e in seen(StepDone, events))
    assert tuple(x for e in seen(Losses, events) for x in e.values) == result.losses


def test_resuming_continues_the_same_curve() -> None:
    entire = sm.fit(TINY, plan="single").losses
    first = sm.fit(TINY, plan="single", steps=9, checkpoints="saved")
    assert first.steps == 9 and first.losses == entire[:9]
    events: list[FitEvent] = []
    rest = sm.fit(TINY, plan="single", resume="saved", on_event=events.append)
    assert rest.losses == entire[9:] and rest.steps == 18 and rest.checkpoint is None
    (started,) = seen(Started, events)
    assert started.resumed == Path("saved/step-9") and (started.epochs, started.more) == (1, True)
    other = sm.fit(TINY, plan="tensor", resume="saved/epoch-1", steps=8)
    assert other.losses == entire[6:8]


def test_a_damaged_checkpoint_is_passed_over_with_a_warning() -> None:
    sm.fit(TINY, plan="single", epochs=2, checkpoints="saved")
    Path("saved/epoch-2/state.json").write_text("{}")
    shutil.rmtree("saved/best")
    with pytest.warns(UserWarning, match=r"state.json has 2 bytes .*goes on from saved/epoch-1"):
        result = sm.fit(TINY, plan="single", epochs=1, resume="saved")
    assert result.steps == 6
    for path in Path("saved").iterdir():
        (path / "state.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"epoch-2/state.json is missing; .*epoch-1/state"):
        sm.fit(TINY, plan="single", epochs=1, resume="saved")
    Path("empty").mkdir()
    with pytest.raises(CheckpointError, match="empty: no checkpoint lies in it"):
        sm.fit(TINY, plan="single", epochs=1, resume="empty")


def test_a_run_that_is_over_does_nothing() -> None:
    sm.fit(TINY, plan="single", epochs=1, checkpoints="saved")
    result = sm.fit(TINY, plan="single", epochs=1, resume="saved/epoch-1")
    assert (result.steps, result.losses, result.loss) == (6, (), None)


def test_the_caller_stops_a_run_which_can_go_on() -> None:
    entire = sm.fit(TINY, plan="single").losses
    events: list[FitEvent] = []
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    result = sm.fit(
        TINY, plan="single", checkpoints="saved", on_event=events.append,
        stop=lambda: len(seen(StepDone, events)) >= 8,
    )  # fmt: skip
    assert (result.stopped, result.steps) == ("request", 9) and result.losses == entire[:9]
    (interrupted,) = seen(Interrupted, events)
    assert interrupted == Interrupted("request", 9, Path("saved/step-9"))
    assert sm.fit(TINY, plan="single", resume=result.checkpoint).losses == entire[9:]
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


def test_a_signal_stops_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that comes from the system and, passed on, from the launcher."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)

    def take(event: FitEvent) -> None:
        if isinstance(event, StepDone) and event.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    result = sm.fit(TINY, plan="single", on_event=take)
    assert (result.stopped, result.steps, result.checkpoint, ended) == ("SIGTERM", 8, None, [])


def test_a_run_in_another_thread_has_no_signal_handlers() -> None:
    results: list[sm.FitResult] = []
    thread = threading.Thread(target=lambda: results.append(sm.fit(TINY, plan="single", steps=2)))
    thread.start()
    thread.join()
    assert results[0].steps == 2


def test_the_last_checkpoint_must_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    save, refused = checkpoint.save, {"epoch-1"}

    def on_a_full_disk(path: Path, *rest: Any) -> None:
        if path.name in refused:
            raise CheckpointError(f"{path}: no space left")
        save(path, *rest)

    monkeypatch.setattr(checkpoint, "save", on_a_full_disk)
    events: list[FitEvent] = []
    sm.fit(TINY, plan="single", epochs=2, checkpoints="saved", on_event=events.append)
    (unsaved,) = seen(NotSaved, events)
    assert unsaved.step == 6 and "no space left" in unsaved.reason
    refused.add("epoch-2")
    with pytest.raises(CheckpointError, match="epoch-2: no space left"):
        sm.fit(TINY, plan="single", epochs=2, checkpoints="again")


def test_what_does_not_fit_is_said_in_one_sentence() -> None:
    events: list[FitEvent] = []
    for sentence, settings in {
        "epochs (2) and steps (3) exclude each other": {"epochs": 2, "steps": 3},
        "steps must be a whole number of at least 1, not 0": {"steps": 0},
        "steps must be a whole number of at least 1, not 2.5": {"steps": 2.5},
        "autocast must be a torch.dtype like torch.bfloat16, not 'bf16'": {"autocast": "bf16"},
        "on_event must be a function, not 3": {"on_event": 3},
        "checkpoint_every needs a folder": {"checkpoint_every": 2},
    }.items():
        with pytest.raises(ValueError) as error:
            sm.fit(TINY, plan="single", **settings)  # type: ignore[arg-type]
        assert sentence in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"a synchromesh\.Workload, not str"):
        sm.fit("digits/cnn")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a plan is a text or a Plan, not int"):
        sm.fit(TINY, plan=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"batch_size\(40\) > 22 items; use a batch size of at"):
        sm.fit(replace(TINY, batch_size=40))
    with pytest.raises(ValueError, match="train_data is empty"):
        replace(TINY, train_data=TensorDataset(torch.zeros(0, 6)))
    with pytest.raises(CheckpointError, match="there is no such checkpoint folder"):
        sm.fit(TINY, plan="single", resume="nowhere")
    Path("file").write_text("")
    with pytest.raises(CheckpointError, match="file/inside: checkpoints cannot be written there"):
        sm.fit(TINY, plan="single", checkpoints="file/inside", on_event=events.append)
    assert not seen(StepDone, events)


def trained(folder: str) -> tuple[tuple[float, ...], str, Path | None]:
    """Rank 1 asks for a stop in its seventh step; all stop after it, and go on."""
    counts: list[FitEvent] = []
    stop = lambda: os.environ["RANK"] == "1" and len(seen(StepDone, counts)) == 6  # noqa: E731
    path = folder + ("" if os.environ["RANK"] == "0" else "-of-another-clock")
    part = sm.fit(TINY, plan="data", checkpoints=path, on_event=counts.append, stop=stop)
    assert part.steps == 7 and part.ranks == 2
    rest = sm.fit(TINY, plan="tensor", resume=part.checkpoint)
    return (*part.losses, *rest.losses), part.stopped, part.checkpoint


def asked_apart(rows: int, steps: int) -> str:
    rank = int(os.environ["RANK"])
    data = TINY.train_data
    apart = replace(TINY, train_data=[data[i % 6] for i in range(22 + rows * rank)])
    with pytest.raises(ValueError) as raised:
        sm.fit(apart, plan="data", steps=20 + steps * rank)
    return str(raised.value)


@pytest.mark.parametrize(
    ("rows", "steps", "what"),
    [(0, 1, "ranks disagree about the number of steps: 20 on rank 0, 21 on rank 1"),
     (5, 0, "ranks read different data: rank 0 22 samples")],
)  # fmt: skip
def test_ranks_that_would_end_apart_are_refused(rows: int, steps: int, what: str) -> None:
    """They would wait for each other until the collectives' time limit."""
    first, second = run(2, asked_apart, rows, steps, timeout=20.0)
    assert first == second and first.startswith(what)


def test_all_ranks_stop_at_one_step_and_agree_on_the_folder(tmp_path: Path) -> None:
    entire = sm.fit(TINY, plan="single").losses
    first, second = run(2, trained, str(tmp_path / "saved"))
    assert first == second and first[1] == "request"
    assert first[0] == pytest.approx(entire, rel=1e-10)
    assert first[2] == tmp_path / "saved" / "step-7"


def test_the_same_as_train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    words = "train digits/cnn --plan single --steps 4 --seed 3 --batch-size 32 --output run --json"
    with known("digits of fit"):
        assert main(words.split()) == 0
        document = json.loads(capsys.readouterr().out)
        workload = replace(load("digits/cnn", None), batch_size=32)
        result = sm.fit(workload, plan="single", steps=4, seed=3)
    lines = [json.loads(x) for x in Path("run/log.jsonl").read_text().splitlines()]
    assert result.losses == tuple(x["loss"] for x in lines if x["event"] == "step")
    assert (result.loss, result.metrics, result.best) == (
        document["loss"], document["metrics"], document["best"],
    )  # fmt: skip
    assert before == {number: signal.getsignal(number) for number in before}
