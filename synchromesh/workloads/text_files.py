"""The files of data sets of text: the Penn treebank, SST-2 and Multi30k.

PTB        Mikolov et al. 2010: a sentence a line, words between spaces, rare ones already
           replaced by `<unk>`
SST-2      the two classes of the Stanford sentiment treebank (Socher et al. 2013), tokenised,
           as Kim (2014, arXiv:1408.5882) published them: a sentence a line, its label before it
Multi30k   Elliott et al. 2016, arXiv:1605.00459: captions of images, one a line; the same line
           of `.en` and `.de` says the same in English and German"""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from synchromesh.workloads import data_files
from synchromesh.workloads.text import Vocabulary, most_frequent

PTB_FILES = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")
PTB_HOLDS = f"{', '.join(PTB_FILES)} (plain or .gz)"
END, UNKNOWN = "<eos>", "<unk>"  # of PTB
SST2_HOLDS = "stsa.binary.train, stsa.binary.dev, stsa.binary.test (plain or .gz)"
MULTI30K_HOLDS = (
    "train.en, train.de, val.en, val.de, test_2016_flickr.en, test_2016_flickr.de (plain or .gz)"
)
WORD = re.compile(r"\w+|[^\w\s]")  # letters and digits in a row, or one other sign


def read_ptb(folder: Path) -> tuple[Tensor, Tensor, Tensor, Vocabulary]:
    """The words of the training, validation and test file, each as one stream of ids, int64 (n),
    in which `<eos>` ends every line; and the vocabulary, the words of the training file by falling
    frequency. A word that the training file does not have is `<unk>`. ValueError for missing and
    malformed files, and for such a word where the training file has no `<unk>`."""
    files = [data_files.read_lines(folder, name, PTB_HOLDS) for name in PTB_FILES]
    vocabulary = most_frequent(_treebank_words(line) for line in files[0][1])
    if UNKNOWN in vocabulary.words:
        vocabulary = Vocabulary(vocabulary.words, UNKNOWN)
    train, valid, test = (_stream(path, lines, vocabulary) for path, lines in files)
    return train, valid, test, vocabulary


def _treebank_words(line: str) -> list[str]:
    return [*line.split(), END]


def _stream(path: Path, lines: Iterable[str], vocabulary: Vocabulary) -> Tensor:
    ids: list[int] = []
    for number, line in enumerate(lines, 1):
        try:
            ids += map(vocabulary.id, _treebank_words(line))
        except KeyError as error:
            raise ValueError(
                f"{path}, line {number}: the word {error.args[0]!r} is not in {PTB_FILES[0]}, "
                f"which has no {UNKNOWN} that could stand for it: the files do not belong "
                "together, fetch all again"
            ) from error
    return torch.tensor(ids, dtype=torch.int64)


def read_sst2(folder: Path, split: str) -> tuple[list[list[str]], Tensor]:
    """The words of the sentences of `split` (train, dev or test), and their labels, int64 (n), 1
    for a positive one. ValueError for a missing file and a malformed line."""
    path, lines = data_files.read_lines(folder, f"stsa.binary.{split}", SST2_HOLDS)
    sentences, labels = [], []
    for number, line in enumerate(lines, 1):
        label, _, sentence = line.partition(" ")
        words = sentence.split()
        if label not in ("0", "1") or not words:
            raise ValueError(
                f"{path}, line {number}: {line[:40]!r} is not a label, 0 or 1, a space and a "
                "sentence: mend the line or fetch the file again"
            )
        sentences.append(words)
        labels.append(int(label))
    return sentences, torch.tensor(labels)


def read_multi30k(folder: Path, split: str) -> tuple[list[list[str]], list[list[str]]]:
    """The words, in lower case, of the English and the German sentences of `split`. ValueError for
    a missing file, a line without words, and files of different lengths."""
    names = (f"{split}.{language}" for language in ("en", "de"))
    files = [data_files.read_lines(folder, name, MULTI30K_HOLDS) for name in names]
    (one, english), (other, german) = files
    if len(english) != len(german):
        raise ValueError(
            f"{one} has {len(english)} lines but {other} {len(german)}: line by line they are "
            "translations, so fetch both again"
        )
    return _caption_words(one, english), _caption_words(other, german)


def _caption_words(path: Path, lines: list[str]) -> list[list[str]]:
    sentences = [WORD.findall(line.lower()) for line in lines]
    for number, words in enumerate(sentences, 1):
        if not words:
            raise ValueError(
                f"{path}, line {number} has no words: remove the line from both languages, or "
                "fetch the file again"
            )
    return sentences
