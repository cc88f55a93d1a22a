"""Labels of the search: partial plans behind a cut, and the decision of the next node for all.

Written as arrays over labels; candidates of a decision are arrays [option, label]."""

import math
from dataclasses import dataclass, replace

import numpy as np

from .bounds import Bound
from .dominance import undominated
from .frontier import Frontier, Graph, Transition
from .problem import Floats
from .table import Ints, Node, Table

PARTS = 8  # of the range of lags, and of memory, from which labels are kept
SHORTLIST = 4  # candidates compared with each other, per label that may stay


@dataclass(frozen=True, eq=False)
class States:
    """States at a cut: rows as in `frontier.Transition`, and where the bound's graph has them."""

    rows: Ints
    coarse: Ints  # the state of the graph
    charged: Floats  # s that the graph charged already for open values that it leaves out


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels at a cut, in lexicographic order of their options."""

    states: States
    state: Ints
    a: Floats
    z: Floats
    memory: Floats
    parent: Ints  # label at the cut behind
    option: Ints  # its option index of the component
    lost: float = math.inf  # the least bound among labels lost here and behind

    def __len__(self) -> int:
        return len(self.state)

    def only(self, kept: Ints) -> "Labels":
        return Labels(
            self.states, self.state[kept], self.a[kept], self.z[kept], self.memory[kept],
            self.parent[kept], self.option[kept], self.lost,
        )  # fmt: skip


def start() -> Labels:
    """The one label behind the last node: nothing is decided."""
    none, zero = np.zeros(1, dtype=np.int64), np.zeros(1)
    states = States(np.zeros((1, 0), dtype=np.int64), none, zero)
    return Labels(states, none, zero, zero, zero, none, none)


@dataclass(frozen=True, eq=False)
class Space:
    """Where labels walk: the problem, its states, what their rest costs at least."""

    table: Table
    graph: Graph
    frontier: Frontier  # with all values
    bound: Bound

    @property
    def limited(self) -> bool:
        """Whether memory is limited."""
        return self.bound.limit < math.inf

    def cross(self, i: int, labels: Labels) -> tuple[Ints, Transition, States]:
        """Each label's state by the crossing of node i, the crossing, the states after it."""
        coarse = self.graph.crossings[i]
        if self.graph.complete:
            rows = coarse.rows
            return labels.state, coarse, States(rows, np.arange(len(rows)), np.zeros(len(rows)))
        used, state = np.unique(labels.state, return_inverse=True)
        before = labels.states
        crossing = self.frontier.cross(i, before.rows[used])
        following = np.zeros(len(crossing.rows), dtype=np.int64)
        following[crossing.next] = coarse.next[before.coarse[used]]
        return state, crossing, States(crossing.rows, following, self._charged(i, crossing.rows))

    def _charged(self, cut: int, rows: Ints) -> Floats:
        total = np.zeros(len(rows))
        for column, v in enumerate(self.frontier.open[cut]):
            if v in self.graph.frontier.left_out:
                numbers, inverse = np.unique(rows[:, column], return_inverse=True)
                prices = self.table.values[v].prices
                least = [self.frontier.sets.cost(prices, int(n))[0].min() for n in numbers]
                total += np.array(least)[inverse]
        return total


def decide(space: Space, i: int, node: Node, labels: Labels, above: float, width: int) -> Labels:
    """The labels at cut i: each label of cut i + 1 with each option of node i, then pruned.

    Candidates whose bound is above `above` go; at most `width` stay."""
    found, least = candidates(space, i, node, labels, above)
    return _pruned(found, least, width, space.limited)


def candidates(
    space: Space, i: int, node: Node, labels: Labels, above: float
) -> tuple[Labels, Floats]:
    """Each label with each option, and their bounds; without those that cannot do."""
    state, crossing, states = space.cross(i, labels)
    always, back, gradient, own = (
        column[:, None] for column in (node.always, node.backward, node.gradient, node.memory)
    )
    there = always + crossing.forward.T[node.at][:, state]  # forward + update
    a = labels.a + there + (back + crossing.backward.T[node.at][:, state])
    z = np.maximum(labels.z + there, a) + gradient
    memory = labels.memory + own
    following = crossing.next.T[node.at][:, state]
    coarse = states.coarse[following]
    with np.errstate(invalid="ignore"):  # 0 inf: not allowed, and nan is not below anything
        least = space.bound.least(i, coarse, a, z, memory) + states.charged[following]
        good = (least <= above) & (least < np.inf) & (a < np.inf)
    if space.limited:
        good &= memory + space.bound.light[i][coarse] <= space.bound.limit
    option, parent = np.nonzero(good)  # in lexicographic order, as the labels are
    picked = (option, parent)
    found = Labels(
        states,
        following[picked],
        a[picked],
        z[picked],
        memory[picked],
        parent,
        node.option[option],
        labels.lost,
    )
    return found, least[picked]


def _pruned(labels: Labels, least: Floats, width: int, limited: bool) -> Labels:
    """Without dominated labels, and of the rest the `width` ones of least bound."""
    if len(labels) > SHORTLIST * width:
        labels, least = _narrowed(labels, least, SHORTLIST * width)
    kept = undominated(labels.state, labels.a, labels.z, labels.memory, limited)
    labels, least = labels.only(kept), least[kept]
    if len(labels) > width:
        labels, least = _narrowed(labels, least, width)
    return labels


def _narrowed(labels: Labels, least: Floats, width: int) -> tuple[Labels, Floats]:
    """Three in four are those of least bound, the others spread over what bounds do not tell.

    A bound weighs clocks and memory; where it is nearly flat, the least ones are all of one kind
    (say, all behind on the network), and no good plan can be made of one kind alone."""
    order = np.argsort(least, kind="stable")
    most = width - width // 4
    first, others = order[:most], order[most:]
    kind = _part((labels.z - labels.a)[others]) * PARTS + _part(labels.memory[others])
    by_kind = np.argsort(kind, kind="stable")  # least bounds first in each kind
    start = np.searchsorted(kind[by_kind], kind[by_kind])
    turn = np.empty(len(others), dtype=np.int64)
    turn[by_kind] = np.arange(len(others)) - start
    dealt = np.argsort(turn, kind="stable")  # the best of each kind, then the second of each ...
    enough = width - len(first)
    kept = np.sort(np.concatenate([first, others[dealt[:enough]]]))
    lost = min(labels.lost, float(least[others[dealt[enough:]]].min()))
    return replace(labels.only(kept), lost=lost), least[kept]


def _part(values: Floats) -> Ints:
    """0 .. PARTS - 1: which part of the range of values each lies in."""
    low, high = float(values.min()), float(values.max())
    if high <= low:
        return np.zeros(len(values), dtype=np.int64)
    found: Ints = np.minimum((values - low) / (high - low) * PARTS, PARTS - 1).astype(np.int64)
    return found
