"""A continuing text: the parts of one stream of tokens, each the item behind the one before it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ContinuingText:
    """Item k is tokens [k n, (k + 1) n) of `ids` and, to be predicted, those one further on; n is
    `length`, the steps that back-propagation goes back. Tokens that fill no item are left out.

    Such are read as continuing streams (`continuing=True` of a loader), each row of a batch one.
    """

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
