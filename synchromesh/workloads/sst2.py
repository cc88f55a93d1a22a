"""Sentiment on SST-2: BERT, RoBERTa, an LSTM and bags of words, random weights; small forms for
CPUs.

The files are tokenised, so what stands between spaces is a word, and the vocabulary is made of the
words of the training sentences: no trained tokeniser has to be downloaded. The embeddings of the
full forms have their published sizes, of which the first 15 thousand rows or so are used."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from synchromesh.workloads import data_files, text, text_files
from synchromesh.workloads.recurrent import LstmClassifier
from synchromesh.workloads.text import PAD
from synchromesh.workloads.training import adamw, logits_of, right_rows, warm_up
from synchromesh.workloads.workload import Workload

Batch = tuple[Tensor, Tensor, Tensor]  # ids, attention mask (rows, length), labels (rows)


@dataclass(frozen=True)
class Form:
    """Words of the vocabulary, and of a row: of ten training sentences nine have at most 32."""

    size: int
    length: int


SMALL = Form(8000, 32)


class BagClassifier(nn.Module):
    """The mean of the embeddings of a sentence's words, and a linear layer (Joulin et al. 2017,
    "Bag of Tricks for Efficient Text Classification", EACL). Gradients are sparse: of the words
    that a batch has."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embeddings = nn.EmbeddingBag(words, width, mode="mean", sparse=True, padding_idx=PAD)
        self.classifier = nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Scores (rows, 2). attention_mask: that of the padding, which no bag counts."""
        scores: Tensor = self.classifier(self.embeddings(input_ids))
        return scores


def _data(
    name: str, form: Form, folder: Path | None, synthetic: bool
) -> tuple[TensorDataset, TensorDataset]:
    """Training and validation rows, the latter of the file `dev`."""
    if synthetic:
        return _synthetic(4096, form, 0), _synthetic(1024, form, 1)
    folder = data_files.needed(folder, name, text_files.SST2_HOLDS)
    train, labels = text_files.read_sst2(folder, "train")
    valid, valid_labels = text_files.read_sst2(folder, "dev")
    words = text.sentence_vocabulary(train, form.size)
    return (
        _rows(text.sentence_rows(train, words, form.length), labels),
        _rows(text.sentence_rows(valid, words, form.length), valid_labels),
    )


def _rows(ids: Tensor, labels: Tensor) -> TensorDataset:
    return TensorDataset(ids, (ids != PAD).to(torch.int64), labels)


def _synthetic(count: int, form: Form, seed: int) -> TensorDataset:
    labels = torch.randint(2, (count,), generator=torch.Generator().manual_seed(seed))
    return _rows(text.synthetic_sentences(count, form.size, form.length, seed), labels)


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    ids, mask, _ = batch
    return logits_of(model(input_ids=ids, attention_mask=mask))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy, the mean over the rows."""
    return F.cross_entropy(_logits(model, batch), batch[2])


def metric(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Rows whose best score is at their label."""
    return right_rows(_logits(model, batch), batch[2])


def _workload(
    name: str, model: Callable[[], nn.Module], form: Form, options: dict[str, Any],
    folder: Path | None, synthetic: bool,
) -> Workload:  # fmt: skip
    train, valid = _data(name, form, folder, synthetic)
    return Workload(
        model=model, loss=loss, metric=metric, train_data=train, valid_data=valid, name=name,
        batch_size=32, **options,
    )  # fmt: skip


def _falling(rate: float, updates: int, epochs: int) -> dict[str, Any]:
    """A learning rate that rises for `updates` updates and falls to the end of all epochs, each of
    217 updates by 32 of the 6,920 training rows."""
    scheduler = warm_up(updates, decay=epochs * 217)
    return {"optimizer": adamw(rate), "scheduler": scheduler, "epochs": epochs}


def _classifier(family: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Builds the classifier of a family of `transformers`, as `Bert`."""

    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{family}Config")(pad_token_id=PAD, **sizes)
        config.num_labels = 2
        model: nn.Module = getattr(transformers, f"{family}ForSequenceClassification")(config)
        return model

    return build


def _small_classifier(family: str, positions: int) -> Callable[[], nn.Module]:
    """Two layers of width 64."""
    return _classifier(
        family, vocab_size=SMALL.size, max_position_embeddings=positions, hidden_size=64,
        intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    )  # fmt: skip


# model, rows, further fields
MODELS: dict[str, tuple[Callable[[], nn.Module], Form, dict[str, Any]]] = {
    # BERT-base (arXiv:1810.04805), 109 M parameters
    "bert": (_classifier("Bert", vocab_size=30522), Form(30522, 64), _falling(1e-4, 200, 3)),
    # 0.6 M parameters, as all small ones
    "bert_small": (_small_classifier("Bert", SMALL.length), SMALL, _falling(1e-3, 50, 2)),
    # RoBERTa-base (arXiv:1907.11692), 125 M parameters
    "roberta": (
        _classifier("Roberta", vocab_size=50265, max_position_embeddings=514), Form(50265, 64),
        _falling(1e-4, 200, 3),
    ),
    # positions are counted from the id of the padding + 1 on: there must be one more
    "roberta_small": (
        _small_classifier("Roberta", SMALL.length + 1), SMALL, _falling(1e-3, 50, 2)
    ),
    # 12 M parameters; 14,828 words and the marks
    "lstm": (
        partial(LstmClassifier, 15000, 512, 2, 2, 0.5), Form(15000, 64),
        {"optimizer": adamw(1e-3), "epochs": 5},
    ),
    "lstm_small": (
        partial(LstmClassifier, SMALL.size, 64, 2, 2, 0.2), SMALL,
        {"optimizer": adamw(5e-3), "epochs": 3},
    ),
    # 1.9 M parameters
    "bags": (
        partial(BagClassifier, 15000, 128), Form(15000, 64),
        {"optimizer": partial(torch.optim.Adagrad, lr=0.02), "epochs": 8},
    ),
}  # fmt: skip
WORKLOADS = {f"sst2/{n}": partial(_workload, f"sst2/{n}", *MODELS[n]) for n in MODELS}
