"""A description of a lab: its hosts' rates, shares and memory, and two racks with a slower uplink.

hosts:
  - {bandwidth: 200mbit, cpu: 40%, memory: 1GiB, count: 3}
  - {bandwidth: 20mbit, cpu: 10%}
racks: [[0, 1], [2, 3]]         # both or neither; hosts count from 0
uplink: 100mbit                 # what all hosts of a rack share on the way to the other

host 0 --- bridge of rack 0 ---uplink--- bridge of rack 1 --- host 2
host 1 ---/                                              \\--- host 3"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from synchromesh.lab import quantity
from synchromesh.values import document, size
from synchromesh.values.cluster import Cluster, Device, Host, Link

MOST_HOSTS = 200  # addresses 10.77.0.1 and up, and what one machine can bear


@dataclass(frozen=True)
class Emulated:
    """One host: bits a second each way on its link, cores (0.4: 40 % of one), and the bytes that
    its processes may hold (None: whatever the machine has)."""

    bandwidth: int
    cpu: float
    memory: int | None = None

    @property
    def cores(self) -> int:
        """Cores its processes are pinned to, as long as the lab is up."""
        return math.ceil(self.cpu)

    def __str__(self) -> str:
        rate, part = quantity.show_bandwidth(self.bandwidth), quantity.show_share(self.cpu)
        limit = "" if self.memory is None else f", {size.show(self.memory)}"
        return f"{rate}, {part} of a core{limit}"


@dataclass(frozen=True)
class Description(document.Document):
    """The hosts in the order of their ranks; where there are racks, each host is in one."""

    hosts: tuple[Emulated, ...]
    racks: tuple[tuple[int, ...], ...] = ()
    uplink: int | None = None  # bits a second each way

    def __post_init__(self) -> None:
        if not 1 <= len(self.hosts) <= MOST_HOSTS:
            raise ValueError(
                f"the number of emulated hosts must be 1 to {MOST_HOSTS}, not {len(self.hosts)}"
            )
        if bool(self.racks) != (self.uplink is not None):
            raise ValueError("racks and uplink belong together: give both or neither")
        placed = sorted(host for rack in self.racks for host in rack)
        if self.racks and (len(self.racks) != 2 or not all(self.racks)):
            raise ValueError(
                f"racks: should be two lists of hosts, as [[0, 1], [2, 3]], "
                f"not {[list(rack) for rack in self.racks]}"
            )
        if self.racks and placed != list(range(len(self.hosts))):
            raise ValueError(
                f"racks: should hold each of the hosts 0 to {len(self.hosts) - 1} once, "
                f"not {placed}"
            )

    def __str__(self) -> str:
        kinds = {host: self.hosts.count(host) for host in self.hosts}
        if len(kinds) == 1:
            text = f"hosts of {self.hosts[0]}"
        else:
            text = "hosts: " + "; ".join(f"{count} of {host}" for host, count in kinds.items())
        if self.uplink is None:
            return text
        return f"{text}; racks {quantity.show_bandwidth(self.uplink)} apart"

    @classmethod
    def alike(
        cls,
        hosts: int | None,
        bandwidth: Any,
        cpu: Any,
        racks: Sequence[Sequence[int]] = (),
        uplink: Any = None,
        memory: Any = None,
    ) -> "Description":
        """`hosts` hosts; `bandwidth`, `cpu` and `memory` are one value for all or a sequence by
        host."""
        values = (bandwidth, cpu, memory)
        lengths = {len(v) for v in values if _is_sequence(v)}
        count = hosts if hosts is not None else max(lengths, default=1)
        if lengths - {count}:
            raise ValueError(
                f"{count} hosts need {count} bandwidths, shares and memories, or one for all, "
                f"not {', '.join(str(n) for n in sorted(lengths - {count}))}"
            )
        by_host = zip(*(v if _is_sequence(v) else [v] * count for v in values), strict=True)
        cores = os.cpu_count() or 1
        return cls(
            tuple(
                Emulated(
                    quantity.bandwidth(rate),
                    quantity.share(part, cores),
                    None if limit is None else quantity.memory(limit),
                )
                for rate, part, limit in by_host
            ),
            tuple(tuple(rack) for rack in racks),
            None if uplink is None else quantity.bandwidth(uplink),
        )

    @classmethod
    def from_dict(cls, value: Any, name: str = "lab") -> "Description":
        """The lab that a document describes. ValueError with the path and key at fault."""
        item = document.mapping(value, name, ("hosts", "racks", "uplink"), ("hosts",))
        entries = document.sequence(item["hosts"], f"{name}: hosts")
        hosts = [h for i, e in enumerate(entries) for h in _hosts(e, f"{name}: hosts[{i}]")]
        racks = [
            tuple(
                document.integer(host, f"{name}: racks[{i}]")
                for host in document.sequence(rack, f"{name}: racks[{i}]")
            )
            for i, rack in enumerate(document.sequence(item.get("racks", []), f"{name}: racks"))
        ]
        with document.at(name):
            uplink = item.get("uplink")
            if uplink is not None:
                with document.at("uplink"):
                    uplink = quantity.bandwidth(_as_text(uplink, "100mbit"))
            return cls(tuple(hosts), tuple(racks), uplink)

    def to_dict(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "hosts": [
                {
                    "bandwidth": quantity.show_bandwidth(host.bandwidth),
                    "cpu": quantity.show_share(host.cpu),
                    **({} if host.memory is None else {"memory": size.show(host.memory)}),
                }
                for host in self.hosts
            ]
        }
        if self.uplink is not None:
            shown["racks"] = [list(rack) for rack in self.racks]
            shown["uplink"] = quantity.show_bandwidth(self.uplink)
        return shown

    def rack(self, host: int) -> int:
        """The rack that `host` stands in; 0 where there are none."""
        return next((i for i, rack in enumerate(self.racks) if host in rack), 0)

    def pins(self, available: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Cores of each host: those that carry the least so far, the largest hosts first.

        A host of 40 % is one core: on several, the first of its threads to run takes all of the
        period's quota to its core, and the thread that moves messages, on another, stands still
        until the next."""
        load = dict.fromkeys(available, 0.0)
        pins: dict[int, tuple[int, ...]] = {}
        for host in sorted(range(len(self.hosts)), key=lambda h: -self.hosts[h].cpu):
            shape = self.hosts[host]
            taken = sorted(available, key=lambda core: load[core])[: shape.cores]
            for core in taken:
                load[core] += shape.cpu / len(taken)
            pins[host] = tuple(sorted(taken))
        return tuple(pins[host] for host in range(len(self.hosts)))

    def excess(self, available: Sequence[int]) -> str | None:
        """A warning where the hosts of a core have more than it; None where all fits."""
        load = dict.fromkeys(available, 0.0)
        for host, cores in zip(self.hosts, self.pins(available), strict=True):
            for core in cores:
                load[core] += host.cpu / len(cores)
        busiest = max(load.values())
        if busiest <= 1 + 1e-9:
            return None
        shares = [host.cpu for host in self.hosts]
        alike = f" x {quantity.show_share(shares[0])}" if len(set(shares)) == 1 else ""
        return (
            f"{len(self.hosts)} hosts{alike} ask for {sum(shares):.3g} cores, but this machine "
            f"has {len(available)} and the busiest would carry {quantity.show_share(busiest)}: "
            f"the hosts will be slower than stated; {_remedy(shares, busiest, len(available))}"
        )

    def cluster(self, name: str, memory_bytes: int, date: str) -> Cluster:
        """The cluster that the ranks see: an emulated one, its links between each pair."""
        names = [f"host{i}" for i in range(len(self.hosts))]
        part = max(1, memory_bytes // len(self.hosts))
        return Cluster(
            name=name,
            hosts=tuple(
                Host(name, (Device("cpu", host.memory or part),))
                for name, host in zip(names, self.hosts, strict=True)
            ),
            links=tuple(
                Link(names[a], names[b], self._between(a, b) / 8)
                for a in range(len(names))
                for b in range(a + 1, len(names))
            ),
            emulated=True,
            source="lab",
            date=date,
        )

    def _between(self, a: int, b: int) -> int:
        """Bits a second from host to host when nothing else is on the way."""
        rates = [self.hosts[a].bandwidth, self.hosts[b].bandwidth]
        if self.uplink is not None and self.rack(a) != self.rack(b):
            rates.append(self.uplink)
        return min(rates)


def _remedy(shares: Sequence[float], busiest: float, cores: int) -> str:
    if len(set(shares)) > 1:
        return f"{math.floor(100 / busiest)} % of each share would fit"
    fitting = math.floor(100 * shares[0] / busiest + 1e-9)
    if fitting >= 100 * quantity.LEAST_SHARE:
        return f"--cpu {fitting}% would fit"
    return f"{cores * max(1, math.floor(1 / shares[0] + 1e-9))} hosts would fit"


def _hosts(value: Any, path: str) -> list[Emulated]:
    """One entry of the list of hosts, which stands for `count` equal ones."""
    needed = ("bandwidth", "cpu")
    item = document.mapping(value, path, (*needed, "memory", "count"), needed)
    cores = os.cpu_count() or 1
    with document.at(f"{path}.bandwidth"):
        rate = quantity.bandwidth(_as_text(item["bandwidth"], "200mbit"))
    with document.at(f"{path}.cpu"):
        part = quantity.share(_as_text(item["cpu"], "40%"), cores)
    limit = None
    if "memory" in item:
        with document.at(f"{path}.memory"):
            limit = quantity.memory(_as_text(item["memory"], "1GiB"))
    count = document.integer(item.get("count", 1), f"{path}.count", 1, MOST_HOSTS)
    return [Emulated(rate, part, limit)] * count


def _as_text(value: Any, example: str) -> str:
    """In a file a number without its unit would be a guess."""
    if not isinstance(value, str):
        raise ValueError(f"should be text with its unit, as {example}, not {document.kind(value)}")
    return value


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
