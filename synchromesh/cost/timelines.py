"""The timelines of all device groups, walked together: what several of them begin at once.

    group 0   [ 0F0 ] send [ 0F1 ] ...          a message begins to move when it has been sent
                         ~~~~~~~~               and its receive is posted, and is there when it
    group 1   receive           [ 1F0 ] ...     has arrived at both ends

A walk is a generator of spans (cost/timeline.py), one for each group. The one whose next event
comes first goes on until it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from math import inf

from synchromesh.cost.timeline import Spans, Timeline, Way


@dataclass
class Departure:
    """What begins when so many groups have come to it. came: by group, which way it goes there."""

    came: dict[int, Way] = field(default_factory=dict)
    begun: bool = False


class Timelines:
    """`lines` by group; a walk calls `come`, and waits until what it met for has `arrived`."""

    def __init__(self, lines: Sequence[Timeline]) -> None:
        self.lines = lines
        self._departures: dict[object, Departure] = {}
        self._pending: list[set[object]] = [set() for _ in lines]  # under way, by group
        self._spans: list[float | None] = [None] * len(lines)  # that a group lets pass next
        self._due = [0.0] * len(lines)  # when that has gone by
        self._ended = 0
        self._queue = [(0.0, group) for group in range(len(lines))]

    def come(
        self, group: int, key: object, parties: int, kind: str, seconds: float,
        lane: object = None, way: Way = "both", pair: object = None,
    ) -> None:  # fmt: skip
        """A group comes to `key`. With the last of the parties it departs, from each of them."""
        departure = self._departures.setdefault(key, Departure())
        departure.came[group] = way
        if len(departure.came) < parties:
            return
        departure.begun = True
        for party, its in departure.came.items():
            if seconds > 0.0:
                self._pending[party].add(key)
            depart = partial(self.lines[party].depart, key, kind, seconds, lane, its, pair)
            if party == group:
                depart()
            else:
                self.lines[party].joining.append(depart)
                self._wake(party, self.lines[group].clock)

    def arrived(self, key: object) -> bool:
        """Whether what began with `key` is under way nowhere."""
        departure = self._departures.get(key)
        if departure is None or not departure.begun:
            return False
        return not any(key in self.lines[group].under_way for group in departure.came)

    def walk(self, walks: Sequence[Spans]) -> None:
        """Lets all walks come to their ends."""
        while self._queue:
            time, group = heappop(self._queue)
            if time == self._due[group]:
                self._go_on(group, walks[group])
        assert self._ended == len(walks), "groups wait for what nobody begins"

    def _go_on(self, group: int, walk: Spans) -> None:
        line, passed = self.lines[group], self._spans[group]
        try:
            span = next(walk) if passed is None else walk.send(passed)
        except StopIteration:
            self._due[group], self._ended = inf, self._ended + 1
        else:
            self._spans[group] = span
            self._due[group] = line.clock + span
            if span < inf:
                heappush(self._queue, (self._due[group], group))
        for key in [k for k in self._pending[group] if k not in line.under_way]:
            self._pending[group].remove(key)
            for party in self._departures[key].came:
                if party != group:
                    self._wake(party, line.clock)

    def _wake(self, group: int, time: float) -> None:
        """The group's time passes until `time` at first: something changes there."""
        if self._spans[group] is not None:
            self._spans[group] = max(0.0, time - self.lines[group].clock)
        self._due[group] = time
        heappush(self._queue, (time, group))
