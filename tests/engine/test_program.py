"""A program on one rank: the model's loss and gradients, micro-batches in turns, states."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.program import Program, share
from synchromesh.programs.batch_norm import BatchNormPolicy
from synchromesh.programs.collectives import GroupAxis
from synchromesh.programs.communicator import SilentGroup
from synchromesh.programs.random import RandomStreams
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan
from synchromesh.values.schedule import Action
from tests.cost.plans import placed
from tests.models import family, traced

ROWS = 6


def program_of(name: str) -> tuple[Program, dict[str, Tensor]]:
    planned = placed(name, Layout(1, 1), ROWS)
    model, _, _ = family(name)
    tensors = {
        n: x.detach().clone() for n, x in (*model.named_parameters(), *model.named_buffers())
    }
    for n, _ in model.named_parameters():
        tensors[n].requires_grad_()

    def axis(layout: Layout, streams: RandomStreams) -> GroupAxis:
        return GroupAxis(cast(Any, SilentGroup(1)), streams, BatchNormPolicy(None))

    found = Program(
        traced(name), planned.partition, cast(Any, SimpleNamespace(position=0)), tensors,
        planned.holdings, axis, RandomStreams(0, torch.device("cpu")),
    )  # fmt: skip
    return found, tensors


@pytest.mark.parametrize("name", ["odd_mlp", "cnn"])
@pytest.mark.parametrize("together", [1, 2])
def test_it_computes_what_the_model_computes(name: str, together: int) -> None:
    program, tensors = program_of(name)
    model, loss, make = family(name)
    rows = GlobalRows((ROWS // together,), Plan.parse("data"))
    batches = [make(ROWS // together, seed=m, dtype=torch.float64) for m in range(together)]
    forward = program.run([(batch, rows) for batch in batches], 0)
    means = [result.outputs[0] / result.outputs[1] for result in forward.results]
    for result, mean, batch in zip(forward.results, means, batches, strict=True):
        torch.testing.assert_close(mean, loss(model, batch))
        assert (result.rows, result.leads) == (ROWS // together, True)
    torch.autograd.backward(means)
    wanted = torch.autograd.grad(
        sum(loss(model, batch) for batch in batches), list(model.parameters())
    )
    for (n, _), gradient in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(tensors[n].grad, gradient)


def test_a_lane_is_free_after_the_backward() -> None:
    program, _ = program_of("odd_mlp")
    batch = family("odd_mlp")[2](ROWS, dtype=torch.float64)
    rows = GlobalRows((ROWS,), Plan.parse("data"))
    first = program.run([(batch, rows)], 0)
    (piece,) = first.states
    assert program.run([(batch, rows)], 0).states != [piece], "it is in use"
    program.end(first)
    assert not first.states and program.run([(batch, rows)], 0).states == [piece]


def test_first_users_are_in_the_order_of_the_chain() -> None:
    program, tensors = program_of("odd_mlp")
    users = program.first_users
    assert set(users) == {n for n, x in tensors.items() if x.requires_grad}
    assert list(users.values()) == sorted(users.values()) and {s for s, _ in users.values()} == {0}
    assert program.gathered(Action(0, "F", 0)) == (), "nothing is sharded"


def test_the_first_of_those_with_equal_rows_leads() -> None:
    rows = GlobalRows((3, 2), Plan.parse("data"))
    shares = [share(Layout(2, 2), position, rows) for position in range(4)]
    assert {leads for _, leads in shares} == {True, False}
    assert sum(count for count, leads in shares if leads) == 5
