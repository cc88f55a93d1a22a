"""A description of a lab: its hosts' rates, shares and memory, and two racks with a slower uplink.

hosts:
  - {bandwidth: 200mbit, cpu: 40%, memory: 1GiB, count: 3}
  - {bandwidth: 20mbit, cpu: 10%}
racks: [[0, 1], [2, 3]]         # both or neither; hosts count from 0
uplink: 100mbit                 # what all hosts of a rack share on the way to the other

host 0 --- bridge of rack 0 ---uplink--- bridge of rack 1 --- host 2
host 1 ---/                                              \\--- host 3

Quantities are text:

bandwidth   NUMBER UNIT, UNIT one of kbit, mbit, gbit, in any case, `/s` or `ps` after it or not:
            10^3, 10^6, 10^9 bits a second in each direction, from 100kbit to 10gbit
share       NUMBER%, per cent of one core, from 2% to all cores
memory      NUMBER UNIT, as 1GiB or 500MB, from 16MiB to 1024TiB"""

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from synchromesh.values import document, size
from synchromesh.values.cluster import Cluster, Device, Host, Link

BANDWIDTH = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmg])bit(?:/s|ps)?", re.IGNORECASE)
SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?%")
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class LabLimits:
    most_hosts: int = 200  # addresses 10.77.0.1 and up, and what one machine can bear
    # Bits a second. Less, and one burst of the shaper (64 KB) lasts longer than 5 s; more, and the
    # kernel's timers and the two ends on one machine are the limit.
    least_bandwidth: int = 10**5
    most_bandwidth: int = 10**10
    least_share: float = 0.02  # 1 ms, the kernel's smallest quota, of 50 ms; chosen
    worth_asking: float = 0.1  # share that a remedy asks for: 1 ms of 10 ms
    # Bytes; an interpreter needs 8 MB, torch 300 (measured), and above the kernel sees no limit.
    least_memory: int = 2**24
    most_memory: int = 2**50


LIMITS = LabLimits()


def parse_bandwidth(value: object) -> int:
    """Bits a second of text, or of a number that says bits a second already."""
    if isinstance(value, str):
        match = BANDWIDTH.fullmatch(value.strip())
        if match is None:
            raise ValueError(
                f"{value!r} is not a bandwidth: write a number with kbit, mbit or gbit, as in "
                "200mbit"
            )
        bits = round(float(match[1]) * UNITS[match[2].lower()])
    elif isinstance(value, int | float) and not isinstance(value, bool):
        bits = round(value) if abs(value) < 2**60 else 2**60
    else:
        raise ValueError(f"{value!r} is not a bandwidth: write text as 200mbit")
    if not LIMITS.least_bandwidth <= bits <= LIMITS.most_bandwidth:
        raise ValueError(f"a bandwidth of {value} is outside 100kbit to 10gbit: try 200mbit")
    return bits


def parse_share(value: object, cores: int) -> float:
    """Cores of text such as `40%`, or of a number that counts cores already (0.4)."""
    if isinstance(value, str):
        match = SHARE.fullmatch(value.strip())
        if match is None:
            raise ValueError(
                f"{value!r} is not a share of a core: write per cent of one core, as in 40%"
            )
        part = float(match[1]) / 100
    elif isinstance(value, int | float) and not isinstance(value, bool):
        part = float(value)
    else:
        raise ValueError(f"{value!r} is not a share of a core: write text as 40%")
    if not LIMITS.least_share <= part <= cores:
        raise ValueError(
            f"a share of {show_share(part)} of a core is outside {show_share(LIMITS.least_share)} "
            f"to {cores * 100}% "
            f"({cores} cores): try 40%"
        )
    return part


def parse_memory(value: object) -> int:
    """Bytes of text such as `1GiB`, or of a number of bytes."""
    if isinstance(value, str):
        bytes_ = int(size.parse(value.strip()))
    elif isinstance(value, int) and not isinstance(value, bool):
        bytes_ = value
    else:
        raise ValueError(f"{value!r} is no size: write text as 1GiB")
    if not LIMITS.least_memory <= bytes_ <= LIMITS.most_memory:
        least, most = size.show(LIMITS.least_memory), size.show(LIMITS.most_memory)
        raise ValueError(f"a host's memory of {value} is outside {least} to {most}: try 1GiB")
    return bytes_


def show_bandwidth(bits: float) -> str:
    """`200mbit` of 200,000,000."""
    unit = next((u for u in "gm" if bits >= UNITS[u]), "k")
    return f"{bits / UNITS[unit]:.6g}{unit}bit"


def show_share(part: float) -> str:
    """`40%` of 0.4."""
    return f"{part * 100:.4g}%"


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
        rate, part = show_bandwidth(self.bandwidth), show_share(self.cpu)
        limit = "" if self.memory is None else f", {size.show(self.memory)}"
        return f"{rate}, {part} of a core{limit}"


@dataclass(frozen=True)
class Description(document.Document):
    """The hosts in the order of their ranks; where there are racks, each host is in one."""

    hosts: tuple[Emulated, ...]
    racks: tuple[tuple[int, ...], ...] = ()
    uplink: int | None = None  # bits a second each way

    def __post_init__(self) -> None:
        if not 1 <= len(self.hosts) <= LIMITS.most_hosts:
            raise ValueError(
                f"the number of emulated hosts must be 1 to {LIMITS.most_hosts}, not "
                f"{len(self.hosts)}"
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
        return f"{text}; racks {show_bandwidth(self.uplink)} apart"

    @classmethod
    def alike(
        cls, hosts: int | None, bandwidth: Any, cpu: Any, racks: Sequence[Sequence[int]] = (),
        uplink: Any = None, memory: Any = None,
    ) -> "Description":  # fmt: skip
        """`hosts` hosts; `bandwidth`, `cpu` and `memory` are one value for all, or one by host."""
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
        made = tuple(
            Emulated(
                parse_bandwidth(rate), parse_share(part, cores),
                None if limit is None else parse_memory(limit),
            )
            for rate, part, limit in by_host
        )  # fmt: skip
        between = None if uplink is None else parse_bandwidth(uplink)
        return cls(made, tuple(tuple(rack) for rack in racks), between)

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
        uplink = item.get("uplink")
        if uplink is not None:
            uplink = _quantity(uplink, f"{name}: uplink", parse_bandwidth, "100mbit")
        with document.at(name):
            return cls(tuple(hosts), tuple(racks), uplink)

    def to_dict(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "hosts": [
                {
                    "bandwidth": show_bandwidth(host.bandwidth),
                    "cpu": show_share(host.cpu),
                    **({} if host.memory is None else {"memory": size.show(host.memory)}),
                }
                for host in self.hosts
            ]
        }
        if self.uplink is not None:
            shown["racks"] = [list(rack) for rack in self.racks]
            shown["uplink"] = show_bandwidth(self.uplink)
        return shown

    from_plain, to_plain = from_dict, to_dict

    def rack(self, host: int) -> int:
        return next((i for i, rack in enumerate(self.racks) if host in rack), 0)

    def pins(self, available: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Cores of each host: those that carry the least so far, the largest hosts first.

        A host of 40 % is one core: on several, its first thread to run takes all of the period's
        quota, and the one that moves messages, on another core, stands still until the next."""
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
        alike = f" x {show_share(shares[0])}" if len(set(shares)) == 1 else ""
        return (
            f"{len(self.hosts)} hosts{alike} ask for {sum(shares):.3g} cores, but this machine "
            f"has {len(available)} and the busiest would carry {show_share(busiest)}: "
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
            emulated=True, source="lab", date=date,
        )  # fmt: skip

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
    if fitting >= 100 * LIMITS.worth_asking:
        return f"--cpu {fitting}% would fit"
    return f"{cores * max(1, math.floor(1 / shares[0] + 1e-9))} hosts would fit"


def _hosts(value: Any, path: str) -> list[Emulated]:
    needed = ("bandwidth", "cpu")
    item = document.mapping(value, path, (*needed, "memory", "count"), needed)
    share = partial(parse_share, cores=os.cpu_count() or 1)
    rate = _quantity(item["bandwidth"], f"{path}.bandwidth", parse_bandwidth, "200mbit")
    part, limit = _quantity(item["cpu"], f"{path}.cpu", share, "40%"), None
    if "memory" in item:
        limit = _quantity(item["memory"], f"{path}.memory", parse_memory, "1GiB")
    count = document.integer(item.get("count", 1), f"{path}.count", 1, LIMITS.most_hosts)
    return [Emulated(rate, part, limit)] * count


def _quantity(value: Any, path: str, parse: Callable[[str], N], example: str) -> N:
    """What a text of a file says, where a number without its unit would be a guess."""
    if not isinstance(value, str):
        kind = document.kind(value)
        raise ValueError(f"{path}: should be text with its unit, as {example}, not {kind}")
    with document.at(path):
        return parse(value)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
