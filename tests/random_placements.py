"""Random placements: valid assignments of a step's units, whatever they cost."""

import random
from collections import ChainMap
from collections.abc import Mapping, Sequence

from synchromesh.trace.partition.localise import localise
from synchromesh.trace.partition.partition import Analysis, Partition, assign, problem_of
from synchromesh.trace.partition.placement_problem import (
    InfeasiblePlacement,
    PlacementProblem,
    Port,
    Price,
    ValueFlow,
)
from synchromesh.trace.step import Step
from synchromesh.values.layout import Layout


def random_partition(
    step: Step, layouts: Sequence[Layout], rows: int, chance: random.Random | None
) -> Partition:
    """The partition of a random valid assignment; without chance of the cheapest."""
    problem = problem_of(Analysis(step), layouts, rows, {}, Price())
    if chance is None:
        return localise(problem, assign(problem)).under(layouts)
    return localise(problem, problem.assignment(sample(problem.problem, chance))).under(layouts)


def sample(problem: PlacementProblem, chance: random.Random, attempts: int = 100_000) -> list[int]:
    """A random valid assignment; where nothing fits, a unit's neighbours draw again."""
    options = problem.options
    moves = _rigid_moves(problem)
    makers = {flow.maker[0] for flow in problem.flows.values() if flow.rigid}
    taken: dict[int, int] = {}

    def fits(unit: int, k: int) -> bool:
        tried = ChainMap({unit: k}, taken)
        return all(_agree(problem, *move, tried) for move in moves[unit])

    waiting = sorted(range(len(options)), key=lambda i: (i not in makers, chance.random()))
    for _ in range(attempts):
        if not waiting:
            return [taken[i] for i in range(len(options))]
        unit = waiting.pop()
        fitting = [k for k in range(len(options[unit])) if fits(unit, k)]
        if not fitting:  # its neighbours disagree: they draw again, after it
            around = {i for flow, reader in moves[unit] for i in (flow.maker[0], reader[0])}
            again = sorted(i for i in around - {unit} if i in taken)
            waiting += again
            for other in again:
                del taken[other]
            fitting = list(range(len(options[unit])))
        taken[unit] = chance.choice(fitting)
    raise InfeasiblePlacement("no random assignment found")


def _agree(
    problem: PlacementProblem, flow: ValueFlow, reader: Port, taken: Mapping[int, int]
) -> bool:
    """Whether a move is allowed between the options that maker and reader have taken."""
    (maker, output), (unit, slot) = flow.maker, reader
    if maker not in taken or unit not in taken:
        return True
    a = problem.options[maker][taken[maker]].makes[output]
    b = problem.options[unit][taken[unit]].reads[slot]
    return flow.move_price(a, b) is not None


def _rigid_moves(problem: PlacementProblem) -> list[list[tuple[ValueFlow, Port]]]:
    moves: list[list[tuple[ValueFlow, Port]]] = [[] for _ in problem.options]
    for flow in problem.flows.values():
        for reader in flow.readers if flow.rigid else ():
            moves[flow.maker[0]].append((flow, reader))
            moves[reader[0]].append((flow, reader))
    return moves
