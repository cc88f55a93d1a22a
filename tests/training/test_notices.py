"""Notices: what is told of a plan, and not of the planner's own choice."""

import warnings

import pytest
import torch
from torch import nn

from synchromesh.trace.capture.capture import trace
from synchromesh.trace.partition.partition import partition
from synchromesh.training.notices import Notices
from synchromesh.values.plan import Plan


def told(given: bool) -> list[str]:
    """Of `tensor` for a parameter of one entry."""
    model = nn.Sequential(nn.PReLU(), nn.Linear(6, 8))
    step = trace(model, lambda m, x: m(x).square().mean(), torch.ones(4, 6), training=True)
    plan = Plan.parse("tensor")
    layouts = plan.layouts(step.chain.names, 2)
    made = partition(step, layouts, rows=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Notices(0).partitioned(plan, layouts, made, step, dict(model.named_parameters()), given)
    return [str(warning.message) for warning in caught]


def test_what_is_not_sharded_is_told_of_a_plan_that_was_given() -> None:
    assert any(text.startswith("nothing of ") for text in told(given=True))
    assert not told(given=False)


def test_the_place_of_a_notice_is_the_callers_line() -> None:
    with pytest.warns(UserWarning, match="evaluation mode") as noted:
        Notices(0).mode(nn.Linear(1, 1).eval())
    assert noted[0].filename == __file__
