"""Translation of Multi30k's captions from English to German with GNMT; a small form for CPUs.

The vocabularies are made of the training sentences: words of letters and digits, and signs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import TensorDataset

from synchromesh.workloads import data_files, text, text_files
from synchromesh.workloads.recurrent import Gnmt
from synchromesh.workloads.text import PAD
from synchromesh.workloads.training import IGNORED, adamw, warm_up
from synchromesh.workloads.workload import Workload

Batch = tuple[Tensor, Tensor]  # ids of source and target, both (rows, length), padded


def _data(
    name: str, words: tuple[int, int], length: int, folder: Path | None, synthetic: bool
) -> tuple[TensorDataset, TensorDataset]:
    """Rows of training and of validation, the latter of the files `val`."""
    if synthetic:

        def rows(count: int) -> TensorDataset:
            sizes = enumerate(words)
            sides = (text.synthetic_sentences(count, size, length, seed) for seed, size in sizes)
            return TensorDataset(*sides)

        return rows(4096), rows(1024)
    folder = data_files.needed(folder, name, text_files.MULTI30K_HOLDS)
    train, valid = (text_files.read_multi30k(folder, split) for split in ("train", "val"))
    known = [text.sentence_vocabulary(*of) for of in zip(train, words, strict=True)]
    rows_of = (
        TensorDataset(*(text.sentence_rows(*of, length) for of in zip(part, known, strict=True)))
        for part in (train, valid)
    )
    return next(rows_of), next(rows_of)


def _scores(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits, and the word that comes next at each place of the target."""
    source, target = batch
    following = target[:, 1:]
    wanted = following.masked_fill(following == PAD, IGNORED.token)
    return model(source, target[:, :-1]), wanted


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the target's words that are no padding: its sum, and their number."""
    return text.token_loss(*_scores(model, batch))


def metric(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Accuracy and nll of the target's words: means over sentences, summed over the rows."""
    return text.token_metric(*_scores(model, batch))


def _workload(
    name: str, words: tuple[int, int], length: int, model: Callable[[], nn.Module],
    folder: Path | None, synthetic: bool, **options: Any,
) -> Workload:  # fmt: skip
    train, valid = _data(name, words, length, folder, synthetic)
    return Workload(
        model=model, loss=loss, metric=metric, train_data=train, valid_data=valid, name=name,
        **options,
    )  # fmt: skip


def gnmt(folder: Path | None, synthetic: bool) -> Workload:
    """GNMT as published: eight layers of width 1024 on either side; 201 M parameters."""
    words = 5898, 7882  # words that occur at least twice, and the marks
    return _workload(
        "multi30k/gnmt", words, 48, lambda: Gnmt(words, 1024, 8, 0.2, PAD), folder, synthetic,
        optimizer=adamw(5e-4), scheduler=warm_up(200), batch_size=128, epochs=6,
    )  # fmt: skip


def gnmt_small(folder: Path | None, synthetic: bool) -> Workload:
    """0.7 M parameters: three layers of width 64, 2000 words, rows for 97 of 100 sentences."""
    words = 2000, 2000
    return _workload(
        "multi30k/gnmt_small", words, 24, lambda: Gnmt(words, 64, 3, 0.0, PAD), folder, synthetic,
        optimizer=adamw(6e-3), scheduler=warm_up(50), batch_size=64, epochs=3,
    )  # fmt: skip


WORKLOADS = {"multi30k/gnmt": gnmt, "multi30k/gnmt_small": gnmt_small}
