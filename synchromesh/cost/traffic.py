"""The traffic of a step: what moves inside a stage and messages between stages take.

Each micro-batch has its share of the rows."""

from synchromesh.cost.planned_step import PlannedStep, collective_seconds, pattern
from synchromesh.cost.timeline import Spans, Timeline
from synchromesh.cost.turns import Transmit
from synchromesh.trace.partition.moves import edge_collectives
from synchromesh.values.layout import Layout
from synchromesh.values.messages import Message
from synchromesh.values.profile import Pattern, Profile
from synchromesh.values.schedule import Action, ActionKind
from synchromesh.values.traffic import Collective, Direction

_Traffic = tuple[str, float, Pattern]  # kind of a collective, seconds, the groups that it is on
_DIRECTIONS: dict[ActionKind, Direction] = {"F": "forward", "B": "backward"}


class Traffic:
    """Seconds of moves and messages. pieces: how many micro-batches take turns on a stage."""

    def __init__(self, planned: PlannedStep, profile: Profile, pieces: int) -> None:
        self.planned, self.profile, self.pieces = planned, profile, pieces
        self._moves: dict[tuple[int, int, str], list[_Traffic]] = {}
        self._messages: dict[tuple[str, int, int], float] = {}

    def begin(self, line: Timeline, item: Transmit, action: Action) -> None:
        """What `item` sends in the direction of `action` departs."""
        known = (item.component, item.number, action.kind)
        if known not in self._moves:
            self._moves[known] = self._move(item, _DIRECTIONS[action.kind])
        for number, (kind, seconds, ranks) in enumerate(self._moves[known]):
            line.depart(self._key(item, action, number), kind, seconds, ranks)

    def end(self, line: Timeline, item: Transmit, action: Action) -> Spans:
        """What `item` has sent in the direction of `action` is waited for."""
        for number in range(len(item.communication.collectives)):
            yield from line.arrive(self._key(item, action, number))

    def repeats(self, component: int) -> list[_Traffic]:
        """What a component that is recomputed sends once more in backward."""
        local = self.planned.partition.components[component]
        return [self._seconds(c, local.layout) for c in local.repeats]

    def message(self, message: Message) -> float:
        """Seconds of all values of a message, one after another."""
        known = (message.kind, message.source, message.target)
        if known not in self._messages:
            self._messages[known] = sum(
                collective_seconds("send", pattern(c), self._payload(c, e.source), self.profile)
                for e in self.planned.crossings[message.source, message.target]
                for c in edge_collectives(
                    e.value, e.have, e.want, e.source, e.target, e.flows
                ) or ()
                if c.direction == _DIRECTIONS[message.kind]
            )  # fmt: skip
        return self._messages[known]

    def _key(self, item: Transmit, action: Action, number: int) -> tuple[int, ...]:
        return action.micro_batch, item.component, item.number, number

    def _move(self, item: Transmit, direction: Direction) -> list[_Traffic]:
        layout = self.planned.partition.components[item.component].layout
        sent = (c for c in item.communication.collectives if c.direction == direction)
        return [self._seconds(c, layout) for c in sent]

    def _seconds(self, collective: Collective, layout: Layout) -> _Traffic:
        ranks, payload = pattern(collective), self._payload(collective, layout)
        seconds = collective_seconds(collective.kind, ranks, payload, self.profile)
        return collective.kind, seconds, ranks

    def _payload(self, collective: Collective, layout: Layout) -> float:
        """Bytes for a micro-batch's rows, of the largest block."""
        rows = max(self.planned.blocks(Layout(collective.data) if collective.data else layout))
        of_rows = collective.bytes_per_row * rows**collective.power / self.pieces
        return float(of_rows + collective.fixed_bytes)
