"""The equations of a step, by hand; what is refused."""

import math

import numpy as np
import pytest

from synchromesh.planner.chain.problem import BATCH, Option, PricedEdge, Prices, Problem, evaluate

FREE = Prices(np.zeros((1, 1)), np.zeros((1, 1)), (0,))


def test_gradients_hide_behind_the_backward_of_earlier_components() -> None:
    components = (
        (Option(1.0, 2.0, gradient=0.5, update=0.25, memory=10),),
        (Option(1.0, 2.0, gradient=3.0, update=0.25, memory=20),),
    )
    problem = Problem(components, (PricedEdge(BATCH, (0,), FREE), PricedEdge(0, (1,), FREE)))
    #  compute  | F0 | F1 |  B1  |  B0  |
    #  network                   |   g1    | g0 |
    assert evaluate(problem, (0, 0)) == (2 + 2 + 3 + 0.5 + 0.5, 30)


def test_a_component_without_gradient_does_not_hold_the_network() -> None:
    components = ((Option(0.0, 4.0),), (Option(0.0, 1.0, gradient=1.0),))
    problem = Problem(components, (PricedEdge(0, (1,), FREE),))
    assert evaluate(problem, (0, 0)) == (5.0, 0)


def test_a_form_is_paid_once_for_all_targets() -> None:
    prices = Prices(np.array([[0.0, 1.0, 10.0]]), np.array([[0.0, 0.5, 5.0]]), (0, 1, 1, 2))
    options = tuple(Option(0.0, 0.0, border=b) for b in range(4))
    problem = Problem(
        ((Option(0.0, 0.0),), options, options, options), (PricedEdge(0, (1, 2, 3), prices),)
    )
    assert evaluate(problem, (0, 0, 0, 0))[0] == 0.0
    assert evaluate(problem, (0, 1, 2, 1))[0] == 1.5
    assert evaluate(problem, (0, 1, 3, 0))[0] == 16.5


def test_backward_prices_stand_before_the_backward_of_the_source() -> None:
    prices = Prices(np.zeros((1, 1)), np.full((1, 1), 2.0), (0,))
    components = ((Option(0.0, 1.0),), (Option(0.0, 1.0, gradient=2.5),))
    assert evaluate(Problem(components, (PricedEdge(0, (1,), prices),)), (0, 0))[0] == 4.0
    #  compute  | B1 | price 0->1 | B0 |          the traffic hides behind the price
    #  network       |      g1       |
    assert evaluate(Problem(components, (PricedEdge(BATCH, (0,), prices),)), (0, 0))[0] == 4.0


def test_what_is_refused() -> None:
    free = (Option(0.0, 0.0),)
    with pytest.raises(ValueError, match="component 1: no option"):
        Problem((free, ()))
    for wrong in (Option(-1.0, 0.0), Option(0.0, math.inf), Option(0.0, math.nan)):
        with pytest.raises(ValueError, match="component 0: seconds"):
            Problem(((wrong,),))
    with pytest.raises(ValueError, match=r"1 -> \(0,\): targets must lie in 2"):
        Problem((free, free), (PricedEdge(1, (0,), FREE),))
    with pytest.raises(ValueError, match="a target has a border without a form"):
        Problem((free, (Option(0.0, 0.0, border=1),)), (PricedEdge(0, (1,), FREE),))
    with pytest.raises(ValueError, match="the source has a border without prices"):
        Problem(((Option(0.0, 0.0, border=1),), free), (PricedEdge(0, (1,), FREE),))
    below = Prices(np.array([[-1.0]]), np.zeros((1, 1)), (0,))
    with pytest.raises(ValueError, match="at least 0"):
        Problem((free, free), (PricedEdge(0, (1,), below),))
