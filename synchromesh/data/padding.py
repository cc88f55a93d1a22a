"""Padding: batches of one length on all ranks, and of few lengths in an epoch.

Who pads to the longest row of a batch gives each rank another length, for each reads its own rows,
and each length another trace. Ranks agree on the longest, and it is rounded up:

    rank 0    7 of 11 tokens, 9 of 11  ]
    rank 1   13 of 13 tokens, 5 of 13  ]->  16 on both"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from synchromesh.trace.capture.batch import path_name

IGNORED = -100  # as a label, of torch's cross_entropy and of what transformers collates
PADDED = "input_ids", "attention_mask", "token_type_ids", "special_tokens_mask"
COLLATORS: Mapping[str, tuple[str, ...]] = {  # of transformers, and what they pad besides `PADDED`
    "DataCollatorWithPadding": (),
    "DataCollatorForTokenClassification": ("labels",),
    "DataCollatorForLanguageModeling": ("labels",),
    "DataCollatorForSeq2Seq": ("labels", "decoder_input_ids", "decoder_attention_mask"),
}
# Lengths that nobody has named are powers of two and three quarters of them, of at least so many
# tokens (chosen: fewer are not worth a trace). Of the longest of 32 sentences of SST-2, 41 tokens
# on average, that makes 49, in 3 lengths; powers of two alone make 63.
LEAST = 16


@dataclass(frozen=True)
class Padding:
    """What fills dim 1 of a batch's tensors, by their names (keys, or places in a tuple)."""

    values: Mapping[str, float]
    lengths: tuple[int, ...] = ()  # to one of which they are filled; none: as `LEAST`
    most: int | None = None  # of a length, where none are named
    left: bool = False  # whether it stands in front
    named: tuple[str, ...] = ()  # by the user: of any dims, and to be found in each batch

    def __post_init__(self) -> None:
        if sorted(set(self.lengths)) != list(self.lengths) or min(self.lengths, default=1) < 1:
            raise ValueError(
                f"lengths={list(self.lengths)} should be whole numbers of at least 1 that grow"
            )

    @classmethod
    def of(
        cls, collate: Any, pad: Any = None, lengths: Any = (), most: int | None = None
    ) -> "Padding | None":
        """As a collator of `transformers` pads, and as pad={name: value} says; None where neither
        does, or all batches have the same length. most: positions that the model has. ValueError
        for words of another kind."""
        wanted = isinstance(pad, Mapping | None) and isinstance(lengths, Sequence)
        if not wanted or isinstance(lengths, str):
            raise ValueError(
                f"pad={pad!r}, lengths={lengths!r} should be like {{'input_ids': 0, 'labels': "
                "-100} and (64, 128)"
            )
        made = cls._of_collator(collate, tuple(lengths), most)
        if pad is not None:
            named = {str(name): value for name, value in pad.items()}
            made = made or cls({}, tuple(lengths), most)
            made = replace(made, values={**made.values, **named}, named=tuple(named))
        if lengths and made is None:
            raise ValueError(
                "lengths are of batches that are padded: give pad={name: value} too, or a "
                "collator of transformers that has a tokenizer with a padding token"
            )
        return made

    @classmethod
    def _of_collator(
        cls, collate: Any, lengths: tuple[int, ...], most: int | None
    ) -> "Padding | None":
        collate = getattr(collate, "data_collator", collate)  # in transformers' Trainer
        tokenizer: Any = getattr(collate, "tokenizer", None)
        token = getattr(tokenizer, "pad_token_id", None)
        known = [c for c in type(collate).__mro__ if c.__module__.startswith("transformers.")]
        further = next((COLLATORS[c.__name__] for c in known if c.__name__ in COLLATORS), None)
        if further is None or token is None or _fixed(collate):
            return None
        values = {
            "input_ids": token, "attention_mask": 0, "special_tokens_mask": 1,
            "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
            "decoder_input_ids": token, "decoder_attention_mask": 0,
            "labels": getattr(collate, "label_pad_token_id", IGNORED),
        }  # fmt: skip
        bounds = (getattr(collate, "max_length", None), tokenizer.model_max_length, most)
        return cls(
            {name: value for name, value in values.items() if name in (*PADDED, *further)},
            lengths, min(bound for bound in bounds if bound is not None),
            tokenizer.padding_side == "left",
        )  # fmt: skip

    def padded(self, batch: Any, agree: Callable[[Any], list[Any]]) -> Any:
        """The batch with lengths that are those of all ranks. agree: gathers a value of each.
        ValueError for rows that are longer than all named lengths, and for a name that it has
        not."""
        given, structure = pytree.tree_flatten_with_path(batch)
        names = [path_name(path) for path, _ in given]
        if missing := [name for name in self.named if name not in names]:
            raise ValueError(
                f"pad={{{missing[0]!r}: ...}}: a batch has no such tensor, but {', '.join(names)}"
            )
        leaves = [x for _, x in given]
        filled = [at for at, name in enumerate(names) if self._fills(name, leaves[at])]
        longest = map(max, zip(*agree([leaves[at].shape[1] for at in filled]), strict=True))
        for at, length in zip(filled, longest, strict=True):
            leaves[at] = self._filled(leaves[at], self._rounded(length), self.values[names[at]])
        return pytree.tree_unflatten(leaves, structure)

    def _fills(self, name: str, x: Any) -> bool:
        if name not in self.values or not isinstance(x, Tensor):
            return False
        return x.dim() == 2 or (x.dim() > 2 and name in self.named)

    def _rounded(self, length: int) -> int:
        if not self.lengths:
            rounded = max(LEAST, 1 << (length - 1).bit_length())
            rounded = max(LEAST, 3 * rounded // 4 if length <= 3 * rounded // 4 else rounded)
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


def _fixed(collate: Any) -> bool:
    """Whether all its batches have the same length."""
    return getattr(collate, "padding", True) == "max_length"
