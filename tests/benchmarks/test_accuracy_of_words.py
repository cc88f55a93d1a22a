"""What runs come next, and what is said of those that have ended."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import accuracy_of_words as words
from benchmarks.accuracy_of_words import Cell
from synchromesh.training.prepare import prepare
from tests.ranks import run


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Scores by word, less 0.01 for each step from rate 1; nothing is trained. How many ran."""
    scores: dict[str, float] = {"ran": 0}

    def ran(cell: Cell) -> dict[str, Any]:
        scores["ran"] += 1
        value = scores.get(cell.word, 0.9) - 0.01 * abs(math.log(cell.rate)) + 0.001 * cell.seed
        return {
            "model": cell.model, "word": cell.word, "rate": cell.rate, "seed": cell.seed,
            "score": value, "sent": 10.0 if cell.word == "every-step" else 1.0, "staleness": None,
        }  # fmt: skip

    monkeypatch.setattr(words, "ran", ran)
    return scores


def test_runs_go_on_where_they_were_stopped(told: dict[str, float], tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    told |= {"every-step": 0.95, "int8": 0.946, "int8, no feedback": 0.947, "onebit": 0.93}
    words.measure(path, "digits/every-step")
    assert told["ran"] == 6
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]) + lines[4][:9])  # killed while it wrote
    words.measure(path, "digits/every-step")
    assert told["ran"] == 8
    words.measure(path, "digits/*")
    known = words.known_of(path)
    assert len(known) == 6 * len(words.WORDS)
    rows = words.rows_of(known, "digits")
    assert [row.word for row in rows] == list(words.WORDS)
    assert all(row.rate == 1.0 and row.bytes in (0.1, 1.0) for row in rows)
    missed = " ".join(words.faults("digits", rows))
    assert "onebit: 2.00 points lost, 1.0 are allowed" in missed
    assert "int8, no feedback: no lower than with feedback" in missed
    assert "int8: " not in missed and "| int8 | 1 | 0.9470" in words.table("digits", rows)


def test_what_diverged_is_never_the_best() -> None:
    known = {
        Cell("gpt2", "every-step", rate, words.TUNING): {"score": value}
        for rate, value in zip(words.RATES, (2.0, 1.5, math.nan), strict=True)
    }
    assert words.best_rate(known, "gpt2", "every-step") == 1.0
    assert words.best_rate(known, "gpt2", "diloco:50") is None


def forgotten() -> bool:
    torch.manual_seed(0)
    model, rows = nn.Linear(64, 8), (torch.randn(8, 64), torch.randint(8, (8,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(b[0]), b[1])

    trainer = prepare(model, optimizer, loss, rows, "data; @compression=int8")
    trainer.step(trainer.shard(rows))
    owed = [float(b.compressor.owed().abs().sum()) for b in trainer.sums.now.compressed]
    words.forget(trainer)
    left = [float(b.compressor.owed().abs().sum()) for b in trainer.sums.now.compressed]
    trainer.close()
    return sum(owed) > 0 == sum(left)


def test_what_is_owed_is_forgotten() -> None:
    assert all(run(2, forgotten))


def test_published_rows_stand_beside(tmp_path: Path) -> None:
    path = tmp_path / "published.csv"
    path.write_text(
        "model,data,workers,algorithm,setting,compression,top1_accuracy\n"
        "VGG-16,CIFAR-10,8,SHAT,,none,0.9226\nVGG-16,CIFAR-10,16,SHAT,,none,0.9209\n"
        "VGG-16,CIFAR-10,8,SSP,stale=3,none,0.9\nVGG-16,CIFAR-10,8,AD-PSGD,,none,0.9\n"
    )
    lines = words.published(path).splitlines()
    assert len(lines) == 4 and "0.9226" in lines[2] and "SSP stale=3" in lines[3]
