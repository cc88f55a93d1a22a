"""Tests of the workloads of text: sizes, seeded rows, rows of files, padding that says nothing."""

from pathlib import Path

import pytest
import torch

from synchromesh.workloads import multi30k, shakespeare, sst2
from synchromesh.workloads.recurrent import Gnmt, LstmClassifier, reverse
from synchromesh.workloads.target import load
from synchromesh.workloads.text import PAD, ContinuingText, token_loss, token_metric
from synchromesh.workloads.training import IGNORED

SIZES = {
    "sst2/bert": 109.48e6, "sst2/bert_small": 0.62e6, "sst2/roberta": 124.65e6,
    "sst2/roberta_small": 0.62e6, "sst2/lstm": 11.9e6, "sst2/lstm_small": 0.58e6,
    "sst2/bags": 1.92e6,
    "shakespeare/gpt2": 124.44e6, "shakespeare/gpt2_small": 0.44e6,
    "multi30k/gnmt": 200.59e6, "multi30k/gnmt_small": 0.68e6,
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
    found = sst2.WORKLOADS["sst2/bert_small"](tmp_path, False)
    ids, mask, label = found.valid_data[0]
    assert ids[:5].tolist() == [2, 4, 1, 3, 0] and len(ids) == sst2.SMALL.length
    assert torch.equal(mask, (ids != PAD).long()) and label == 0
    assert [int(row[2]) for row in found.train_data] == [1, 0]


def test_padding_says_nothing_to_the_lstm_classifier() -> None:
    model = LstmClassifier(10, 8, 2, 2, dropout=0.5).eval()
    ids = torch.tensor([[2, 5, 7, 3]])
    padded = torch.nn.functional.pad(ids, (0, 3))
    short, long = (model(x, (x != PAD).long()) for x in (ids, padded))
    assert torch.allclose(short, long)


# Tokens


def test_scores_leave_out_what_does_not_count() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator)
    targets = torch.tensor([[1, 4, IGNORED.token], [2, IGNORED.token, IGNORED.token]])
    likelihood = -logits.log_softmax(-1)
    one, two, three = likelihood[0, 0, 1], likelihood[0, 1, 4], likelihood[1, 0, 2]
    total, weight = token_loss(logits, targets)
    assert torch.allclose(total, one + two + three) and weight == 3
    logits[0, 0, 1] = logits[1, 0, 2] = 9.0
    logits[0, 1, 4] = -9.0
    likelihood = -logits.log_softmax(-1)
    one, two, three = likelihood[0, 0, 1], likelihood[0, 1, 4], likelihood[1, 0, 2]
    found = token_metric(logits, targets)
    assert float(found["accuracy"]) == 1.5
    assert torch.allclose(found["nll"], (one + two) / 2 + three)


# Language modelling


def test_shakespeare_is_blocks_and_the_bytes_after(tmp_path: Path) -> None:
    text = bytes(range(32, 127)) * 10  # 950: 855 of training, 95 of validation
    (tmp_path / "input.txt").write_bytes(text)
    found = shakespeare.gpt2_small(tmp_path, False)
    assert (len(found.train_data), len(found.valid_data)) == (13, 1)
    for number in (0, 12):
        here, following = (bytes(x.tolist()) for x in found.train_data[number])
        assert here == text[64 * number :][:64] and following == text[64 * number + 1 :][:64]
    with pytest.raises(ValueError, match=r"input\.txt has 950 bytes: .* needs at least 10251, of"):
        shakespeare.gpt2(tmp_path, False)


# Translation


def test_reverse_turns_words_and_leaves_padding() -> None:
    values = torch.arange(1.0, 9).view(2, 4, 1)
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    turned = reverse(values, mask)
    assert turned.flatten().tolist() == [3, 2, 1, 4, 8, 7, 6, 5]
    assert torch.equal(reverse(turned, mask), values)


def test_gnmt_sees_no_padding_and_no_later_word() -> None:
    torch.manual_seed(0)
    model = Gnmt((9, 9), 8, 3, 0.5, PAD).eval()
    source, target = torch.tensor([[2, 5, 7, 3]]), torch.tensor([[2, 6, 4]])
    expected = model(source, target)
    longer = model(torch.nn.functional.pad(source, (0, 3)), target)
    assert torch.allclose(longer, expected, atol=1e-6)
    other = model(source, torch.tensor([[2, 6, 8]]))
    assert torch.equal(other[:, :2], expected[:, :2]) and not torch.equal(other, expected)
    assert not torch.allclose(model(source.flip(1), target), expected)


def test_a_loss_of_translation_counts_words(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / f"{split}.en").write_text("A dog.\nThree men sit.\n")
        (tmp_path / f"{split}.de").write_text("Ein Hund.\nDrei Männer sitzen da.\n")
    found = multi30k.gnmt_small(tmp_path, False)
    source, target = found.train_data[0]
    assert source[:6].tolist() == [2, 5, 6, 4, 3, 0] and len(source) == len(target) == 24
    rows = torch.stack([found.train_data[i][1] for i in (0, 1)])
    _, weight = found.loss(found.build(), (rows, rows))
    assert weight == 4 + 6  # ein hund . </s>, drei männer sitzen da . </s>


# Parts of a text: each goes on where the one before it ends


def test_parts_follow_each_other_and_what_fills_none_is_left_out() -> None:
    text = ContinuingText(torch.arange(12), 4)
    assert [(x.tolist(), y.tolist()) for x, y in text] == [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([4, 5, 6, 7], [5, 6, 7, 8]),
    ]
    assert len(ContinuingText(torch.arange(13), 4)) == 3
    with pytest.raises(ValueError, match="a text of 4 tokens has no part of 4 with one behind"):
        ContinuingText(torch.arange(4), 4)
