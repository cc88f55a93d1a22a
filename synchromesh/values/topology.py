"""Links, and the levels of a network, from the devices outwards.

    - {name: host, size: 8, link: {bytes_per_second: 3.6e+11}}          joins devices
    - {name: rack, size: 4, link: {bytes_per_second: 5.0e+10}}          joins hosts
    - {name: pod, size: 96, oversubscription: 7}                        joins racks
    - {name: core, size: 8}                                             joins pods

A level joins `size` units of the level before, each by a link: the first level's link is of each
device, the second's of each host. Where a later one says none, a unit's link carries what its
members' links carry together, over its oversubscription:

    W_(k+1)  =  size_k W_k / oversubscription_k"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from synchromesh.values import document
from synchromesh.values.fields import Within, of_plain

Seconds = Annotated[float, Within(0, 3600.0)]  # of a message
MOST_RATE = 1e24  # bytes or operations a second: beyond, their arithmetic overflows
MOST_DEVICES = 65_536  # of one cluster


@dataclass(frozen=True)
class Link:
    """What carries bytes between two hosts, or (`a == b`) between the devices of one host.

    bytes_per_second: achieved, in each direction; inside a host of each device, between hosts of
    all devices of a host together, over `lanes` equal adapters of which one device uses one.
    latency_seconds: of one message or one step of a collective. start_seconds: what a collective
    needs once, however many steps it has. switch_bytes_per_second: bus bandwidth (as nccl-tests
    defines it: 2 (m-1)/m n / seconds) of an all-reduce that the switch itself sums; 0 where it
    cannot."""

    a: str
    b: str
    bytes_per_second: Annotated[float, Within(1, MOST_RATE)]
    latency_seconds: Seconds = 0.0
    kind: str = ""  # nvlink, pcie, ethernet, infiniband, efa, loopback; for people alone
    start_seconds: Seconds = 0.0
    switch_bytes_per_second: Annotated[float, Within(0, MOST_RATE)] = 0.0
    lanes: Annotated[int, Within(1, 2**40)] = 1

    def seconds(self, size: int) -> float:
        """Time of one message of `size` bytes: latency + size / bandwidth."""
        return self.latency_seconds + size / self.bytes_per_second

    def to_dict(self) -> dict[str, Any]:
        """Its figures; those at their defaults only where they are needed."""
        needed = ("bytes_per_second", "latency_seconds")
        figures = ((f, getattr(self, f.name)) for f in fields(self) if f.name in FIGURES)
        return {f.name: x for f, x in figures if f.name in needed or x != f.default}


ANY = "*"  # the ends of a link that stands for every pair not listed
FIGURES = tuple(f.name for f in fields(Link) if f.name not in ("a", "b"))  # of a link


def link_of(a: str, b: str, item: Any, path: str) -> Link:
    """The link between `a` and `b` of these figures. ValueError with the key at fault."""
    known = document.mapping(item, path, FIGURES, ("bytes_per_second",))
    return of_plain(Link, {**known, "a": a, "b": b}, path)


@dataclass(frozen=True)
class Level:
    """size: units of the level before, each joined by `link`. oversubscription: how many times
    this unit's members could fill its own link; 1: it carries what all of them do."""

    name: str
    size: int
    link: Link | None = None
    oversubscription: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        item: dict[str, Any] = {"name": self.name, "size": self.size}
        item |= {"link": self.link.to_dict()} if self.link else {}
        over = self.oversubscription
        return item | ({"oversubscription": over} if over != 1.0 else {})

    @classmethod
    def from_dict(cls, value: Any, path: str) -> "Level":
        item = document.mapping(
            value, path, ("name", "size", "link", "oversubscription"), ("name", "size")
        )
        over = document.number(item.get("oversubscription", 1.0), f"{path}.oversubscription", 1)
        size = document.integer(item["size"], f"{path}.size", 1, MOST_DEVICES)
        link = link_of(ANY, ANY, item["link"], f"{path}.link") if "link" in item else None
        return cls(document.text(item["name"], f"{path}.name"), size, link, over)


@dataclass(frozen=True)
class Topology:
    """The levels above the hosts."""

    levels: tuple[Level, ...]

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """How many a host, a rack, a pod ... has."""
        return tuple(accumulate((level.size for level in self.levels[:-1]), mul, initial=1))

    @cached_property
    def links(self) -> tuple[Link | None, ...]:
        """Of a host, a rack, a pod ...; None: not described."""
        made = [self.levels[0].link]
        for below, level in zip(self.levels[:-1], self.levels[1:], strict=True):
            link, over = made[-1], below.size / below.oversubscription
            wider = link and replace(link, bytes_per_second=over * link.bytes_per_second)
            made.append(level.link or wider)
        return tuple(made)

    def routes(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
        """The links that a flow from host a[i] to another host b[i] takes, a row each, by their
        places in `capacities`; -1 for a level that it need not go up to."""
        route, first = [], 0
        for hosts in self.hosts:
            units = self.count // hosts
            out, into = a // hosts, b // hosts
            away = out != into
            route += [np.where(away, first + out, -1), np.where(away, first + units + into, -1)]
            first += 2 * units
        return np.stack(route, axis=1)

    @cached_property
    def capacities(self) -> NDArray[np.float64]:
        """Of every link, a host's being 1: at each level those out of its units, then in."""
        rates = [link.bytes_per_second if link else 1.0 for link in self.links]
        each = [
            np.full(2 * (self.count // hosts), rate / rates[0])
            for hosts, rate in zip(self.hosts, rates, strict=True)
        ]
        return np.concatenate(each)

    def height(self, a: int, b: int) -> int:
        """The highest level that a flow between two hosts goes through."""
        return max(k for k, hosts in enumerate(self.hosts) if a // hosts != b // hosts)

    @property
    def count(self) -> int:
        """Of hosts."""
        return self.hosts[-1] * self.levels[-1].size
