"""Reports: what a loss gives beside itself, `(loss, {name: value})`, over the rows of all ranks.

    mean            sum_b m_b v_b / sum_b m_b      of blocks of m rows: on ranks, in micro-batches
    weighted mean   sum_b s_b / sum_b w_b          (s, w): its two sums, as a loss's
    sum             sum_b s_b

What is seen to be none of these (a root of a mean, say) is taken for a mean, with a warning."""

from collections.abc import Sequence

from torch import Tensor

from synchromesh.engine.program import RankOutputs
from synchromesh.trace.step import Report


class Reports(dict[str, float]):
    """What the backward calls since the last update have reported, by name. latest: the last one
    alone, of a global batch of so many `rows`."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: dict[str, float] = {}
        self.rows = 0
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, of: Sequence[Report], sums: Sequence[float], rows: int, begins: bool) -> None:
        """The sums of a backward over all ranks, two of each report. begins: an accumulation."""
        if begins:
            self._sums.clear()
        before, self.rows = dict(self._sums), rows
        self.clear()
        self.latest = {}
        for report, *pair in zip(of, sums[::2], sums[1::2], strict=True):
            if not pair[1] and report.kind == "unknown":
                continue  # of a model that runs untraced, which has not reported it
            known = before.get(report.name, (0.0, 0.0))
            total = self._sums[report.name] = known[0] + pair[0], known[1] + pair[1]
            for target, (value, weight) in ((self.latest, pair), (self, total)):
                quotient = value / weight if weight else float("nan")
                target[report.name] = value if report.kind == "sum" else quotient


def add_reports(of: Sequence[Report], result: RankOutputs, sums: Tensor) -> None:
    """Adds what this rank reports of a micro-batch. ValueError for what is not known of it."""
    places = {report.name: (2 * i, report.kind) for i, report in enumerate(of)}
    for (name, part), value, rows in result.reports:
        if name not in places:
            raise ValueError(
                f"the loss reports {name}, which it did not of the example batch: where a model "
                "runs untraced it should report the same names in every step"
            )
        place, kind = places[name]
        exact = kind in ("sum", "weighted mean")
        sums[place + part].add_(value.double() * (1 if exact else rows))
        sums[place + 1].add_(0 if exact else rows)
