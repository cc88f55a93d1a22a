"""A survey: the machines of a run, what was timed there, and the cluster they make."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import combinations, pairwise
from statistics import median
from time import time
from typing import Any

from synchromesh.doctor import links, rates
from synchromesh.doctor.links import CollectiveTiming, MessageTiming
from synchromesh.engine.groups import World
from synchromesh.launch.machine import LAB, Machine
from synchromesh.values.cluster import Cluster, Device, Host, Link

EVERY_PAIR = 6  # hosts; of more the neighbours alone are measured
CLOCK_READINGS = 5  # of all clocks


@dataclass(frozen=True)
class Survey:
    """What every rank of a run found, equal on all of them. Rates are per rank, all at once."""

    machines: tuple[Machine, ...]
    flops: tuple[dict[str, float], ...]
    copied: tuple[float, ...]  # bytes a second of the device's memory
    clocks: tuple[float, ...]  # seconds ahead of rank 0
    timings: tuple[CollectiveTiming, ...]
    messages: tuple[MessageTiming, ...]
    emulated: bool
    date: str

    @property
    def hosts(self) -> dict[str, list[int]]:
        """Ranks by host name; a number is added to names that hosts share."""
        return hosts(self.machines)

    def cluster(self, name: str = "measured") -> Cluster:
        """The cluster: devices with their rates, links from the messages.

        Memory that several ranks share is divided. A collective's start is what the shortest
        all-reduce takes beyond the latency of its 2 (N-1) steps."""
        found = self.hosts
        made = tuple(
            Host(host, tuple(self._device(rank) for rank in ranks))
            for host, ranks in found.items()
        )
        host_of = {rank: host for host, ranks in found.items() for rank in ranks}
        lines = {(host_of[m.a], host_of[m.b]): m.line for m in self.messages}
        step = median([line.latency_seconds for line in lines.values()] or [0.0])
        smallest = [t.points[0][1] for t in self.timings if t.kind == "all_reduce"]
        start = max(0.0, min(smallest, default=0.0) - 2 * (len(self.machines) - 1) * step)
        wires = {
            (a, b): Link(
                a, b, _short(line.bytes_per_second), _short(line.latency_seconds),
                kind="inside" if a == b else "network", start_seconds=_short(start),
            )
            for (a, b), line in lines.items()
        }  # fmt: skip
        return Cluster(
            name,
            made,
            tuple(wires.values()),
            emulated=self.emulated,
            date=self.date,
            network=_middle([x for (a, b), x in wires.items() if a != b])
            if len(found) > EVERY_PAIR
            else None,
        )

    def _device(self, rank: int) -> Device:
        m = self.machines[rank]
        memory = m.memory_bytes // m.sharers(self.machines)
        flops = {dtype: _short(rate) for dtype, rate in self.flops[rank].items()}
        return Device(m.device, memory, flops, _short(self.copied[rank]))

    def to_dict(self) -> dict[str, Any]:
        """The document of `synchromesh doctor --json`, without checks and cluster."""
        return {
            "ranks": [
                {**m.to_dict(), "flops": f, "bytes_per_second": c, "clock_seconds_ahead": t}
                for m, f, c, t in zip(
                    self.machines, self.flops, self.copied, self.clocks, strict=True
                )
            ],
            "collectives": [{**asdict(t), **asdict(t.line)} for t in self.timings],
            "messages": [{**asdict(m), **asdict(m.line)} for m in self.messages],
        }


def hosts(machines: Sequence[Machine]) -> dict[str, list[int]]:
    """Ranks by host, hosts in the order of their first rank."""
    places: dict[str, list[Machine]] = {}
    for m in machines:
        places.setdefault(m.place, []).append(m)
    names = Counter(group[0].host for group in places.values())
    found: dict[str, list[int]] = {}
    for group in places.values():
        name, number = re.sub(r"[^A-Za-z0-9._-]", "-", group[0].host) or "host", 0
        while (full := f"{name}-{number}" if names[group[0].host] > 1 else name) in found:
            number += 1
        found[full] = [m.rank for m in group]
    return found


def _short(value: float) -> float:
    """Four digits: no more is measured."""
    return float(f"{value:.4g}")


def _middle(wires: list[Link]) -> Link:
    """The link of median bandwidth: what stands for those that were not measured."""
    return sorted(wires, key=lambda x: x.bytes_per_second)[len(wires) // 2]


def pairs(found: dict[str, list[int]]) -> list[tuple[int, int]]:
    """The ranks between which messages are timed: two of each host, one of each of two hosts."""
    first = [ranks[0] for ranks in found.values()]
    inside = [(ranks[0], ranks[1]) for ranks in found.values() if len(ranks) > 1]
    if len(first) <= EVERY_PAIR:
        return [*inside, *combinations(first, 2)]
    return [*inside, *pairwise(first), (first[0], first[-1])]


def survey(world: World, machine: Machine, quick: bool = False) -> Survey:
    """Inspects and measures all ranks of `world`, for 10 s or so (`quick`: 3 s); collective."""
    everyone, scale = world.everyone, 0.3 if quick else 1.0
    machines = [Machine.from_dict(x) for x in everyone.all_gather_json(machine.to_dict())]
    everyone.barrier()  # all at once, as in training: ranks that share cores share them here
    flops = rates.flops(world.device, 1.5 * scale)
    everyone.barrier()
    copied = rates.bytes_per_second(world.device, 0.3 * scale)
    found = everyone.all_gather_json([flops, copied])
    clocks = _clocks(world)
    timings = links.collectives(world, 4.0 * scale, quick)
    messages = links.messages(world, pairs(hosts(machines)), quick)
    world.ledger.reset()
    return Survey(
        tuple(machines),
        tuple(f for f, _ in found),
        tuple(c for _, c in found),
        clocks,
        tuple(timings),
        tuple(messages),
        emulated=bool(os.environ.get(LAB)),
        date=date.today().isoformat(),
    )


def _clocks(world: World) -> tuple[float, ...]:
    """Seconds by which each rank's clock is ahead of rank 0's: the median of a few readings."""
    readings = []
    for _ in range(CLOCK_READINGS):
        world.everyone.barrier()
        seen = world.everyone.all_gather_json(time())
        readings.append([t - seen[0] for t in seen])
    return tuple(median(ahead) for ahead in zip(*readings, strict=True))
