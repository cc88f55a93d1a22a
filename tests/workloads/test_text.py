"""Tests of the workloads of text: sizes, seeded rows, and that padding says nothing."""

from pathlib import Path

import pytest
import torch

from synchromesh.workloads import sentences, sst2
from synchromesh.workloads.lstm_classifier import LstmClassifier
from synchromesh.workloads.target import load

SIZES = {
    "sst2/bert": 109.48e6, "sst2/bert_small": 0.62e6, "sst2/roberta": 124.65e6,
    "sst2/roberta_small": 0.62e6, "sst2/lstm": 11.9e6, "sst2/lstm_small": 0.58e6,
}  # fmt: skip
SMALL = [name for name in SIZES if name.endswith("_small")]


@pytest.mark.parametrize("name", SIZES)
def test_models_have_their_stated_sizes(name: str) -> None:
    with torch.device("meta"):
        model = load(name, synthetic=True).build()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(SIZES[name], rel=0.01)


@pytest.mark.parametrize("name", SMALL)
def test_small_forms_train_a_step_on_seeded_rows(name: str) -> None:
    found = load(name, synthetic=True)
    rows = found.example(3)
    again = load(name, synthetic=True).example(3)
    assert all(torch.equal(one, two) for one, two in zip(rows, again, strict=True))
    torch.manual_seed(0)
    model = found.build()
    optimizer = found.build_optimizer(model.parameters())
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = found.loss(model, rows)
        value = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0] and all(p.grad is not None for p in model.parameters())
    metric = found.metric(model.eval(), rows)
    assert next(iter(metric)) == "accuracy" and 0 <= float(metric["accuracy"]) <= 3


def test_a_folder_is_asked_for(tmp_path: Path) -> None:
    for name in SIZES:
        with pytest.raises(ValueError, match=f"{name} reads its data from a folder: name one"):
            load(name)


# Sentiment


def test_sst2_has_its_rows(tmp_path: Path) -> None:
    (tmp_path / "stsa.binary.train").write_text("1 a b a\n0 c\n")
    (tmp_path / "stsa.binary.dev").write_text("0 a d\n")
    found = sst2.bert_small(tmp_path, False)
    ids, mask, label = found.valid_data[0]
    assert ids[:5].tolist() == [2, 4, 1, 3, 0] and len(ids) == sst2.SHORT
    assert torch.equal(mask, (ids != sentences.PAD).long()) and label == 0
    assert [int(row[2]) for row in found.train_data] == [1, 0]


def test_padding_says_nothing_to_the_lstm_classifier() -> None:
    model = LstmClassifier(10, 8, 2, 2, dropout=0.5).eval()
    ids = torch.tensor([[2, 5, 7, 3]])
    padded = torch.nn.functional.pad(ids, (0, 3))
    short, long = (model(x, (x != sentences.PAD).long()) for x in (ids, padded))
    assert torch.allclose(short, long)
