"""Sharded parameters: which are gathered for each use of a component, and freed after it."""

import pytest

from synchromesh.values.component import Parameter
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout, ShardStates
from synchromesh.values.schedule import Action, pipeline
from synchromesh.values.sharding import Unit, Use, Uses, UseWalk, gathering, units, uses_of


def unit(name: str, states: ShardStates) -> Unit:
    return Unit((Holding(Parameter(name, (6, 2), "float32"), Layout(2, 1), states=states),))


def uses(
    *needed: tuple[int, ...], states: ShardStates = "parameters", goes_on: bool = False
) -> Uses:
    """Of components that need these units, forward and then backward."""
    its = [unit(str(n), states) for n in range(1 + max(n for use in needed for n in use))]
    run = tuple(enumerate(needed))
    runs = [(Action(0, "F", 0), run), (Action(0, "B", 0), run[::-1])]
    return uses_of(runs, its, goes_on)


def picture(found: Uses, *steps: str, together: int = 1) -> list[str]:
    """What is done at each of `steps`: start, end, or `enter F1`, `leave B1` by a component, with
    a `-` where it will not leave."""
    walk, lines = UseWalk(found), []
    for step in steps:
        verb, _, place = step.partition(" ")
        if place:
            kind, component = place[0], int(place[1])
            number = found.number[Action(0, "F" if kind == "F" else "B", 0), component]
        match verb:
            case "start":
                events = walk.start()
            case "end":
                events = walk.end_action()
            case "enter":
                events = walk.enter(number, together, leaves=not place.endswith("-"))
            case _:
                events = walk.leave(number, together)
        lines.append(", ".join(map(str, events)))
    return lines


def test_parameters_are_there_while_a_component_computes() -> None:
    """Three components forward and backward; the last one's stay between the two."""
    assert uses((0,), (1,), (2,)).uses == (
        Use((0,), (0,), (0,), (1,)), Use((1,), (1,), (1,), (2,)), Use((2,), (2,), (), ()),
        Use((2,), (), (2,), (1,)), Use((1,), (1,), (1,), (0,)), Use((0,), (0,), (0,), ()),
    )  # fmt: skip


def test_parameters_that_last_are_gathered_once() -> None:
    once = uses((0,), (1,), states="gradients")
    assert [(use.gathered, use.freed) for use in once.uses] == [
        ((0,), ()), ((1,), ()), ((), (1,)), ((), (0,)),
    ]  # fmt: skip
    going_on = uses((0,), (1,), states="gradients", goes_on=True)
    assert [use.freed for use in going_on.uses] == [(), (), (), ()]


def test_a_shared_parameter_is_gathered_for_each_of_its_users() -> None:
    """A tied embedding, of the first component and the last one."""
    assert [use.gathered for use in uses((0,), (1,), (2, 0)).uses] == [
        (0,), (1,), (2, 0), (), (1,), (0,),
    ]  # fmt: skip


def test_a_walk_gathers_one_use_ahead() -> None:
    assert picture(
        uses((0,), (1,)),
        "start", "enter F0", "leave F0", "enter F1", "leave F1",
        "enter B1", "leave B1", "enter B0", "leave B0",
    ) == [
        "gather 0", "await 0, gather 1", "free 0", "await 1", "",
        "gather 0", "free 1", "await 0", "free 0",
    ]  # fmt: skip


def test_a_use_is_over_with_the_last_micro_batch_of_those_that_take_turns() -> None:
    assert picture(
        uses((0,), (1,)), "enter F0", "leave F0", "enter F1", "enter F0", "leave F0", together=2
    ) == ["await 0, gather 1", "", "await 1", "gather 1", "free 0"]


def test_a_use_that_does_not_leave_is_over_when_another_begins_or_the_action_ends() -> None:
    """Of a component whose inputs need no gradient nobody tells that its backward has ended."""
    assert picture(
        uses((0,), (1,)), "enter F0", "leave F0", "enter F1", "leave F1", "end",
        "enter B1-", "enter B0-", "end",
    )[4:] == ["", "gather 0", "free 1, await 0", "free 0"]  # fmt: skip
    both = picture(uses((0,), (1,)), "enter F0-", "enter F0-", "enter F1", together=2)
    assert both == ["await 0, gather 1", "gather 1", "free 0, await 1"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("states", ["parameters", "gradients", "optimizer"])
def test_what_is_gathered_is_there_until_it_is_freed(schedule: str, states: ShardStates) -> None:
    """On every group of a pipeline whose first and last stage, on one group, share a unit."""
    its = tuple(unit(str(n), states) for n in range(4))
    found = gathering(its, [((str(n), *"0" * (n == 3)), True) for n in range(4)])
    stages, whole = [range(n, n + 1) for n in range(4)], pipeline(schedule, (0, 1, 1, 0), 3)
    for actions in whole.groups:
        there: set[int] = set()
        gathers = 0
        for use in found.uses(actions, stages).uses:
            assert not there & set(use.gathered) and set(use.units) <= there | set(use.gathered)
            there = (there | set(use.gathered)) - set(use.freed)
            gathers += len(use.gathered)
        assert not there
        assert gathers == 2 or states == "parameters"


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
