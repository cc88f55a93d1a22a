"""Cuts of a chain into stages on equal groups of devices, by the work of its components.

    W = min over cuts of max over stages of the sum of weights
    of the cuts that reach W, the one of least sum of squares; of equal ones the latest

A pipeline is as quick as its slowest stage (PipeDream, SOSP 2019, section 3.1); the squares keep
the other stages level too, so that memory in flight is."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

ROUNDING = 1e-12  # relative difference of sums that is rounding


def cut(weights: Sequence[float], stages: int) -> tuple[int, ...]:
    """The first component of each stage: 0, then where the chain is cut.

    weights: seconds (or any measure of work) of each component, at least 0. ValueError where
    there are fewer components than stages."""
    if not 1 <= stages <= len(weights):
        raise ValueError(
            f"{stages} stages need as many components at least, and at least one; there are "
            f"{len(weights)}"
        )
    until = [0.0, *accumulate(weights)]

    def work(i: int, j: int) -> float:
        return until[j] - until[i]

    largest, _ = _best(len(weights), stages, work, max)
    allowed = largest + ROUNDING * until[-1]
    _, firsts = _best(
        len(weights),
        stages,
        lambda i, j: work(i, j) ** 2 if work(i, j) <= allowed else math.inf,
        lambda stage, rest: stage + rest,
    )
    return firsts


def _best(
    count: int,
    stages: int,
    cost: Callable[[int, int], float],
    joined: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """Least cost of components 0 .. count-1 in `stages`, and the first of each, where a stage
    i .. j-1 costs `cost(i, j)` and `joined` adds it to the cost of those before it."""
    least = [math.inf] * (count + 1)  # of the first j components in the stages so far
    least[0] = 0.0
    taken: list[list[int]] = []
    for _ in range(stages):
        row, begins = [math.inf] * (count + 1), [0] * (count + 1)
        for j in range(1, count + 1):
            for i in range(j):
                if least[i] < math.inf and (found := joined(cost(i, j), least[i])) <= row[j]:
                    row[j], begins[j] = found, i
        least = row
        taken.append(begins)
    firsts, j = [], count
    for begins in reversed(taken):
        j = begins[j]
        firsts.append(j)
    return least[count], tuple(reversed(firsts))
