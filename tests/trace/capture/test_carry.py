"""What a carry must be, and what a wrong one is told."""

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from synchromesh.trace.capture.batch import take
from synchromesh.trace.capture.capture import trace
from synchromesh.trace.capture.carry import Carrying, carry_leaves, join, started, with_leaves
from synchromesh.trace.capture.outputs import carried, flat_outputs
from synchromesh.trace.capture.run import run
from tests.recurrent import ROWS, Recurrent, batches, beginning, loss

H = torch.arange(12.0).view(6, 2)


def returning(carry: Any) -> Any:
    return Carrying(lambda model, batch, given: (batch.sum(), carry(given)))


def test_a_carry_is_leaves_of_the_batch_and_of_the_outputs() -> None:
    given = {"h": (H, H + 1), "n": H[:, 0]}
    parts = take(join(torch.ones(6), given), 2, 4)
    names = ["carry.h.0", "carry.h.1", "carry.n"]
    assert list(carry_leaves(parts["carry"])) == names
    result = returning(lambda x: {"h": [2 * y for y in x["h"]], "n": x["n"]})(None, parts)
    assert flat_outputs(result)[0] == ("loss",) and list(carried(result)) == names
    again = with_leaves(given, carried(result))
    assert torch.equal(again["h"][1], 2 * (H + 1)[2:4])


def test_a_new_carry_is_detached_and_keeps_its_types() -> None:
    weight = torch.ones((), requires_grad=True)
    made = returning(lambda h: (h * weight).to(torch.bfloat16))(None, join(H, H))
    (leaf,) = carried(made).values()
    assert leaf.dtype is torch.float32 and not leaf.requires_grad


def test_under_autocast_the_trace_gives_the_types_that_it_takes() -> None:
    start = tree_map_only(torch.Tensor, torch.Tensor.float, beginning(ROWS))
    joint, model = join(batches()[0], start), Recurrent()
    step = trace(model, Carrying(loss), joint, training=True, autocast=torch.bfloat16)
    made = run(step, model, joint)[len(step.outputs) :]
    assert step.carry == tuple(carry_leaves(start))
    assert {x.dtype for x in made} == {torch.float32} and not any(x.requires_grad for x in made)


@pytest.mark.parametrize(
    ("carry", "told"),
    [
        (
            lambda h: h[:5],
            r"was given carry of shape \[6, 2\], and returned it as \[5, 2\]: a carry",
        ),
        (lambda h: h.t(), r"returned it as \[2, 6\]: a carry keeps its shape, and dim 0"),
        (lambda h: (h, h), "was given a carry of carry, and returned one of carry.0, carry.1: it"),
        (lambda h: None, "returned one of no tensors: it should return the same tensors"),
    ],
)
def test_a_carry_unlike_the_one_that_was_given(carry: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        returning(carry)(None, join(H, H))


def test_a_loss_that_returns_no_carry() -> None:
    with pytest.raises(ValueError, match="returned a tensor, but it takes a carry: it should"):
        Carrying(lambda model, batch, given: batch.sum())(None, join(H, H))
    with pytest.raises(ValueError, match="returned 3 values, but it takes a carry"):
        Carrying(lambda model, batch, given: (1, 2, given))(None, join(H, H))


@pytest.mark.parametrize(
    ("start", "told"),
    [
        (lambda n: torch.zeros(2, n), r"carry\(7\) has carry of shape \[2, 7\]: dim 0 of each"),
        (lambda n: torch.zeros(6, 2), r"carry\(7\) has carry of shape \[6, 2\]"),  # by chance
        (lambda n: {"n": torch.zeros(())}, r"carry.n of shape \[\]: dim 0"),
        (lambda n: (), r"carry\(7\) holds no tensor: it should be a tensor, or"),
        (lambda n: (torch.zeros(n), 3), r"carry\(7\) holds int: it should be a tensor, or"),
    ],
)
def test_a_beginning_without_the_rows(start: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        started(start, 6)
