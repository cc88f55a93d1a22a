"""A survey: the machines of a run, what was timed there, and the cluster they make."""

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import combinations, pairwise
from statistics import median
from time import perf_counter, time
from typing import Any

import torch

from synchromesh.doctor import links
from synchromesh.doctor.links import CollectiveTiming, MessageTiming
from synchromesh.engine.world import World
from synchromesh.launcher.machine import LAB, Machine
from synchromesh.values.cluster import Cluster, Device, Host, Link

EVERY_PAIR = 6  # hosts; of more the neighbours alone are measured; chosen
# edges of the products; the last is what counts, the ones before it warm the device up
EDGES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
COPIED = {"cpu": 1 << 25, "cuda": 1 << 30}  # bytes
DTYPES = {
    "cpu": {"float32": torch.float32, "bfloat16": torch.bfloat16},
    "cuda": {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16},
}


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
        ranks_of = self.hosts
        made = tuple(
            Host(host, tuple(self._device(rank) for rank in ranks))
            for host, ranks in ranks_of.items()
        )
        host_of = {rank: host for host, ranks in ranks_of.items() for rank in ranks}
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
        between = [x for (a, b), x in wires.items() if a != b]
        between.sort(key=lambda x: x.bytes_per_second)  # the median stands for those not measured
        rest = between[len(between) // 2] if len(ranks_of) > EVERY_PAIR else None
        return Cluster(name, made, (*wires.values(),), self.emulated, date=self.date, network=rest)

    def _device(self, rank: int) -> Device:
        m = self.machines[rank]
        memory = m.memory_bytes // m.sharers(self.machines)
        flops = {dtype: _short(rate) for dtype, rate in self.flops[rank].items()}
        return Device(m.device, memory, flops, _short(self.copied[rank]))

    def to_dict(self) -> dict[str, Any]:
        """The document of `synchromesh doctor --json`, without checks and cluster."""
        of_ranks = zip(self.machines, self.flops, self.copied, self.clocks, strict=True)
        return {
            "ranks": [
                {**m.to_dict(), "flops": f, "bytes_per_second": c, "clock_seconds_ahead": t}
                for m, f, c, t in of_ranks
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
    ranks_of: dict[str, list[int]] = {}
    for group in places.values():
        name, number = re.sub(r"[^A-Za-z0-9._-]", "-", group[0].host) or "host", 0
        while (full := f"{name}-{number}" if names[group[0].host] > 1 else name) in ranks_of:
            number += 1
        ranks_of[full] = [m.rank for m in group]
    return ranks_of


def _short(value: float) -> float:
    """Four digits: no more is measured."""
    return float(f"{value:.4g}")


def pairs(ranks_of: dict[str, list[int]]) -> list[tuple[int, int]]:
    """The ranks between which messages are timed: two of each host, one of each of two hosts."""
    first = [ranks[0] for ranks in ranks_of.values()]
    inside = [(ranks[0], ranks[1]) for ranks in ranks_of.values() if len(ranks) > 1]
    if len(first) <= EVERY_PAIR:
        return [*inside, *combinations(first, 2)]
    return [*inside, *pairwise(first), (first[0], first[-1])]


def survey(world: World, machine: Machine, quick: bool = False) -> Survey:
    """Inspects and measures all ranks of `world`, for 10 s or so (`quick`: 3 s); collective."""
    everyone, scale = world.everyone, 0.3 if quick else 1.0
    machines = [Machine.from_dict(x) for x in everyone.all_gather_json(machine.to_dict())]
    everyone.barrier()  # all at once, as in training: ranks that share cores share them here
    flops = flops_by_dtype(world.device, 1.5 * scale)
    everyone.barrier()
    copied = bytes_per_second(world.device, 0.3 * scale)
    rates = everyone.all_gather_json([flops, copied])
    clocks = _clocks(world)
    timings = links.collectives(world, 4.0 * scale, quick)
    messages = links.messages(world, pairs(hosts(machines)), quick)
    world.ledger.reset()
    return Survey(
        tuple(machines), tuple(f for f, _ in rates), tuple(c for _, c in rates), clocks,
        tuple(timings), tuple(messages), emulated=bool(os.environ.get(LAB)),
        date=date.today().isoformat(),
    )  # fmt: skip


def _clocks(world: World, readings_taken: int = 5) -> tuple[float, ...]:
    readings = []
    for _ in range(readings_taken):
        world.everyone.barrier()
        seen = world.everyone.all_gather_json(time())
        readings.append([t - seen[0] for t in seen])
    return tuple(median(ahead) for ahead in zip(*readings, strict=True))


def flops_by_dtype(device: torch.device, seconds: float) -> dict[str, float]:
    """Achieved rate of large matrix products by dtype; no float16 on a CPU.

    seconds: for each dtype. float32 is as torch is set; where that is TF32 it is TF32's rate."""
    return {name: _products(device, dtype, seconds) for name, dtype in DTYPES[device.type].items()}


def _products(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    rate = 0.0
    for edge in EDGES[device.type]:
        a = torch.ones(edge, edge, device=device, dtype=dtype)
        b = torch.empty_like(a)
        once = _median(lambda a=a, b=b: torch.mm(a, a, out=b), device, seconds / 3)  # type: ignore[misc]
        rate = 2 * edge**3 / once
        if once > seconds / 3:
            break  # a larger one would take eight times as long
    return rate


def bytes_per_second(device: torch.device, seconds: float) -> float:
    """Rate of a copy in the device's memory, bytes read and written."""
    size = COPIED[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _median(lambda: target.copy_(source), device, seconds)


def _median(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median seconds of a call, of at least three and as many as there is time for."""
    taken: list[float] = []
    _timed(call, device)
    end = perf_counter() + seconds
    while len(taken) < 3 or perf_counter() < end:
        taken.append(_timed(call, device))
    return median(taken)


def _timed(call: Callable[[], object], device: torch.device) -> float:
    began = perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - began
