"""Seconds of a collective over given ranks of a cluster, from its links alone, unmeasured.

A group of N ranks on H hosts, d on each (the host with the most counts); n bytes of payload, of
which each rank sends v as in `traffic.py`; B and l bandwidth and latency of the slowest link
inside a host, W and L those between hosts, S the start of a collective. As in NCCL the ranks of a
host are neighbours on the ring, and the quickest of the algorithms that exist is taken:

    time      = S + a + b + f sqrt(a b)         a: latency of the path, b: transfer at full rate

    ring      a = h L + (s - h) l               b = v / min(B, W)           f = 2
        all_reduce                    s = 2 (N-1), h = 2 H
        reduce_scatter, all_gather    s = N-1, h = H-1
    tree      a = 2 ((d-1) l + ceil(log2 H) L)  b = max(v(d) / B, t n / W)  f = 2
        all_reduce between hosts      v(d) = 2 (d-1)/d n, t = 1 on two hosts, else 2
    switch    a = 25 us                         b = v / B_switch            f = 1
        all_reduce in one host whose switch adds
    direct    a = max(l, L)                     b = max(v / B, d (N-d)/N n / W)   f = 0
        all_to_all                    each rank sends n / N to each other one
        send, exchange                b = n / min(B, W): links carry both ways at once

f sqrt(a b): data flow over s hops in c chunks in (c + s - 1) (l + b/c) seconds; the best c gives
b + (s-1) l + 2 sqrt((s-1) l b). f = 1 of the switch is fitted to measured all-reduces of 8 H200;
docs/design.md, "The catalogue", has the errors.

Source of steps, tree, switch and their latencies: NCCL's own model (github.com/NVIDIA/nccl at
5067397, src/graph/tuning.cc); of the volumes: Chan et al. 2007 (`traffic.py`). A tree sends n up
and n down; on two hosts each of them sends n once.

W: d devices of a host reach min(d, lanes) / lanes of its adapters' rate; what groups that run at
once get of hosts' links, and of those of racks and pods (`values/topology.py`), are max-min fair
shares (`fair_shares.py`) of what goes from host to host around their rings."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from math import ceil, inf, log2, sqrt
from typing import cast

import numpy as np

from synchromesh.estimate.fair_shares import fair_shares
from synchromesh.values.cluster import Cluster, Link
from synchromesh.values.profile import Curve, Pattern
from synchromesh.values.topology import ANY
from synchromesh.values.traffic import MESSAGES, CollectiveKind

SWITCH_SECONDS = 25e-6  # NCCL's latency of NVLS over NVLink (tuning.cc)
SWITCH_FILL = 1.0
SIZES = (1, *(1 << k for k in range(10, 31)))  # payload bytes of a curve's points


@dataclass(frozen=True)
class GroupPlacement:
    """Where the ranks of a group are, and the slowest links between them (None where unused)."""

    ranks: int
    hosts: int
    devices: int  # on the host with the most
    inside: Link | None
    network: Link | None
    bytes_per_second: float  # W: what the group gets of the network

    @classmethod
    def of(cls, cluster: Cluster, ranks: Sequence[int], groups: int = 1) -> "GroupPlacement":
        """The group of `ranks` (as in `cluster.ranks`), of which `groups` alike run at once.
        ValueError where a rank is none of the cluster or a link is not described."""
        known = len(cluster.ranks)
        if not ranks or len(set(ranks)) < len(ranks) or not 0 <= min(ranks) <= max(ranks) < known:
            raise ValueError(
                f"ranks {list(ranks)} should be different ones from 0 to {known - 1} of "
                f"{cluster.name}"
            )
        (placed,) = _placed(cluster, [ranks], "all_reduce", groups)
        return placed

    @property
    def start_seconds(self) -> float:
        """S: the start of a collective."""
        return max((x.start_seconds for x in (self.inside, self.network) if x), default=0.0)


def _slowest(links: Sequence[Link]) -> Link | None:
    """A link with the least bandwidths and the largest latencies of several."""
    if not links:
        return None
    return Link(
        ANY, ANY, min(x.bytes_per_second for x in links),
        max(x.latency_seconds for x in links), start_seconds=max(x.start_seconds for x in links),
        switch_bytes_per_second=min(x.switch_bytes_per_second for x in links),
    )  # fmt: skip


def group_seconds(kind: CollectiveKind, size: int, group: GroupPlacement) -> float:
    """Seconds of one collective over `size` payload bytes (as of `traffic.sent_bytes`)."""
    if group.ranks == 1:
        return 0.0
    if kind == "all_to_all":
        return group.start_seconds + _direct(size, group)
    if kind in MESSAGES:
        return group.start_seconds + _message(size, group)
    ways = [_ring(kind, size, group)]
    if kind == "all_reduce":
        if group.hosts > 1:
            ways.append(_tree(size, group))
        elif group.inside is not None and group.inside.switch_bytes_per_second:
            ways.append(_switch(size, group))
    return group.start_seconds + min(ways)


def curves(
    cluster: Cluster, wanted: Iterable[tuple[str, Pattern]], ranks: Sequence[int] | None = None
) -> dict[tuple[str, Pattern], Curve]:
    """Seconds over payload of collectives on `ranks` (all), of all groups of a pattern at once.
    What counts is the group that takes longest. Ranks are placed host after host."""
    there = range(len(cluster.ranks)) if ranks is None else ranks

    def curve(kind: CollectiveKind, pattern: Pattern) -> Curve:
        groups = {
            placed
            for places in _rounds(kind, pattern, len(there))
            for placed in _placed(cluster, [[there[p] for p in g] for g in places], kind)
        }
        most = ((n, max((group_seconds(kind, n, g) for g in groups), default=0.0)) for n in SIZES)
        return Curve.of(most)

    return {(k, p): curve(cast(CollectiveKind, k), p) for k, p in dict.fromkeys(wanted)}


def _rounds(kind: str, pattern: Pattern, devices: int) -> Iterable[Sequence[tuple[int, ...]]]:
    """The groups of a pattern that talk at once."""
    if kind in MESSAGES:
        return pattern.pairs(devices)
    return [[g for g in pattern.groups(devices) if len(g) == pattern.size]]


@dataclass(frozen=True)
class Crossing:
    """A flow of a group between two hosts. fills: the part of a host's adapters that it can use.
    part: of what the group sends out of a host."""

    group: int
    source: int
    target: int
    link: Link
    fills: float
    part: float = 1.0


def _placed(
    cluster: Cluster, groups: Sequence[Sequence[int]], kind: str, times: int = 1
) -> set[GroupPlacement]:
    """The different ones of groups that run at once, each with what it gets of the links. times:
    how many equal ones each of them stands for."""
    counted = [Counter(cluster.host_of[rank] for rank in ranks) for ranks in groups]
    crossings = [
        c for n, counts in enumerate(counted) for c in crossings_of(cluster, n, counts, kind)
    ]
    rates = [0.0 if len(counts) == 1 else inf for counts in counted]
    links: list[set[Link]] = [set() for _ in groups]
    for crossing, share in zip(crossings, _shares(cluster, crossings, times), strict=True):
        rate = share / crossing.part * crossing.link.bytes_per_second
        rates[crossing.group] = min(rates[crossing.group], rate)
        links[crossing.group].add(crossing.link)
    return {
        GroupPlacement(
            len(ranks), len(counts), max(counts.values()),
            _slowest([cluster.link_at(host, host) for host, n in counts.items() if n > 1]),
            _slowest([*outer]), rate,
        )
        for ranks, counts, outer, rate in zip(groups, counted, links, rates, strict=True)
    }  # fmt: skip


def crossings_of(
    cluster: Cluster, group: int, counts: Mapping[int, int], kind: str
) -> list[Crossing]:
    """Of a group with so many ranks on hosts: around the ring, of a message its way, or from each
    host to each other one."""
    hosts = list(counts)
    if len(hosts) == 1:
        return []
    ways = list(pairwise([*hosts, *([] if kind == "send" else hosts[:1])]))
    if kind == "all_to_all":
        ways = list(permutations(hosts, 2))
    part = 1.0 / (len(hosts) - 1) if kind == "all_to_all" else 1.0

    def crossing(a: int, b: int) -> Crossing:
        link = cluster.link_at(a, b)
        fills = part * min(counts[a], counts[b], link.lanes) / link.lanes
        return Crossing(group, a, b, link, fills, part)

    return [crossing(a, b) for a, b in ways]


def _shares(cluster: Cluster, crossings: Sequence[Crossing], times: int) -> list[float]:
    """The part of a host's link that each has beside the others; each has a link of its own, too,
    which ends where the adapters do that it can use."""
    if not crossings:
        return []
    levels = cluster.levels
    ends = np.array([(c.source, c.target) for c in crossings])
    own = len(levels.capacities) + np.arange(len(crossings))
    routes = np.column_stack([levels.routes(ends[:, 0], ends[:, 1]), own])
    fills = np.array([times * c.fills for c in crossings])
    capacities = np.concatenate([levels.capacities, fills])
    shares: list[float] = fair_shares(
        routes, capacities, np.full(len(crossings), float(times))
    ).tolist()
    return shares


def _sent(kind: CollectiveKind, size: int, ranks: int) -> float:
    """v: the volume of `traffic.sent_bytes` before it is rounded."""
    return (2 if kind == "all_reduce" else 1) * size * (ranks - 1) / ranks


def _flow(latency: float, transfer: float, fill: float = 2.0) -> float:
    return latency + transfer + fill * sqrt(latency * transfer)


def _ring(kind: CollectiveKind, size: int, group: GroupPlacement) -> float:
    twice = 2 if kind == "all_reduce" else 1
    steps = twice * (group.ranks - 1)
    crossings = 0
    if group.hosts > 1:
        crossings = min(steps, 2 * group.hosts if twice == 2 else group.hosts - 1)
    latency, rates = 0.0, []
    if group.network is not None:
        latency += crossings * group.network.latency_seconds
        rates.append(group.bytes_per_second)
    if group.inside is not None:
        latency += (steps - crossings) * group.inside.latency_seconds
        rates.append(group.inside.bytes_per_second)
    return _flow(latency, _sent(kind, size, group.ranks) / min(rates))


def _tree(size: int, group: GroupPlacement) -> float:
    assert group.network is not None
    latency = 2 * ceil(log2(group.hosts)) * group.network.latency_seconds
    transfers = [(1 if group.hosts == 2 else 2) * size / group.bytes_per_second]
    if group.inside is not None:
        latency += 2 * (group.devices - 1) * group.inside.latency_seconds
        rate = max(group.inside.bytes_per_second, group.inside.switch_bytes_per_second)
        transfers.append(_sent("all_reduce", size, group.devices) / rate)
    return _flow(latency, max(transfers))


def _switch(size: int, group: GroupPlacement) -> float:
    assert group.inside is not None
    transfer = _sent("all_reduce", size, group.ranks) / group.inside.switch_bytes_per_second
    return _flow(SWITCH_SECONDS, transfer, SWITCH_FILL)


def _message(size: int, group: GroupPlacement) -> float:
    links = [x for x in (group.inside, group.network) if x is not None]
    rates = [] if group.inside is None else [group.inside.bytes_per_second]
    rates += [] if group.network is None else [group.bytes_per_second]
    return max(x.latency_seconds for x in links) + size / min(rates)


def _direct(size: int, group: GroupPlacement) -> float:
    latency, transfers = 0.0, []
    if group.inside is not None:
        latency = group.inside.latency_seconds
        transfers.append(_sent("all_to_all", size, group.ranks) / group.inside.bytes_per_second)
    if group.network is not None:
        latency = max(latency, group.network.latency_seconds)
        away = group.devices * (group.ranks - group.devices) / group.ranks
        transfers.append(away * size / group.bytes_per_second)
    return latency + max(transfers)
