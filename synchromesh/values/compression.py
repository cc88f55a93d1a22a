"""Compression of gradients: which parameter's are compressed by what, and what that sends.

    @compression=int8                               of all parameters
    @compression=classifier:powersgd:4,*:int8       by pattern; the first one that matches counts

Patterns are matched as those of layouts are, against a parameter's name and the modules around it.
What none matches is not compressed. Gradients of n numbers, in a bucket of N ranks:

    word         sends                                         by
    fp16         2 bytes a number                              all-to-all, sum, all-gather
    int8         1 byte a number, 4 a block of 256             all-to-all, sum, all-gather
    onebit       1 bit a number, 4 bytes a block of 256        all-to-all, sum, all-gather
    topk:F       F n of them, each with its place (4 bytes)    all-gather
    powersgd:R   R (a + b) numbers of a matrix a x b           all-reduce, twice

Numbers that are sent as such have at least four bytes, as residuals do."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, prod
from typing import ClassVar

from synchromesh.values.component import ITEM_BYTES
from synchromesh.values.fault import near
from synchromesh.values.plan_item import around, check_pattern, matches
from synchromesh.values.traffic import CollectiveKind

NONE = "none"
QUANTISED = ("fp16", "int8", "onebit")
WORDS = (*QUANTISED, "topk", "powersgd")
AMOUNT = re.compile(r"[0-9]{1,6}|[0-9]?\.[0-9]{1,9}")
SHOWN = "fp16, int8, onebit, topk:0.01, powersgd:4"
Shape = tuple[int, ...]


def canonical(text: str) -> str:
    """The one text that says the same. ValueError with the item at fault."""
    rules = parsed(text)
    if len(rules) == 1 and rules[0][0] == "*":
        return rules[0][1]
    return ",".join(f"{pattern}:{word}" for pattern, word in rules) or NONE


def parsed(text: str) -> tuple[tuple[str, str], ...]:
    """(pattern, word) of each item in order."""
    if text.strip() == NONE:
        return ()
    return tuple(_item([part.strip() for part in item.split(":")]) for item in text.split(","))


def _item(parts: Sequence[str]) -> tuple[str, str]:
    known = [i for i, part in enumerate(parts[:2]) if part in WORDS]
    if not known:
        name = parts[min(1, len(parts) - 1)]
        raise ValueError(
            f"compression {':'.join(parts)[:80]!r}: {name[:40]!r} is no compressor"
            f"{near(name, WORDS)}; known are {SHOWN}"
        )
    at = known[-1]
    pattern = parts[0] if at else "*"
    check_pattern(pattern, ":,;=")
    return pattern, _word(parts[at], ":".join(parts[at + 1 :]))


def _word(name: str, amount: str) -> str:
    """A compressor with its amount. ValueError where it has another one than it takes."""
    number = Fraction(amount) if AMOUNT.fullmatch(amount) else Fraction(0)
    match name:
        case "topk" if 0 < number <= 1:
            return f"topk:{float(number):.9f}".rstrip("0").rstrip(".")
        case "powersgd" if number and number.denominator == 1:
            return f"powersgd:{number}"
        case _ if name in QUANTISED and not amount:
            return name
    takes = {
        "topk": "topk takes the fraction that is sent, above 0 and at most 1: topk:0.01",
        "powersgd": "powersgd takes a rank, a whole number of at least 1: powersgd:4",
    }
    raise ValueError(
        f"compression {name + ':' * bool(amount) + amount[:20]!r}: "
        + takes.get(name, f"{name} takes no number")
    )


def assigned(text: str, parameters: Mapping[str, tuple[Shape, str]]) -> dict[str, str]:
    """The compressor of each of `parameters`, which are shapes and types by name, that has one.
    Numbers that are complex, or as short as what would be sent, are not compressed. ValueError: a
    pattern that matches nothing."""
    words: dict[str, str] = {}
    paths = {name: (name, *around(name)) for name in parameters}
    for pattern, word in parsed(text):
        hits = [name for name, of in paths.items() if any(matches(pattern, p) for p in of)]
        if not hits and parameters:
            known = sorted(set().union(*paths.values()))
            raise ValueError(
                f"compression {text!r}: pattern {pattern!r} matches no parameter that is "
                f"trained{near(pattern, known)}"
            )
        words = dict.fromkeys(hits, word) | words
    return {n: word for n, word in words.items() if _shortens(word, parameters[n][1])}


def _shortens(word: str, dtype: str) -> bool:
    return "float" in dtype and ITEM_BYTES[dtype] > (2 if word == "fp16" else 1)


def refuse_rank(words: Iterable[tuple[str, Shape]]) -> None:
    """ValueError where powersgd's rank is too large for every matrix that it is to compress.
    words: compressors, each with the shape of what a device computes with."""
    shapes: dict[str, list[Shape]] = {}
    for word, shape in words:
        if word.startswith("powersgd"):
            shapes.setdefault(word, []).append(shape)
    for word, its in shapes.items():
        r = int(word.partition(":")[2])
        if not any(low_rank(shape, r) for shape in its):
            a, b = max(map(matrix, its), key=lambda ab: ab[0] * ab[1] / sum(ab))
            most = (a * b - 1) // (a + b)
            remedy = f"take a rank of at most {most}" if most else "leave it out"
            raise ValueError(
                f"compression {word}: {r} ({a} + {b}) = {r * (a + b)} numbers are not fewer than "
                f"the {a * b} of the largest matrix, {a} x {b}: {remedy}, or take int8"
            )


def matrix(shape: Shape) -> tuple[int, int]:
    """A tensor as a matrix of its first dimension by the others; a vector has one column."""
    return (shape[0] if shape else 1), prod(shape[1:])


def low_rank(shape: Shape, rank: int) -> bool:
    """Whether factors of this rank are fewer numbers than the tensor has; it is sent whole
    otherwise."""
    a, b = matrix(shape)
    return rank * (a + b) < a * b


@dataclass(frozen=True)
class CompressedSizes:
    """Gradients of one compressor that are sent together, and how many bytes that takes."""

    word: str
    shapes: tuple[Shape, ...]
    item_bytes: int  # of a number of a residual
    ranks: int

    BLOCK: ClassVar = 256  # numbers that share a scale
    SCALE_BYTES: ClassVar = 4
    PLACE_BYTES: ClassVar = 4

    @classmethod
    def of(cls, word: str, shapes: Iterable[Shape], dtype: str, ranks: int) -> "CompressedSizes":
        return cls(word, tuple(shapes), max(4, ITEM_BYTES[dtype]), ranks)

    @property
    def name(self) -> str:
        return self.word.partition(":")[0]

    @property
    def amount(self) -> Fraction:
        """The fraction of topk, the rank of powersgd."""
        return Fraction(self.word.partition(":")[2] or 0)

    @property
    def numbers(self) -> int:
        return sum(map(prod, self.shapes))

    @property
    def part(self) -> int:
        """Numbers of which a rank makes the sum, as many on each: the last ones may be unused."""
        block = 1 if self.name == "fp16" else self.BLOCK
        return block * -(-self.numbers // (self.ranks * block))

    @property
    def part_bytes(self) -> int:
        """Of such a part as it is sent."""
        if self.name == "fp16":
            return 2 * self.part
        scales = self.SCALE_BYTES * (self.part // self.BLOCK)
        return scales + (self.part if self.name == "int8" else self.part // 8)

    @property
    def chosen(self) -> int:
        """Numbers that topk sends."""
        return max(1, ceil(self.amount * self.numbers))

    @property
    def factors(self) -> tuple[int, int]:
        """Numbers of both factors of powersgd, what is sent whole among the first."""
        r, first, second = int(self.amount), 0, 0
        for shape in self.shapes:
            a, b = matrix(shape)
            low = low_rank(shape, r)
            first, second = first + (r * a if low else a * b), second + low * r * b
        return first, second

    @property
    def payloads(self) -> tuple[tuple[CollectiveKind, int], ...]:
        """The collectives in their order, with the bytes that they are counted by."""
        if self.name in QUANTISED:
            size = self.ranks * self.part_bytes
            return ("all_to_all", size), ("all_gather", size)
        if self.name == "topk":
            size = self.chosen * (self.item_bytes + self.PLACE_BYTES)
            return (("all_gather", self.ranks * size),)
        first, second = self.factors
        sizes = (first, second) if second else (first,)
        return tuple(("all_reduce", n * self.item_bytes) for n in sizes)

    @property
    def state_bytes(self) -> int:
        """Of what each rank keeps from step to step: the residual at the first end; the one at the
        second, or powersgd's factors, now and as they began."""
        if self.name in QUANTISED:
            return self.item_bytes * self.part * (self.ranks + 1)
        second = 2 * self.factors[1] if self.name == "powersgd" else 0
        return self.item_bytes * (self.numbers + second)
