"""A device model: how the processors of a run share time, where they are not a rank's own.

A CPU quota or several processes on a core do two things that a GPU or a processor of one's own
does not: a host computes quicker at first after a pause (`BurstSpeed`), and more time passes on
the wall than on the processor's clock (`slowdown`). The default model is inert."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from synchromesh.values import document
from synchromesh.values.fields import of_plain, to_plain

KEYS = ("sprint", "pace")  # of a profile's JSON form; users have such files


@dataclass(frozen=True)
class BurstSpeed:
    """What a device does after a pause: it computes `speed` times as fast until it has done
    `credit` seconds of work more than at its lasting speed.

    A CPU quota gives a host a whole period's share at once; processors raise their clock for a
    while. 1 and 0 where there is no such thing. Waiting earns credit back, a second a second."""

    speed: float = 1.0
    credit: float = 0.0

    def __post_init__(self) -> None:
        if not (self.speed >= 1.0 and self.credit >= 0.0):
            raise ValueError(f"a burst is no slowdown: speed {self.speed}, credit {self.credit}")


@dataclass(frozen=True)
class DeviceModel:
    """The mean burst of all ranks; of each rank the seconds that pass in a second of the clock
    that programs are timed with (none: 1)."""

    burst: BurstSpeed = BurstSpeed()
    slowdowns: tuple[float, ...] = ()

    def slowdown_of(self, rank: int) -> float:
        """Seconds that pass in a second of the clock that programs are timed with on `rank`."""
        return self.slowdowns[rank] if self.slowdowns else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Its part of a profile's JSON form."""
        return {"sprint": to_plain(self.burst), "pace": list(self.slowdowns)}

    @classmethod
    def from_dict(cls, item: Mapping[str, Any], name: str) -> "DeviceModel":
        """From the document `name` of a profile. ValueError by the key that is wrong."""
        burst = of_plain(BurstSpeed, item["sprint"], f"{name}: sprint", complete=True)
        slowdowns = enumerate(document.sequence(item["pace"], f"{name}: pace"))
        return cls(burst, tuple(document.number(s, f"{name}: pace[{i}]", 0) for i, s in slowdowns))


INERT = DeviceModel()  # processors of their own
