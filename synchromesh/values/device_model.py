"""A device model: how the processors of a run share time, where they are not a rank's own.

A CPU quota or several processes on a core do two things that a GPU or a processor of one's own
does not: a host computes quicker at first after a pause (`BurstSpeed`), and more time passes on
the wall than on the processor's clock (`slowdown`). The default model is inert.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from synchromesh.values import document

KEYS = ("sprint", "pace")  # of a profile's JSON form; users have such files


@dataclass(frozen=True)
class BurstSpeed:
    """What a device does after a pause: it computes `speed` times as fast until it has done
    `credit` seconds of work more than at its lasting speed.

    A CPU quota gives a host a whole period's share at once; processors raise their clock for a
    while. 1 and 0 where there is no such thing. Waiting earns credit back, a second a second.
    """

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
        burst = {"speed": self.burst.speed, "credit": self.burst.credit}
        return {"sprint": burst, "pace": list(self.slowdowns)}

    @classmethod
    def from_dict(cls, item: Mapping[str, Any], name: str) -> "DeviceModel":
        """From the document `name` of a profile. ValueError by the key that is wrong."""
        keys = ("speed", "credit")
        given = document.mapping(item["sprint"], f"{name}: sprint", keys, keys)
        speed, credit = (document.number(given[k], f"{name}: sprint.{k}", 0) for k in keys)
        slowdowns = enumerate(document.sequence(item["pace"], f"{name}: pace"))
        with document.at(f"{name}: sprint"):
            burst = BurstSpeed(speed, credit)
        return cls(burst, tuple(document.number(s, f"{name}: pace[{i}]", 0) for i, s in slowdowns))


INERT = DeviceModel()  # processors of their own
