"""The gradients of a device group: when each is complete, and the bytes of those in parts."""

from synchromesh.cost.alive_bytes import AliveBytes
from synchromesh.cost.gradients import PART, SCATTERED, GroupGradients, ScatteredBytes
from synchromesh.values.layout import Layout, ShardStates
from synchromesh.values.plan import Plan
from synchromesh.values.schedule import Action
from tests.cost.plans import drawn


def interleaved(states: ShardStates) -> GroupGradients:
    """`tied` is used by both stages of the first group, whose other stage is the third one."""
    names = ({"tied": 6, "a": 2}, {"b": 4}, {"tied": 6, "c": 2})
    layouts = [Layout(2, 1, first=first, shard_states=states) for first in (0, 2, 0)]
    plan = "data; @stages=0-1:c0/2-3:c1/0-1:c2; @micro_batches=2; @schedule=gpipe"
    Plan.parse(plan)
    return GroupGradients(drawn([{"parameters": p} for p in names], layouts, plan=plan), 0)


def complete(gradients: GroupGradients) -> dict[str, list[str]]:
    actions = gradients.planned.actions(0, 1)
    return {
        f"{action} c{i}": list(names)
        for action in actions
        for i in (0, 2)
        if action.kind == "B" and (names := gradients.complete(action, i))
    }


def test_a_gradient_is_complete_after_its_first_user() -> None:
    """Not after every second use: 2B0 2B1 0B0 0B1 use `tied` in the order 2 2 0 0."""
    assert complete(interleaved("gradients")) == {
        "2B0 c2": ["c"], "2B1 c2": ["c"], "0B0 c0": ["tied", "a"], "0B1 c0": ["tied", "a"],
    }  # fmt: skip
    assert complete(interleaved("optimizer")) == {"2B1 c2": ["c"], "0B1 c0": ["tied", "a"]}


def test_bytes_of_a_bucket_until_its_part_has_arrived() -> None:
    gradients = interleaved("gradients")
    alive = AliveBytes({})
    scattered = ScatteredBytes(gradients, alive, 0)
    held = gradients.planned.holdings["c"]
    number = gradients.bucket_of["c"]
    scattered.open(held)
    assert alive.bytes == {(SCATTERED, number): 8.0}
    scattered.add(held)
    assert alive.bytes == {(SCATTERED, number): 16.0}, "what is sent, and parts of all ranks"
    scattered.end_backward(2)
    scattered.open(held)
    assert alive.bytes == {(PART, number): 4.0, (SCATTERED, number): 8.0}


def test_each_kind_has_its_buckets() -> None:
    gradients = interleaved("gradients")
    names = [[h.tensor.name for h in bucket] for bucket in gradients.buckets]
    assert sorted(map(sorted, names)) == [["a"], ["c"], ["tied"]], "by the stages that use them"
    assert gradients.complete(Action(2, "B", 0), 1) == ()
