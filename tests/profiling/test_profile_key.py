"""The key of a profile: each thing that its numbers depend on changes them."""

from typing import Any

import pytest
import torch
from torch import nn

from synchromesh.engine.groups import World
from synchromesh.planner.problem import PartitionCache, PlanningProblem
from synchromesh.profiling import profile_key as module
from synchromesh.profiling.live_facts import LiveFacts
from synchromesh.profiling.profile_key import of_optimizer, of_rank, of_ranks, profile_key
from synchromesh.programs.model import Model
from synchromesh.trace.capture.capture import trace

CPU = torch.device("cpu")


def facts(rows: int = 8, optimizer: Any = torch.optim.SGD, **changed: Any) -> LiveFacts:
    """Of two linear layers."""
    width, dtype = changed.get("width", 8), changed.get("dtype", torch.float32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4)).to(dtype)
    model[0].weight.requires_grad_(not changed.get("frozen", False))
    batch = torch.randn(rows, 4, dtype=dtype)
    if changed.get("strided"):
        batch = torch.randn(4, rows, dtype=dtype).T
    step = trace(
        model, lambda m, b: m(b).square().mean(), batch, training=True,
        autocast=changed.get("autocast"),
    )  # fmt: skip
    made = optimizer(model.parameters(), lr=0.1)
    partitions = PartitionCache(PlanningProblem(step, rows, 1))
    return LiveFacts(World.open(CPU), partitions, Model(model), batch, made)


def found(about: LiveFacts | None = None, ranks: tuple[int, ...] = (0,)) -> dict[str, Any]:
    return profile_key(about or facts(), ranks)


def test_equal_keys_are_equal_and_say_what_they_are() -> None:
    first = found()
    assert first == found() and first["rows"] == 8 and first["hosts"] == [0]
    (rank,) = first["ranks"]
    assert rank["device"] and rank["torch"] == torch.__version__ and rank["threads"] == 1
    assert "place" not in rank, "another night's host may be as good"


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": 9}, {"optimizer": torch.optim.AdamW}, {"width": 16}, {"dtype": torch.float64},
        {"frozen": True}, {"strided": True}, {"dtype": torch.bfloat16},
        {"autocast": torch.bfloat16},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_measured_counts(changed: dict[str, Any]) -> None:
    assert found(facts(**changed)) != found()


def test_which_ranks_take_part_counts() -> None:
    assert found(ranks=()) != found()


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (torch, "__version__", "9.9"), (torch, "get_num_threads", lambda: 64),
        (module, "processor", lambda: "another"), (module, "cores", lambda: 0.4),
        (module.platform, "python_version", lambda: "9.9"),
        (module, "VERSION", "9.9"),
    ],
)  # fmt: skip
def test_what_it_is_measured_on_counts(
    where: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = of_rank(CPU)
    monkeypatch.setattr(where, name, value)
    assert of_rank(CPU) != before


def test_emulated_hosts_are_no_real_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNCHROMESH_LAB", raising=False)
    before = of_rank(CPU)
    monkeypatch.setenv("SYNCHROMESH_LAB", "/run/lab.yaml")
    assert of_rank(CPU) != before


def row(place: str, device: str = "cpu") -> dict[str, Any]:
    return {"device": device, "place": place}


def test_how_ranks_lie_on_hosts_counts_and_not_which_these_are() -> None:
    ranks = (0, 1, 2, 3)
    pairs = of_ranks([row("a"), row("a"), row("b"), row("b")], ranks)
    assert pairs["hosts"] == [0, 0, 1, 1]
    assert pairs == of_ranks([row("x"), row("x"), row("y"), row("y")], ranks)
    assert pairs != of_ranks([row("a"), row("b"), row("a"), row("b")], ranks)
    assert pairs != of_ranks([row("a")] * 4, ranks)
    assert pairs != of_ranks([row("a"), row("a"), row("b"), row("b", "H100")], ranks)
    assert of_ranks([row("a")] * 2, (0, 1)) != of_ranks([row("a")] * 4, (0, 1))


def test_settings_of_an_optimizer_count_as_far_as_they_cost() -> None:
    parameter = nn.Parameter(torch.ones(3))

    def settings(**changed: Any) -> dict[str, Any]:
        return of_optimizer(torch.optim.SGD([parameter], **{"lr": 0.1, **changed}))

    assert settings() == settings(lr=0.2), "the learning rate does not"
    assert settings(momentum=0.9) == settings(momentum=0.8) != settings()
    assert settings(foreach=True) != settings()
    scheduled = torch.optim.SGD([parameter], lr=0.1)
    torch.optim.lr_scheduler.LinearLR(scheduled)
    assert of_optimizer(scheduled) == settings(), "nor a schedule"
