"""The user's optimizer on pieces: which are exact, rebinding in mid-training, global norms."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from synchromesh.engine.early_step import DividedStep
from synchromesh.engine.optimizer import (
    check,
    clip_norm,
    global_norm,
)
from synchromesh.engine.world import World
from synchromesh.programs.model import Model
from synchromesh.values.optimizer import ELEMENTWISE, JoinedOptimizer, parts_differ
from tests.ranks import run


def _train(optimizer: torch.optim.Optimizer, p: nn.Parameter, steps: range, piece: slice) -> None:
    for step in steps:
        p.grad = torch.sin(torch.arange(24.0, dtype=torch.float64).view(6, 4) + step)[
            piece
        ].clone()
        optimizer.step()


def _start() -> Tensor:
    return torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)


def shaped(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> dict[str, Tensor]:
    """The state that has one entry per entry of the parameter."""
    return {
        k: v for k, v in optimizer.state[p].items() if isinstance(v, Tensor) and v.shape == p.shape
    }


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
@pytest.mark.parametrize("foreach", [False, True])
def test_elementwise_optimizers_are_exact_on_pieces_taken_in_mid_training(
    name: str, foreach: bool
) -> None:
    kind = getattr(torch.optim, name)
    settings = {"foreach": foreach, "lr": 0.1, "weight_decay": 0.01}
    if name == "SGD":
        settings |= {"momentum": 0.9}
    if name == "Rprop":
        del settings["weight_decay"]
    whole = nn.Parameter(_start())
    reference = kind([whole], **settings)
    _train(reference, whole, range(6), slice(None))

    p = nn.Parameter(_start())
    optimizer = kind([p], **settings)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    _train(optimizer, p, range(3), slice(None))
    piece = slice(2, 5)
    for key, value in shaped(optimizer, p).items():
        optimizer.state[p][key] = value[piece].clone()
    Model(nn.ParameterList([p])).place("0", p.detach()[piece].clone())
    check(optimizer, sharded=True)
    _train(optimizer, p, range(3, 6), piece)
    scheduler.step()
    assert torch.equal(p.detach(), whole.detach()[piece])
    expected = shaped(reference, whole)
    for key, value in reference.state[whole].items():
        wanted = expected[key][piece] if key in expected else value
        assert torch.equal(torch.as_tensor(optimizer.state[p][key]), torch.as_tensor(wanted))


def test_a_meta_parameter_becomes_real_and_stays_the_same_object() -> None:
    layer = nn.Linear(3, 2, device="meta")
    optimizer = torch.optim.AdamW(layer.parameters())
    p = layer.weight
    Model(layer).place("weight", torch.ones(1, 3))
    assert layer.weight is p and optimizer.param_groups[0]["params"][0] is p
    assert p.tolist() == [[1, 1, 1]] and p.requires_grad and p.is_leaf
    p.sum().backward()
    optimizer.step()
    assert p in optimizer.state


class Lamb(torch.optim.Adam):
    def step(self, closure=None):
        return None


class Homemade(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})


class Scaled(torch.optim.SGD):
    """SGD by the direction of the gradient, whose norm is that of all entries."""

    scale = staticmethod(lambda g: g / g.norm())

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.steps = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * self.scale(p.grad)


class Signs(Scaled):
    scale = staticmethod(torch.sign)


class Noisy(Scaled):
    scale = staticmethod(lambda g: g + torch.randn_like(g))


class Renamed(torch.optim.AdamW):
    """An AdamW with other defaults: its update is AdamW's."""


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2))]


def test_what_cannot_update_pieces_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="LBFGS cannot be used: it keeps own copies"):
        check(torch.optim.LBFGS(_parameters()), sharded=False)
    for optimizer in (
        torch.optim.Adafactor(_parameters()),
        torch.optim.Muon(_parameters()),
        Lamb(_parameters()),
    ):
        name = type(optimizer).__name__
        with pytest.raises(ValueError, match=f"{name} cannot update pieces .* the plan 'data'"):
            check(optimizer, sharded=True)
        check(optimizer, sharded=False)
    with pytest.raises(ValueError, match=r"Scaled cannot update pieces .* of a small one it"):
        check(Scaled(_parameters(), lr=0.0), sharded=True)  # as a warm-up begins
    tried = [kind(_parameters(), lr=0.1) for kind in (Scaled, Signs, Noisy)]
    assert [parts_differ(optimizer) for optimizer in tried] == [True, False, None]
    assert all(optimizer.steps == 0 for optimizer in tried), "it was another that stepped"
    with pytest.warns(UserWarning, match="not known whether the optimizer Homemade"):
        check(Homemade(_parameters()), sharded=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(Homemade(_parameters()), sharded=False)
        check(Renamed(_parameters()), sharded=True)


def test_every_optimizer_of_torch_is_classified() -> None:
    """A new one in a later torch must be looked at."""
    known = {*(n.lower() for n in ELEMENTWISE), "adafactor", "muon", "lbfgs", "sparseadam"}
    found = {
        name.lower()
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
    assert found == known


def _norms() -> tuple[float, list[float], list[float]]:
    """A parameter in two pieces (each on two of four ranks), one on all, one without gradient."""
    world = World.open("cpu")
    pieces = torch.arange(8.0).view(2, 4)
    sharded = nn.Parameter(torch.zeros(4))
    sharded.grad = pieces[world.rank % 2].clone()
    whole = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    whole.grad = torch.full((3,), 2.0, dtype=torch.float64)
    copies = [(sharded, 2), (whole, 4), (nn.Parameter(torch.zeros(1)), 4)]
    if world.rank == 3:
        norm = global_norm(copies, world.everyone)
    else:
        norm = global_norm(iter(copies), world.everyone)
    assert clip_norm(copies, world.everyone, 1e9) == norm
    before = sharded.grad.clone()
    assert clip_norm(copies, world.everyone, 1.0) == norm
    torch.testing.assert_close(sharded.grad, before / (norm + 1e-6).float())
    assert whole.grad.dtype is torch.float64 and world.ledger.sent == 0
    world.close()
    return float(norm)


def test_the_global_norm_counts_every_entry_once() -> None:
    assert run(4, _norms) == [pytest.approx((140 + 12) ** 0.5)] * 4


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_a_step_of_one_range_after_the_other_is_that_of_the_whole(name: str) -> None:
    kind = getattr(torch.optim, name)
    settings = {"lr": 0.1, **({"momentum": 0.9} if name == "SGD" else {})}
    both = [nn.Parameter(_start()), nn.Parameter(_start())]
    of_all, divided = (kind([nn.Parameter(torch.ones(2)), p], **settings) for p in both)
    torch.optim.lr_scheduler.ConstantLR(divided, 1.0)  # replaces its `step`
    for step in range(3):
        gradient = torch.sin(torch.arange(24.0, dtype=torch.float64).view(6, 4) + step)
        for p in both:
            p.grad = gradient.clone()
        of_all.step()
        parts = DividedStep(divided, both[1])
        for start, stop in ((0, 7), (7, 24), (24, 24)):
            parts.step(start, stop, stop == start)
        if step == 1:  # states are cast
            for optimizer in (of_all, divided):
                optimizer.load_state_dict(optimizer.state_dict())
    expected, found = (of.state[p] for of, p in zip((of_all, divided), both, strict=True))
    torch.testing.assert_close(both[1], both[0], atol=1e-15, rtol=0.0)
    torch.testing.assert_close(dict(found), dict(expected), atol=1e-15, rtol=0.0)


def test_a_range_of_a_step_is_made_by_the_optimizer_that_has_the_parameter() -> None:
    a, b = nn.Parameter(_start()), nn.Parameter(_start())
    joined = JoinedOptimizer({
        "a": torch.optim.SGD([a], 1.0), "b": torch.optim.SGD([b], 0.5, momentum=0.9),
    })  # fmt: skip
    b.grad = torch.ones_like(b)
    DividedStep(joined, b).step(0, 24, True)
    torch.testing.assert_close(b.detach(), _start() - 0.5, rtol=0.0, atol=0.0)
    assert torch.equal(a, _start()) and joined.state[b]["momentum_buffer"].shape == (6, 4)
