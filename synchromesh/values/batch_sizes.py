"""Global batches that change while training: in words, `auto:64-512`, `30:x5,60:x5`, `ranks`."""

import re
from dataclasses import dataclass
from math import inf, prod
from typing import ClassVar

WORDS = re.compile(r"auto(?::(\d{1,12})-(\d{1,12}))?")
GROWTH = re.compile(r"(\d{1,9}):x(\d{1,6}(?:\.\d{1,6})?)")


@dataclass(frozen=True)
class BatchRange:
    """Rows that a batch may have where it is chosen while training; None: not said."""

    GROWN: ClassVar = 32  # times the first batch that one may have where nothing is said; chosen
    UPDATES: ClassVar = 10  # of an epoch, at least, where nothing is said; chosen

    least: int | None = None
    most: int | None = None

    @classmethod
    def parse(cls, text: str) -> "BatchRange":
        """Of `auto` or `auto:MIN-MAX`. ValueError for anything else."""
        if not (found := WORDS.fullmatch(text)):
            raise ValueError(f"{text!r} is no batch size: give a number, auto or auto:MIN-MAX")
        least, most = (None if n is None else int(n) for n in found.groups())
        if least is not None and most is not None and not 1 <= least <= most:
            raise ValueError(f"{text!r}: MIN is at least 1, and at most MAX")
        return cls(least, most)

    def __str__(self) -> str:
        return "auto" if self.least is None else f"auto:{self.least}-{self.most}"

    def sizes(self, base: int, samples: int | None) -> list[int]:
        """Those that are compared, ascending: `base` times powers of two, and both ends. samples:
        of an epoch. ValueError where data has fewer than the least."""
        entire = inf if samples is None else samples
        least = base if self.least is None else self.least
        if least > entire:
            raise ValueError(f"batches of {least:,} rows or more, of data that has {samples:,}")
        usual = max(least, int(min(self.GROWN * base, entire // self.UPDATES)))
        most = min(entire, usual if self.most is None else self.most)
        found = {least, int(most)} if self.most is not None else {least}
        for power in range(-64, 65):
            found.add(int(base * 2.0**power))
        return sorted(n for n in found if least <= n <= most)


def batches_of(text: str) -> "BatchRange | BatchSchedule | RankBatches":
    """Of one's text. ValueError for anything else."""
    if text == str(RankBatches()):
        return RankBatches()
    return (BatchRange if text.startswith("auto") else BatchSchedule).parse(text)


@dataclass(frozen=True)
class RankBatches:
    """Each rank of an elastic run keeps the rows that it has when the run begins."""

    def __str__(self) -> str:
        return "ranks"


@dataclass(frozen=True)
class BatchSchedule:
    """By what a batch has grown behind so many epochs, each: in place of a rate that decays
    (Smith et al. 2018, arXiv 1711.00489)."""

    growths: tuple[tuple[int, float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "BatchSchedule":
        """Of `EPOCH:xTIMES,...`, epochs ascending. ValueError for anything else."""
        found = [GROWTH.fullmatch(part.strip()) for part in text.split(",")]
        growths = tuple((int(x[1]), float(x[2])) for x in found if x)
        epochs = [epoch for epoch, _ in growths]
        rising = epochs == sorted({*epochs}) and all(times > 1.0 for _, times in growths)
        if len(growths) < len(found) or not rising or epochs[0] < 1:
            raise ValueError(
                f"{text!r} is no schedule of batches: give epochs, ascending from 1, and by what "
                "the batch grows behind each, more than 1, as 30:x5,60:x5"
            )
        return cls(growths)

    def __str__(self) -> str:
        return ",".join(f"{epoch}:x{times:g}" for epoch, times in self.growths)

    def grown(self, epochs: int) -> float:
        """By what a batch has grown behind so many epochs."""
        return prod(times for epoch, times in self.growths if epoch <= epochs)
