"""A schedule: the order of forward and backward micro-batches on each pipeline stage, as data.

An action is `2F0`: on stage 2, forward of micro-batch 0; `2B0` is its backward. A schedule is one
list of actions per stage, in the order in which the stage runs them; walked with tensors by an
engine and with durations by a simulator. Drawn with one unit of time per action:

    gpipe    stage 0   F0 F1 F2 .. .. B0 B1 B2       1f1b    stage 0   F0 F1 .. B0 F2 B1 .. B2
             stage 1   .. F0 F1 F2 B0 B1 B2                  stage 1   .. F0 B0 F1 B1 F2 B2
"""

import re
from dataclasses import dataclass
from typing import Literal

ActionKind = Literal["F", "B"]


@dataclass(frozen=True, order=True)
class Action:
    """Forward (F) or backward (B) of one micro-batch on one stage."""

    stage: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        match = re.fullmatch(r"([0-9]{1,6})([FB])([0-9]{1,6})", text)
        if not match:
            raise ValueError(f"{text[:40]!r} is no action: write it as 2F0")
        return cls(int(match[1]), "F" if match[2] == "F" else "B", int(match[3]))

    def waits_for(self, stages: int) -> tuple["Action", ...]:
        """The actions on this or a neighbouring stage that have to be done before."""
        if self.kind == "F":
            return (Action(self.stage - 1, "F", self.micro_batch),) if self.stage else ()
        own = Action(self.stage, "F", self.micro_batch)
        if self.stage == stages - 1:
            return (own,)
        return (own, Action(self.stage + 1, "B", self.micro_batch))


@dataclass(frozen=True)
class Schedule:
    """The actions of each stage in order. Checked once: complete, no deadlock."""

    stages: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        count = self.micro_batches
        for stage, actions in enumerate(self.stages):
            complete = sorted(Action(stage, k, m) for k in ("F", "B") for m in range(count))
            if sorted(actions) != complete:
                raise ValueError(
                    f"stage {stage} should run F and B of micro-batches 0 to {count - 1} "
                    f"once each, not {' '.join(map(str, actions[:12]))}"
                )
        self.times()

    @property
    def micro_batches(self) -> int:
        return len(self.stages[0]) // 2 if self.stages else 0

    def times(self) -> dict[Action, int]:
        """When each action begins if each takes one unit of time and begins as soon as it can."""
        begun: dict[Action, int] = {}
        free = [0] * len(self.stages)
        done = [0] * len(self.stages)
        while any(done[s] < len(actions) for s, actions in enumerate(self.stages)):
            before = len(begun)
            for s, actions in enumerate(self.stages):
                if done[s] == len(actions):
                    continue
                action = actions[done[s]]
                waits = action.waits_for(len(self.stages))
                if all(w in begun for w in waits):
                    begun[action] = max([free[s], *(begun[w] + 1 for w in waits)])
                    free[s] = begun[action] + 1
                    done[s] += 1
            if len(begun) == before:
                stuck = [str(a[done[s]]) for s, a in enumerate(self.stages) if done[s] < len(a)]
                raise ValueError(f"the schedule waits for ever at {', '.join(stuck)}")
        return begun

    def grid(self) -> str:
        """A line per stage, a column per unit of time; `..` where the stage is idle."""
        times = self.times()
        lines = []
        for actions in self.stages:
            at = {times[a]: f"{a.kind}{a.micro_batch}" for a in actions}
            lines.append(" ".join(at.get(t, "..") for t in range(max(at, default=-1) + 1)))
        return "\n".join(lines)


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""
    kinds: tuple[ActionKind, ...] = ("F", "B")
    return Schedule(
        tuple(
            tuple(Action(s, kind, m) for kind in kinds for m in range(micro_batches))
            for s in range(stages)
        )
    )


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503).

    Stage s runs `stages - s` forwards first, so that it never holds the activations of more.
    """

    def order(stage: int) -> tuple[Action, ...]:
        ahead = min(stages - stage, micro_batches)
        actions = [Action(stage, "F", m) for m in range(ahead)]
        for m in range(micro_batches):
            actions.append(Action(stage, "B", m))
            if ahead + m < micro_batches:
                actions.append(Action(stage, "F", ahead + m))
        return tuple(actions)

    return Schedule(tuple(order(s) for s in range(stages)))
