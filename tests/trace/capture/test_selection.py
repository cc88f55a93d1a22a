"""Losses over chosen tokens, as masked language models are written: traced, and those of one
process; what needs the number of tokens is not traced, and warned of."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.trace.capture.capture import trace
from synchromesh.trace.capture.comparison import compare
from tests.plain import Case, all_on_ranks, apart, exact, plain

D = torch.float64
LENGTH, WORDS = 4, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.a = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS)
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.table(x)).tanh()  # type: ignore[no-any-return]


def batch(rows: int, seed: int) -> dict[str, Tensor]:
    """Of the example, which is the first one, every token is chosen; of others none of the rows at
    the end."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 10, (rows, LENGTH), generator=g)
    y = torch.randint(0, WORDS, (rows, LENGTH), generator=g)
    keep = torch.rand(rows, LENGTH, generator=g) < (0.5 if seed else 2)
    if seed:
        keep[rows // 2 :] = False
    target = y.masked_fill(~keep, -100)
    return {"x": x, "y": y, "t": target, "keep": keep, "some": keep.any(1), "z": x.to(D) / 10}


Form = Callable[[Net, Tensor, Any], Tensor]  # the model, its activations and the batch


def logits(m: Net, h: Tensor) -> Tensor:
    return m.head(h)  # type: ignore[no-any-return]


def each(m: Net, h: Tensor, b: Any) -> Tensor:
    return F.cross_entropy(m.head(h).transpose(1, 2), b.y, reduction="none")


def of_their_number(m: Net, h: Tensor, b: Any) -> Tensor:
    found = each(m, h, b)[b.keep]
    return found.sum() / found.numel()


def of_their_length(m: Net, h: Tensor, b: Any) -> Tensor:
    found = each(m, h, b)[b.keep]
    return found.sum() / max(len(found), 1)


def accuracy_beside(m: Net, h: Tensor, b: Any) -> Tensor:
    right = m.head(h)[b.keep].argmax(-1) == b.y[b.keep]
    return F.cross_entropy(m.head(h)[b.keep], b.y[b.keep]) - right.to(D).mean()


def gated(m: Net, h: Tensor, b: Any) -> Tensor:
    first, second = m.head(h)[b.keep][:, :4].chunk(2, -1)
    return (first.sigmoid() * second).square().sum(-1).mean()


def without_gradient(m: Net, h: Tensor, b: Any) -> Tensor:
    with torch.no_grad():
        teacher = h[b.keep].softmax(-1)
    return -(teacher * h[b.keep].log_softmax(-1)).sum(-1).mean()


WEIGHT = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0], dtype=D)
FORMS: dict[str, Form] = {
    "chosen": lambda m, h, b: F.cross_entropy(logits(m, h)[b.keep], b.y[b.keep]),
    "labelled": lambda m, h, b: F.cross_entropy(logits(m, h)[b.t != -100], b.t[b.t != -100]),
    "flat": lambda m, h, b: F.cross_entropy(
        logits(m, h).view(-1, WORDS)[b.keep.view(-1)], b.y.view(-1)[b.keep.view(-1)]
    ),
    "viewed": lambda m, h, b: F.cross_entropy(
        logits(m, h)[b.keep].view(-1, WORDS), b.y[b.keep].view(-1)
    ),
    "before the head": lambda m, h, b: F.cross_entropy(m.head(h[b.keep]), b.y[b.keep]),
    "select": lambda m, h, b: each(m, h, b).masked_select(b.keep).mean(),
    "mean": lambda m, h, b: each(m, h, b)[b.keep].mean(),
    "number": of_their_number,
    "length": of_their_length,
    "item": lambda m, h, b: F.cross_entropy(
        logits(m, h).flatten(0, 1), b.t.flatten(), reduction="sum") / b.keep.sum().item(),
    "sum of the mask": lambda m, h, b: each(m, h, b)[b.keep].sum() / b.keep.sum(),
    "distance": lambda m, h, b: F.mse_loss(h[b.keep][:, 0], b.z[b.keep]),
    "likelihood": lambda m, h, b: F.nll_loss(m.head(h[b.keep]).log_softmax(1), b.y[b.keep]),
    "gather": lambda m, h, b: -m.head(h[b.keep]).log_softmax(-1).gather(
        1, b.t[b.keep][:, None]).mean(),
    "rows": lambda m, h, b: F.cross_entropy(logits(m, h).mean(1)[b.some], b.y[:, 0][b.some]),
    "weights": lambda m, h, b: F.cross_entropy(
        logits(m, h)[b.keep], b.y[b.keep], weight=WEIGHT, label_smoothing=0.1),
    "ignored as well": lambda m, h, b: F.cross_entropy(
        logits(m, h)[b.keep], b.y[b.keep], ignore_index=2),
    "probability": lambda m, h, b: -logits(m, h).softmax(-1)[..., 0][b.keep].log().mean(),
    "divergence": lambda m, h, b: F.kl_div(
        h[b.keep].log_softmax(-1), h.detach().flip(-1)[b.keep].softmax(-1), reduction="batchmean"),
    "accuracy": accuracy_beside,
    "gated": gated,
    "without gradient": without_gradient,
    "two choices": lambda m, h, b: F.cross_entropy(logits(m, h)[b.keep], b.y[b.keep])
    + F.cross_entropy(logits(m, h).mean(1)[b.some], b.y[:, 0][b.some]),
    "beside a mean": lambda m, h, b: F.cross_entropy(logits(m, h)[b.keep], b.y[b.keep])
    + h.square().mean(),
}  # fmt: skip


def of_batch(form: Form) -> Any:
    return lambda m, b: form(m, m(b["x"]), SimpleNamespace(**b))


BATCHES = [batch(n, i) for i, n in enumerate((8, 7, 6))]
CASES = {name: Case(Net, of_batch(form), BATCHES) for name, form in FORMS.items()}


@pytest.mark.wide(8)
@pytest.mark.parametrize("name", FORMS)
def test_a_loss_over_chosen_tokens_is_traced(name: str) -> None:
    model, loss = Net(), CASES[name].loss
    step = trace(model, loss, BATCHES[0], training=True)
    assert not step.opaque and not step.coupled and not step.doubt, (step.reason, step.coupled)
    assert compare(model, loss, batch(8, 3), step).fault is None


@pytest.mark.wide(1)
@pytest.mark.parametrize(("plan", "parts"), [("data", 1), ("tensor", 1), ("data", 2)])
def test_it_is_that_of_one_process(plan: str, parts: int) -> None:
    """Whichever rows of a data rank or of a micro-batch have a chosen token."""
    cases = [replace(case, micro_batches=parts) for case in CASES.values()]
    expected = [plain(case) for case in CASES.values()]
    for of_rank in all_on_ranks([(case, plan) for case in cases], 2):
        for name, found, wanted in zip(FORMS, of_rank, expected, strict=True):
            assert apart(found, wanted) <= 1e-10, (name, found.losses, wanted.losses)
            assert not found.opaque and not found.warned, (name, found.opaque, found.warned)


LEFT: dict[str, Form] = {  # that need the chosen tokens themselves
    "the largest": lambda m, h, b: h[b.keep].max(),
    "along them": lambda m, h, b: h[b.keep].cumsum(0).mean(),
    "normalised": lambda m, h, b: m.norm(h[b.keep]).square()[:, 0].mean(),
    "their first": lambda m, h, b: h[b.keep][0].sum(),
    "places": lambda m, h, b: F.cross_entropy(
        logits(m, h)[torch.where(b.keep)], b.y[torch.where(b.keep)]),
    "chosen twice": lambda m, h, b: h[b.keep][b.z[b.keep] > 0.3].mean(),
    "two masks": lambda m, h, b: (h[b.keep] * h[b.keep & (b.y >= 0)]).mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_needs_the_tokens_themselves_is_not_traced(name: str) -> None:
    step = trace(Net(), of_batch(LEFT[name]), BATCHES[0], training=True)
    assert step.opaque


def test_such_a_loss_is_warned_of_where_rows_are_divided() -> None:
    case = Case(Net, of_batch(LEFT["places"]), BATCHES[:1])
    told = exact(case, "tensor", 2)[0].warned
    assert not any("may be another one" in text for text in told)
    for plan, parts in (("data", 1), ("single", 2)):
        (told,) = all_on_ranks([(replace(case, micro_batches=parts), plan)], 2)[0]
        assert any("may be another one" in t and "(sum, weight)" in t for t in told.warned), plan


def pair(m: Net, b: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    at = torch.where(b["keep"])
    return F.cross_entropy(m.head(m(b["x"]))[at], b["y"][at], reduction="sum"), b["keep"].sum()


def test_a_pair_of_such_a_model_is_exact() -> None:
    for parts in (1, 2):
        for outcome in exact(Case(Net, pair, BATCHES, micro_batches=parts), "data", 2):
            assert outcome.opaque
            assert not any("may be another one" in text for text in outcome.warned)


def test_numbers_that_are_not_finite_among_the_others_reach_nothing() -> None:
    def loss(m: Net, b: dict[str, Tensor]) -> Tensor:
        return -(b["z"] * m(b["x"])[..., 0].exp())[b["keep"]].log().mean()

    first, second = batch(6, 0), batch(6, 1)
    second["z"] = second["z"].masked_fill(~second["keep"], -1.0)
    exact(Case(Net, loss, [first, second | {"z": second["z"] + 0.1}]), "data", 2)


def autocast_loss(m: Net, b: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(m.head(m(b["x"])[b["keep"]]), b["y"][b["keep"]])


def test_under_autocast_types_are_those_of_the_model() -> None:
    model = Net().float()
    step = trace(model, autocast_loss, BATCHES[1], training=True, autocast=torch.bfloat16)
    assert not step.opaque, step.reason
    assert compare(model, autocast_loss, BATCHES[1], step, torch.bfloat16).fault is None
