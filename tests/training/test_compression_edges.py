"""Compressed gradients where not every step has every gradient: turns, branches, steps that fail;
a parameter of two stages, weighted losses, and who says no."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from tests.ranks import run
from tests.training.test_compression import batch, close, go_on, loss, model, momentum, owed
from tests.training.test_stages import tied, tokens

pytestmark = pytest.mark.filterwarnings(
    "ignore:nothing of", "ignore:the model runs whole", "ignore:the loss is not seen"
)


# Turns


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
        self.second = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
        self.double()


def of_first(model: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(model.first(b[0]), b[1] % 3)


def of_second(model: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(model.second(b[0]) + model.first(b[0]).detach(), b[1] % 3)


def turns(plan: str, apart: bool) -> list[Any]:
    """What is owed behind each of four turns of two losses; the model."""
    own = Two()
    optimizer: Any = momentum(own)
    if apart:
        optimizer = {"a": momentum(own.first), "b": momentum(own.second)}
    of = prepare(own, optimizer, {"a": of_first, "b": of_second}, batch(12, 0), plan)
    found = []
    for index in range(4):
        of.step(of.shard(batch(12, index)), loss="ab"[index % 2])
        found.append(owed(of))
    found.append(of.state_dict())
    of.close()
    return found


@pytest.mark.wide(3)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("word", ["int8", "onebit", "topk:0.1", "powersgd:2"])
def test_a_turn_leaves_alone_what_is_owed_of_others(word: str, apart: bool) -> None:
    first, second = run(2, turns, f"data; @compression={word}", apart)
    for one, other in zip(first, second, strict=True):
        close(one, other, 0.0)

    def of(step: int, part: str) -> dict[str, Tensor]:
        return {n: x for n, x in first[step].items() if part in n}

    assert all(x.any() for x in of(0, "first").values() if x.dim() > 1)
    assert not any(x.any() for x in of(0, "second").values())
    close(of(1, "first"), of(0, "first"), 1e-12)
    close(of(2, "second"), of(1, "second"), 1e-12)
    with pytest.raises(AssertionError):
        close(of(2, "first"), of(1, "first"), 1e-12)


# Branches, which only a model that runs as it is can have


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.even, self.odd = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return self.even(hidden) if float(x.sum()) > 0 else self.odd(hidden)  # type: ignore[no-any-return]


def branching(plan: str) -> list[Any]:
    """Of each step: what this rank took, which gradients came of it, what was owed before and
    behind; the model."""
    own = Branches()
    of = prepare(own, momentum(own), loss, batch(12, 0), plan)
    assert of.traced.opaque
    found: list[Any] = []
    for index in range(10):
        before, mine = owed(of), of.shard(batch(12, index))
        of.backward(mine)
        had = {n: p.grad is not None for n, p in of.model.parameters.items()}
        found.append((float(mine[0].sum()) > 0, had, before, owed(of)))
        of.update()
    found.append(of.state_dict())
    of.close()
    return found


@pytest.mark.parametrize("word", ["int8", "topk:0.1", "powersgd:2"])
def test_gradients_that_some_ranks_lack(word: str) -> None:
    first, second = run(2, branching, f"data; @compression={word}")
    close(first[-1], second[-1], 0.0)
    ways = set()
    for (even, had, before, after), (other, *_) in zip(first[:-1], second[:-1], strict=True):
        ways.add((even, other))
        assert had["even.weight"] == (even or other)
        assert had["odd.weight"] == (not even or not other)
        for name in (n for n in had if not had[n]):
            torch.testing.assert_close(after[name], before[name], rtol=1e-12, atol=1e-15)
    assert len(ways) >= 3, "on both ranks, and on one alone"


# A step that fails


@contextmanager
def failing(of: Trainer) -> Iterator[None]:
    """Backward fails behind the first gradients, on all ranks."""

    def fail(_: Tensor) -> None:
        raise ArithmeticError("planted")

    handle = of.model.parameters["body.1.weight"].register_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def failed(plan: str) -> Any:
    own = model()
    of = prepare(own, momentum(own), loss, batch(12, 0), plan)
    go_on(of, 1, 2)
    with failing(of), pytest.raises(ArithmeticError):
        of.step(of.shard(batch(12, 3)))
    go_on(of, 3, 6)
    found = of.state_dict()
    of.close()
    return found


@pytest.mark.parametrize("word", ["int8", "topk:0.1", "powersgd:2"])
def test_training_goes_on_behind_a_step_that_failed(word: str) -> None:
    first, second = run(2, failed, f"data; @compression={word}")
    close(first, second, 0.0)
    assert all(x.isfinite().all() for x in first.values())


# Shared parameters, weighted losses


def over_tokens(model: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    scores = model(b["x"]).flatten(0, 1)
    total = F.cross_entropy(scores, b["y"].flatten(), ignore_index=-100, reduction="sum")
    return total, (b["y"] != -100).sum()


def with_tokens(plan: str) -> dict[str, Tensor]:
    own = tied()
    of = prepare(own, momentum(own), over_tokens, tokens(12, 0), plan)
    for index in range(5):
        of.step(of.shard(tokens(12, index)))
    found = of.state_dict()
    of.close()
    return found


@pytest.mark.wide(2)
@pytest.mark.parametrize("plan", ["data", "data; @stages=0-1:embed/2-3:gain; @micro_batches=2"])
@pytest.mark.parametrize("word", ["fp16", "powersgd:1", "int8"])
def test_a_parameter_of_two_stages_has_one_sum(plan: str, word: str) -> None:
    exact = run(4, with_tokens, plan)[0]
    found = run(4, with_tokens, f"{plan}; @compression={word}")
    for state in found:
        close(state, found[0], 0.0)
    limit = 1e-3 if word == "fp16" else 0.1
    for name, x in exact.items():
        assert float((found[0][name] - x).abs().max()) < limit


# Who says no


def measured(plan: str) -> Trainer:
    own = model()
    return prepare(own, momentum(own), loss, batch(12, 0), plan, noise_scale=True)


def test_the_noise_scale_is_not_measured_of_what_is_lost() -> None:
    with pytest.raises(ValueError, match=r"sent with a loss \(@compression=int8\)"):
        measured("data; @compression=int8")


def adapting() -> tuple[list[str], str, int]:
    said: list[str] = []
    own = model()
    plan = "data; @compression=int8"
    of = prepare(own, momentum(own), loss, batch(12, 0), plan, say=said.append)
    of.adapt()
    go_on(of, 1, 3)
    found = said, str(of.plan), len(of.decisions)
    of.close()
    return found


def test_nothing_adapts_a_plan_that_compresses() -> None:
    said, plan, decisions = run(2, adapting)[0]
    assert any("computes something else" in text for text in said)
    assert plan.startswith("data; @compression=int8") and not decisions
