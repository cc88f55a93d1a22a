"""Fair shares beside a linear program, and what is known of them."""

import numpy as np
import pytest
from scipy.optimize import linprog

from synchromesh.estimate.fair_shares import NONE, fair_shares


def by_programs(routes: np.ndarray, capacities: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The same by linear programs: the highest rate that all flows which are not yet settled can
    have; settled are those that can have no more than it."""
    flows = len(routes)
    loads = np.zeros((len(capacities), flows))
    for f, route in enumerate(routes):
        loads[route[route != NONE], f] += counts[f]
    rates = np.zeros(flows)
    open_flows = set(range(flows))

    def most(objective: np.ndarray, least: float | None) -> float:
        bounds = [
            (least if f in open_flows else rates[f], None if f in open_flows else rates[f])
            for f in range(flows)
        ] + [(0, None)]
        rows = [np.append(row, 0.0) for row in loads]
        limits = [*capacities]
        if least is None:  # t <= rate of each open flow
            bounds = [(0, None) if f in open_flows else bounds[f] for f in range(flows)]
            bounds.append((0, None))
            for f in open_flows:
                row = np.zeros(flows + 1)
                row[f], row[-1] = -1.0, 1.0
                rows.append(row)
                limits.append(0.0)
        solved = linprog(-objective, A_ub=np.array(rows), b_ub=limits, bounds=bounds)
        assert solved.success, solved.message
        return -float(solved.fun)

    while open_flows:
        highest = np.zeros(flows + 1)
        highest[-1] = 1.0
        level = most(highest, None)
        settled = set()
        for f in open_flows:
            one = np.zeros(flows + 1)
            one[f] = 1.0
            if most(one, level * (1 - 1e-9)) <= level * (1 + 1e-6):
                settled.add(f)
        assert settled
        for f in settled:
            rates[f] = level
        open_flows -= settled
    return rates


@pytest.mark.parametrize("seed", range(100))
def test_shares_are_those_of_linear_programs(seed: int) -> None:
    draw = np.random.default_rng(seed)
    links, flows = int(draw.integers(1, 6)), int(draw.integers(1, 7))
    capacities = draw.uniform(1.0, 10.0, links)
    counts = draw.integers(1, 4, flows).astype(float)
    routes = np.full((flows, links), NONE)
    for f in range(flows):
        its = draw.choice(links, int(draw.integers(1, links + 1)), replace=False)
        routes[f, : len(its)] = its
    found = fair_shares(routes, capacities, counts)
    assert found == pytest.approx(by_programs(routes, capacities, counts), rel=1e-6)


def test_flows_alone_and_together() -> None:
    """Three in a row: the long one meets each of the short ones."""
    routes = np.array([[0, 1], [0, NONE], [1, NONE], [2, NONE], [NONE, NONE]])
    shares = fair_shares(routes, np.array([10.0, 4.0, 3.0]))
    assert shares.tolist() == [2.0, 8.0, 2.0, 3.0, np.inf]


def test_many_flows_are_shared_at_once() -> None:
    """65,536 devices in hosts of 8 and racks of 64, each to the next but one rack."""
    devices = np.arange(65_536)
    host, rack = devices // 8, devices // 64
    other = (devices + 128) % 65_536
    routes = np.stack([host, 8192 + rack, 9216 + other // 64, 10_240 + other // 8], axis=1)
    capacities = np.concatenate([np.full(8192, 8.0), np.full(2048, 16.0), np.full(8192, 8.0)])
    assert fair_shares(routes, capacities).tolist() == pytest.approx([0.25] * 65_536)
