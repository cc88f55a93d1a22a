"""A profile: what was measured of a model and of the links; seconds and bytes, and where from.

    compute      seconds of a component's forward and backward by batch rows, on each rank
    network      seconds of a collective by payload bytes, on a pattern of groups, all at once
    overlap      how much computation and traffic slow each other down while both are under way
    sprint       how much faster computation is at first after a pause
    pace         seconds that pass in a second of processor time, on each rank
    update       seconds of the optimizer step by parameter bytes and by tensors
    host         seconds of a step that none of these explain: Python, agreement, the loss

Where nothing could be measured the same figures come from data sheets: `source` says which.

Units: seconds, bytes (payload as `traffic.sent_bytes` counts it), batch rows.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, get_args

from synchromesh.values import document
from synchromesh.values.traffic import CollectiveKind


@dataclass(frozen=True)
class Curve:
    """Seconds over a size: measured points, straight lines between and beyond them.

    points: (size, seconds), sizes ascending. One point alone is a line through the origin. Bytes
    over rows are such curves too.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [x for x, _ in self.points]
        finite = all(0 <= x < float("inf") for x in sizes)
        if not sizes or not finite or sizes != sorted(set(sizes)):
            raise ValueError(f"a curve needs ascending sizes, not {sizes[:8]}")
        if any(not 0 <= y < float("inf") for _, y in self.points):
            raise ValueError(f"a curve needs finite seconds, not {self.points[:8]}")

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> "Curve":
        """The curve through `points`, made non-decreasing: more takes no less time.

        Of several points of one size the highest counts.
        """
        found: dict[float, float] = {}
        highest = 0.0
        for x, y in sorted(points):
            highest = max(highest, y)
            found[x] = highest
        return cls(tuple(found.items()))

    def __call__(self, size: float) -> float:
        """Seconds at `size`; beyond the ends the nearest line goes on, never below zero."""
        if len(self.points) == 1:
            ((x, y),) = self.points
            return y * size / x if x else y
        sizes = [x for x, _ in self.points]
        i = min(max(bisect_right(sizes, size), 1), len(sizes) - 1)
        (x0, y0), (x1, y1) = self.points[i - 1], self.points[i]
        return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))

    @property
    def reach(self) -> float:
        """The largest size that was measured."""
        return self.points[-1][0]

    def joined(self, other: "Curve") -> "Curve":
        """Both curves' points; where both have a size, those of `other`."""
        return Curve.of({**dict(self.points), **dict(other.points)}.items())

    def scaled(self, factor: float) -> "Curve":
        return Curve(tuple((x, y * factor) for x, y in self.points))


@dataclass(frozen=True)
class Compute:
    """One local program: seconds over rows, forward and backward, of each rank; its memory.

    spread: the largest distance of a timed block from the median of its blocks, over that median.
    """

    forward: tuple[Curve, ...]
    backward: tuple[Curve, ...]
    memory: "Memory"
    spread: float = 0.0

    @property
    def reach(self) -> float:
        """The most rows at which every rank was timed."""
        return min(curve.reach for curve in self.forward)

    def on(self, rank: int, rows: float) -> tuple[float, float]:
        """Seconds of forward and backward on a rank; one curve alone stands for all ranks."""
        at = min(rank, len(self.forward) - 1)
        return self.forward[at](rows), self.backward[at](rows)

    def joined(self, other: "Compute") -> "Compute":
        """What was measured at further rows besides."""

        def curves(mine: tuple[Curve, ...], new: tuple[Curve, ...]) -> tuple[Curve, ...]:
            return tuple(a.joined(b) for a, b in zip(mine, new, strict=True))

        m, n = self.memory, other.memory
        memory = replace(
            n,
            kept=m.kept.joined(n.kept),
            forward=m.forward.joined(n.forward),
            backward=m.backward.joined(n.backward),
            staying=m.staying.joined(n.staying),
        )
        return Compute(
            curves(self.forward, other.forward),
            curves(self.backward, other.backward),
            memory,
            max(self.spread, other.spread),
        )


@dataclass(frozen=True)
class Memory:
    """Bytes of a local program over rows, inputs and parameters not counted.

    kept: what its forward keeps for backward. kept_inputs, kept_outputs: which of the inputs and
    outputs (outputs are part of `kept` then) autograd keeps alive. forward: the most that is alive
    at once of what it makes. backward: the most that is alive at once of what was kept, of what it
    makes and of the gradients of its outputs, a parameter's gradient until it is complete;
    staying: the same where gradients of parameters stay.
    """

    kept: Curve = Curve(((0.0, 0.0),))
    forward: Curve = Curve(((0.0, 0.0),))
    backward: Curve = Curve(((0.0, 0.0),))
    staying: Curve = Curve(((0.0, 0.0),))
    kept_inputs: tuple[int, ...] = ()
    kept_outputs: tuple[int, ...] = ()


@dataclass(frozen=True, order=True)
class Pattern:
    """Groups over K positions that talk at once: `size` ranks each, `stride` apart.

    size 2, stride 1:   (0 1) (2 3)        size 2, stride 2:   (0 2) (1 3)
    """

    size: int
    stride: int = 1

    def groups(self, devices: int) -> tuple[tuple[int, ...], ...]:
        """Positions of every group; those that make no whole group stay alone."""
        block = self.size * self.stride
        whole = devices - devices % block
        made = [
            tuple(start + i * self.stride for i in range(self.size))
            for first in range(0, whole, block)
            for start in range(first, first + self.stride)
        ]
        return (*made, *((p,) for p in range(whole, devices)))


LEAST_RATE = 0.05  # of computation beside traffic, and of traffic beside computation


@dataclass(frozen=True)
class Overlap:
    """Rates at which computation and traffic go on while both are under way; 1.0: undisturbed.

    delay: seconds that a collective takes longer where all ranks have computed until it begins:
    they come at different moments, and a quota lets them wait for their next share.
    """

    compute: float = 1.0
    network: float = 1.0
    delay: float = 0.0

    def __post_init__(self) -> None:
        if not (0.0 < self.compute <= 1.0 and 0.0 < self.network <= 1.0):
            raise ValueError(f"rates of overlap lie in (0, 1]: {self.compute}, {self.network}")
        if not 0.0 <= self.delay < float("inf"):
            raise ValueError(f"a delay is a number of seconds from 0: {self.delay}")

    def stretched(self, times: float) -> "Overlap":
        """The same traffic where its links let it take `times` as long. What it costs processors
        stays, spread over more time: the (1 - a) / b seconds of computing that a second of it
        takes, and the 1 / b - 1 that it waits for them.
        """
        late, cost = 1.0 / self.network - 1.0, (1.0 - self.compute) / self.network
        b = 1.0 / (1.0 + late / times)
        return replace(self, compute=max(LEAST_RATE, 1.0 - cost * b / times), network=b)


@dataclass(frozen=True)
class Sprint:
    """What a device does after a pause: it computes `speed` times as fast until it has done
    `credit` seconds of work more than at its lasting speed.

    A CPU quota gives a host a whole period's share at once; processors raise their clock for a
    while. 1 and 0 where there is no such thing. Waiting earns credit back, a second a second.
    """

    speed: float = 1.0
    credit: float = 0.0

    def __post_init__(self) -> None:
        if not (self.speed >= 1.0 and self.credit >= 0.0):
            raise ValueError(f"a sprint is no slowdown: speed {self.speed}, credit {self.credit}")


@dataclass(frozen=True)
class Profile:
    """Everything that was measured; see the module's docstring."""

    devices: int
    compute: Mapping[str, Compute] = field(default_factory=dict)  # by program (trace.local.key)
    network: Mapping[tuple[str, Pattern], Curve] = field(default_factory=dict)
    overlap: Mapping[str, Overlap] = field(default_factory=dict)  # by kind of collective
    sprint: Sprint = Sprint()
    pace: tuple[float, ...] = ()  # of each rank of the run; none: 1
    update_byte: float = 0.0  # seconds of the optimizer step a parameter byte
    update_tensor: float = 0.0  # ... and a tensor
    copy_byte: float = 0.0  # seconds to copy a byte of a gradient into its bucket
    state_factor: float = 0.0  # bytes of optimizer state a parameter byte
    work_largest: float = 0.0  # bytes alive in the optimizer step for a byte of the largest tensor
    work_byte: float = 0.0  # ... and for a byte of all tensors
    host: float = 0.0  # seconds a step
    source: str = "measured"  # or datasheet
    error_band: float = 0.0  # relative error of estimates from these figures; 0: not stated
    seconds: float = 0.0  # that measuring took
    emulated: bool = False
    missing: tuple[str, ...] = ()  # what could not be measured, and why

    def pace_of(self, rank: int) -> float:
        """Seconds that pass in a second of the clock that programs are timed with."""
        return self.pace[rank] if self.pace else 1.0

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """How fast each rank computes, the fastest being 1: the median over what was measured, so
        that a program during which something else ran counts little. None: not known."""
        shares: list[list[float]] = []
        for found in self.compute.values():
            rows = found.reach  # that all were timed with
            each = [f(rows) + b(rows) for f, b in zip(found.forward, found.backward, strict=True)]
            if min(each) > 0.0:
                shares.append([min(each) / t for t in each])
        if not shares:
            return ()
        middle = [median(column) for column in zip(*shares, strict=True)]
        return tuple(m / max(middle) for m in middle)

    def lateness(self, ranks: Collection[int]) -> float:
        """Seconds that the slowest of `ranks` takes for what takes the slowest of all one."""
        speeds = self.speeds
        if len(ranks) >= len(speeds) or max(ranks) >= len(speeds):
            return 1.0  # they are all, or nothing is known of each
        return min(speeds) / min(speeds[r] for r in ranks)

    def remade(
        self, ranks: Callable[[tuple[Curve, ...]], Iterable[Curve]], slowest: float
    ) -> "Profile":
        """The profile with other curves for its ranks, the slowest taking `slowest` times as long
        for the optimizer's step and copies, which were measured on it."""
        compute = {
            key: replace(c, forward=tuple(ranks(c.forward)), backward=tuple(ranks(c.backward)))
            for key, c in self.compute.items()
        }
        return replace(
            self,
            compute=compute,
            update_byte=self.update_byte * slowest,
            update_tensor=self.update_tensor * slowest,
            copy_byte=self.copy_byte * slowest,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "devices": self.devices,
            "source": self.source,
            "error_band": self.error_band,
            "emulated": self.emulated,
            "seconds": self.seconds,
            "compute": {
                key: {
                    "forward": [_points(c) for c in found.forward],
                    "backward": [_points(c) for c in found.backward],
                    "memory": {
                        "kept": _points(found.memory.kept),
                        "forward": _points(found.memory.forward),
                        "backward": _points(found.memory.backward),
                        "staying": _points(found.memory.staying),
                        "kept_inputs": list(found.memory.kept_inputs),
                        "kept_outputs": list(found.memory.kept_outputs),
                    },
                    "spread": found.spread,
                }
                for key, found in self.compute.items()
            },
            "network": [
                {"kind": kind, "size": p.size, "stride": p.stride, "points": _points(curve)}
                for (kind, p), curve in sorted(self.network.items())
            ],
            "overlap": {
                kind: {"compute": o.compute, "network": o.network, "delay": o.delay}
                for kind, o in sorted(self.overlap.items())
            },
            "sprint": {"speed": self.sprint.speed, "credit": self.sprint.credit},
            "pace": list(self.pace),
            "update": {
                "seconds_per_byte": self.update_byte,
                "seconds_per_tensor": self.update_tensor,
                "copy_seconds_per_byte": self.copy_byte,
                "state_factor": self.state_factor,
                "work_bytes_per_largest_byte": self.work_largest,
                "work_bytes_per_byte": self.work_byte,
            },
            "host_seconds": self.host,
            "missing": list(self.missing),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, value: Any, name: str = "profile") -> "Profile":
        keys = (
            "devices", "source", "error_band", "emulated", "seconds", "compute", "network",
            "overlap", "sprint", "pace", "update", "host_seconds", "missing",
        )  # fmt: skip
        item = document.mapping(value, name, keys, keys)
        rates = document.mapping(item["overlap"], f"{name}: overlap", get_args(CollectiveKind))
        given = item["compute"] if isinstance(item["compute"], dict) else ()  # any keys
        programs = document.mapping(item["compute"], f"{name}: compute", given)
        speeds = ("speed", "credit")
        sprint = document.mapping(item["sprint"], f"{name}: sprint", speeds, speeds)
        prices = (
            "seconds_per_byte", "seconds_per_tensor", "copy_seconds_per_byte", "state_factor",
            "work_bytes_per_largest_byte", "work_bytes_per_byte",
        )  # fmt: skip
        update = document.mapping(item["update"], f"{name}: update", prices, prices)
        paces = enumerate(document.sequence(item["pace"], f"{name}: pace"))
        missing = enumerate(document.sequence(item["missing"], f"{name}: missing"))

        def number(x: Any, path: str) -> float:
            return document.number(x, f"{name}: {path}", 0)

        speed, credit = (number(sprint[k], f"sprint.{k}") for k in speeds)
        with document.at(f"{name}: sprint"):
            quick = Sprint(speed, credit)
        return cls(
            devices=document.integer(item["devices"], f"{name}: devices", 1, 1_000_000),
            compute={k: _compute(v, f"{name}: compute.{k}") for k, v in programs.items()},
            network=_links(item["network"], f"{name}: network"),
            overlap={k: _overlap(v, f"{name}: overlap.{k}") for k, v in rates.items()},
            sprint=quick,
            pace=tuple(number(p, f"pace[{i}]") for i, p in paces),
            update_byte=number(update["seconds_per_byte"], "update.seconds_per_byte"),
            update_tensor=number(update["seconds_per_tensor"], "update.seconds_per_tensor"),
            copy_byte=number(update["copy_seconds_per_byte"], "update.copy_seconds_per_byte"),
            state_factor=number(update["state_factor"], "update.state_factor"),
            work_largest=number(
                update["work_bytes_per_largest_byte"], "update.work_bytes_per_largest_byte"
            ),
            work_byte=number(update["work_bytes_per_byte"], "update.work_bytes_per_byte"),
            host=number(item["host_seconds"], "host_seconds"),
            source=document.text(item["source"], f"{name}: source"),
            error_band=number(item["error_band"], "error_band"),
            seconds=number(item["seconds"], "seconds"),
            emulated=document.boolean(item["emulated"], f"{name}: emulated"),
            missing=tuple(document.text(m, f"{name}: missing[{i}]") for i, m in missing),
        )

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """The profile in a `.json` or `.yaml` file."""
        return cls.from_dict(document.read(path), str(path))


def _points(curve: Curve) -> list[list[float]]:
    return [[x, y] for x, y in curve.points]


def _curve(value: Any, path: str) -> Curve:
    points = []
    for i, point in enumerate(document.sequence(value, path)):
        pair = document.sequence(point, f"{path}[{i}]")
        if len(pair) != 2:
            raise ValueError(f"{path}[{i}]: should be [size, value], not {len(pair)} numbers")
        x, y = pair
        points.append((document.number(x, path, 0), document.number(y, path, 0)))
    with document.at(path):
        return Curve(tuple(points))


def _compute(value: Any, path: str) -> Compute:
    keys = ("forward", "backward", "memory", "spread")
    item = document.mapping(value, path, keys, keys)

    def curves(key: str) -> tuple[Curve, ...]:
        listed: Sequence[Any] = document.sequence(item[key], f"{path}.{key}")
        if not listed:
            raise ValueError(f"{path}.{key}: should have a curve for each rank, not none")
        return tuple(_curve(c, f"{path}.{key}[{i}]") for i, c in enumerate(listed))

    return Compute(
        curves("forward"),
        curves("backward"),
        _memory(item["memory"], f"{path}.memory"),
        document.number(item["spread"], f"{path}.spread", 0),
    )


def _overlap(value: Any, path: str) -> Overlap:
    keys = ("compute", "network", "delay")
    item = document.mapping(value, path, keys, keys)
    compute, network, delay = (document.number(item[k], f"{path}.{k}", 0) for k in keys)
    with document.at(path):
        return Overlap(compute, network, delay)


def _memory(value: Any, path: str) -> Memory:
    keys = ("kept", "forward", "backward", "staying", "kept_inputs", "kept_outputs")
    item = document.mapping(value, path, keys, keys)
    kept, forward, backward, staying = (_curve(item[k], f"{path}.{k}") for k in keys[:4])

    def places(key: str) -> tuple[int, ...]:
        listed = document.sequence(item[key], f"{path}.{key}")
        return tuple(document.integer(n, f"{path}.{key}", 0, 1_000_000) for n in listed)

    inputs, outputs = places("kept_inputs"), places("kept_outputs")
    return Memory(kept, forward, backward, staying, inputs, outputs)


def _links(value: Any, path: str) -> dict[tuple[str, Pattern], Curve]:
    found: dict[tuple[str, Pattern], Curve] = {}
    for i, link in enumerate(document.sequence(value, path)):
        keys = ("kind", "size", "stride", "points")
        item = document.mapping(link, f"{path}[{i}]", keys, keys)
        size, stride = (
            document.integer(item[k], f"{path}[{i}].{k}", 1, 1_000_000) for k in ("size", "stride")
        )
        kind = document.text(item["kind"], f"{path}[{i}].kind")
        if kind not in get_args(CollectiveKind):
            known = ", ".join(get_args(CollectiveKind))
            raise ValueError(f"{path}[{i}].kind: {kind[:60]!r} is none of {known}")
        if (kind, Pattern(size, stride)) in found:
            raise ValueError(f"{path}[{i}]: {kind} of size {size}, stride {stride} stands twice")
        found[kind, Pattern(size, stride)] = _curve(item["points"], f"{path}[{i}].points")
    return found
