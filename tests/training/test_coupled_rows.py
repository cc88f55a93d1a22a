"""Losses that couple rows, CLIP's and SimCLR's, train as in one process under every plan."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.training.prepare import prepare
from tests.plain import Case, exact, plain, sgd
from tests.profiling.hurried import hurried
from tests.ranks import run
from tests.traces import remembered, shared

D = torch.float64
SIZES = (8, 7, 8, 3)  # rows of batches: on four ranks 7 do not divide, and of 3 one has none


def clip() -> nn.Module:
    torch.manual_seed(0)
    tower = {
        "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }  # fmt: skip
    config = hf.CLIPConfig(
        text_config={
            **tower, "vocab_size": 40, "max_position_embeddings": 6, "bos_token_id": 0,
            "eos_token_id": 2,
        },
        vision_config={**tower, "image_size": 8, "patch_size": 4},
        projection_dim=16,
    )  # fmt: skip
    model: nn.Module = hf.CLIPModel(config).double()
    return model


def pairs(rows: int, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, 40, (rows, 6), generator=g),
        "pixel_values": torch.randn(rows, 3, 8, 8, generator=g, dtype=D),
    }


def clip_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, return_loss=True).loss  # type: ignore[no-any-return]


class SimCLR(nn.Module):
    """An encoder of two views; `centred` couples rows in its middle as well."""

    def __init__(self, centred: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16))
        self.middle, self.projector = nn.Linear(16, 16), nn.Linear(16, 8)
        self.centred = centred
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.encoder(x))
        h = h - h.mean(0) if self.centred else h
        return self.projector(h.tanh())  # type: ignore[no-any-return]


def views(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=g, dtype=D)
    return x, x + 0.1 * torch.randn(rows, 6, generator=g, dtype=D)


def nt_xent(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """SimCLR's loss: each view is told from all others of the batch, itself left out."""
    first, second = model(batch[0]), model(batch[1])
    z = F.normalize(torch.cat([first, second]), dim=1)
    rows, device = first.shape[0], z.device
    itself = torch.eye(2 * rows, dtype=torch.bool, device=device)
    likeness = (z @ z.t() / 0.5).masked_fill(itself, -1e9)
    other = torch.cat([torch.arange(rows) + rows, torch.arange(rows)])
    return F.cross_entropy(likeness, other)


CASES = {
    "clip": Case(clip, clip_loss, [pairs(n, i) for i, n in enumerate(SIZES)]),
    "simclr": Case(SimCLR, nt_xent, [views(n, i) for i, n in enumerate(SIZES)]),
}


def told(warned: list[str]) -> list[str]:
    return [text for text in warned if "rows depend on each other" in text]


@pytest.mark.wide(4)
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("data", 2), ("data", 4), ("hybrid:tensor=2", 4), ("tensor", 2),
        ("data; @rows=4,2,1,1", 4), ("data; @pieces=2", 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_a_contrastive_loss_is_that_of_one_process(name: str, plan: str, ranks: int) -> None:
    case = CASES[name]
    found = exact(case, plan, ranks)
    assert all(not outcome.opaque for outcome in found)
    said = told(found[0].warned)
    assert not told(found[1].warned) and len(said) == (plan != "tensor")
    for text in said:
        assert "makes a value of rows x rows" in text and f"each of the {ranks} ranks" in text
        assert f"up to {ranks} times the computation" in text and "of inputs to gather" in text


@pytest.mark.slow
def test_a_contrastive_loss_under_a_plan_that_is_found() -> None:
    name = "simclr"
    case = CASES[name]
    expected = plain(case).losses
    with hurried(), shared(name, case.build(), case.loss, case.batches[0], "auto"):
        for losses, layouts in run(4, chosen, name, timeout=110):
            assert losses == pytest.approx(expected, rel=1e-10)
            assert layouts[-1].startswith("1x")  # where the loss is


def chosen(name: str) -> tuple[list[float], list[str]]:
    case = CASES[name]
    model = case.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = prepare(model, sgd(model), case.loss, case.batches[0], "auto")
    losses = [trainer.step(trainer.shard(batch)).item() for batch in case.batches]
    layouts = [str(c.layout) for c in trainer.partition.components]
    trainer.close()
    return losses, layouts


# Rows that are coupled elsewhere than in the loss


def test_rows_that_are_coupled_within_the_model_stay_together_there_alone() -> None:
    case = Case(lambda: SimCLR(centred=True), nt_xent, CASES["simclr"].batches)
    found = exact(case, "data", 4)
    (text,) = told(found[0].warned)
    assert "of middle, " in text and "encoder" not in text.partition("computes all rows")[2]


class Joined(nn.Module):
    """The largest of the rows goes through a parameter of `a` to rows in `b`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        most = self.a(x.amax(0))
        return self.c(self.b(self.a(x).tanh()) + most)  # type: ignore[no-any-return]


@pytest.mark.parametrize("plan", ["data", "data; a=tensor", "tensor; c=data"])
def test_what_rows_were_reduced_to_is_of_all_rows_where_it_is_made_too(plan: str) -> None:
    batches = [views(n, i)[:1] for i, n in enumerate(SIZES)]
    case = Case(Joined, lambda m, b: m(b[0]).square().mean(), batches)
    found = exact(case, plan, 4)
    assert len(told(found[0].warned)) == (plan != "tensor; c=data")


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 8).double()


def at_once(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    z = F.normalize(model(torch.cat(batch)), dim=1)
    return (z @ z.t()).logsumexp(1).mean() - (z * z.roll(len(batch[0]), 0)).sum(1).mean()


def test_a_model_of_one_component_is_not_divided_at_all() -> None:
    case = Case(linear, at_once, CASES["simclr"].batches)
    found = exact(case, "data; @rows=3,1", 2)
    (text,) = told(found[0].warned)
    assert "all rows of every component" in text and "gather" not in text
    assert any("@rows=3,1 is left aside" in text for text in found[0].warned)


# Micro-batches, optimizers


def accumulated(micro_batches: int) -> tuple[str, dict[str, Tensor]]:
    case = CASES["simclr"]
    model = case.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = prepare(model, sgd(model), case.loss, case.batches[0], "data")
    refusal = ""
    try:
        trainer.step(trainer.shard(case.batches[0]), micro_batches)
    except ValueError as error:
        refusal = str(error)
    with pytest.raises(ValueError, match="micro_batches=3 would part rows"):
        trainer.switch("data; @micro_batches=3")
    trainer.backward(trainer.shard(case.batches[0]), last=False)
    trainer.backward(trainer.shard(case.batches[1]))
    trainer.update()
    state = trainer.state_dict()
    trainer.close()
    return refusal, state


def test_micro_batches_are_refused_and_batches_accumulate() -> None:
    case = CASES["simclr"]
    model = case.build()
    optimizer = sgd(model)
    sizes = [len(batch[0]) for batch in case.batches[:2]]
    losses = [n * case.loss(model, batch) for n, batch in zip(sizes, case.batches, strict=False)]
    (sum(losses) / sum(sizes)).backward()
    optimizer.step()
    with shared("simclr", case.build(), case.loss, case.batches[0], "data"):
        answers = run(2, accumulated, 2)
    for refusal, state in answers:
        assert "micro_batches=2 would part rows" in refusal and "rows x rows" in refusal
        for name, tensor in model.state_dict().items():
            assert torch.allclose(state[name], tensor, rtol=1e-10, atol=1e-12)


def test_an_optimizer_that_cannot_update_shards_has_complete_parameters() -> None:
    case = CASES["simclr"]
    whole = Case(
        case.build, case.loss, case.batches, lambda m: torch.optim.Adafactor(m.parameters())
    )
    exact(whole, "data", 2)


# Metrics


def retrieved(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """How many rows are the nearest of their other view, and a sum over pairs of rows."""
    near = F.normalize(model(batch[0]), dim=1) @ F.normalize(model(batch[1]), dim=1).t()
    return {"top": (near.argmax(1) == torch.arange(near.shape[0])).sum(), "all": near.sum()}


@contextmanager
def metric_too(loss: Any) -> Iterator[None]:
    """Inside, ranks take one trace of SimCLR's step with `loss` and of the metric."""
    example = views(SIZES[0], 0)
    remembered("simclr", SimCLR(), retrieved, example, training=False)
    with shared("simclr", SimCLR(), loss, example, "data"):
        yield


def plain_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1].sum(1, keepdim=True)).square().mean()


def evaluated(plan: str, contrastive: bool) -> dict[str, float] | str:
    model = SimCLR()
    batches = [views(n, i) for i, n in enumerate(SIZES)]
    loss = nt_xent if contrastive else plain_loss
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = prepare(model, sgd(model), loss, batches[0], plan)
    try:
        return trainer.evaluate([trainer.shard(batch) for batch in batches], retrieved)
    except ValueError as error:
        return str(error)
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("plan", "contrastive"), [("data", True), ("hybrid:tensor=2", True), ("data", False)]
)
def test_a_metric_of_pairs_of_rows_is_of_all_pairs(plan: str, contrastive: bool) -> None:
    model = SimCLR()
    sums = [retrieved(model, views(n, i)) for i, n in enumerate(SIZES)]
    expected = {n: sum(float(s[n].detach()) for s in sums) / sum(SIZES) for n in ("top", "all")}
    with metric_too(nt_xent if contrastive else plain_loss):
        answers = run(4, evaluated, plan, contrastive)
    for found in answers:
        assert found == pytest.approx(expected, rel=1e-10)


def test_a_metric_that_shards_would_have_to_move_for_is_refused() -> None:
    with metric_too(plain_loss):
        answers = run(4, evaluated, "hybrid:tensor=2", False)
    for found in answers:
        assert "another trace of the model uses it" in found and "rows x rows" in found
