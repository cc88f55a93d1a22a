"""A cluster: hosts, their devices and the links between them; measured, or from a catalogue.

    name: two-hosts
    source: measured            # or the data sheet it comes from
    date: 2026-01-31
    emulated: true              # never left out of a report where it is so
    hosts:
      - name: a
        devices: [{kind: cpu, count: 2, memory_bytes: 8000000000, flops: {float32: 5.0e+10}}]
    links:
      - {between: [a, b], bytes_per_second: 2.5e+7, latency_seconds: 1.0e-4}

Units: bytes, seconds, floating-point operations per second that are achieved in practice.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from synchromesh import document

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "int8")


@dataclass(frozen=True)
class Device:
    """One accelerator or processor as a rank uses it."""

    kind: str
    memory_bytes: int
    flops: Mapping[str, float] = field(default_factory=dict)  # by dtype, achieved

    def __hash__(self) -> int:
        return hash((self.kind, self.memory_bytes, tuple(sorted(self.flops.items()))))


@dataclass(frozen=True)
class Host:
    """A machine and its devices, in the order of local ranks."""

    name: str
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class Link:
    """What carries bytes between two hosts, or (`a == b`) between the devices of one host."""

    a: str
    b: str
    bytes_per_second: float
    latency_seconds: float = 0.0

    def seconds(self, size: int) -> float:
        """Time of one message of `size` bytes: latency + size / bandwidth."""
        return self.latency_seconds + size / self.bytes_per_second


@dataclass(frozen=True)
class Cluster:
    """Hosts and links with where the figures come from."""

    name: str
    hosts: tuple[Host, ...]
    links: tuple[Link, ...] = ()
    emulated: bool = False
    source: str = "measured"
    date: str = ""

    def __post_init__(self) -> None:
        names = [h.name for h in self.hosts]
        doubled = sorted({n for n in names if names.count(n) > 1})
        if doubled:
            raise ValueError(f"{self.name}: two hosts are called {', '.join(doubled)}")
        if not self.ranks:
            raise ValueError(f"{self.name}: has no devices")
        for link in self.links:
            unknown = sorted({link.a, link.b} - set(names))
            if unknown:
                raise ValueError(f"{self.name}: a link names {unknown[0]!r}, which is no host")

    @property
    def ranks(self) -> tuple[tuple[str, Device], ...]:
        """Host name and device of every rank, host after host."""
        return tuple((host.name, device) for host in self.hosts for device in host.devices)

    def link(self, a: str, b: str) -> Link:
        """The link between hosts `a` and `b`. ValueError where the cluster describes none."""
        for link in self.links:
            if {link.a, link.b} == {a, b}:
                return link
        raise ValueError(f"{self.name}: no link between {a!r} and {b!r} is described")

    def __str__(self) -> str:
        emulated = ", emulated" if self.emulated else ""
        return f"{self.name}: {len(self.hosts)} hosts, {len(self.ranks)} devices{emulated}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "source": self.source,
            "date": self.date,
            "emulated": self.emulated,
            "hosts": [
                {"name": host.name, "devices": [_device_dict(d) for d in host.devices]}
                for host in self.hosts
            ],
            "links": [
                {
                    "between": [link.a, link.b],
                    "bytes_per_second": link.bytes_per_second,
                    "latency_seconds": link.latency_seconds,
                }
                for link in self.links
            ],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_dict(cls, value: Any, name: str = "cluster") -> "Cluster":
        keys = ("name", "hosts", "links", "emulated", "source", "date")
        item = document.mapping(value, name, keys, ("name", "hosts"))
        hosts = enumerate(document.sequence(item["hosts"], f"{name}: hosts"))
        links = enumerate(document.sequence(item.get("links", []), f"{name}: links"))
        made: dict[str, Any] = {
            "name": document.text(item["name"], f"{name}: name"),
            "hosts": tuple(_host(h, f"{name}: hosts[{i}]") for i, h in hosts),
            "links": tuple(_link(x, f"{name}: links[{i}]") for i, x in links),
            "emulated": document.boolean(item.get("emulated", False), f"{name}: emulated"),
            "source": document.text(item.get("source", "measured"), f"{name}: source"),
            "date": document.text(item.get("date", ""), f"{name}: date"),
        }
        with document.at(name):
            return cls(**made)

    @classmethod
    def from_json(cls, text: str, name: str = "cluster") -> "Cluster":
        return cls.from_dict(document.read_json(text, name), name)

    @classmethod
    def from_yaml(cls, text: str, name: str = "cluster") -> "Cluster":
        return cls.from_dict(document.read_yaml(text, name), name)

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """The cluster in a `.json`, `.yaml` or `.yml` file."""
        return cls.from_dict(document.read(path), str(path))


def _device_dict(device: Device) -> dict[str, Any]:
    return {
        "kind": device.kind,
        "memory_bytes": device.memory_bytes,
        "flops": dict(sorted(device.flops.items())),
    }


def _host(value: Any, path: str) -> Host:
    item = document.mapping(value, path, ("name", "devices"), ("name", "devices"))
    devices: list[Device] = []
    for i, entry in enumerate(document.sequence(item["devices"], f"{path}.devices")):
        devices += _devices(entry, f"{path}.devices[{i}]")
    return Host(document.text(item["name"], f"{path}.name"), tuple(devices))


def _devices(value: Any, path: str) -> list[Device]:
    """One entry of a device list, which stands for `count` equal devices."""
    keys = ("kind", "memory_bytes", "flops", "count")
    item = document.mapping(value, path, keys, ("kind", "memory_bytes"))
    rates = document.mapping(item.get("flops", {}), f"{path}.flops", DTYPES)
    device = Device(
        document.text(item["kind"], f"{path}.kind"),
        int(document.number(item["memory_bytes"], f"{path}.memory_bytes", 1)),
        {k: document.number(v, f"{path}.flops.{k}") for k, v in rates.items()},
    )
    return [device] * document.integer(item.get("count", 1), f"{path}.count", 1, 100_000)


def _link(value: Any, path: str) -> Link:
    keys = ("between", "bytes_per_second", "latency_seconds")
    item = document.mapping(value, path, keys, keys[:2])
    ends = document.sequence(item["between"], f"{path}.between")
    if len(ends) != 2:
        raise ValueError(f"{path}.between: should name two hosts, not {len(ends)}")
    a, b = (document.text(end, f"{path}.between") for end in ends)
    return Link(
        a,
        b,
        document.number(item["bytes_per_second"], f"{path}.bytes_per_second", 1e-9),
        document.number(item.get("latency_seconds", 0.0), f"{path}.latency_seconds"),
    )
