"""Sharded parameters on ranks: parts become whole parameters and are freed, in a walk's order."""

import pytest
import torch
from torch import Tensor, nn

from synchromesh.engine.sharding import Sharding, on_backward, parts_of
from synchromesh.engine.world import World
from synchromesh.values.component import Parameter
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout
from synchromesh.values.placement import shard
from synchromesh.values.schedule import Action
from synchromesh.values.sharding import Unit
from tests.ranks import run

FORWARD, BACKWARD = Action(0, "F", 0), Action(0, "B", 0)
RUNS = [(FORWARD, ((0, (0,)), (1, (1,)))), (BACKWARD, ((1, (1,)), (0, (0,))))]


@pytest.mark.parametrize("length", [1, 4, 6, 7])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_are_those_of_the_placement(length: int, dim: int) -> None:
    x = torch.arange(3 * length).view((length, 3) if dim == 0 else (3, length))
    found: list[Tensor] = []
    for ranks, view in parts_of(x, shard(dim), 4):
        assert len(found) == ranks.start and len(view) == ranks.stop - ranks.start
        found += list(view)
    wanted = (
        x.narrow(dim, a, b - a) for a, b in (shard(dim).share(length, 4, r) for r in range(4))
    )
    assert [part.tolist() for part in found] == [w.tolist() for w in wanted if w.numel()]


def there(sharding: Sharding) -> list[str]:
    return [name for name, x in sharding.whole.items() if x.untyped_storage().size()]


def walk() -> list[list[str]]:
    """What is there at each step of a forward and a backward of two components."""
    world = World.open("cpu")
    held = [
        Holding(Parameter(name, (6, 3), "float32"), Layout(2, 1), states="parameters")
        for name in "ab"
    ]
    whole = {name: torch.arange(18.0).view(6, 3) + 18 * i for i, name in enumerate("ab")}
    parameters = {}
    for h in held:
        start, stop = h.part_placement.share(6, 2, world.rank)
        parameters[h.tensor.name] = nn.Parameter(whole[h.tensor.name][start:stop].clone())
    units = [Unit((h,)) for h in held]
    sharding = Sharding(units, world.rank, parameters, lambda _: world.everyone)
    seen = [there(sharding)]
    for _ in range(2):  # the second one after a walk that was given up half-way
        sharding.expect(RUNS, goes_on=False)
        sharding.begin(FORWARD)
        sharding.enter(0)
    for action, component in ((FORWARD, 0), (FORWARD, 1), (BACKWARD, 1), (BACKWARD, 0)):
        if (action, component) != (FORWARD, 0):
            if component == 1 and action is BACKWARD:
                sharding.begin(action)
            sharding.enter(component)
        name = "ab"[component]
        assert torch.equal(sharding.whole[name], whole[name])
        assert sharding.owned([component], sharding.whole[name][1:])
        seen.append(there(sharding))
        sharding.leave(component)
    seen.append(there(sharding))
    sharding.over()
    world.close()
    return seen


def test_parameters_are_there_while_their_component_is_used() -> None:
    assert run(2, walk) == [[[], ["a"], ["b"], ["b"], ["a"], []]] * 2


def test_a_signal_calls_before_the_gradient_goes_on() -> None:
    calls: list[str] = []
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    inner, same = on_backward([x, y], lambda: calls.append("ends"))
    outer, _ = on_backward([inner * 3, y], lambda: calls.append("begins"))
    outer.register_hook(lambda _: calls.append("arrives"))
    assert same is y and not calls
    outer.sum().backward()
    assert calls == ["arrives", "begins", "ends"] and x.grad is not None
    assert x.grad.tolist() == [3, 3]
