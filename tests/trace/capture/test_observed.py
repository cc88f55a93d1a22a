"""Rows that are sorted by values and put back cross borders; rows that are not put back do not."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.trace.capture.capture import trace
from synchromesh.trace.capture.observed import order
from synchromesh.values.component import Rows, Value
from tests.models import language_loss, tokens
from tests.plain import Case, exact

D = torch.float64


class Mixture(nn.Module):
    """Rows go through it in an order of their values; `back`: and are put back."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.gate, self.weight = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8, 8))
        self.back = back

    def forward(self, h: Tensor) -> Tensor:
        order = (h @ self.gate).argsort()
        made = (h[order] @ self.weight).relu()
        return made[order.argsort()] if self.back else made


class Experts(nn.Module):
    def __init__(self, back: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.mixture, self.c = nn.Linear(6, 8), Mixture(back), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.mixture(self.a(x).tanh()))  # type: ignore[no-any-return]


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=g, dtype=D), torch.randint(0, 4, (rows,), generator=g)


def loss(model: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(model(b[0]), b[1])


@pytest.mark.parametrize("plan", ["data", "data; c=tensor", "tensor; a=data", "tensor"])
def test_rows_that_are_put_back_cross(plan: str) -> None:
    batches = [batch(n, i) for i, n in enumerate((6, 7, 1))]
    found = exact(Case(lambda: Experts(True), loss, batches), plan, 2)
    assert not found[0].opaque and not found[0].warned


def test_rows_that_are_not_put_back_do_not() -> None:
    step = trace(Experts(False), loss, batch(6, 0), training=True)
    assert step.chain.names == ("a", "mixture")  # with what reads them
    assert "mixture and c has rows" in step.merged


def test_a_mixture_of_experts_is_cut_into_its_layers() -> None:
    config = hf.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    step = trace(hf.MixtralForCausalLM(config), language_loss, tokens(64)(4), training=True)
    assert len(step.chain.components) == 6, step.reason


def test_an_order_is_that_of_every_block() -> None:
    rows = torch.arange(7.0)
    value = Value("v", (2,), "float32", Rows(0, 1, 2), False)

    def seen(make: Any) -> Rows | None:
        blocks = [rows, rows[:3], rows[3:], rows[5:6]]
        return order([make(block) for block in blocks], value, 1e-6)

    assert seen(lambda x: torch.cat([x, -x])) == Rows(0, 2, 1)
    assert seen(lambda x: x.repeat_interleave(2)) == Rows(0, 1, 2)
    assert seen(lambda x: torch.cat([x, x.flip(0)])) is None
    assert seen(lambda x: torch.cat([x, x + x.sum()])) is None


def test_components_that_scattered_rows_pass_between_are_one() -> None:
    """Under plans that divide no rows such a model is cut as ever, but for these."""

    class Rolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x)).tanh() * self.a(x).roll(1, 0))  # type: ignore[no-any-return]

    found = exact(Case(Rolled, loss, [batch(6, i) for i in range(3)]), "tensor", 2)
    assert not found[0].opaque and not found[0].warned
    (told,) = exact(Case(Rolled, loss, [batch(6, i) for i in range(3)]), "data", 2)[0].warned
    assert "roll along dimension 0" in told and "computes all rows of" in told


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_decoders_with_caches_are_cut_into_their_layers(name: str) -> None:
    """A cache begins as an empty tensor, to which keys are added."""
    common = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0}
    if name == "llama":
        config: Any = hf.LlamaConfig(intermediate_size=32, num_attention_heads=2, **common)
        model: Any = hf.LlamaForCausalLM(config)
    elif name == "gpt2":
        model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2))
    else:
        config = hf.T5Config(vocab_size=50, d_model=16, d_ff=32, d_kv=8, num_layers=2, num_heads=2)
        config.decoder_start_token_id = 0
        model = hf.T5ForConditionalGeneration(config)

    def own_loss(model: Any, b: Tensor) -> Tensor:
        return model(input_ids=b, labels=b).loss  # type: ignore[no-any-return]

    step = trace(model.train(), own_loss, torch.randint(1, 50, (4, 12)), training=True)
    components = {"llama": 6, "gpt2": 7, "t5": 13}[name]
    assert not step.opaque and len(step.chain.components) == components and step.targets
