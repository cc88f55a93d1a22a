"""The walk of labels from the last cut to the front, and the plans that it ends in."""

from dataclasses import dataclass

import numpy as np

from .bounds import OptionPath, bound
from .frontier import Frontier, Graph
from .labels import Labels, Space, decide
from .problem import Problem, evaluate
from .table import Table

EXACT = 1e-9  # relative difference of seconds that is rounding (see `table`)


@dataclass(frozen=True)
class Found:
    """An option index per component, seconds of a step, bytes on a device.

    `gap`: no plan takes less than (1 - gap) of the seconds; 0 where this one is the best. `fits`:
    memory is within the limit; if not, this is the plan of least memory (the quickest of these).
    """

    choice: tuple[int, ...]
    seconds: float
    memory: int
    gap: float = 0.0
    fits: bool = True
    alternatives: tuple["Found", ...] = ()


def space_of(table: Table, states: Graph, limit: float) -> tuple[Space, list[OptionPath]] | None:
    """Where to walk, and the plans that its bound met; None: nothing is allowed or fits."""
    found = bound(states, limit)
    if found is None:
        return None
    return Space(table, states, Frontier(table), found[0]), found[1]


def walk(
    space: Space, behind: dict[int, Labels], i: int, above: float, width: int
) -> dict[int, Labels]:
    """Labels by cut, from the given ones of cut i to cut 0, the front."""
    layers = dict(behind)
    for node in reversed(range(i)):
        labels, options = layers[node + 1], space.table.nodes[node]
        if len(labels):
            labels = decide(space, node, options, labels, above, width)
        layers[node] = labels
    return layers


def ended(problem: Problem, layers: dict[int, Labels]) -> Found | None:
    """The best plan at the front: least time, then least memory, then the smallest indices."""
    last = layers[0]
    if not len(last):
        return None
    label = int(np.lexsort((last.memory, last.z))[0])
    choice = []
    for cut in range(len(layers) - 1):
        choice.append(int(layers[cut].option[label]))
        label = int(layers[cut].parent[label])
    return found_of(problem, tuple(choice[1:]))


def found_of(problem: Problem, choice: tuple[int, ...]) -> Found:
    """A choice with its seconds and bytes."""
    return Found(choice, *evaluate(problem, choice))


def gap(seconds: float, lower: float) -> float:
    """How far below the seconds a plan might be, as a part of them."""
    missing = 1 - lower / seconds if seconds > 0 else 0.0
    return missing if missing > EXACT else 0.0
