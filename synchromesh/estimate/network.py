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

W: d devices of a host reach min(d, lanes) / lanes of its adapters' rate, and where `groups` such
groups run at once each gets at most 1 / groups of the whole."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import ceil, log2, sqrt
from typing import cast

from synchromesh.values.cluster import Cluster, Link
from synchromesh.values.profile import Curve, Pattern
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
        known = cluster.ranks
        if not 0 < len(ranks) == len(set(ranks) & set(range(len(known)))):
            raise ValueError(f"ranks {list(ranks)} should be different ones from 0 to "
                             f"{len(known) - 1} of {cluster.name}")  # fmt: skip
        counts = Counter(known[rank][0] for rank in ranks)
        names = list(counts)
        ring = list(pairwise([*names, names[0]])) if len(names) > 1 else []
        outer = [cluster.link(a, b) for a, b in ring]
        shared = {
            link: min(min(counts[a], counts[b], link.lanes) / link.lanes, 1 / groups)
            for (a, b), link in zip(ring, outer, strict=True)
        }
        return cls(
            len(ranks), len(names), max(counts.values()),
            _slowest([cluster.link(name, name) for name, n in counts.items() if n > 1]),
            _slowest(outer),
            min((x.bytes_per_second * share for x, share in shared.items()), default=0.0),
        )  # fmt: skip

    @property
    def start_seconds(self) -> float:
        """S: the start of a collective."""
        return max((x.start_seconds for x in (self.inside, self.network) if x), default=0.0)


def _slowest(links: Sequence[Link]) -> Link | None:
    """A link with the least bandwidths and the largest latencies of several."""
    if not links:
        return None
    return Link(
        links[0].a, links[0].b, min(x.bytes_per_second for x in links),
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
    of_kind: dict[tuple[str, Pattern], Curve] = {}
    for kind, pattern in dict.fromkeys(wanted):
        there = ranks or range(len(cluster.ranks))
        if kind in MESSAGES:
            groups = _pairs(cluster, kind, pattern, there)
        else:
            groups = _together(cluster, pattern, there)
        of_kind[kind, pattern] = Curve.of(
            (
                size,
                max(
                    (group_seconds(cast(CollectiveKind, kind), size, g) for g in groups),
                    default=0.0,
                ),
            )
            for size in SIZES
        )
    return of_kind


def _together(cluster: Cluster, pattern: Pattern, ranks: Sequence[int]) -> set[GroupPlacement]:
    """The different groups of a pattern, each with what it gets of the network beside the rest."""
    known = cluster.ranks
    places = (g for g in pattern.groups(len(ranks)) if len(g) == pattern.size)
    groups = [tuple(ranks[place] for place in g) for g in places]
    hosts = [{known[rank][0] for rank in group} for group in groups]
    outward = Counter(chain.from_iterable(names for names in hosts if len(names) > 1))
    return {
        GroupPlacement.of(cluster, group, max(1, *map(outward.__getitem__, names)))
        for group, names in zip(groups, hosts, strict=True)
    }


def _pairs(
    cluster: Cluster, kind: str, pattern: Pattern, ranks: Sequence[int]
) -> set[GroupPlacement]:
    """The different pairs of a pattern, with their share of the adapters in their round."""
    known, placements = cluster.ranks, set()
    for pairs in pattern.pairs(len(ranks)):
        here = [(ranks[a], ranks[b]) for a, b in pairs]
        across = [(known[a][0], known[b][0]) for a, b in here if known[a][0] != known[b][0]]
        if kind == "exchange":
            across += [(b, a) for a, b in across]
        out, into = (Counter(names) for names in zip(*across, strict=True)) if across else ({}, {})
        for a, b in here:
            shared = max(out.get(known[a][0], 1), into.get(known[b][0], 1))
            placements.add(GroupPlacement.of(cluster, (a, b), shared))
    return placements


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
