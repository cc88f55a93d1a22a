"""Padding: batches of one length on all ranks, and of few lengths in an epoch.

Who pads to the longest row of a batch gives each rank another length, for each reads its own rows,
and each length another trace. Ranks agree on the longest, and it is rounded up:

    rank 0    7 of 11 tokens, 9 of 11  ]
    rank 1   13 of 13 tokens, 5 of 13  ]->  16 on both"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from synchromesh.trace.capture.batch import path_name

IGNORED = -100  # as a label, of torch's cross_entropy and of what transformers collates
LEAST = 16  # tokens, of lengths that nobody has named: fewer are not worth a trace; chosen


@dataclass(frozen=True)
class Padding:
    """What fills dim 1 of a batch's tensors, by their names (keys, or places in a tuple)."""

    values: Mapping[str, float]
    lengths: tuple[int, ...] = ()  # to one of which they are filled; none: powers of two
    most: int | None = None  # of a length, where none are named
    left: bool = False  # whether it stands in front

    def __post_init__(self) -> None:
        if sorted(set(self.lengths)) != list(self.lengths) or min(self.lengths, default=1) < 1:
            raise ValueError(
                f"lengths={list(self.lengths)} should be whole numbers of at least 1 that grow"
            )

    @classmethod
    def of(cls, collate: Any, lengths: Sequence[int] = ()) -> "Padding | None":
        """As a collator of `transformers` pads; None where this is none that does, or one that
        gives all batches the same length."""
        tokenizer: Any = getattr(collate, "tokenizer", None)
        token = getattr(tokenizer, "pad_token_id", None)
        if token is None or getattr(collate, "padding", True) == "max_length":
            return None
        label = getattr(collate, "label_pad_token_id", IGNORED)
        values = {
            "input_ids": token, "attention_mask": 0, "special_tokens_mask": 1,
            "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
            "labels": label, "decoder_input_ids": token, "decoder_attention_mask": 0,
        }  # fmt: skip
        most = getattr(collate, "max_length", None) or tokenizer.model_max_length
        return cls(values, tuple(lengths), most, tokenizer.padding_side == "left")

    def padded(self, batch: Any, agree: Callable[[Any], list[Any]]) -> Any:
        """The batch with lengths that are those of all ranks. agree: gathers a value of each.
        ValueError for rows that are longer than all named lengths."""
        given, structure = pytree.tree_flatten_with_path(batch)
        filled = {
            at: name
            for at, (path, x) in enumerate(given)
            if (name := path_name(path)) in self.values and isinstance(x, Tensor) and x.dim() > 1
        }
        here = [given[at][1].shape[1] for at in filled]
        longest = [*map(max, zip(*agree(here), strict=True))]
        leaves = [x for _, x in given]
        for (at, name), length in zip(filled.items(), longest, strict=True):
            leaves[at] = self._filled(leaves[at], self._rounded(length), self.values[name])
        return pytree.tree_unflatten(leaves, structure)

    def _rounded(self, length: int) -> int:
        if not self.lengths:
            rounded = max(LEAST, 1 << (length - 1).bit_length())
            return rounded if self.most is None else max(length, min(rounded, self.most))
        for known in self.lengths:
            if length <= known:
                return known
        raise ValueError(
            f"a row of {length} is longer than the lengths that batches may have "
            f"({', '.join(map(str, self.lengths))}): name a longer one, or cut such rows"
        )

    def _filled(self, x: Tensor, length: int, value: float) -> Tensor:
        missing = length - x.shape[1]
        if not missing:
            return x
        behind = [0, 0] * (x.dim() - 2)  # `pad` counts from the last dim
        return F.pad(x, (*behind, *((missing, 0) if self.left else (0, missing))), value=value)
