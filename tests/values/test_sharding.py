"""Sharded parameters: which are gathered for each use of a component, and freed after it."""

from synchromesh.values.component import Parameter
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout, ShardStates
from synchromesh.values.sharding import Use, gathering, units, uses


def test_parameters_are_there_while_a_component_computes() -> None:
    """Three components forward and backward; the last one's stay between the two."""
    needed = ((0,), (1,), (2,), (2,), (1,), (0,))
    assert uses(needed, (False,) * 3) == (
        Use((0,), (0,), (0,)), Use((1,), (1,), (1,)), Use((2,), (2,), ()),
        Use((2,), (), (2,)), Use((1,), (1,), (1,)), Use((0,), (0,), (0,)),
    )  # fmt: skip


def test_parameters_that_last_are_gathered_once() -> None:
    needed = ((0,), (1,), (1,), (0,))
    once = (Use((0,), (0,), ()), Use((1,), (1,), ()), Use((1,), (), (1,)), Use((0,), (), (0,)))
    assert uses(needed, (True,) * 2) == once
    going_on = uses(needed, (True,) * 2, goes_on=True)
    assert [use.freed for use in going_on] == [(), (), (), ()]


def test_a_shared_parameter_is_gathered_for_each_of_its_users() -> None:
    """A tied embedding, of the first component and the last one."""
    needed = ((0,), (1,), (2, 0), (2, 0), (1,), (0,))
    assert [use.gathered for use in uses(needed, (False,) * 3)] == [
        (0,), (1,), (2, 0), (), (1,), (0,),
    ]  # fmt: skip


def test_units_are_of_one_kind_and_of_the_first_user() -> None:
    def held(name: str, dtype: str = "float32", states: ShardStates = "parameters") -> Holding:
        return Holding(Parameter(name, (6, 2), dtype), Layout(2, 1), states=states)

    tied, half, plain = held("tied"), held("half", "float16"), held("plain", states="none")
    found = units([[tied, half, plain], [held("own"), tied]])
    assert [unit.names for unit in found] == [("tied",), ("half",), ("own",)]
    needs = gathering(found, [(("tied", "half", "plain"), True), (("own", "tied"), False)])
    assert needs.needed == ((0, 1), (2, 0))
    assert needs.run(range(2), backward=False) == ((0, (0, 1)), (1, (2, 0)))
    assert needs.run(range(2), backward=True) == ((0, (0, 1)),)
