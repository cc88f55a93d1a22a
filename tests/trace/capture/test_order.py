"""Rows that are sorted by values and put back cross borders; rows that are not put back do not,
and stay together."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
import transformers.integrations.moe  # defines its operator
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.trace.capture.capture import trace
from tests.models import language_loss, tokens
from tests.plain import Case, all_on_ranks, apart, exact, plain

D = torch.float64


Middle = Callable[["Experts", Tensor], Tensor]


class Experts(nn.Module):
    """Tokens go from `a` through `mixture`, in an order of their values, to `c`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.mixture, self.c = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(4, 8, 8))
        self.double()

    def forward(self, x: Tensor, middle: Middle) -> Tensor:
        return self.c(middle(self, self.a(x).tanh()))  # type: ignore[no-any-return]


def chosen(m: Experts, h: Tensor) -> Tensor:
    """The expert of each row."""
    return m.mixture(h).argmax(1)  # type: ignore[no-any-return]


def computed(m: Experts, h: Tensor) -> Tensor:
    return (h @ m.weight[0]).relu()


def by_argsort(m: Experts, h: Tensor) -> Tensor:
    order = chosen(m, h).argsort()
    return computed(m, h[order])[order.argsort()]


def by_scattered_places(m: Experts, h: Tensor) -> Tensor:
    order = chosen(m, h).sort().indices
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return computed(m, h.index_select(0, order))[inverse]


def by_assignment(m: Experts, h: Tensor) -> Tensor:
    order = m.mixture(h)[:, 0].argsort(descending=True)
    made = torch.zeros_like(h)
    made[order] = computed(m, h[order])
    return made


def best_two(m: Experts, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row twice, by expert: what is computed, its weights and its order."""
    weights, ids = m.mixture(h).softmax(1).topk(2)
    order = ids.flatten().argsort(stable=True)
    return computed(m, h[order // 2]), weights.flatten()[order][:, None], order


def by_adding(m: Experts, h: Tensor) -> Tensor:
    made, weights, order = best_two(m, h)
    return torch.zeros_like(h).index_add(0, order // 2, made * weights)


def by_view(m: Experts, h: Tensor) -> Tensor:
    made, weights, order = best_two(m, h)
    return (made * weights)[order.argsort()].view(-1, 2, 8).sum(1)


def in_groups(m: Experts, h: Tensor, ids: Any = None) -> Tensor:
    """Each row by the weight of its expert, as `transformers` computes it."""
    ids, order = chosen(m, h).sort()
    ends = torch.histc(ids.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
    made = torch.ops.transformers.grouped_mm_fallback(h[order], m.weight, ends)
    return made[order.argsort()]  # type: ignore[no-any-return]


UNDONE: dict[str, Middle] = {
    "argsort": by_argsort, "scattered places": by_scattered_places, "assignment": by_assignment,
    "adding": by_adding, "view": by_view, "groups": in_groups,
}  # fmt: skip


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=g, dtype=D), torch.randint(0, 4, (rows,), generator=g)


def loss(model: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(model(b[0]), b[1])


BATCHES = [batch(n, i) for i, n in enumerate((6, 7, 1))]


def through(middle: Middle) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, b: F.cross_entropy(model(b[0], middle), b[1])


def case(middle: Middle) -> Case:
    return Case(Experts, through(middle), BATCHES)


def agree(cases: list[tuple[Case, str]]) -> list[list[str]]:
    """Asserts that each case is exact on two ranks; what was said of each."""
    of_ranks = all_on_ranks(cases, ranks=2)
    for outcomes in of_ranks:
        for (given, plan), found in zip(cases, outcomes, strict=True):
            assert not found.opaque, found.opaque
            assert apart(found, plain(given)) <= 1e-10, (plan, found.losses)
    return [found.warned for found in of_ranks[0]]


def test_rows_that_are_put_back_cross() -> None:
    plans = ("data", "data; c=tensor", "tensor; a=data", "tensor")
    cases = [(case(by_argsort), plan) for plan in plans]
    cases += [(case(middle), "data") for middle in UNDONE.values()]
    assert not any(agree(cases))


@pytest.mark.parametrize("name", UNDONE)
def test_an_order_that_is_undone_is_proved_so(name: str) -> None:
    step = trace(Experts(), through(UNDONE[name]), BATCHES[0], training=True)
    assert step.chain.names == ("a", "mixture", "c"), step.reason
    assert not step.coupled and not step.merged and not step.doubt


def sorted_rows(m: Experts, h: Tensor) -> Tensor:
    return computed(m, h[chosen(m, h).argsort()])


def of_the_next(m: Experts, h: Tensor) -> Tensor:
    order = chosen(m, h).argsort()
    return computed(m, h[order].roll(1, 0))[order.argsort()]


def by_their_places(m: Experts, h: Tensor) -> Tensor:
    order = m.mixture(h)[:, 0].argsort()
    return computed(m, h[order] * order[:, None])[order.argsort()]


def by_their_rank(m: Experts, h: Tensor) -> Tensor:
    return computed(m, h * m.mixture(h)[:, 0].argsort().argsort()[:, None])


def in_another_order(m: Experts, h: Tensor) -> Tensor:
    order = m.mixture(h)[:, 0].argsort()
    return computed(m, h[order])[m.mixture(h)[:, 1].argsort().argsort()]


def twice(m: Experts, h: Tensor) -> Tensor:
    order = m.mixture(h)[:, 0].argsort()
    return computed(m, h[order])[order]


def in_order_and_not(m: Experts, h: Tensor) -> Tensor:
    order = m.mixture(h)[:, 0].argsort()
    return computed(m, h[order] + h)[order.argsort()]


def summed_along(m: Experts, h: Tensor) -> Tensor:
    order = m.mixture(h)[:, 0].argsort()
    return computed(m, h[order].cumsum(0))[order.argsort()]


def against_the_least(m: Experts, h: Tensor) -> Tensor:
    return computed(m, h - m.mixture(h)[:, 0].sort().values[0])


def in_groups_of_others(m: Experts, h: Tensor) -> Tensor:
    """The groups end where other ids say."""
    order = chosen(m, h).argsort()
    others = m.mixture(h).argmin(1).sort().values
    ends = torch.histc(others.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
    made = torch.ops.transformers.grouped_mm_fallback(h[order], m.weight, ends)
    return made[order.argsort()]  # type: ignore[no-any-return]


def within_capacity(m: Experts, h: Tensor) -> Tensor:
    """Of each expert's rows the first alone is computed."""
    ids = F.one_hot(chosen(m, h), 4)
    place = (ids.cumsum(0) * ids).sum(1, keepdim=True)
    return computed(m, h * (place <= 1))


KEPT: dict[str, Middle] = {
    f.__name__: f
    for f in (
        sorted_rows, of_the_next, by_their_places, by_their_rank, in_another_order, twice,
        in_order_and_not, summed_along, against_the_least, in_groups_of_others, within_capacity,
    )
}  # fmt: skip


def test_rows_that_are_not_put_back_stay_together() -> None:
    cases = [(case(middle), "data") for middle in KEPT.values()]
    for name, warned in zip(KEPT, agree(cases), strict=True):
        assert any("rows depend on each other" in text for text in warned), (name, warned)


def test_rows_that_are_not_put_back_do_not_cross() -> None:
    step = trace(Experts(), through(sorted_rows), BATCHES[0], training=True)
    assert step.chain.names == ("a", "mixture")  # with what reads them
    assert "mixture and c has rows" in step.merged


@pytest.mark.parametrize("products", ["grouped_mm", "batched_mm"])
def test_a_mixture_of_experts_is_cut_into_its_layers(products: str) -> None:
    config = hf.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, use_cache=False,
        experts_implementation=products,
    )  # fmt: skip
    step = trace(hf.MixtralForCausalLM(config), language_loss, tokens(64)(4), training=True)
    assert len(step.chain.components) == 6 and not step.coupled, (step.reason, step.coupled)


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
