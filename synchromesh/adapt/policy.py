"""The policy: whether a better plan is worth the move.

    saving  =  (seconds of a step now - seconds of a step under the better plan) x steps to come
    cost    =  seconds of the move (measuring is spent by then, and has a share of its own)
    switch  <=>  saving > margin x cost   and   the better plan is at least `gain` quicker

`gain` is hysteresis: two plans that are nearly equal do not take turns, since each would have to
be predicted so much quicker than the other.
"""

from dataclasses import dataclass


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


def may_measure(spent: float, elapsed: float, wanted: float) -> bool:
    """Whether `wanted` more seconds of measuring keep it below its share of the run."""
    return spent + wanted <= LIMITS.measuring_share * (elapsed + wanted)
