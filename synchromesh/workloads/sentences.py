"""Sentences as rows of word ids, all of one length: what is longer is cut, what is shorter padded,
so that one traced shape serves all."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from synchromesh.workloads.vocabulary import Vocabulary, most_frequent

PAD, UNKNOWN, BEGIN, END = range(4)
MARKS = ("<pad>", "<unk>", "<s>", "</s>")  # the words with these ids


def vocabulary(sentences: Iterable[Iterable[str]], size: int) -> Vocabulary:
    """The marks and the most frequent words, at most `size` in all; `<unk>` is all others."""
    return most_frequent(sentences, size, MARKS, MARKS[UNKNOWN])


def rows(sentences: Sequence[Sequence[str]], words: Vocabulary, length: int) -> Tensor:
    """Ids int64 (sentences, length): `<s> w1 ... wn </s> <pad> ...`; of a sentence of more than
    `length` - 2 words the first ones."""
    table = torch.full((len(sentences), length), PAD)
    for row, sentence in zip(table, sentences, strict=True):
        ids = [BEGIN, *(words.id(word) for word in sentence[: length - 2]), END]
        row[: len(ids)] = torch.tensor(ids)
    return table


def synthetic(count: int, size: int, length: int, seed: int) -> Tensor:
    """Seeded rows of such a form, of three words to as many as fit, of a vocabulary of `size`."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(len(MARKS), size, (count, length), generator=generator)
    ends = torch.randint(4, length, (count, 1), generator=generator)
    places = torch.arange(length)
    table[:, 0] = BEGIN
    return table.masked_fill(places > ends, PAD).masked_fill(places == ends, END)
