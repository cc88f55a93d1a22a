"""Text as ids of words: vocabularies, sentences as rows, a continuing text, scores of tokens.

Sentences are rows of one length, so that one traced shape serves all: what is longer is cut, what
is shorter padded."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from synchromesh.workloads.training import IGNORED, summed_loss

PAD, UNKNOWN, BEGIN, END = range(4)
MARKS = ("<pad>", "<unk>", "<s>", "</s>")  # the words with these ids


@dataclass(frozen=True)
class Vocabulary:
    """Words in the order of their ids, all different."""

    words: tuple[str, ...]
    unknown: str | None = None  # one of them, which stands for all others; None: there is none

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def id(self, word: str) -> int:
        """The id of a word. KeyError for one that is not in `words` where none stands for it."""
        if self.unknown is None:
            return self._ids[word]
        return self._ids.get(word, self._ids[self.unknown])


def most_frequent(
    texts: Iterable[Iterable[str]], size: int | None = None, first: tuple[str, ...] = (),
    unknown: str | None = None,
) -> Vocabulary:  # fmt: skip
    """The vocabulary of the most frequent words of `texts`: `first`, then the others by falling
    number, equally frequent ones in alphabetical order, so that it is the same on every rank.
    size: the most words it may have, with those of `first`; None: all."""
    counts = Counter(word for text in texts for word in text)
    others = sorted(counts.keys() - set(first), key=lambda word: (-counts[word], word))
    return Vocabulary((*first, *others)[:size], unknown)


def sentence_vocabulary(sentences: Iterable[Iterable[str]], size: int) -> Vocabulary:
    """The marks and the most frequent words, at most `size` in all; `<unk>` is all others."""
    return most_frequent(sentences, size, MARKS, MARKS[UNKNOWN])


def sentence_rows(sentences: Sequence[Sequence[str]], words: Vocabulary, length: int) -> Tensor:
    """Ids int64 (sentences, length): `<s> w1 ... wn </s> <pad> ...`; of a sentence of more than
    `length` - 2 words the first ones."""
    table = torch.full((len(sentences), length), PAD)
    for row, sentence in zip(table, sentences, strict=True):
        ids = [BEGIN, *(words.id(word) for word in sentence[: length - 2]), END]
        row[: len(ids)] = torch.tensor(ids)
    return table


def synthetic_sentences(count: int, size: int, length: int, seed: int) -> Tensor:
    """Seeded rows of such a form, of three words to as many as fit, of a vocabulary of `size`."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(len(MARKS), size, (count, length), generator=generator)
    ends = torch.randint(4, length, (count, 1), generator=generator)
    places = torch.arange(length)
    table[:, 0] = BEGIN
    return table.masked_fill(places > ends, PAD).masked_fill(places == ends, END)


@dataclass(frozen=True)
class ContinuingText:
    """Item k is tokens [k n, (k + 1) n) of `ids` and, to be predicted, those one further on; n is
    `length`, the steps that back-propagation goes back. Tokens that fill no item are left out.
    Such are read as continuing streams (`continuing=True`), each row of a batch one."""

    ids: Tensor  # int64 (tokens)
    length: int

    def __post_init__(self) -> None:
        if self.length < 1 or len(self) < 1:
            raise ValueError(
                f"a text of {len(self.ids)} tokens has no part of {self.length} with one behind "
                "it: give a longer text or shorter parts, of one token at least"
            )

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        start, stop = index * self.length, (index + 1) * self.length
        return self.ids[start:stop], self.ids[start + 1 : stop + 1]


# Logits (rows, length, tokens) against targets (rows, length), of which those that are
# `IGNORED.token`, as padding, count nowhere


def token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the targets that count, and their number."""
    return summed_loss(logits.flatten(0, 1), targets.flatten(), IGNORED.token)


def token_metric(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Sums over the rows of the row's means over its targets that count: `accuracy`, the share
    that got the best score, and `nll`, the negative log likelihood in nats. exp(nll) is the
    perplexity, where all rows have equally many targets."""
    counted = targets != IGNORED.token
    number = counted.sum(1)
    right = (logits.argmax(-1) == targets).sum(1)
    scores = logits.transpose(1, 2)
    each = F.cross_entropy(scores, targets, ignore_index=IGNORED.token, reduction="none")
    return {"accuracy": (right / number).sum(), "nll": (each.sum(1) / number).sum()}
