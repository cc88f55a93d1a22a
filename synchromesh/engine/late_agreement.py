"""A late agreement: the ranks of a stage agree on a step before it begins, all ranks some steps
later, so that no stage waits for those that are still at an earlier one.

    stage 0   tells 0, knows 0 | tells 1 | tells 2, knows 1 | tells 3, knows 2 ...
    stage 1   tells 0, knows 0 ....... | tells 1 | tells 2, knows 1 | ..."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from synchromesh.engine.agreement import Marks, RankReport, RowAgreement
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.control_channel import STEP, start_checked_gather
from synchromesh.engine.groups import Group
from synchromesh.values.layout import Layout


class _Told(NamedTuple):
    """What this rank has told of a step."""

    gather: Callable[[Sequence[int]], list[tuple[int, ...]]]
    packed: list[int]
    data: str
    fault: str


class LateAgreement(RowAgreement):
    """As `RowAgreement`; `numbers` are those of the last step that all have told of. everyone: the
    agreement of all ranks. layout: of the batch on this stage's. steps: that it is late."""

    def __init__(self, everyone: RowAgreement, stage: Group, layout: Layout, steps: int) -> None:
        own = Layout(layout.data, layout.tensor)
        super().__init__(stage, tuple(range(stage.size)), (own,), everyone.plan)
        self._everyone, self._steps = everyone, steps
        self._told: deque[_Told] = deque()
        self._filled = False

    def __call__(
        self, batch: Any, marks: Marks, numbers: tuple[int, ...] = (), outdated: bool = False,
        method: str = STEP, at_once: bool = True, unknown: bool = False,
    ) -> GlobalRows:  # fmt: skip
        """The rows of this step. ValueError on every rank where they were not alike in a step
        before; in the first one of a pipeline that is filled anew, of that."""
        # whether data ranks have other rows is a question of their stage, below
        report, fault = self._everyone._own(batch, marks, numbers, outdated, False)
        packed = report.packed()
        gather = start_checked_gather(self._everyone.group, method, packed)
        self._told.append(_Told(gather, packed, marks.data, fault))
        self._know(self._steps if self._filled else 0)
        self._filled, known = True, self.numbers
        rows = super().__call__(batch, marks, (), outdated, method, False, unknown)
        self.numbers = known
        return rows

    def drain(self) -> None:
        """All are at one step, and know of all of them."""
        self._know(0)
        self._filled = False

    def _know(self, but: int) -> None:
        """Of all steps that were told, but as many of the last ones."""
        while len(self._told) > but:
            told = self._told.popleft()
            reports = [*map(RankReport.unpacked, told.gather(told.packed))]
            self._everyone._checked(reports, told.data, told.fault)
            self.numbers = self._everyone.numbers
