"""A target of a study: a metric and the value that it should reach, `accuracy=0.9`."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from synchromesh.results.run import Epoch, Reached
from synchromesh.values.fault import near


@dataclass(frozen=True)
class Target:
    """`accuracy=0.9` and `accuracy>=0.9`: at least so much; `loss<=1.5`: at most."""

    metric: str
    value: float
    least: bool = True  # reached by values that are as large; else by those that are as small

    @classmethod
    def parse(cls, text: str) -> "Target":
        """ValueError for what is none."""
        match = re.fullmatch(r"\s*([^<>=]+?)\s*(=|>=|<=)\s*([^<>=]+?)\s*", text)
        try:
            value = float(match[3]) if match else math.nan
        except ValueError:
            value = math.nan
        if match is None or not math.isfinite(value):
            raise ValueError(
                f"target {text!r}: write a metric and its value, as accuracy=0.9 (at least) or "
                "loss<=1.5 (at most)"
            )
        return cls(match[1], value, match[2] != "<=")

    def __str__(self) -> str:
        return f"{self.metric}{'=' if self.least else '<='}{self.value:g}"

    def check(self, names: Sequence[str]) -> None:
        if self.metric not in names:
            raise ValueError(
                f"--target {self}: the workload's metric gives {', '.join(names) or 'nothing'}, "
                f"not {self.metric!r}{near(self.metric, names)}"
            )

    def reached(self, epochs: Iterable[Epoch]) -> Reached:
        """The first epoch that reaches it, if one does."""
        for epoch in epochs:
            value = epoch.values.get(self.metric, math.nan)
            if value >= self.value if self.least else value <= self.value:
                return Reached(str(self), epoch.epoch, epoch.seconds)
        return Reached(str(self))
