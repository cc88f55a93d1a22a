"""Sentiment on SST-2: BERT and RoBERTa from `transformers`, random weights, and an LSTM; small
forms for CPUs.

The files are tokenised, so what stands between spaces is a word, and the vocabulary is made of the
words of the training sentences: no trained tokeniser has to be downloaded. The embeddings of the
full forms have their published sizes, of which the first 15 thousand rows or so are used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from synchromesh.workloads import packed, sentences, sst2_files
from synchromesh.workloads.lstm_classifier import LstmClassifier
from synchromesh.workloads.training import adamw, warm_up
from synchromesh.workloads.workload import Workload

CLASSES = 2
LONG, SHORT = 64, 32  # the longest training sentence has 52 words, nine in ten at most 32
SMALL_VOCABULARY = 8000
EPOCH = 217  # updates by 32 of the 6,920 training rows each
Batch = tuple[Tensor, Tensor, Tensor]  # ids, attention mask (rows, length), labels (rows)


def _data(
    name: str, size: int, length: int, folder: Path | None, synthetic: bool
) -> tuple[TensorDataset, TensorDataset]:
    """Training and validation rows, the latter of the file `dev`."""
    if synthetic:
        return _synthetic(4096, size, length, 0), _synthetic(1024, size, length, 1)
    folder = packed.needed(folder, name, sst2_files.HOLDS)
    train, labels = sst2_files.read(folder, "train")
    valid, valid_labels = sst2_files.read(folder, "dev")
    words = sentences.vocabulary(train, size)
    return (
        _rows(sentences.rows(train, words, length), labels),
        _rows(sentences.rows(valid, words, length), valid_labels),
    )


def _rows(ids: Tensor, labels: Tensor) -> TensorDataset:
    return TensorDataset(ids, (ids != sentences.PAD).to(torch.int64), labels)


def _synthetic(count: int, size: int, length: int, seed: int) -> TensorDataset:
    labels = torch.randint(CLASSES, (count,), generator=torch.Generator().manual_seed(seed))
    return _rows(sentences.synthetic(count, size, length, seed), labels)


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    ids, mask, _ = batch
    output = model(input_ids=ids, attention_mask=mask)
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy, the mean over the rows."""
    return F.cross_entropy(_logits(model, batch), batch[2])


def metric(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Rows whose best score is at their label."""
    return {"accuracy": (_logits(model, batch).argmax(-1) == batch[2]).to(torch.float32).sum()}


def _workload(
    name: str, model: Callable[[], nn.Module], size: int, length: int,
    folder: Path | None, synthetic: bool, **options: Any,
) -> Workload:  # fmt: skip
    """A workload of this model, for a vocabulary of `size`; `options` are further fields."""
    train, valid = _data(name, size, length, folder, synthetic)
    return Workload(
        model=model, loss=loss, metric=metric, train_data=train, valid_data=valid, name=name,
        batch_size=32, **options,
    )  # fmt: skip


SMALL = {
    "vocab_size": SMALL_VOCABULARY, "hidden_size": 64, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def _classifier(family: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Builds the classifier of a family of `transformers`, as `Bert`."""

    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{family}Config")(pad_token_id=sentences.PAD, **sizes)
        config.num_labels = CLASSES
        model: nn.Module = getattr(transformers, f"{family}ForSequenceClassification")(config)
        return model

    return build


def bert(folder: Path | None, synthetic: bool) -> Workload:
    """BERT-base (arXiv:1810.04805), 109 M parameters."""
    return _workload(
        "sst2/bert", _classifier("Bert", vocab_size=30522), 30522, LONG, folder, synthetic,
        optimizer=adamw(1e-4), scheduler=warm_up(200, decay=3 * EPOCH), epochs=3,
    )  # fmt: skip


def bert_small(folder: Path | None, synthetic: bool) -> Workload:
    """0.6 M parameters: two layers of width 64."""
    model = _classifier("Bert", max_position_embeddings=SHORT, **SMALL)
    return _workload(
        "sst2/bert_small", model, SMALL_VOCABULARY, SHORT, folder, synthetic,
        optimizer=adamw(1e-3), scheduler=warm_up(50, decay=2 * EPOCH), epochs=2,
    )  # fmt: skip


def roberta(folder: Path | None, synthetic: bool) -> Workload:
    """RoBERTa-base (arXiv:1907.11692), 125 M parameters."""
    model = _classifier("Roberta", vocab_size=50265, max_position_embeddings=514)
    return _workload(
        "sst2/roberta", model, 50265, LONG, folder, synthetic,
        optimizer=adamw(1e-4), scheduler=warm_up(200, decay=3 * EPOCH), epochs=3,
    )  # fmt: skip


def roberta_small(folder: Path | None, synthetic: bool) -> Workload:
    """0.6 M parameters: two layers of width 64. Its positions are counted from the id of the
    padding + 1 on: there must be one more."""
    model = _classifier("Roberta", max_position_embeddings=SHORT + 1, **SMALL)
    return _workload(
        "sst2/roberta_small", model, SMALL_VOCABULARY, SHORT, folder, synthetic,
        optimizer=adamw(1e-3), scheduler=warm_up(50, decay=2 * EPOCH), epochs=2,
    )  # fmt: skip


def lstm(folder: Path | None, synthetic: bool) -> Workload:
    """12 M parameters: two layers of width 512 on the words of the training sentences."""
    size = 15000  # 14,828 words and the marks
    return _workload(
        "sst2/lstm", lambda: LstmClassifier(size, 512, 2, CLASSES, 0.5), size, LONG, folder,
        synthetic, optimizer=adamw(1e-3), epochs=5,
    )  # fmt: skip


def lstm_small(folder: Path | None, synthetic: bool) -> Workload:
    """0.6 M parameters: two layers of width 64."""
    size = SMALL_VOCABULARY
    return _workload(
        "sst2/lstm_small", lambda: LstmClassifier(size, 64, 2, CLASSES, 0.2), size, SHORT,
        folder, synthetic, optimizer=adamw(5e-3), epochs=3,
    )  # fmt: skip


WORKLOADS = {
    "sst2/bert": bert,
    "sst2/bert_small": bert_small,
    "sst2/roberta": roberta,
    "sst2/roberta_small": roberta_small,
    "sst2/lstm": lstm,
    "sst2/lstm_small": lstm_small,
}
