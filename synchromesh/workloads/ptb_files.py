"""The Penn treebank's files for language models (Mikolov et al. 2010): a sentence a line, words
between spaces, rare ones already replaced by `<unk>`."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from synchromesh.workloads import text_lines
from synchromesh.workloads.vocabulary import Vocabulary, most_frequent

FILES = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")
HOLDS = f"{', '.join(FILES)} (plain or .gz)"
END, UNKNOWN = "<eos>", "<unk>"


def read(folder: Path) -> tuple[Tensor, Tensor, Tensor, Vocabulary]:
    """The words of the training, validation and test file, each as one stream of ids, int64 (n),
    in which `<eos>` ends every line; and the vocabulary, the words of the training file by falling
    frequency.

    A word that the training file does not have is `<unk>`. ValueError for missing and malformed
    files, and for such a word where the training file has no `<unk>`."""
    files = [text_lines.read(folder, name, HOLDS) for name in FILES]
    vocabulary = most_frequent(_words(line) for line in files[0][1])
    if UNKNOWN in vocabulary.words:
        vocabulary = Vocabulary(vocabulary.words, UNKNOWN)
    train, valid, test = (_stream(path, lines, vocabulary) for path, lines in files)
    return train, valid, test, vocabulary


def _words(line: str) -> list[str]:
    return [*line.split(), END]


def _stream(path: Path, lines: Iterable[str], vocabulary: Vocabulary) -> Tensor:
    ids: list[int] = []
    for number, line in enumerate(lines, 1):
        try:
            ids += map(vocabulary.id, _words(line))
        except KeyError as error:
            raise ValueError(
                f"{path}, line {number}: the word {error.args[0]!r} is not in {FILES[0]}, which "
                f"has no {UNKNOWN} that could stand for it: the files do not belong together, "
                "fetch all again"
            ) from error
    return torch.tensor(ids, dtype=torch.int64)
