"""Prices: what instances with accelerators cost per hour, with region, date and source."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

from synchromesh.values import document
from synchromesh.values.cluster import Cluster
from synchromesh.values.fault import near


@dataclass(frozen=True)
class HourlyPrice:
    """Dollars per hour, and of what: an instance of so many devices, or one device."""

    dollars_per_hour: float
    devices: int = 1  # that it pays for
    name: str = ""  # of the instance
    region: str = ""
    date: str = ""
    source: str = ""
    device: str = ""  # which accelerator it has

    def dollars(self, seconds: float, devices: int) -> float:
        """What `seconds` on so many devices cost: instances are paid for entirely. price x
        ceil(devices / devices of an instance) x seconds / 3600"""
        return self.dollars_per_hour * -(-devices // self.devices) * seconds / 3600

    def to_dict(self, kind: str) -> dict[str, Any]:
        """kind: `on demand` or `spot`."""
        return {**asdict(self), "kind": kind}

    def __str__(self) -> str:
        of = "a device" if self.devices == 1 else f"{self.devices} devices"
        told = (self.name, self.region, f"of {self.date}" if self.date else "", self.source)
        return ", ".join([f"${self.dollars_per_hour:g} an hour for {of}", *filter(None, told)])


def price(instance: str, region: str | None = None, date: str | None = None) -> HourlyPrice:
    """The price of an instance, the newest where no date is given. ValueError, with what there
    is, for an instance, region or date that the table does not have."""
    of_instance = [p for p in prices() if p.name == instance]
    if not of_instance:
        names = sorted({p.name for p in prices()})
        raise ValueError(
            f"there is no price of an instance {instance!r}{near(instance, names)}; known are "
            f"{', '.join(names)}; --hourly-price DOLLARS@DATE says your own"
        )
    matching = [p for p in of_instance if region in (None, p.region) and date in (None, p.date)]
    if not matching:
        known = ", ".join(f"{p.region} of {p.date}" for p in of_instance)
        asked = " ".join(filter(None, (region, date)))
        raise ValueError(
            f"there is no price of {instance} for {asked}: the table has {known}; "
            "--hourly-price DOLLARS@DATE says your own"
        )
    return max(matching, key=lambda p: (p.date != UNDATED, p.date))


UNDATED = "undated"
KINDS = {  # devices of the table, as the catalogue calls them
    "V100-16": "v100", "T4": "t4", "A10G": "a10g", "L4": "l4", "A100-40": "a100-40gb",
    "A100-80": "a100", "H100-80": "h100", "H100": "h100", "H200-141": "h200", "B200": "b200",
}  # fmt: skip


def cluster_price(cluster: Cluster, given: HourlyPrice | None = None) -> HourlyPrice | None:
    """`given`, if of any device or the cluster's; else the instance with as many devices as a host
    that makes it cheapest now, a dated one if there is one. None: there is none."""
    kinds = {device.kind for _, device in cluster.ranks}
    names = [name for name, kind in KINDS.items() if kinds == {kind}]
    if given is not None and (not given.device or given.device in names):
        return given
    known = sorted({(p.name, p.region) for p in prices() if p.device in names})
    return _cheapest([price(*of) for of in known], cluster)


def _cheapest(known: Sequence[HourlyPrice], cluster: Cluster) -> HourlyPrice | None:
    each, count = max(len(host.devices) for host in cluster.hosts), len(cluster.ranks)
    fitting = [p for p in known if p.devices >= each] or known
    return min(fitting, key=lambda p: (p.date == UNDATED, p.dollars(1.0, count)), default=None)


@cache
def prices() -> tuple[HourlyPrice, ...]:
    """The table, in its order. ValueError names a row that is not of its form."""
    text = resources.files("synchromesh.catalogue").joinpath("prices.yaml").read_text()
    known = document.read_yaml(text, "prices.yaml")
    table = document.mapping(known, "prices.yaml", ("sources", "prices"))
    titles = {key: source["title"] for key, source in table["sources"].items()}
    rows = []
    for i, row in enumerate(document.sequence(table["prices"], "prices")):
        place = f"prices.yaml: prices[{i}]"
        if len(document.sequence(row, place)) != 7:
            raise ValueError(f"{place}: should have 7 entries, not {len(row)}")
        name, devices, device, dollars, region, date, source = row
        figures = document.number(dollars, place), document.integer(devices, place, 1)
        rows.append(HourlyPrice(*figures, name, region, date, titles[source], device))
    return tuple(rows)
