"""A schedule: the order of forward and backward micro-batches on each pipeline stage, as data.

An action is `2F0`: on stage 2, forward of micro-batch 0; `2B0` is its backward. A schedule is one
list of actions per stage, in the order in which the stage runs them; the engine walks it with
tensors, the predictions of `cost` with durations and bytes. One unit of time per action:

    gpipe    stage 0   F0 F1 F2 .. .. B0 B1 B2       1f1b    stage 0   F0 F1 .. B0 F2 B1 .. B2
             stage 1   .. F0 F1 F2 B0 B1 B2                  stage 1   .. F0 B0 F1 B1 F2 B2

Interleaved micro-batches share one backward. Their forwards are cut into turns where a tensor is
under way between ranks, so that another one computes meanwhile; `2F0.1` is the second turn of
`2F0`. Autograd runs backward in the reverse order, turn by turn:

    interleaved(2, turns=2)    F0.0 F1.0 F0.1 F1.1 B1.1 B0.1 B1.0 B0.0
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

ActionKind = Literal["F", "B"]
INTERLEAVED = 4  # micro-batches, where interleaving is tried: chosen, not measured against others


@dataclass(frozen=True, order=True)
class Action:
    """Forward (F) or backward (B) of one micro-batch on one stage, or one turn of it."""

    stage: int
    kind: ActionKind
    micro_batch: int
    turn: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.label(self.turn > 0)}"

    def label(self, turns: bool) -> str:
        """The text form without the stage; turns: whether to name the turn."""
        return f"{self.kind}{self.micro_batch}" + (f".{self.turn}" if turns else "")

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action whose text form is `text`; ValueError where it is none."""
        match = re.fullmatch(r"([0-9]{1,6})([FB])([0-9]{1,6})(?:\.([0-9]{1,6}))?", text)
        if not match:
            raise ValueError(f"{text[:40]!r} is no action: write it as 2F0")
        kind: ActionKind = "F" if match[2] == "F" else "B"
        return cls(int(match[1]), kind, int(match[3]), int(match[4] or 0))

    def waits_for(self, stages: int, turns: int = 1) -> tuple["Action", ...]:
        """The actions on this or a neighbouring stage that have to be done before."""
        stage, m, turn = self.stage, self.micro_batch, self.turn
        if self.kind == "F":
            if turn:
                return (Action(stage, "F", m, turn - 1),)
            return (Action(stage - 1, "F", m, turns - 1),) if stage else ()
        own = Action(stage, "F", m, turn)
        if turn < turns - 1:
            return (own, Action(stage, "B", m, turn + 1))
        return (own,) if stage == stages - 1 else (own, Action(stage + 1, "B", m))


@dataclass(frozen=True)
class Schedule:
    """The actions of each stage in order. Checked once: complete, no deadlock."""

    stages: tuple[tuple[Action, ...], ...]
    turns: int = 1  # of each forward and each backward

    def __post_init__(self) -> None:
        count, turns = self.micro_batches, self.turns
        for stage, actions in enumerate(self.stages):
            complete = {
                Action(stage, k, m, t)
                for k in ("F", "B")
                for m in range(count)
                for t in range(turns)
            }
            if len(actions) != len(complete) or set(actions) != complete:
                raise ValueError(
                    f"stage {stage} should run F and B of micro-batches 0 to {count - 1} "
                    f"once each, not {' '.join(map(str, actions[:12]))}"
                )
        self.times()

    @property
    def micro_batches(self) -> int:
        """How many micro-batches each stage runs."""
        return len(self.stages[0]) // (2 * self.turns) if self.stages else 0

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
                waits = action.waits_for(len(self.stages), self.turns)
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
            at = {times[a]: a.label(self.turns > 1) for a in actions}
            lines.append(" ".join(at.get(t, "..") for t in range(max(at, default=-1) + 1)))
        return "\n".join(lines)


@lru_cache(maxsize=256)
def interleaved(micro_batches: int, turns: int = 1, at_once: int | None = None) -> Schedule:
    """One stage on which `at_once` micro-batches (none: all) share a backward, taking turns.

    Those that do not fit into one backward follow one after the other: gradient accumulation.
    """
    actions: list[Action] = []
    for first in range(0, micro_batches, at_once or micro_batches):
        group = range(first, min(micro_batches, first + (at_once or micro_batches)))
        forward = [(m, turn) for turn in range(turns) for m in group]
        actions += [Action(0, "F", m, turn) for m, turn in forward]
        actions += [Action(0, "B", m, turn) for m, turn in reversed(forward)]
    return Schedule((tuple(actions),), turns)


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
