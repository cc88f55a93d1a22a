"""States of cuts: which values are open, which sets of forms are wanted, what is left out."""

from benchmarks.planning import chain as repeated
from synchromesh.planner.chain.frontier import Frontier, graph
from synchromesh.planner.chain.table import table
from tests.planner.problems import SHAPES, random_problem


def test_open_values_of_a_u_net() -> None:
    frontier = Frontier(table(random_problem(0, SHAPES["U-Net"])))
    open_values = [{(frontier.table.values[v].source - 1) for v in cut} for cut in frontier.open]
    # cut i stands before node i, node 0 is the batch (-1 below), and 6, 5, 4 read 0, 1, 2 too
    assert open_values == [
        set(), {-1}, {0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 4}, {0, 5}, set(),
    ]  # fmt: skip


def test_a_chain_has_a_state_per_form_and_a_residual_pairs() -> None:
    chain = graph(table(random_problem(1, SHAPES["chain"], options=9)))
    for cut, crossing in enumerate(chain.crossings[1:], start=1):
        (value,) = (chain.frontier.table.values[v] for v in chain.frontier.open[cut])
        borders = chain.frontier.table.nodes[cut].border
        assert len(crossing.rows) == len({value.prices.form[b] for b in borders})
    residual = graph(table(repeated(6, 8, residual=True)))  # 4 degrees x 3 states = 12 borders
    assert max(len(crossing.rows) for crossing in residual.crossings) == 12 * 12


def test_equal_stretches_share_their_crossings() -> None:
    problem = random_problem(2, SHAPES["chain"])
    block, link = problem.components[1], problem.links[2]
    links = [problem.links[0], *(type(link)(i, (i + 1,), link.prices) for i in range(39))]
    blocks = graph(table(type(problem)((block,) * 40, tuple(links))))
    assert len({id(crossing) for crossing in blocks.crossings}) <= 5


def test_the_longest_values_are_left_out_where_states_are_too_many() -> None:
    columns = table(random_problem(3, SHAPES["U-Net"], options=9))
    assert graph(columns).complete
    small = graph(columns, 30)
    assert {columns.values[v].source - 1 for v in small.frontier.left_out} >= {0}
    assert max(crossing.next.size for crossing in small.crossings) <= 30
