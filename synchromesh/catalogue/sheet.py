"""Data sheets of the catalogue: devices and classes of links, each figure with its source."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from synchromesh.values import document
from synchromesh.values.cluster import DTYPES, Device, Link
from synchromesh.values.fields import Keys, Within, of_plain
from synchromesh.values.topology import ANY

LINK_FIGURES = (
    "bytes_per_second", "latency_seconds", "start_seconds", "switch_bytes_per_second", "lanes",
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A number and where it is from: `source` is a key of the catalogue's sources."""

    value: Annotated[float, Within(0)]
    source: str
    status: Literal["seen", "memory-unverified", "derived", "assumed"]
    note: str = ""


Rates = Annotated[Mapping[str, Figure], Keys(DTYPES)]


@dataclass(frozen=True)
class DeviceSheet:
    """A device: peak rates by dtype (dense), the fraction of them that large products reach."""

    name: str
    title: str
    memory_bytes: Figure
    bytes_per_second: Figure
    peak_flops: Rates
    inside: str  # the class of link between the devices of a host
    network: str  # the one between hosts, unless a cluster's name says another
    devices_per_host: Figure
    achieved_fraction: Rates = field(default_factory=dict)

    def fraction(self, dtype: str, default: Figure) -> Figure:
        """Of a type's peak: its own, else bfloat16's where the same units compute it."""
        own = self.achieved_fraction.get(dtype)
        same = dtype in ("tf32", "float16", "float8")
        return own or (self.achieved_fraction.get("bfloat16") if same else None) or default

    def device(self, default: Figure) -> Device:
        """The device with achieved rates: peak x fraction."""
        peaks = self.peak_flops.items()
        rates = {dtype: peak.value * self.fraction(dtype, default).value for dtype, peak in peaks}
        return Device(self.name, int(self.memory_bytes.value), rates, self.bytes_per_second.value)


@dataclass(frozen=True)
class LinkSheet:
    """A class of links with its figures by the names of `Link`'s fields."""

    name: str
    kind: str
    figures: Mapping[str, Figure]

    @property
    def link(self) -> Link:
        values: dict[str, Any] = {name: f.value for name, f in self.figures.items()}
        values["lanes"] = int(values.get("lanes", 1))
        return Link(ANY, ANY, kind=self.kind, **values)


@dataclass(frozen=True)
class Source:
    title: str
    url: str = ""


@dataclass(frozen=True)
class Sheets:
    """All data sheets, the date they were taken, and how far estimates from them are off."""

    date: str
    sources: Mapping[str, Source]
    devices: Mapping[str, DeviceSheet]
    links: Mapping[str, LinkSheet]
    default_fraction: Figure
    error_band: Figure  # where product rates and links of the cluster were measured by somebody
    error_band_unmeasured: Figure  # where they are data-sheet rates alone


@cache
def sheets() -> Sheets:
    """The bundled ones, read once."""
    folder = resources.files(__package__)
    texts = {name: (folder / name).read_text("utf-8") for name in ("devices.yaml", "links.yaml")}
    return parse(*texts.values())


def parse(devices: str, links: str) -> Sheets:
    """The catalogue that two YAML texts describe; ValueError names the key at fault."""
    first, second = document.read_yaml(devices, "devices"), document.read_yaml(links, "links")
    bands = ("error_band", "error_band_unmeasured")
    of_devices = ("date", "sources", "default_achieved_fraction", *bands, "devices")
    of_links = ("date", "sources", "links")
    document.mapping(first, "devices", of_devices, of_devices)
    document.mapping(second, "links", of_links, of_links)
    sources = {**_sources(first, "devices"), **_sources(second, "links")}
    parsed = Sheets(
        max(document.text(x["date"], "date") for x in (first, second)),
        sources,
        {k: of_plain(DeviceSheet, {"name": k, **v}, k) for k, v in first["devices"].items()},
        {k: _link(k, v) for k, v in second["links"].items()},
        *(of_plain(Figure, first[k], k) for k in ("default_achieved_fraction", *bands)),
    )
    _check(parsed)
    return parsed


def _sources(item: dict[str, Any], path: str) -> dict[str, Source]:
    known = document.mapping(item["sources"], f"{path}: sources", list(item["sources"]))
    return {k: of_plain(Source, v, f"{path}: {k}") for k, v in known.items()}


def _link(name: str, value: Any) -> LinkSheet:
    item = document.mapping(value, name, ("kind", *LINK_FIGURES), ("kind", *LINK_FIGURES[:3]))
    figures = {k: of_plain(Figure, v, f"{name}.{k}") for k, v in item.items() if k != "kind"}
    return LinkSheet(name, document.text(item["kind"], f"{name}.kind"), figures)


def _check(known: Sheets) -> None:
    """That every figure's source and every device's links are there."""
    for device in known.devices.values():
        for link in (device.inside, device.network):
            if link not in known.links:
                raise ValueError(f"{device.name}: there is no class of links {link!r}")
    for path, figure in figures(known):
        if figure.source not in known.sources:
            raise ValueError(f"{path}: there is no source {figure.source!r}")


def figures(known: Sheets) -> Iterator[tuple[str, Figure]]:
    """Every figure of the catalogue with its path, `h100.peak_flops.float16`."""
    devices = {name: vars(sheet) for name, sheet in known.devices.items()}
    links = {name: sheet.figures for name, sheet in known.links.items()}
    return _figures("", {**devices, **links, **vars(known)})


def _figures(path: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    for name, value in values.items():
        if isinstance(value, Figure):
            yield path + name, value
        elif isinstance(value, dict):
            yield from _figures(f"{path}{name}.", value)
