"""A vocabulary: the words that a model knows, each with its id."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Vocabulary:
    """Words in the order of their ids.

    words      all different
    unknown    the word that stands for those that are not in `words`, one of them; None: there is
               none"""

    words: tuple[str, ...]
    unknown: str | None = None

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def id(self, word: str) -> int:
        """The id of a word. KeyError for one that is not in `words` where none stands for it."""
        found = self._ids.get(word)
        if found is not None:
            return found
        if self.unknown is None:
            raise KeyError(word)
        return self._ids[self.unknown]


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
