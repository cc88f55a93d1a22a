"""One clock for all ranks: recordings of several machines, as rank 0's clock would have them.

Processes of one machine share its system clock. To another machine's, the offset is by Cristian's
algorithm (Distributed Computing 3, 1989): a rank sends at `a`, rank 0 answers with its time `t`,
the answer is there at `b`; rank 0's clock then shows t + (b - a) / 2, and is off by (b - a) / 2 at
most. The exchange with the smallest round trip counts."""

import time

import torch

from synchromesh.engine.groups import Group
from synchromesh.launch.machine import boot
from synchromesh.runs.spans import Recording


def common_clock(group: Group, exchanges: int = 16) -> float:
    """Seconds that rank 0's system clock (of the group) shows more than this rank's; all members
    call alike.

    exchanges: for each rank; chosen: the smallest of so many round trips is near the least
    possible."""
    machines = group.all_gather_json(boot())
    offset = 0.0
    with group.world.ledger.paused():
        for index in range(1, group.size):
            if machines[index] == machines[0]:
                continue
            if group.index == index:
                offset = _asked(group, exchanges)
            elif group.index == 0:
                _answer(group, index, exchanges)
    return offset


def gathered(recording: Recording, group: Group) -> list[Recording]:
    """The recordings of all members, on one clock; all members call alike."""
    own = recording.later(common_clock(group)).to_dict()
    return [Recording.from_dict(value) for value in group.all_gather_json(own)]


def _number(group: Group, value: int = 0) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device=group.world.device)


def _asked(group: Group, exchanges: int) -> float:
    """The offset of rank 0's clock, by the quickest of several exchanges."""
    trips: list[tuple[int, float]] = []
    for _ in range(exchanges):
        answer, began = _number(group), time.time_ns()
        group.exchange([(0, _number(group))], [])
        group.exchange([], [(0, answer)])
        there = int(answer)
        ended = time.time_ns()
        trips.append((ended - began, there - (began + ended) / 2))
    return min(trips)[1] * 1e-9


def _answer(group: Group, index: int, exchanges: int) -> None:
    for _ in range(exchanges):
        question = _number(group)
        group.exchange([], [(index, question)])
        group.exchange([(index, _number(group, time.time_ns()))], [])
