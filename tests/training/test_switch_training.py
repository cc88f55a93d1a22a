"""A run that shifts between plans, or stops and resumes under others, has the loss curve of one
that does not."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from tests.models import FAMILIES, family
from tests.ranks import run
from tests.targets import Rows
from tests.traces import remembered, shared

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")  # what cannot be sharded
STEPS = 16


def start(family: str, plan: str) -> tuple[Trainer, Rows]:
    torch.manual_seed(1)
    model, loss, make = FAMILIES[family]()
    model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    data = Rows(make(30, seed=3, dtype=torch.float64))
    example = make(12, seed=0, dtype=torch.float64)
    trainer = prepare(
        model, optimizer, loss, example, plan, scheduler=warm_up, sync_batch_norm=True
    )
    return trainer, data


def losses(
    trainer: Trainer, data: Rows, steps: int, after: Callable[[], None] = lambda: None
) -> list[float]:
    """after: called after each step."""
    found: list[float] = []
    while len(found) < steps:
        for batch in trainer.loader(data, batch_size=12, shuffle=True, seed=5):
            found.append(trainer.step(batch).item())
            after()
            if len(found) == steps:
                break
    return found


def unswitched(family: str, steps: int = STEPS) -> list[float]:
    trainer, data = start(family, "data")
    found = losses(trainer, data, steps)
    trainer.close()
    return found


PLANS = ("tensor", "hybrid:tensor=2", "data")  # behind `data`


def switched(
    family: str, steps: int = STEPS, plans: tuple[str, ...] = PLANS
) -> tuple[list[float], Any]:
    trainer, data = start(family, "data")
    switches = {steps // 4 * i: plan for i, plan in enumerate(plans, 1)}

    def switch() -> None:
        if trainer.steps in switches:
            moved = trainer.switch(switches[trainer.steps])
            assert moved.bytes >= 0 and moved.seconds > 0

    found = losses(trainer, data, steps, switch)
    state = trainer.state_dict()
    trainer.close()
    return found, state


def one_trace(name: str) -> AbstractContextManager[None]:
    """For an example batch, and as a loader collates it: with a list in place of a tuple."""
    model, loss, make = family(name)
    batch = make(12, dtype=torch.float64)
    if isinstance(batch, tuple):
        remembered(name, model, loss, list(batch), training=True)
    return shared(name, model, loss, batch, "data", ranks=4)


@cache
def expected(name: str) -> list[float]:
    """Losses of one rank that goes through."""
    with one_trace(name):
        (found,) = run(1, unswitched, name)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["gpt2", "resnet_basic"])
def test_switching_leaves_the_loss_curve_as_it_was(name: str) -> None:
    """Tied weights, AdamW and a warm-up; batch norm's statistics. A switch falls into the middle
    of an epoch."""
    with one_trace(name):
        answers = run(4, switched, name, timeout=90)
    for found, _ in answers:
        assert found == pytest.approx(expected(name), rel=1e-10)


def first_half(family: str, plan: str, folder: str, steps: int) -> list[float]:
    trainer, data = start(family, plan)
    found = losses(trainer, data, steps)
    trainer.save(Path(folder) / "last", {"note": "half"})
    trainer.close()
    return found


def second_half(family: str, plan: str, folder: str, steps: int) -> list[float]:
    trainer, data = start(family, plan)
    with torch.no_grad():  # nothing of the fresh model may survive
        for parameter in trainer.model.parameters.values():
            parameter.fill_(7.0)
    assert trainer.resume(Path(folder) / "last") == {"note": "half"}
    found = losses(trainer, data, steps)
    trainer.close()
    return found


@pytest.mark.parametrize(
    ("plan", "ranks", "then", "later_ranks"),
    [("data", 2, "tensor", 4), ("hybrid:tensor=2", 4, "data", 1), ("tensor", 2, "single", 2)],
)
def test_resuming_under_another_plan_and_number_of_ranks(
    tmp_path: Path, plan: str, ranks: int, then: str, later_ranks: int
) -> None:
    with one_trace("gpt2"):
        first = run(ranks, first_half, "gpt2", plan, str(tmp_path), 5)[0]
        second = run(later_ranks, second_half, "gpt2", then, str(tmp_path), 5)[0]
    assert first + second == pytest.approx(expected("gpt2")[:10], rel=1e-10)


def small() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def means_of_rows(plans: list[str], folder: str, first: int) -> tuple[list[float], dict[str, Any]]:
    """Three steps under each plan with an optimizer whose state is smaller than parameters."""
    model = small()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    trainer = prepare(model, optimizer, classify, points(0), plans[0])
    if first:
        trainer.resume(Path(folder) / "last")
    found = []
    for step, plan in enumerate(p for p in plans for _ in range(3)):
        if plan != str(trainer.plan):
            trainer.switch(plan)
        found.append(trainer.step(trainer.shard(points(first + step))).item())
    trainer.save(Path(folder) / "last")
    weights = trainer.state_dict()
    trainer.close()
    return found, weights


def points(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=g).double(), torch.randint(3, (8,), generator=g)


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_state_of_other_shapes_than_parameters_moves_and_is_kept(tmp_path: Path) -> None:
    """Adafactor's means of rows and columns; an idle rank learns of them when it takes part."""
    with shared("small", small(), classify, points(0), "data"):
        whole, last = run(1, means_of_rows, ["data"] * 4, str(tmp_path), 0)[0]
        first, _ = run(2, means_of_rows, ["single", "data"], str(tmp_path), 0)[1]
        answers = run(3, means_of_rows, ["data", "single"], str(tmp_path), 6)
    for second, weights in answers:
        assert first + second == pytest.approx(whole, rel=1e-12)
        assert all(torch.allclose(weights[n], t, rtol=1e-12) for n, t in last.items())


def bits(plan: str, folder: str, resume: bool) -> torch.Tensor:
    """Weights after six steps with dropout, without or with a stop after three."""
    torch.manual_seed(1)
    model, loss, make = FAMILIES["bert"](dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = prepare(model, optimizer, loss, make(8), plan)
    data = Rows(make(24, seed=3))
    if resume:
        trainer.resume(Path(folder) / "three")
    losses(trainer, data, 3)
    if not resume:
        trainer.save(Path(folder) / "three")
        losses(trainer, data, 3)
    weights = nn.utils.parameters_to_vector(trainer.state_dict().values())
    trainer.close()
    return weights


@pytest.mark.parametrize("plan", ["data", "tensor"])
def test_the_same_plan_resumes_bit_for_bit_with_dropout(tmp_path: Path, plan: str) -> None:
    model, loss, make = FAMILIES["bert"](dropout=0.1)
    with shared("bert with dropout", model, loss, make(8), plan):
        through = run(2, bits, plan, str(tmp_path), False)
        resumed = run(2, bits, plan, str(tmp_path), True)
    assert all(torch.equal(a, b) for a, b in zip(through, resumed, strict=True))


def with_graphs_kept(keep: bool) -> list[float]:
    """Losses under plans that cut parameters otherwise; what was computed before may be kept."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    batch = torch.randn(6, 4), torch.randint(0, 2, (6,))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    kept = [loss(model, batch)] if keep else []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = prepare(model, optimizer, loss, batch, "tensor")
    found = [trainer.step(trainer.shard(batch)).item()]
    for plan in ("data", "tensor"):
        trainer.switch(plan)
        kept += [sum(p.sum() for p in model.parameters())] if keep else []  # type: ignore[list-item]
        found.append(trainer.step(trainer.shard(batch)).item())
    trainer.close()
    return found


def test_a_graph_that_is_kept_does_not_fix_the_shapes_of_gradients() -> None:
    assert run(2, with_graphs_kept, True) == run(2, with_graphs_kept, False)


def alone() -> list[str]:
    """The plan after each switch of one device, and what is told or raised."""
    trainer, _ = start("lstm", "single")
    said = []
    for plan in (
        "hybrid:tensor=2",
        "pipeline:stages=2,microbatches=2",
        "tensor",
        "data; none=data",
    ):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                trainer.switch(plan)
            except ValueError as error:
                said.append(f"error: {error}")
                continue
        said.append(f"{trainer.plan}: {''.join(str(w.message) for w in told)}")
    trainer.close()
    return said


def test_one_device_stays_as_it_is_where_a_plan_needs_more() -> None:
    degrees, stages, tensor, unknown = run(1, alone)[0]
    assert degrees.startswith("single: the plan stays single, as there is one device: ")
    assert stages.startswith("single: the plan stays single") and "has 2 stages" in stages
    assert tensor.startswith("tensor: ") and unknown.startswith("error: ")
