"""The turns of a forward: what one micro-batch computes and sends between two pauses.

    turn 0    compute ... depart |  turn 1    arrive compute ... depart |  turn 2    arrive ...

A schedule (values/schedule.py) says in which order the turns of all micro-batches run. Backward
goes through each turn in reverse: an arrival becomes a departure, a departure an arrival. What
comes from another stage is a message of the schedule (values/messages.py), no part of a turn."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from synchromesh.trace.partition.local import Communication, Computation, LocalComponent
from synchromesh.values.schedule import Action


@dataclass(frozen=True)
class Portion:
    """A share of what a component computes."""

    component: int
    share: float  # of its seconds


@dataclass(frozen=True)
class Transmit:
    """A communication of a component departs, or is waited for."""

    component: int
    number: int  # among the component's events
    communication: Communication
    departs: bool  # in forward


Turn = tuple[Portion | Transmit, ...]


def turns_of(components: Sequence[LocalComponent], first: int = 0) -> tuple[Turn, ...]:
    """The turns of one micro-batch's forward through the components of a stage. first: the place
    of the first of them in the chain."""
    turns: list[list[Portion | Transmit]] = [[]]
    for i, local in enumerate(components, first):
        total = sum(e.work for e in local.events if isinstance(e, Computation))
        if not total:
            turns[-1].append(Portion(i, 1.0))
        for number, event in enumerate(local.events):
            if isinstance(event, Computation):
                turns[-1].append(Portion(i, event.work / total))
                continue
            if any(c.kind == "send" for c in event.collectives):
                continue
            turns[-1].append(Transmit(i, number, event, True))
            if event.pauses:
                turns.append([])
            turns[-1].append(Transmit(i, number, event, False))
    return tuple(map(tuple, turns))


def walked(turns: Sequence[Turn], action: Action) -> Iterable[Portion | Transmit]:
    """What an action does, in order; a backward undoes what its forward did."""
    turn = turns[action.turn]
    return turn if action.kind == "F" else reversed(turn)
