"""A model that is trained as its owner sees it: whole, copied, averaged, saved, or refused."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import synchromesh as sm
from synchromesh.training.trainer import Trainer
from tests.ranks import run
from tests.traces import shared

PLANS = ("data", "tensor", "sharded-data", "pipeline:stages=2,microbatches=2")


class Tied(nn.Module):
    """Two layers that share a weight, batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.second(self.norm(self.first(x)))))
        return out


def model() -> nn.Module:
    torch.manual_seed(0)
    return Tied().double()


def loss(module: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def batch(seed: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=made).double(), torch.randint(3, (8,), generator=made)


def start(module: nn.Module, plan: str) -> Trainer:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return sm.prepare(module, optimizer, loss, batch(0), plan, sync_batch_norm=True)


def fault(do: Any) -> str:
    try:
        do()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def owned(plan: str) -> dict[str, Any]:
    """What a held model gives its owner after two steps."""
    trainer = start(module := model(), plan)
    for seed in (0, 1):
        trainer.step(trainer.shard(batch(seed)))
    state = trainer.state_dict()
    cut = not trainer.model.complete()
    found: dict[str, Any] = {"cut": cut, "state": state}
    with trainer.whole() as whole:
        assert whole is module and whole.second.weight is whole.first.weight
        seen = {n: t.clone() for n, t in whole.state_dict().items()}
        found["equal"] = all(torch.equal(seen[n], t) for n, t in state.items())
        whole.train()
        value = loss(whole, batch(2))
        value.backward()
        found["value"], found["gradient"] = value.item(), whole.head.weight.grad.clone()
        found["copy"] = copy.deepcopy(whole)(batch(2)[0]).detach()
    with trainer.whole(rank=1) as one:
        found["one"] = None if one is None else one.head(torch.ones(6).double()).detach()

    def change() -> None:
        with trainer.whole() as whole, torch.no_grad():
            whole.head.bias.mul_(1.0)  # type: ignore[union-attr, operator]

    found["changed"] = fault(change)
    with trainer.whole(rank=0) as outer, trainer.whole() as inner:
        if outer is not None:
            outer.head.weight.data.zero_()  # type: ignore[union-attr, operator]
        inner.head(torch.ones(6).double())  # type: ignore[union-attr, operator]
        saved = io.BytesIO()
        torch.save(inner, saved)
        found["inside"] = fault(lambda: trainer.step(trainer.shard(batch(2))))
    found["pickled"] = fault(lambda: torch.save(module, io.BytesIO()))
    found["state_dict"] = fault(module.state_dict)
    found["part"] = fault(module.head.state_dict)  # type: ignore[operator]
    found["load"] = fault(lambda: module.load_state_dict(state))
    found["average"] = fault(lambda: AveragedModel(module))
    found["no such rank"] = fault(lambda: trainer.whole(rank=2).__enter__())
    after = trainer.state_dict()
    found["same"] = all(torch.equal(after[n], t) for n, t in state.items())
    trainer.step(trainer.shard(batch(2)))
    trainer.close()
    found["closed"] = fault(module.state_dict)
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_a_model_is_whole_inside_and_refused_outside_where_it_is_cut(plan: str) -> None:
    with shared("Tied", model(), loss, batch(0), plan):
        ranks = run(2, owned, plan)
    plain = model()
    plain.load_state_dict(ranks[0]["state"])
    value = loss(plain.train(), batch(2))
    value.backward()
    for rank, found in enumerate(ranks):
        assert found["cut"] == (plan != "data")
        assert found["equal"] and found["same"]
        assert found["value"] == pytest.approx(value.item(), rel=1e-12)
        assert torch.allclose(found["gradient"], plain.head.weight.grad, rtol=1e-10)
        assert (found["one"] is None) == (rank == 0)
        assert "was changed inside" in found["changed"] and "ranks 0 to 1" in found["no such rank"]
        assert "leave `with trainer.whole()` first" in found["inside"]
        assert "held by Synchromesh" in found["pickled"]
        for name in ("state_dict", "part", "load", "average", "closed"):
            if found["cut"] and name != "part":
                assert "cut over devices" in found[name], name
            elif not found["cut"]:
                assert not found[name], name


def averaged(plan: str, ranks: int) -> dict[str, Tensor]:
    """An exponential moving average of the weights of five steps, the plan changed between."""
    module = model()
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    trainer = start(module, plan)
    for seed in range(5):
        trainer.step(trainer.shard(batch(seed)))
        if seed == 2 and ranks > 1:
            trainer.switch("sharded-data")
        with trainer.whole() as whole:
            assert whole is not None
            average.update_parameters(whole)
    trainer.close()
    return dict(average.module.named_parameters())


def test_an_average_of_weights_is_that_of_one_process() -> None:
    alone = run(1, averaged, "single", 1)[0]
    with shared("Tied", model(), loss, batch(0), "tensor"):
        for rank in run(2, averaged, "tensor", 2):
            for name, value in alone.items():
                assert torch.allclose(rank[name], value, rtol=1e-9), name


def saved(plan: str, folder: str) -> dict[str, Tensor]:
    from transformers import BertConfig, BertForSequenceClassification

    bert = BertForSequenceClassification.from_pretrained(f"{folder}/before").train()
    assert isinstance(bert.config, BertConfig)
    words = torch.arange(40).view(4, 10) % 50

    def bert_loss(module: nn.Module, batch: Any) -> Tensor:
        out: Tensor = module(**batch).loss
        return out

    example = {"input_ids": words, "labels": torch.tensor([0, 1, 1, 0])}
    trainer = sm.prepare(
        bert, torch.optim.AdamW(bert.parameters(), lr=1e-3), bert_loss, example, plan
    )
    trainer.step(trainer.shard(example))
    with trainer.whole(rank=0) as module:
        if module is not None:
            module.save_pretrained(f"{folder}/after")  # type: ignore[operator]
    state = trainer.state_dict()
    trainer.close()
    return state


def test_a_pretrained_model_is_loaded_before_and_saved_behind_any_plan(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    kind = transformers.BertForSequenceClassification
    kind(small).save_pretrained(tmp_path / "before")
    for plan in ("tensor", "zero3"):
        state = run(2, saved, plan, str(tmp_path))[0]
        again = kind.from_pretrained(tmp_path / "after").state_dict()
        assert again.keys() == state.keys()
        assert all(torch.equal(again[n], t) for n, t in state.items())
