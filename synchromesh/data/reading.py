"""A reading: what one rank read of a global batch, as a request asked for it; both are values."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from traceback import format_exception
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data._utils.pin_memory import pin_memory

from synchromesh.values.fault import message

Collate = Callable[[list[Any]], Any]
Ranges = tuple[tuple[int, int], ...]  # [start, stop) of a global batch, in order
OwnRows = Callable[[int], Ranges]  # rows of a global batch -> this rank's


class SampleError(ValueError):
    """A sample that cannot be read; the message has its index and the cause."""


@dataclass(frozen=True)
class Request:
    rows: Ranges  # of the global batch, that are this rank's
    size: int  # rows of the global batch
    what: Any  # as the reader understands it; None: nothing, for the turn of a worker
    place: tuple[int, ...] = ()  # from which samples draw (cursor.py)


@dataclass(frozen=True)
class ReadingFault:
    """Why samples could not be read. A value: ending a worker that raised takes torch 5 s."""

    sentence: str
    traceback: str

    @classmethod
    def of(cls, what: str, error: Exception) -> "ReadingFault":
        sentence = f"{what} cannot be read: {type(error).__name__}: {message(error)}"
        return cls(sentence, "".join(format_exception(error)))

    def error(self) -> SampleError:
        """As an exception, with the traceback of the reader as a note."""
        error = SampleError(self.sentence)
        error.add_note(self.traceback)
        return error


@dataclass(frozen=True)
class Reading:
    """A reader's answer. Of a stream also what ranks tell each other (`data/stream.py`)."""

    batch: Any = None  # collated of `made` samples: of this rank's rows, or one where it has none
    made: int = 0
    fault: ReadingFault | None = None
    counts: tuple[int, ...] = ()  # items that each substream gave, -1 where none was to be read
    items: tuple[list[Any], ...] = ()  # where a substream ended: no batch is made of them yet
    states: tuple[Any, ...] = ()  # of the stream's data set behind these items
    digest: int = 0  # a number that equal items share

    def changed(self, change: Callable[[Any], Any]) -> "Reading":
        return self if self.batch is None else replace(self, batch=change(self.batch))

    def pin_memory(self) -> "Reading":
        """With a batch in page-locked memory, as a DataLoader asks for it."""
        return self.changed(pin_memory)

    def rows(self, count: int) -> Any:
        """The batch of `count` rows; emptied where no row is this rank's. SampleError for samples
        that could not be read, ValueError where the batch does not have a row for each sample."""
        if self.fault is not None:
            raise self.fault.error()
        rows = sorted({x.shape[0] for x in pytree.tree_leaves(self.batch) if _has_rows(x)})
        if rows != [self.made]:
            raise ValueError(
                f"collate made {' and '.join(map(str, rows)) or 'no'} rows of {self.made} "
                "samples: dimension 0 of every tensor of a batch should be its rows"
            )
        if count:
            return self.batch
        return pytree.tree_map(lambda x: x[:0] if _has_rows(x) else x, self.batch)


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0
