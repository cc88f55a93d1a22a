"""Labels of the search: partial plans behind a cut, the decision of the next node, the walk.

Written as arrays over labels; candidates of a decision are arrays [option, label]."""

import math
from dataclasses import dataclass, replace

import numpy as np

from synchromesh.planner.chain.bounds import Bound, OptionPath, bound
from synchromesh.planner.chain.frontier import Frontier, Graph, Transition
from synchromesh.planner.chain.problem import Bools, ChainPlan, Floats, Ints, Problem
from synchromesh.planner.chain.table import Node, Table


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
    return _pruned(*candidates(space, i, node, labels, above), width, space.limited)


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
    at = (option, parent)
    chosen = node.option[option]
    extended = Labels(states, following[at], a[at], z[at], memory[at], parent, chosen, labels.lost)
    return extended, least[at]


def _pruned(
    labels: Labels, least: Floats, width: int, limited: bool, shortlist: int = 4
) -> Labels:
    """Without dominated labels, and of the rest the `width` ones of least bound. shortlist:
    candidates that are compared with each other, for each label that may stay."""
    labels, least = _narrowed(labels, least, shortlist * width)
    kept = undominated(labels.state, labels.a, labels.z, labels.memory, limited)
    return _narrowed(labels.only(kept), least[kept], width)[0]


def _narrowed(labels: Labels, least: Floats, width: int, parts: int = 8) -> tuple[Labels, Floats]:
    """At most `width`, of which three in four are those of least bound, the others spread over
    what bounds do not tell. A bound weighs clocks and memory; where it is nearly flat, the least
    ones are all of one kind (say, all behind on the network), and no good plan can be made of one
    kind alone. parts: of the range of lags, and of memory, from which the others are taken."""
    if len(labels) <= width:
        return labels, least
    order = np.argsort(least, kind="stable")
    most = width - width // 4
    first, others = order[:most], order[most:]
    lag = _part((labels.z - labels.a)[others], parts)
    kind = lag * parts + _part(labels.memory[others], parts)
    by_kind = np.argsort(kind, kind="stable")  # least bounds first in each kind
    start = np.searchsorted(kind[by_kind], kind[by_kind])
    turn = np.empty(len(others), dtype=np.int64)
    turn[by_kind] = np.arange(len(others)) - start
    dealt = np.argsort(turn, kind="stable")  # the best of each kind, then the second of each ...
    enough = width - len(first)
    kept = np.sort(np.concatenate([first, others[dealt[:enough]]]))
    lost = min(labels.lost, float(least[others[dealt[enough:]]].min()))
    return replace(labels.only(kept), lost=lost), least[kept]


def _part(values: Floats, parts: int) -> Ints:
    """0 .. parts - 1: which part of the range of values each lies in."""
    low, high = float(values.min()), float(values.max())
    if high <= low:
        return np.zeros(len(values), dtype=np.int64)
    return np.minimum((values - low) / (high - low) * parts, parts - 1).astype(np.int64)


# Dominance: which of many labels no other one of the same state undercuts in everything


def undominated(state: Ints, x: Floats, y: Floats, z: Floats, limited: bool) -> Ints:
    """Indices, ascending, of the labels to keep. A label goes when another one of its state is at
    most as large in x and y, and, if `limited`, in z. Of labels equal in these one of least z
    stays, the first."""
    order = np.lexsort((z, y, x, state))
    state, y, z = state[order], y[order], z[order]
    kept = ~_dominated(state, y, z) if limited else _staircase(state, y)
    return np.sort(order[kept])


def _ranks(values: Floats) -> Ints:
    """0, 1, 2 ... in ascending order, equal values alike."""
    return np.unique(values, return_inverse=True)[1]


def _staircase(state: Ints, y: Floats) -> Bools:
    """Sorted by (state, x): true where y is below all before it in its state."""
    if not len(y):
        return np.zeros(0, dtype=bool)
    fresh = np.r_[True, state[1:] != state[:-1]]
    # The running minimum starts anew in each state, as later states lie below earlier ones.
    level = _ranks(y) - np.cumsum(fresh) * (len(y) + 1)
    least = np.minimum.accumulate(level)
    kept: Bools = np.r_[True, level[1:] < least[:-1]] | fresh
    return kept


def _dominated(state: Ints, y: Floats, z: Floats) -> Bools:
    """Sorted by (state, x): true where an earlier label of the state has y and z at most as large.
    Divide and conquer from the bottom: in each block of 2 w labels, is one of the left half below
    one of the right half? Sorted by y, that is a running minimum of z."""
    n = len(y)
    dominated = np.zeros(n, dtype=bool)
    # an earlier state gets the larger y, so that it is below nothing
    by_y = np.lexsort((np.arange(n), y, -state))
    height = _ranks(z)
    width = 1
    while width < n:
        order = by_y[np.argsort(by_y // (2 * width), kind="stable")]
        block = order // (2 * width)
        left = (order // width) % 2 == 0
        floor = -block * (n + 1)  # later blocks lie below earlier ones
        least = np.minimum.accumulate(np.where(left, height[order], n) + floor)
        dominated[order] |= ~left & (least <= height[order] + floor)
        width *= 2
    return dominated


# The walk from the last cut to the front, and the plans that it ends in


def space_of(table: Table, states: Graph, limit: float) -> tuple[Space, list[OptionPath]] | None:
    """Where to walk, and the plans that its bound met; None: nothing is allowed or fits."""
    bounded = bound(states, limit)
    if bounded is None:
        return None
    return Space(table, states, Frontier(table), bounded[0]), bounded[1]


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


def ended(problem: Problem, layers: dict[int, Labels]) -> ChainPlan | None:
    """The best plan at the front: least time, then least memory, then the smallest indices."""
    last = layers[0]
    if not len(last):
        return None
    label = int(np.lexsort((last.memory, last.z))[0])
    choice = []
    for cut in range(len(layers) - 1):
        choice.append(int(layers[cut].option[label]))
        label = int(layers[cut].parent[label])
    return ChainPlan.of(problem, tuple(choice[1:]))
