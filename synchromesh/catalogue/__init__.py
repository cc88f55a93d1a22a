"""The catalogue: clusters one does not have, from data sheets and others' measurements.

A name is DEVICExCOUNT (`h100x16`: two hosts of eight, joined as such hosts usually are) or
DEVICExCOUNT-NETWORK (`a100x16-ethernet25`). `devices.yaml` and `links.yaml` hold the figures, each
with its source; the rest of the last host is what remains of COUNT."""

import re
from contextlib import suppress

from synchromesh.catalogue.sheet import Sheets, sheets
from synchromesh.values.cluster import Cluster, Host
from synchromesh.values.fault import near

SLOWER = ("ethernet25", "ethernet100")  # networks that `names` lists beside the usual one
INSIDE = ("nvlink", "pcie")  # kinds of links that join no hosts
MEASURED = ("seen", "derived")  # statuses of figures that rest on somebody's measurement


def names() -> tuple[str, ...]:
    """The clusters worth listing, device by device; any other count is as good."""
    listed: list[str] = []
    for name, sheet in sheets().devices.items():
        listed += [f"{name}x{2**n}" for n in range(8)]
        few = [int(sheet.devices_per_host.value) * hosts for hosts in (2, 4)]
        others = [network for network in SLOWER if network != sheet.network]
        listed += [f"{name}x{n}-{network}" for n in few for network in others]
    return tuple(listed)


def cluster(name: str, most: int = 65_536) -> Cluster:
    """The cluster of a name. ValueError for an unknown one, with near ones; more than `most`."""
    known = sheets()
    devices = sorted(known.devices, key=len, reverse=True)
    networks = [k for k, link in known.links.items() if link.kind not in INSIDE]
    kinds = "|".join(map(re.escape, devices))
    match = re.fullmatch(rf"({kinds})x([1-9][0-9]{{0,8}})(?:-({'|'.join(networks)}))?", name)
    if match is None:
        raise ValueError(
            f"the catalogue has no cluster {name!r}{near(name, names())}; a name is DEVICExCOUNT "
            f"or DEVICExCOUNT-NETWORK with a device of {', '.join(known.devices)} and a network "
            f"of {', '.join(networks)}"
        )
    count = int(match[2])
    if count > most:
        raise ValueError(f"{name}: {count} devices are more than the {most} of one cluster")
    return _cluster(known, name, match[1], count, match[3] or known.devices[match[1]].network)


def resized(of: Cluster, devices: int) -> Cluster:
    """A cluster with so many devices: of the catalogue where it is one of these, else `of` with
    the first of its devices, or with more hosts."""
    named = re.fullmatch(r"(.+x)[1-9][0-9]*(-.+)?", of.name)
    if named and of.source == "datasheet":
        with suppress(ValueError):
            return cluster(f"{named[1]}{devices}{named[2] or ''}")
    return of.resized(devices)


def _cluster(known: Sheets, name: str, kind: str, count: int, network: str) -> Cluster:
    sheet = known.devices[kind]
    device, each = sheet.device(known.default_fraction), int(sheet.devices_per_host.value)
    filled = (min(each, count - start) for start in range(0, count, each))
    hosts = tuple(Host(f"host{i}", (device,) * number) for i, number in enumerate(filled))
    used = [sheet.inside] if len(hosts[0].devices) > 1 else []
    used += [network] if len(hosts) > 1 else []
    rate = [known.links[link].figures["bytes_per_second"].status for link in used]
    measured = bool(sheet.achieved_fraction) and all(status in MEASURED for status in rate)
    band = known.error_band if measured else known.error_band_unmeasured
    return Cluster(
        name, hosts, source="datasheet", date=known.date,
        inside=known.links[sheet.inside].link if sheet.inside in used else None,
        network=known.links[network].link if network in used else None, error_band=band.value,
    )  # fmt: skip
