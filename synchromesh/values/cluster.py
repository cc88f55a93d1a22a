"""A cluster: hosts, their devices and the links between them; measured, or from a catalogue.

    name: two-hosts
    source: measured            # or datasheet
    error_band: 0.3             # estimates from these figures are right to +-30 %; 0: not stated
    date: 2026-01-31
    emulated: true              # never left out of a report where it is so
    hosts:
      - name: a
        devices: [{kind: cpu, count: 2, memory_bytes: 8000000000, flops: {float32: 5.0e+10}}]
    links:
      - {between: [a, b], bytes_per_second: 2.5e+7, latency_seconds: 1.0e-4}
    inside: {bytes_per_second: 1.0e+9}      # between the devices of a host that `links` leaves out
    network: {bytes_per_second: 2.5e+7}     # between two hosts that `links` leaves out
    topology: []                            # levels, in place of inside and network (`topology`)

Units: bytes, seconds, floating-point operations per second that are achieved in practice."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby, pairwise
from math import prod
from typing import Any

from synchromesh.values import document
from synchromesh.values.topology import (
    ANY,
    FIGURES,
    MOST_DEVICES,
    MOST_RATE,
    Level,
    Topology,
    link_of,
)
from synchromesh.values.topology import Link as Link

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "int8")


@dataclass(frozen=True)
class Device:
    """One accelerator or processor as a rank uses it."""

    kind: str
    memory_bytes: int
    flops: Mapping[str, float] = field(default_factory=dict)  # by dtype, achieved
    bytes_per_second: float = 0.0  # of its memory, read and written; 0 where it is not known

    def __hash__(self) -> int:
        return hash((self.kind, self.memory_bytes, tuple(sorted(self.flops.items()))))


@dataclass(frozen=True)
class Host:
    """A machine and its devices, in the order of local ranks."""

    name: str
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class Cluster(document.Document):
    """Hosts and links with where the figures come from.

    inside, network: the link between the devices of a host, and between two hosts, for those that
    `links` leaves out; their own ends are `ANY`. Links are kept in order and without those that
    say what `inside` and `network` say, so that equal clusters compare equal.
    topology: levels from the devices outwards; `inside` and `network` are the links of the first
    two of them."""

    name: str
    hosts: tuple[Host, ...]
    links: tuple[Link, ...] = ()
    emulated: bool = False
    source: str = "measured"
    date: str = ""
    inside: Link | None = None
    network: Link | None = None
    error_band: float = 0.0  # relative error of estimates from these figures; 0: not stated
    topology: tuple[Level, ...] = ()

    def __post_init__(self) -> None:
        ordered = (replace(x, a=min(x.a, x.b), b=max(x.a, x.b)) for x in self.links)
        links = sorted(ordered, key=lambda x: (x.a, x.b))
        if fault := next(self._faults(links), None):
            raise ValueError(f"{self.name}: {fault}")
        for end, level in zip(("inside", "network"), self.topology, strict=False):
            object.__setattr__(self, end, level.link)
        for end in ("inside", "network"):
            link = getattr(self, end)
            if link is not None:
                object.__setattr__(self, end, replace(link, a=ANY, b=ANY))
        kept = tuple(x for x in links if x != self._default(x.a, x.b))
        object.__setattr__(self, "links", kept)

    def _faults(self, links: Sequence[Link]) -> Iterator[str]:
        names = [h.name for h in self.hosts]
        doubled = sorted(n for n, count in Counter(names).items() if count > 1)
        if doubled:
            yield f"two hosts are called {', '.join(doubled)}"
        if ANY in names:
            yield f"a host is called {ANY!r}, which stands for any host"
        if not 0 < len(self.ranks) <= MOST_DEVICES:
            yield f"has {len(self.ranks) or 'no'} devices; a cluster has 1 to {MOST_DEVICES:,}"
        for link in self.links:
            if unknown := sorted({link.a, link.b} - set(names)):
                yield f"a link names {unknown[0]!r}, which is no host"
        for first, second in pairwise(links):
            if (first.a, first.b) == (second.a, second.b):
                yield f"two links join {first.a!r} and {first.b!r}"
        yield from (f"topology: {fault}" for fault in self._topology_faults())

    def _topology_faults(self) -> Iterator[str]:
        if not self.topology:
            return
        first, *above = self.topology
        if not above or None in (first.link, above[0].link):
            yield "its first two levels are hosts and what joins them, each with a link"
        each = sorted({len(host.devices) for host in self.hosts} - {first.size})
        if each:
            yield f"{first.size} devices a host, but hosts have {' or '.join(map(str, each))}"
        sizes = [level.size for level in self.topology]
        if prod(sizes) != len(self.ranks):
            told = " x ".join(map(str, sizes))
            yield f"{told} are {prod(sizes)} devices, but the hosts have {len(self.ranks)}"
        if self.links or {self.inside, self.network} - {None, first.link, above[0].link}:
            yield "says what `inside`, `network` and `links` say: leave these out"

    @cached_property
    def levels(self) -> Topology:
        """The levels above the hosts; without a topology one that joins all."""
        joins = self.topology[1:] or (Level("network", len(self.hosts), self.network),)
        return Topology(joins)

    @cached_property
    def ranks(self) -> tuple[tuple[str, Device], ...]:
        """Host name and device of every rank, host after host."""
        return tuple((host.name, device) for host in self.hosts for device in host.devices)

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """The place of each rank's host."""
        return tuple(i for i, host in enumerate(self.hosts) for _ in host.devices)

    def link(self, a: str, b: str) -> Link:
        """The link between hosts `a` and `b`. ValueError where the cluster describes none."""
        link = self._listed.get((min(a, b), max(a, b))) or self._default(a, b)
        if link is None:
            raise ValueError(f"{self.name}: no link between {a!r} and {b!r} is described")
        return link

    def link_at(self, a: int, b: int) -> Link:
        """The link between hosts by their places; where there are racks and so on, of a host, with
        the latencies of the highest level that it leads through."""
        link = self.link(self.hosts[a].name, self.hosts[b].name)
        if a == b or len(self.levels.levels) == 1:
            return link
        highest = self.levels.links[self.levels.height(a, b)] or link
        return replace(
            link, latency_seconds=highest.latency_seconds, start_seconds=highest.start_seconds
        )

    @cached_property
    def _listed(self) -> dict[tuple[str, str], Link]:
        return {(link.a, link.b): link for link in self.links}

    def _default(self, a: str, b: str) -> Link | None:
        link = self.inside if a == b else self.network
        return link and replace(link, a=min(a, b), b=max(a, b))

    def resized(self, devices: int) -> "Cluster":
        """The same with so many devices: the first ones, or more hosts like the last. ValueError
        where the levels of its network, or its hosts, cannot have that many."""
        if devices == len(self.ranks):
            return self
        if not 0 < devices <= MOST_DEVICES:
            raise ValueError(f"{self.name}: {devices} devices are none of 1 to {MOST_DEVICES:,}")
        hosts, left = list[Host](), devices
        while left > 0:
            known = len(hosts) < len(self.hosts)
            name = self.hosts[len(hosts)].name if known else f"{self.name}.{len(hosts)}"
            of = self.hosts[min(len(hosts), len(self.hosts) - 1)].devices[:left]
            hosts.append(Host(name, of))
            left -= len(of)
        names = {host.name for host in hosts}
        links = tuple(x for x in self.links if {x.a, x.b} <= names)
        levels = tuple(_resized(self.topology, devices))
        return replace(self, hosts=tuple(hosts), links=links, topology=levels)

    def __str__(self) -> str:
        band = f", +-{self.error_band:.0%}" if self.error_band else ""
        source = f", {self.source}{band}" if self.source != "measured" or band else ""
        emulated = ", emulated" if self.emulated else ""
        counts = {"host": len(self.hosts), "device": len(self.ranks)}
        told = ", ".join(f"{count} {noun}{'s' * (count != 1)}" for noun, count in counts.items())
        return f"{self.name}: {told}{source}{emulated}"

    def to_dict(self) -> dict[str, Any]:
        """Only what is not at its default stands there of a link, of `inside` and `network`."""
        item: dict[str, Any] = {
            "name": self.name, "source": self.source, "error_band": self.error_band,
            "date": self.date, "emulated": self.emulated,
            "hosts": [{"name": h.name, "devices": _device_list(h.devices)} for h in self.hosts],
            "links": [{"between": [x.a, x.b], **x.to_dict()} for x in self.links],
        }  # fmt: skip
        if self.topology:
            return item | {"topology": [level.to_dict() for level in self.topology]}
        for end in ("inside", "network"):
            link = getattr(self, end)
            if link is not None:
                item[end] = link.to_dict()
        return item

    @classmethod
    def from_dict(cls, value: Any, name: str = "cluster") -> "Cluster":
        """The cluster that `to_dict` described. ValueError with the path and key at fault."""
        keys = tuple(f.name for f in fields(cls))
        item = document.mapping(value, name, keys, ("name", "hosts"))
        hosts = enumerate(document.sequence(item["hosts"], f"{name}: hosts"))
        links = enumerate(document.sequence(item.get("links", []), f"{name}: links"))
        values: dict[str, Any] = {
            "name": document.text(item["name"], f"{name}: name"),
            "hosts": tuple(_host(h, f"{name}: hosts[{i}]") for i, h in hosts),
            "links": tuple(_link(x, f"{name}: links[{i}]") for i, x in links),
            "emulated": document.boolean(item.get("emulated", False), f"{name}: emulated"),
            "source": document.text(item.get("source", "measured"), f"{name}: source"),
            "date": document.text(item.get("date", ""), f"{name}: date"),
            "error_band": document.number(item.get("error_band", 0.0), f"{name}: error_band"),
        }
        for end in sorted({"inside", "network"} & item.keys()):
            values[end] = link_of(ANY, ANY, item[end], f"{name}: {end}")
        levels = enumerate(document.sequence(item.get("topology", []), f"{name}: topology"))
        values["topology"] = tuple(Level.from_dict(x, f"{name}: topology[{i}]") for i, x in levels)
        with document.at(name):
            return cls(**values)


def _resized(levels: Sequence[Level], units: int) -> Iterator[Level]:
    """Levels with so many devices: the lower ones as full as they are, the last one with the
    rest."""
    for level in levels:
        size = units if level is levels[-1] else min(level.size, units)
        yield replace(level, size=size)
        units = -(-units // size)


def _device_list(devices: tuple[Device, ...]) -> list[dict[str, Any]]:
    """Neighbouring equal devices as one entry."""
    return [
        {
            "kind": device.kind,
            "memory_bytes": device.memory_bytes,
            "bytes_per_second": device.bytes_per_second,
            "flops": dict(sorted(device.flops.items())),
            "count": len([*same]),
        }
        for device, same in groupby(devices)
    ]


def _host(value: Any, path: str) -> Host:
    item = document.mapping(value, path, ("name", "devices"), ("name", "devices"))
    devices: list[Device] = []
    for i, entry in enumerate(document.sequence(item["devices"], f"{path}.devices")):
        devices += _devices(entry, f"{path}.devices[{i}]")
    return Host(document.text(item["name"], f"{path}.name"), tuple(devices))


def _devices(value: Any, path: str) -> list[Device]:
    """One entry of a device list, which stands for `count` equal devices."""
    keys = ("kind", "memory_bytes", "bytes_per_second", "flops", "count")
    item = document.mapping(value, path, keys, ("kind", "memory_bytes"))
    rates = document.mapping(item.get("flops", {}), f"{path}.flops", DTYPES)
    speed = item.get("bytes_per_second", 0.0)
    device = Device(
        document.text(item["kind"], f"{path}.kind"),
        int(document.number(item["memory_bytes"], f"{path}.memory_bytes", 1, 1e18)),
        {k: _rate(v, f"{path}.flops.{k}") for k, v in rates.items()},
        _rate(speed, f"{path}.bytes_per_second") if speed != 0 else 0.0,
    )
    return [device] * document.integer(item.get("count", 1), f"{path}.count", 1, 100_000)


def _rate(value: Any, path: str) -> float:
    return document.number(value, path, 1, MOST_RATE)


def _link(value: Any, path: str) -> Link:
    item = document.mapping(value, path, ("between", *FIGURES), ("between", "bytes_per_second"))
    ends = document.sequence(item["between"], f"{path}.between")
    if len(ends) != 2:
        raise ValueError(f"{path}.between: should name two hosts, not {len(ends)}")
    a, b = (document.text(end, f"{path}.between") for end in ends)
    return link_of(a, b, {k: v for k, v in item.items() if k != "between"}, path)
