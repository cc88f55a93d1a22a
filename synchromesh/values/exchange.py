"""An exchange: a value that one component makes in one layout and another reads in another."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from synchromesh.values.component import Value
from synchromesh.values.layout import Layout
from synchromesh.values.placement import Placement
from synchromesh.values.routes import (
    Change,
    Ranges,
    copies,
    shape_rows_first,
    side,
    with_stand_ins,
)

Border = str  # the form in which a value is there: name, mesh, placement


def border(name: str, layout: Layout, placement: Placement) -> Border:
    """A value in a form, as text, which is quicker to look up than its parts."""
    return f"{name} {layout.mesh} {placement}"


@dataclass(frozen=True)
class Exchange:
    """A value that one component makes as (source, have) and another reads as (target, want)."""

    value: Value
    have: Placement
    want: Placement
    source: Layout
    target: Layout
    flows: bool = True  # whether a gradient comes back

    @cached_property
    def made(self) -> Border:
        """The form in which it is there."""
        return border(self.value.name, self.source, self.have)

    @cached_property
    def read(self) -> Border:
        """The form in which it is wanted."""
        return border(self.value.name, self.target, self.want)

    @cached_property
    def crosses(self) -> bool:
        """Whether it goes to the ranks of another stage."""
        return self.source.positions != self.target.positions

    def change(self, ranges: Callable[[int], Ranges], gradient: bool) -> Change:
        """From side to side of the value, or of its gradient, which goes the other way.

        ranges: the rows of each data index, by data degree. A rank of another stage that has no
        rows gets one that is not its own, to run on (engine/absent.py)."""
        known = gradient, ranges(self.source.data), ranges(self.target.data)
        if known not in self._changes:
            self._changes[known] = self._change(*known)
        return self._changes[known]

    @cached_property
    def _changes(self) -> dict[tuple[bool, Ranges, Ranges], Change]:
        return {}

    def _change(self, gradient: bool, made_rows: Ranges, read_rows: Ranges) -> Change:
        if self.crosses and not gradient:
            read_rows = with_stand_ins(read_rows)
        made = side(self.value, self.source, self.have, made_rows, gradient)
        read = side(self.value, self.target, self.want, read_rows, gradient)
        return Change(read, made) if gradient else Change(made, read)

    def copies(self, gradient: bool) -> list[tuple[int, int]]:
        """(sender, receiver) of a value without rows, or of its gradient, between stages."""
        return copies(self.source, self.target, gradient)

    def sent_bytes(self, ranges: Callable[[int], Ranges], gradient: bool, position: int) -> int:
        """What a position sends to other stages."""
        if self.value.rows is None:
            size = self.value.bytes(1)
            return size * sum(sender == position for sender, _ in self.copies(gradient))
        change, one = self.change(ranges, gradient), shape_rows_first(self.value)
        if position not in change.source.layout.positions:
            return 0
        entries = change.sent_entries(one, position)
        return entries * self.value.item_bytes
