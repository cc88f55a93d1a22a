"""The catalogue: clusters one does not have, from data sheets and others' measurements.

A name is DEVICExCOUNT (`h100x16`: two hosts of eight, joined as such hosts usually are) or
DEVICExCOUNT-NETWORK (`a100x16-ethernet25`). `devices.yaml` and `links.yaml` hold the figures, each
with its source; the rest of the last host is what remains of COUNT.

`-over4` behind it: racks that leave by a quarter of what their hosts have. `-pods`: of 3,072
devices each, between which is a seventh (`Levels`)."""

import re
from contextlib import suppress
from dataclasses import replace

from synchromesh.catalogue.sheet import Sheets, sheets
from synchromesh.values.cluster import Cluster, Host
from synchromesh.values.fault import near
from synchromesh.values.topology import Level

SLOWER = ("ethernet25", "ethernet100")  # networks that `names` lists beside the usual one
INSIDE = ("nvlink", "pcie")  # kinds of links that join no hosts
MEASURED = ("seen", "derived")  # statuses of figures that rest on somebody's measurement


class Levels:
    """Hosts of a rack: assumed; of a rack and racks of a pod of the cluster in which Llama 3 was
    trained, and how much less leaves its pods (Dubey et al. 2024, "The Llama 3 Herd of Models",
    arXiv 2407.21783, section 3.3.1)."""

    RACK = 4
    POD_RACK, POD, PODS = 2, 192, 7.0


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
    form = rf"({kinds})x([1-9][0-9]{{0,8}})(?:-({'|'.join(networks)}))?(-pods|-over[1-9][0-9]?)?"
    match = re.fullmatch(form, name)
    if match is None:
        raise ValueError(
            f"the catalogue has no cluster {name!r}{near(name, names())}; a name is DEVICExCOUNT "
            f"or DEVICExCOUNT-NETWORK with a device of {', '.join(known.devices)} and a network "
            f"of {', '.join(networks)}; behind it may stand -overN or -pods"
        )
    count = int(match[2])
    if count > most:
        raise ValueError(f"{name}: {count} devices are more than the {most} of one cluster")
    made = _cluster(known, name, match[1], count, match[3] or known.devices[match[1]].network)
    return _with_levels(made, match[4]) if match[4] and made.network else made


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


def _with_levels(flat: Cluster, form: str) -> Cluster:
    """`-over4`, `-pods`. ValueError where the last rack or pod would not be full."""
    assert flat.inside is not None
    hosts, each = len(flat.hosts), len(flat.hosts[0].devices)
    rack, pod, over, between = Levels.RACK, 1, 1.0, 1.0
    if form == "-pods":
        rack, pod, between = Levels.POD_RACK, Levels.POD, Levels.PODS
    else:
        over = float(form.removeprefix("-over"))
    racks = -(-hosts // rack)
    levels = (
        Level("host", each, flat.inside), Level("rack", min(rack, hosts), flat.network, over),
        Level("pod", min(pod, racks), None, between), Level("core", -(-racks // pod)),
    )  # fmt: skip
    try:
        return replace(flat, inside=None, network=None, topology=levels)
    except ValueError as error:
        full = f"racks of {rack * each} devices" if pod == 1 else f"pods of {rack * pod * each}"
        raise ValueError(f"{error}: give a number of devices that fills {full}") from None
