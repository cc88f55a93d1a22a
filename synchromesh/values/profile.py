"""A profile: what was measured of a model and of the links; seconds and bytes, and where from.

    compute      seconds of a component's forward and backward by batch rows, on each rank
    network      seconds of a collective by payload bytes, on a pattern of groups, all at once
    overlap      how much computation and traffic slow each other down while both are under way
    device       what quotas and shared processors do to time (`DeviceModel`; else inert)
    update       seconds of the optimizer step by parameter bytes and by tensors
    calls        seconds of calling components, programs and the optimizer, beside their operators
    host         seconds of a step's agreement between the ranks

Where nothing could be measured the same figures come from data sheets: `source` says which.

Units: seconds, bytes (payload as `traffic.sent_bytes` counts it), batch rows."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from statistics import median
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from synchromesh.values import document
from synchromesh.values.compute import INERT
from synchromesh.values.compute import BurstSpeed as BurstSpeed
from synchromesh.values.compute import Compute as Compute
from synchromesh.values.compute import Curve as Curve
from synchromesh.values.compute import DeviceModel as DeviceModel
from synchromesh.values.compute import Memory as Memory
from synchromesh.values.fields import Within, of_plain, to_plain
from synchromesh.values.traffic import CollectiveKind

T = TypeVar("T")
Seconds = Annotated[float, Within(0.0)]


@dataclass(frozen=True, order=True)
class Pattern:
    """Groups over K positions that talk at once: `size` ranks each, `stride` apart.

    size 2, stride 1:   (0 1) (2 3)        size 2, stride 2:   (0 2) (1 3)"""

    size: int
    stride: int = 1

    def groups(self, devices: int) -> tuple[tuple[int, ...], ...]:
        """Positions of every group; those that fill no group stay alone."""
        block = self.size * self.stride
        filled = devices - devices % block
        made = [
            tuple(start + i * self.stride for i in range(self.size))
            for first in range(0, filled, block)
            for start in range(first, first + self.stride)
        ]
        return (*made, *((p,) for p in range(filled, devices)))

    def pairs(self, devices: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Every (p, p + stride) between which messages go, in rounds in which no position is in
        two pairs; those of a round talk at once.

        4 positions, stride 1:   (0 1) (2 3), then (1 2)        stride 3:   (0 3)"""
        every = [(p, p + self.stride) for p in range(devices - self.stride)]
        rounds = (tuple(x for x in every if x[0] // self.stride % 2 == odd) for odd in (0, 1))
        return tuple(pairs for pairs in rounds if pairs)


@dataclass(frozen=True)
class ServerMessages:
    """Pushes to servers, or fetches from them, in each group of a pattern."""

    what: Literal["push", "fetch"]
    ranks: Pattern
    servers: int

    def pairs(self, group: Sequence[int]) -> list[tuple[int, int]]:
        """One message of each rank, servers in turn; all of a rank's take its link as one does."""
        servers = min(self.servers, len(group))
        met = [(rank, group[(n + 1) % servers]) for n, rank in enumerate(group)]
        return met if self.what == "push" else [(b, a) for a, b in met]


@dataclass(frozen=True)
class Overlap:
    """Rates at which computation and traffic go on while both are under way; 1.0: undisturbed.
    delay: seconds that a collective takes longer where all ranks have computed until it begins:
    they come at different moments, and a quota lets them wait for their next share. both: rate of
    a message between two ranks while another goes the opposite way."""

    LEAST_RATE: ClassVar[float] = 0.05  # of either beside the other

    compute: float = 1.0
    network: float = 1.0
    delay: float = 0.0
    both: float = 1.0

    def __post_init__(self) -> None:
        rates = self.compute, self.network, self.both
        if not all(0.0 < rate <= 1.0 for rate in rates):
            raise ValueError(f"rates of overlap lie in (0, 1]: {rates}")
        if not 0.0 <= self.delay < float("inf"):
            raise ValueError(f"a delay is a number of seconds from 0: {self.delay}")

    @property
    def cost(self) -> float:
        """Seconds of computing that a second of this traffic takes, alone: (1 - a) / b."""
        return (1.0 - self.compute) / self.network

    def stretched(self, times: float) -> "Overlap":
        """The same traffic where its links let it take `times` as long. What it costs processors
        stays, spread over more time: its cost, and the 1 / b - 1 that it waits for them."""
        b = 1.0 / (1.0 + (1.0 / self.network - 1.0) / times)
        return replace(self, compute=max(self.LEAST_RATE, 1.0 - self.cost * b / times), network=b)


@dataclass(frozen=True)
class Calls:
    """Seconds of calls beside operators and bytes: Python, and entering autograd. forward,
    backward: of one component for one micro-batch, besides what its program takes that is timed
    alone; less than 0 where being called alone costs more. begin_forward, begin_backward: of each
    forward and backward of a micro-batch, whatever its components. step: of a step, the
    optimizer's call included."""

    forward: Annotated[float, Within(-1.0)] = 0.0
    backward: Annotated[float, Within(-1.0)] = 0.0
    begin_forward: Seconds = 0.0
    begin_backward: Seconds = 0.0
    step: Seconds = 0.0

    def scaled(self, factor: float) -> "Calls":
        return Calls(*(factor * getattr(self, f.name) for f in fields(self)))


# The optimizer's costs: keys of the JSON form, and the profile's fields.
UPDATE = {
    "seconds_per_byte": "update_byte", "seconds_per_tensor": "update_tensor",
    "copy_seconds_per_byte": "copy_byte", "state_factor": "state_factor",
    "work_bytes_per_largest_byte": "work_largest", "work_bytes_per_byte": "work_byte",
}  # fmt: skip


@dataclass(frozen=True)
class Profile(document.Document):
    devices: int
    compute: Mapping[str, Compute] = field(default_factory=dict)  # by program (trace.local.key)
    network: Mapping[tuple[str, Pattern], Curve] = field(default_factory=dict)
    overlap: Mapping[str, Overlap] = field(default_factory=dict)  # by kind of collective
    device: DeviceModel = INERT
    update_byte: float = 0.0  # seconds of the optimizer step a parameter byte
    update_tensor: float = 0.0  # ... and a tensor
    copy_byte: float = 0.0  # seconds to copy a byte of a gradient into its bucket
    state_factor: float = 0.0  # bytes of optimizer state a parameter byte
    work_largest: float = 0.0  # bytes alive in the optimizer step for a byte of the largest tensor
    work_byte: float = 0.0  # ... and for a byte of all tensors
    calls: Calls = Calls()
    host: float = 0.0  # seconds a step
    source: str = "measured"  # or datasheet
    error_band: float = 0.0  # relative error of estimates from these figures; 0: not stated
    seconds: float = 0.0  # that measuring took
    emulated: bool = False
    missing: tuple[str, ...] = ()  # what could not be measured, and why

    @cached_property
    def relative_slowdowns(self) -> tuple[float, ...]:
        """Seconds that each rank takes for a second of the quickest one: by the median, so that a
        program beside which something else ran counts little. None: not known."""
        shares: list[list[float]] = []
        for measured in self.compute.values():
            rows = measured.reach  # that all were timed with
            curves = zip(measured.forward, measured.backward, strict=True)
            each = [forward(rows) + backward(rows) for forward, backward in curves]
            if min(each) > 0.0:
                shares.append([min(each) / t for t in each])
        if not shares:
            return ()
        middle = [median(column) for column in zip(*shares, strict=True)]
        return tuple(max(middle) / m for m in middle)

    def relative_slowdown(self, ranks: Collection[int]) -> float:
        """Seconds that the slowest of `ranks` takes for what takes the slowest of all one."""
        slowdowns = self.relative_slowdowns
        if len(ranks) >= len(slowdowns) or max(ranks) >= len(slowdowns):
            return 1.0  # they are all, or nothing is known of each
        return max(slowdowns[r] for r in ranks) / max(slowdowns)

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
            self, compute=compute, update_byte=self.update_byte * slowest,
            update_tensor=self.update_tensor * slowest, copy_byte=self.copy_byte * slowest,
            calls=self.calls.scaled(slowest),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {
            "devices": self.devices,
            "source": self.source,
            "error_band": self.error_band,
            "emulated": self.emulated,
            "seconds": self.seconds,
            "compute": to_plain(self.compute),
            "network": [
                {"kind": kind, "size": p.size, "stride": p.stride, "points": curve.to_plain()}
                for (kind, p), curve in sorted(self.network.items())
            ],
            "overlap": to_plain(dict(sorted(self.overlap.items()))),
            **self.device.to_dict(),
            "update": {key: getattr(self, name) for key, name in UPDATE.items()},
            "calls": to_plain(self.calls),
            "host_seconds": self.host,
            "missing": list(self.missing),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, value: Any, name: str = "profile") -> "Profile":
        """From the JSON form of document `name`. ValueError by the key that is wrong."""
        keys = (
            "devices", "source", "error_band", "emulated", "seconds", "compute", "network",
            "overlap", *DeviceModel.KEYS, "update", "calls", "host_seconds", "missing",
        )  # fmt: skip
        item = document.mapping(value, name, keys, keys)
        rates = document.mapping(item["overlap"], f"{name}: overlap", get_args(CollectiveKind))
        given = item["compute"] if isinstance(item["compute"], dict) else ()  # any keys
        programs = document.mapping(item["compute"], f"{name}: compute", given)
        update = document.mapping(item["update"], f"{name}: update", UPDATE, UPDATE)
        missing = enumerate(document.sequence(item["missing"], f"{name}: missing"))

        def number(x: Any, path: str) -> float:
            return document.number(x, f"{name}: {path}", 0)

        def whole(kind: type[T], x: Any, path: str) -> T:
            return of_plain(kind, x, f"{name}: {path}", complete=True)

        return cls(
            devices=document.integer(item["devices"], f"{name}: devices", 1, 1_000_000),
            compute={k: whole(Compute, v, f"compute.{k}") for k, v in programs.items()},
            network=_links(item["network"], f"{name}: network"),
            overlap={k: whole(Overlap, v, f"overlap.{k}") for k, v in rates.items()},
            device=DeviceModel.from_dict(item, name),
            **{to: number(update[key], f"update.{key}") for key, to in UPDATE.items()},
            calls=whole(Calls, item["calls"], "calls"),
            host=number(item["host_seconds"], "host_seconds"),
            source=document.text(item["source"], f"{name}: source"),
            error_band=number(item["error_band"], "error_band"),
            seconds=number(item["seconds"], "seconds"),
            emulated=document.boolean(item["emulated"], f"{name}: emulated"),
            missing=tuple(document.text(m, f"{name}: missing[{i}]") for i, m in missing),
        )


def _links(value: Any, path: str) -> dict[tuple[str, Pattern], Curve]:
    curves: dict[tuple[str, Pattern], Curve] = {}
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
        if (kind, Pattern(size, stride)) in curves:
            raise ValueError(f"{path}[{i}]: {kind} of size {size}, stride {stride} stands twice")
        points = Curve.from_plain(item["points"], f"{path}[{i}].points")
        curves[kind, Pattern(size, stride)] = points
    return curves
