"""What a loss reports beside itself: under every plan as in one process."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.trace.capture.capture import trace
from synchromesh.trace.step import Report
from synchromesh.training.prepare import prepare
from tests.plain import Case, traced
from tests.ranks import run

D = torch.float64
IGNORED = 3
Reported = dict[str, float]


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 4))
    return model.double()


def batch(rows: int, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 6, generator=g, dtype=D),
        "y": torch.randint(0, 4, (rows,), generator=g),
        "w": torch.rand(rows, generator=g, dtype=D),
    }


def loss(model: Any, b: dict[str, Tensor]) -> Any:
    hidden = model[0](b["x"])
    scores = model[1](hidden)
    value = F.cross_entropy(scores, b["y"], ignore_index=IGNORED)
    each = F.cross_entropy(scores, b["y"], reduction="none")
    return value, {
        "loss": value,  # a mean over targets
        "right": (scores.argmax(1) == b["y"]).double().mean(),
        "count": (scores.argmax(1) == b["y"]).sum(),
        "hidden": hidden.square().mean(),  # of the first component
        "weighted": (each * b["w"]).sum() / b["w"].sum(),
        "labels": b["y"].double().mean(),  # of the batch alone
        "number": 0.25,
    }


def pair(model: Any, b: dict[str, Tensor]) -> Any:
    each = F.cross_entropy(model(b["x"]), b["y"], reduction="none")
    return (each.sum(), torch.tensor(len(each), dtype=D)), {"each": each.mean()}


def rooted(model: Any, b: dict[str, Tensor]) -> Any:
    value = F.mse_loss(model(b["x"]), b["x"][:, :4])
    return value, {"root": value.sqrt()}


def coupled(model: Any, b: dict[str, Tensor]) -> Any:
    scores = model(b["x"])
    return scores.square().mean(), {"spread": (scores - scores.mean(0)).square().mean()}


def with_item(model: Any, b: dict[str, Tensor]) -> Any:
    value = F.cross_entropy(model(b["x"]), b["y"])
    return value * (1.0 if value.detach().item() > 0 else 2.0), {"loss": value}


def other_each_time(model: Any, b: dict[str, Tensor]) -> Any:
    value = F.cross_entropy(model(b["x"]), b["y"])
    return value * (value.detach().item() > 0), {"many" if len(b["x"]) > 3 else "few": value}


BATCHES = [batch(8, 1), batch(8, 2), batch(5, 3)]


def reported(function: Callable[..., Any], plan: str, by_hand: int = 1) -> list[Reported]:
    """Of a step with each batch: the loss, and what is reported."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = prepare(model, optimizer, function, BATCHES[0], plan)
    found = []
    for b in BATCHES:
        value = trainer.step(trainer.shard(b), by_hand)
        found.append({"": float(value), **trainer.reports})
        assert trainer.reports == trainer.reports.latest and trainer.reports.rows == len(b["x"])
    trainer.close()
    return found


def plain(function: Callable[..., Any]) -> list[Reported]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for b in BATCHES:
        optimizer.zero_grad()
        value, beside = function(model, b)
        value = value[0] / value[1] if isinstance(value, tuple) else value
        value.backward()
        optimizer.step()
        found.append({n: float(torch.as_tensor(v)) for n, v in {"": value.detach(), **{
            n: torch.as_tensor(v).detach() for n, v in beside.items()
        }}.items()})  # fmt: skip
    return found


def agree(found: list[Reported], wanted: list[Reported]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.keys() == b.keys()
        assert all(abs(a[n] - b[n]) < 1e-10 for n in b), (a, b)


PLANS = (
    "data", "tensor", "single", "sharded-data", "data; 0=tensor", "data; @micro_batches=2",
    "pipeline:stages=2,microbatches=2",
)  # fmt: skip


def under_all_plans() -> Any:
    return (
        {plan: reported(loss, plan) for plan in PLANS}, reported(loss, "data", 2),
        reported(pair, "data"), reported(coupled, "data"), accumulated(),
    )  # fmt: skip


def accumulated() -> tuple[list[Reported], Reported]:
    """Of each of three batches alone, and of them together."""
    model = build()
    trainer = prepare(model, torch.optim.SGD(model.parameters()), loss, BATCHES[0], "data")
    alone = []
    for i, b in enumerate(BATCHES):
        trainer.backward(trainer.shard(b), last=i == 2)
        alone.append(dict(trainer.reports.latest))
    together = dict(trainer.reports)
    trainer.update()
    assert trainer.reports == together, "they stay until the next step"
    trainer.close()
    return alone, together


def test_reports_are_those_of_one_process_under_every_plan() -> None:
    case = Case(build, loss, BATCHES)
    wanted, of_pair = plain(loss), plain(pair)
    model, beside = build(), {k: torch.cat([b[k] for b in BATCHES]) for k in BATCHES[0]}
    with torch.no_grad():
        whole = {n: float(v) for n, v in loss(model, beside)[1].items()}
        of_each = [{n: float(v) for n, v in loss(model, b)[1].items()} for b in BATCHES]
    with traced(*((case, plan) for plan in PLANS), ranks=2), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "what the loss reports as spread")
        ranks = run(2, under_all_plans, timeout=120.0)
    for by_plan, in_parts, pairs, spread, (alone, together) in ranks:
        for found in (*by_plan.values(), in_parts):
            agree(found, wanted)
        agree(pairs, of_pair)
        agree([{"": x[""]} for x in spread], [{"": x[""]} for x in plain(coupled)])
        agree(alone, of_each)
        agree([together], [whole])


def test_a_report_changes_nothing_of_how_the_model_is_trained() -> None:
    step = trace(build(), coupled, BATCHES[0], training=True)
    without = trace(build(), lambda m, b: coupled(m, b)[0], BATCHES[0], training=True)
    assert step.coupling == () and step.chain.names == without.chain.names
    assert step.reports == (Report("spread", "unknown"),)
    kinds = {r.name: r.kind for r in trace(build(), loss, BATCHES[0], training=True).reports}
    assert kinds == {
        "loss": "weighted mean", "right": "mean", "count": "sum", "hidden": "mean",
        "weighted": "weighted mean", "labels": "mean", "number": "constant",
    }  # fmt: skip


def with_warnings(function: Callable[..., Any]) -> tuple[list[Reported], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = reported(function, "data")
    return found, [str(w.message) for w in caught]


def faults() -> tuple[list[Any], str]:
    told = [with_warnings(function) for function in (rooted, with_item)]
    with pytest.raises(ValueError, match="the loss reports few, which it did not"):
        with_warnings(other_each_time)
    return told, "ended"


def test_unknown_reductions_are_told_and_untraced_models_report() -> None:
    wanted = plain(rooted), plain(with_item)
    (root, item), _ = run(2, faults)[0]
    assert any("reports as root is not seen to be a mean" in x for x in root[1])
    agree([{"": x[""]} for x in root[0]], [{"": x[""]} for x in wanted[0]])
    halves = [build()(BATCHES[0]["x"][s]) - BATCHES[0]["x"][s, :4] for s in
              (slice(0, 4), slice(4, 8))]  # fmt: skip
    mean = sum(h.square().mean().sqrt() for h in halves) / 2
    assert abs(root[0][0]["root"] - float(mean)) < 1e-10
    assert any("runs whole on every device" in x for x in item[1])
    agree(item[0], wanted[1])


def test_what_is_no_report_is_refused() -> None:
    def step(function: Callable[..., Any], training: bool = True) -> Any:
        return trace(build(), function, BATCHES[0], training=training)

    with pytest.raises(ValueError, match="x has 2 dimensions"):
        step(lambda m, b: (m(b["x"]).mean(), {"x": m(b["x"])}))
    with pytest.raises(ValueError, match="a metric reports nothing beside itself"):
        step(lambda m, b: ({"a": m(b["x"]).sum()}, {"b": m(b["x"]).sum()}), training=False)
