"""Decisions: whether a better plan is worth the move, what measuring may take, what was decided.

    saving  =  (seconds of a step now - seconds of a step under the better plan) x steps to come
    cost    =  seconds of the move (measuring is spent by then, and has a share of its own)
    switch  <=>  saving > margin x cost   and   the better plan is at least `gain` quicker

`gain` is hysteresis: two plans that are nearly equal do not take turns, since each would have to
be predicted so much quicker than the other."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar


@dataclass(frozen=True)
class SwitchLimits:
    """When a switch pays. All three are chosen, not measured."""

    margin: float = 1.5  # times the seconds of the move that a switch must save
    gain: float = 0.08  # of a step's seconds; above the 6 to 7 % that predictions err on average
    measuring_share: float = 0.03  # of the run, as far as it is known, for measuring


LIMITS = SwitchLimits()


@dataclass(frozen=True)
class Verdict:
    """Whether to switch, and the sentence that says why or why not."""

    switch: bool
    reason: str


def weigh(now: float, better: float, steps: int, move: float) -> Verdict:
    """now, better: seconds of a step; steps: still to come; move: seconds of pause."""
    gain = 1 - better / now if now else 0.0
    saving = (now - better) * steps
    figures = (
        f"{now * 1e3:.0f} -> {better * 1e3:.0f} ms a step, {steps} steps to come: saves "
        f"{saving:.1f} s, the move costs {move:.1f} s"
    )
    if gain < LIMITS.gain:
        return Verdict(False, f"no plan is {LIMITS.gain:.0%} quicker ({figures})")
    if saving <= LIMITS.margin * move:
        return Verdict(False, f"not worth {LIMITS.margin:g} times the move ({figures})")
    return Verdict(True, figures)


class Budget:
    """What measuring has taken of a run that began at `began` (seconds), and may still take."""

    # what measuring again is assumed to take; chosen, on the safe side
    SECONDS: ClassVar = 3.0  # at least
    GROWTH: ClassVar = 1.5  # times as long as the one before, at most

    def __init__(self, began: float) -> None:
        self._began, self._spent = began, 0.0
        self._next, self._first = self.SECONDS, True  # of measuring again, at most

    def allows(self, clock: float, to_come: float) -> bool:
        """Whether measuring again keeps below its share of the run; to_come: seconds left."""
        run = clock - self._began + to_come + self._next
        return self._spent + self._next <= LIMITS.measuring_share * run

    def spend(self, seconds: float, again: bool = True) -> None:
        """Measuring has taken so long. again: everything was measured again, whose first time
        takes twice as long as the next, which knows its programs."""
        self._spent += seconds
        if again:
            usual = seconds / 2 if self._first else seconds
            self._next, self._first = max(self.SECONDS, self.GROWTH * usual), False


@dataclass(frozen=True)
class Decision:
    """What was noticed, what was done or why not, predicted and measured."""

    step: int
    noticed: str
    switched: bool
    reason: str
    plan_from: str
    plan_to: str
    measured_before: float  # seconds a step
    predicted_before: float
    predicted_after: float
    measuring_seconds: float
    bytes_moved: int = 0
    most_bytes: int = 0  # that one rank sent or received
    pause_seconds: float = 0.0
    measured_after: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As the log and `train --json` have it."""
        values = asdict(self)
        return {"from": values.pop("plan_from"), "to": values.pop("plan_to"), **values}


@dataclass
class History:
    """What was decided; `awaited`: the last switch's place, until what steps take is known."""

    decisions: list[Decision] = field(default_factory=list)
    awaited: int | None = None

    def add(self, decision: Decision) -> Decision:
        """Notes it; a switch's effect is awaited from now on."""
        if decision.switched:
            self.awaited = len(self.decisions)
        self.decisions.append(decision)
        return decision

    def measured(self, now: float) -> Decision | None:
        """The last switch, since which a step takes `now`; None where that is not awaited."""
        at, self.awaited = self.awaited, None
        if at is None:
            return None
        self.decisions[at] = replace(self.decisions[at], measured_after=now)
        return self.decisions[at]
