"""The search against brute force and the integer program, and its laws."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from benchmarks.planning import chain
from synchromesh.planner.chain import integer
from synchromesh.planner.chain import search as search_module
from synchromesh.planner.chain.frontier import graph
from synchromesh.planner.chain.problem import Option, Problem, evaluate
from synchromesh.planner.chain.search import SearchTuning, runners_up, search
from tests.planner.problems import CHAIN, SHAPES, UNET, brute_force, random_problem


def limits(problem: Problem) -> list[float]:
    """None, two that bind, the least that fits, and one in which nothing fits."""
    free, least = brute_force(problem), brute_force(problem, -1)
    if free is None or least is None:
        return []
    between = [least.memory + part * (free.memory - least.memory) for part in (0.3, 0.7)]
    return [math.inf, *between, least.memory, least.memory - 1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_brute_force_and_the_integer_program_agree(shape: str, seed: int) -> None:
    problem = random_problem(seed, SHAPES[shape], options=3)
    for limit in limits(problem):
        best, found = brute_force(problem, limit), search(problem, limit)
        assert best is not None
        assert found.seconds == pytest.approx(best.seconds, rel=1e-12)
        assert found.gap == 0.0 and found.within == best.within
        assert (found.seconds, found.memory) == evaluate(problem, found.choice)
        assert found.memory <= limit or found.memory == best.memory
        solved = integer.quickest(problem, limit)
        assert (solved is not None) == best.within
        if solved is not None:
            assert solved.seconds == pytest.approx(best.seconds, abs=1e-5)


@pytest.mark.parametrize("states", [2, 10])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gap_holds_where_labels_and_states_are_lost(
    shape: str, states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = SearchTuning(widths=(2, 3))
    monkeypatch.setattr(search_module, "TUNING", narrow)
    monkeypatch.setattr(search_module, "graph", lambda table: graph(table, states))
    gaps = []
    for seed in range(2):
        problem = random_problem(seed, SHAPES[shape], options=3)
        for limit in limits(problem)[:-1]:
            best, found = brute_force(problem, limit), search(problem, limit)
            assert best is not None and found.within and found.memory <= limit
            assert found.seconds * (1 - found.gap) - 1e-9 <= best.seconds <= found.seconds + 1e-9
            gaps.append(found.gap)
    assert max(gaps) > 0.0


def test_forbidden_everywhere() -> None:
    problem = random_problem(0, CHAIN)
    prices = problem.links[3].prices
    closed = replace(prices, forward=prices.forward + math.inf)
    links = (*problem.links[:3], replace(problem.links[3], prices=closed), *problem.links[4:])
    with pytest.raises(ValueError, match="infinite prices"):
        search(Problem(problem.components, links))


def test_equal_inputs_give_equal_plans() -> None:
    for shape in SHAPES.values():
        first, second = (random_problem(7, shape, forbidden=0.0) for _ in range(2))
        assert search(first, most=3) == search(second, most=3)


def test_ties_take_less_memory_then_the_smaller_indices() -> None:
    options = (
        Option(0.1, 0.2, memory=5, border=1),
        Option(0.2, 0.1, memory=3),
        Option(0.1, 0.2, memory=3, border=2),
        Option(0.1, 0.2, memory=3, border=2),
    )
    assert search(Problem((options,) * 3)).choice == (1, 1, 1)


def test_no_components_and_no_links() -> None:
    assert search(Problem(())).choice == ()
    lonely = ((Option(1.0, 1.0), Option(0.5, 1.0)),) * 3
    assert search(Problem(lonely)).choice == (1, 1, 1)


@pytest.mark.parametrize("seed", range(3))
def test_a_larger_limit_is_never_slower(seed: int) -> None:
    problem = random_problem(seed, UNET, options=6, borders=4, forbidden=0.0)
    free, least = search(problem), search(problem, -1)
    before = math.inf
    for part in range(11):
        limit = least.memory + part / 10 * (free.memory - least.memory)
        found = search(problem, limit)
        assert found.within and found.gap == 0.0 and found.memory <= limit
        assert found.seconds <= before + 1e-12
        before = found.seconds
    assert before == free.seconds


@pytest.mark.parametrize("seed", range(3))
def test_a_cheaper_option_is_never_slower(seed: int) -> None:
    chance = random.Random(seed)
    problem = random_problem(seed, UNET, options=6, borders=4, forbidden=0.0)
    for column in ("forward", "backward", "gradient", "update"):
        before = search(problem).seconds
        i = chance.randrange(len(problem.components))
        options = list(problem.components[i])
        k = chance.randrange(len(options))
        options[k] = replace(options[k], **{column: 0.5 * getattr(options[k], column)})
        components = (*problem.components[:i], tuple(options), *problem.components[i + 1 :])
        problem = Problem(components, problem.links)
        assert search(problem).seconds <= before + 1e-12


def test_the_gradients_count_on_both_clocks() -> None:
    """A plan whose sum is least is not the quickest one where traffic stays hidden."""
    hidden = Option(1.0, 1.0, gradient=4.0)
    open_ = Option(1.5, 1.5, gradient=0.0)
    front = (Option(1.0, 5.0),)
    assert search(Problem((front, (hidden, open_)))).choice == (0, 0)
    assert search(Problem(((hidden, open_), front))).choice == (1, 0)


def test_a_hundred_components_on_64_devices_are_exact() -> None:
    problem = chain(100, 64)
    found = search(problem)
    assert found.gap == 0.0
    least = sum(min(o.memory for o in options) for options in problem.components)
    bounded = search(problem, (least + found.memory) / 2)
    assert bounded.gap == 0.0 and bounded.within and bounded.seconds > found.seconds


@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_plan_with_another_border(shape: str, part: float) -> None:
    problem = random_problem(23, SHAPES[shape], options=3, forbidden=0.05)
    free = search(problem)
    least = search(problem, -1)
    limit = least.memory + part * (free.memory - least.memory)
    found = search(problem, limit)
    every = [
        (*evaluate(problem, choice), choice)
        for choice in itertools.product(*(range(len(o)) for o in problem.components))
    ]
    for i, other in enumerate(runners_up(problem, found, limit)):
        border = problem.components[i][found.choice[i]].border
        best = min(
            (seconds for seconds, memory, choice in every
             if memory <= limit and problem.components[i][choice[i]].border != border),
            default=float("inf"),
        )  # fmt: skip
        if other is None:
            assert best == float("inf")
            continue
        assert problem.components[i][other.choice[i]].border != border
        assert other.memory <= limit
        assert other.seconds * (1 - other.gap) - 1e-9 <= best <= other.seconds + 1e-9
        assert other.gap < 0.05


def test_alternatives_are_different_and_in_order() -> None:
    problem = random_problem(22, SHAPES["U-Net"], forbidden=0.0)
    found = search(problem, most=4)
    choices = [found.choice, *(other.choice for other in found.alternatives)]
    assert len(set(choices)) == 5
    seconds = [found.seconds, *(other.seconds for other in found.alternatives)]
    assert seconds == sorted(seconds)
