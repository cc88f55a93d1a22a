"""A stand-in has the workload's shapes and numbers of the same kind, of which it draws few."""

from dataclasses import replace

import torch
from torch import nn

from synchromesh.workloads.digits import cnn
from synchromesh.workloads.stand_in import _DrawnOnce, stand_in

DRAWN = _DrawnOnce.DRAWN


def test_a_large_tensor_repeats_what_was_drawn() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(1024, 2500)

    model = stand_in(replace(cnn(None, True), model=build))
    plain, made = build().weight, model.get_parameter("weight")
    assert made.shape == plain.shape and made.requires_grad and made.is_leaf
    flat = made.detach().flatten()
    assert torch.equal(flat[:DRAWN], plain.detach().flatten()[:DRAWN])
    assert torch.equal(flat[DRAWN : 2 * DRAWN], flat[:DRAWN])
    assert torch.equal(flat[2 * DRAWN :], flat[: len(flat) - 2 * DRAWN])
    assert len(made.unique(dim=0)) == len(made), "equal rows"
    assert torch.allclose(made.std(), plain.std(), rtol=0.01)


def test_a_small_model_is_the_workloads_own() -> None:
    workload = cnn(None, True)
    torch.manual_seed(0)
    plain = workload.model().state_dict()
    torch.manual_seed(0)
    made = stand_in(workload).state_dict()
    assert all(torch.equal(made[name], x) for name, x in plain.items())


def test_what_is_not_laid_out_in_order_is_drawn_as_ever() -> None:
    def build() -> nn.Module:
        model = nn.Linear(1, 1)
        model.weight = nn.Parameter(torch.empty(1024, 2048).t())
        torch.manual_seed(0)
        nn.init.normal_(model.weight)
        return model

    made = stand_in(replace(cnn(None, True), model=build)).get_parameter("weight")
    assert torch.equal(made, build().get_parameter("weight"))
