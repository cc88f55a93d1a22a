"""Spans: what a rank did from when to when, on a clock that is common to all ranks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from synchromesh.runs.intervals import Interval

Kind = Literal["computation", "communication"]


@dataclass(frozen=True)
class Span:
    """Seconds in which one thing went on in one lane (a thread or a CUDA stream) of a rank.

    name    of a communication: all_reduce, all_gather, reduce_scatter, ..., send, receive; of a
            computation: the operator or kernel, or `host` for what runs between operators
    ranks   of a communication: all that take part; of a message (sender, receiver)"""

    start: float
    end: float
    kind: Kind
    name: str
    lane: str
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.start <= self.end, self


@dataclass(frozen=True)
class Recording:
    """What one rank recorded: its spans in the order of their starts, and the bounds of the steps
    that were recorded, all in seconds since the Unix epoch."""

    rank: int
    steps: tuple[Interval, ...]
    spans: tuple[Span, ...]

    def later(self, seconds: float) -> "Recording":
        """The same with a clock that shows `seconds` more."""
        return Recording(
            self.rank,
            tuple((start + seconds, end + seconds) for start, end in self.steps),
            tuple(replace(s, start=s.start + seconds, end=s.end + seconds) for s in self.spans),
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, with names and lanes as numbers into `texts`."""
        texts: dict[str, int] = {}

        def number(text: str) -> int:
            return texts.setdefault(text, len(texts))

        spans = [
            [s.start, s.end, number(s.kind), number(s.name), number(s.lane), *s.ranks]
            for s in self.spans
        ]
        steps = [list(bounds) for bounds in self.steps]
        return {"rank": self.rank, "steps": steps, "spans": spans, "texts": list(texts)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Recording":
        """The inverse of `to_dict`."""
        texts: list[Any] = value["texts"]
        spans = tuple(
            Span(a, b, texts[kind], texts[name], texts[lane], tuple(ranks))
            for a, b, kind, name, lane, *ranks in value["spans"]
        )
        return cls(value["rank"], tuple((a, b) for a, b in value["steps"]), spans)


def by_start(spans: Iterable[Span]) -> tuple[Span, ...]:
    """In the order of their starts, those that contain others first."""
    return tuple(sorted(spans, key=lambda s: (s.start, -s.end)))
