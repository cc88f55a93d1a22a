"""The policy: whether a better plan is worth the move.

    saving  =  (seconds of a step now - seconds of a step under the better plan) x steps to come
    cost    =  seconds of the move (measuring is spent by then, and has a share of its own)
    switch  <=>  saving > MARGIN x cost   and   the better plan is at least GAIN quicker

GAIN is hysteresis: two plans that are nearly equal do not take turns, since each would have to be
predicted `GAIN` quicker than the other.
"""

from dataclasses import dataclass

MARGIN = 1.5
GAIN = 0.08
MEASURING = 0.03  # of the run, as far as it is known, that may go into measuring


@dataclass(frozen=True)
class Verdict:
    """Whether to switch, and the sentence that says why or why not."""

    switch: bool
    reason: str


def weigh(now: float, better: float, steps: int, move: float) -> Verdict:
    """now, better: seconds of a step; steps: still to come; move: seconds of pause."""
    gain = 1 - better / now if now else 0.0
    saving = (now - better) * steps
    told = (
        f"{now * 1e3:.0f} -> {better * 1e3:.0f} ms a step, {steps} steps to come: saves "
        f"{saving:.1f} s, the move costs {move:.1f} s"
    )
    if gain < GAIN:
        return Verdict(False, f"no plan is {GAIN:.0%} quicker ({told})")
    if saving <= MARGIN * move:
        return Verdict(False, f"not worth {MARGIN:g} times the move ({told})")
    return Verdict(True, told)


def may_measure(spent: float, elapsed: float, wanted: float) -> bool:
    """Whether `wanted` more seconds of measuring keep it below its share of the run."""
    return spent + wanted <= MEASURING * (elapsed + wanted)
