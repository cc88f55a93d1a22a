"""Servers: the first ranks of a group, each of which keeps one part of what all compute with.

    push     rank i sends part s of its gradient to server s, which adds up the parts of all ranks
    fetch    server s sends its part of the parameters to all others

Of n bytes in all, on N ranks of which S are servers, one that is none sends n in a push; a server
sends (S - 1)/S n, and (N - 1)/S n in a fetch; a dedicated one nothing, and W/S n for W workers.
Both may be in several messages: a server steps by what has come, and sends it, while the rest
comes. (Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", OSDI;
`values/traffic.Servers`.)"""

from collections.abc import Callable, Iterator
from enum import IntEnum

from torch import Tensor

from synchromesh.engine.groups import Group
from synchromesh.values.traffic import Servers


class MessageTag(IntEnum):
    """What a message is, where several may be under way between two ranks; 0: a push."""

    ASKED = 1  # what an asynchronous worker wants, as `WorkerRequest`
    GRADIENT = 2
    ANSWERED = 3  # as `ServerAnswer`
    PARAMETERS = 4
    FETCHED = 5  # by all at once; and above, of fetches with a number


def _ranges(entries: int, count: int) -> list[tuple[int, int]]:
    """[start, stop) of so many parts of entries, as equal as they can be."""
    stops = [entries * (i + 1) // count for i in range(count)]
    return [*zip([0, *stops], stops, strict=False)]


class PushUnderWay:
    """A push that has begun. parts: (servers, n), this rank's of what each server keeps, with
    `told` numbers at their end, of which all ranks get the sum. payload: bytes to count. count:
    messages to each server; these numbers go by themselves, and first, where there are several."""

    def __init__(
        self, group: Group, servers: Servers, parts: Tensor, told: int, payload: int, count: int
    ) -> None:
        entries, first = parts.shape[1], servers.first
        self._group, self._told, self._serves = group, told, group.index < servers.count
        self._others = range(servers.count, group.size)
        rows = group.size - first if self._serves else 1
        self._came = parts.new_zeros(rows, entries if self._serves else told)
        of = [(entries - told, entries), *_ranges(entries - told, count)]
        self._begun: list[tuple[int, int, Callable[[], None]]] = []
        for start, stop in of if count > 1 else [(0, entries)]:
            to = servers.count if group.index >= first else 0
            sends = [(server, parts[server, start:stop]) for server in range(to)]
            receives = [(first + i, x[start:stop]) for i, x in enumerate(self._came)]
            if not self._serves:
                receives = [(0, self._came[0])] * (stop == entries)
            begun = group.start_exchange(sends, receives, 0 if self._begun else payload)
            self._begun.append((start, stop, begun))

    def sums(self) -> Iterator[tuple[int, int, Tensor]]:
        """[start, stop) of each message, as it comes, with the sum over all ranks on a server; on
        others nothing, or the numbers at the end of the first one."""
        for number, (start, stop, finish) in enumerate(self._begun):
            finish()
            if not self._serves:
                total = self._came[0, : 0 if number else None]
            else:
                total = self._came[:, start:stop].sum(0)
            if self._group.index == 0 and not number:
                self._group.exchange([(i, total[-self._told :]) for i in self._others], [], 0)
            yield start, stop, total


class FetchUnderWay:
    """A fetch that has begun: receives are posted. part: (n,) of a server, which may be filled as
    it is sent; of others any as long. count: messages of each server. number: of what is fetched,
    where several fetches are under way at once that may not begin in one order on all ranks."""

    def __init__(
        self, group: Group, servers: Servers, part: Tensor, count: int = 1, number: int = 0
    ) -> None:
        self.part, self._group = part, group
        self._serves, self._fetches = group.index < servers.count, group.index >= servers.first
        self._to = range(servers.first, group.size) if self._serves else range(0)
        # it may begin while gradients are still pushed
        self._tag = MessageTag.FETCHED + number
        self._unsent = _ranges(len(part), count)
        self.parts = (part.new_empty if self._fetches else part.new_zeros)(
            servers.count, len(part)
        )
        self._begun: list[Callable[[], None]] = []
        others = [s for s in range(servers.count) if self._fetches and s != group.index]
        for start, stop in self._unsent if others else ():
            receives = [(s, self.parts[s, start:stop]) for s in others]
            self._begun.append(group.start_exchange([], receives, tag=self._tag))

    def send(self, filled: int) -> None:
        """The first so many entries of the part are filled: messages of these go."""
        while self._unsent and self._unsent[0][1] <= filled:
            start, stop = self._unsent.pop(0)
            sends = [(i, self.part[start:stop]) for i in self._to if i != self._group.index]
            self._begun.append(self._group.start_exchange(sends, [], tag=self._tag))

    def __call__(self) -> Tensor:
        """(servers, n), once all of it has come; zeros on a dedicated server."""
        self.send(len(self.part))
        for finish in self._begun:
            finish()
        if self._serves and self._fetches:
            self.parts[self._group.index].copy_(self.part)
        return self.parts
