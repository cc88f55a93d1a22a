"""Known values: code may branch on tensors that neither rows nor parameters enter."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synchromesh.trace.capture.capture import trace
from synchromesh.trace.capture.comparison import compare
from synchromesh.trace.capture.known_values import digest
from synchromesh.trace.step import Step
from tests.models import TOKENS, tokens


class Causal(nn.Module):
    """PyTorch's own layers under a causal mask, which they look at to find out that it is one."""

    def __init__(self, decoder: bool, buffer: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        if decoder:
            self.body: nn.Module = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True)
        else:
            layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 40)
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
        self.register_buffer("mask", mask if buffer else None)

    def forward(self, x: Tensor) -> Tensor:
        h, mask = self.embedding(x), self.mask
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=h.dtype)
        if isinstance(self.body, nn.Transformer):
            h = self.body(h, h, src_mask=mask, tgt_mask=mask)
        else:
            h = self.body(h, mask=mask)
        return self.head(h)  # type: ignore[no-any-return]


def token_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["t"].flatten())


@pytest.mark.parametrize("decoder", [False, True])
def test_pytorchs_layers_trace_with_a_mask_made_inside(decoder: bool) -> None:
    torch.manual_seed(0)
    model = Causal(decoder).double()
    batch = tokens(40, t=40)(6)
    step = trace(model, token_loss, batch, training=True)
    assert not step.opaque, step.reason
    assert compare(model, token_loss, batch, step).fault is None
    parts = ("encoder", "decoder") if decoder else ("body",)
    assert all(any(part in name for name in step.chain.names) for part in parts)
    assert len(step.chain.names) >= 6 and not step.assumed


def test_a_mask_in_a_buffer_is_assumed_to_stay() -> None:
    model = Causal(False, buffer=True)
    batch = tokens(40, t=40)(6)
    step = trace(model, token_loss, batch, training=True)
    assert not step.opaque and step.assumed == {"mask": digest(model.mask)}
    assert compare(model, token_loss, batch, step).fault is None


class Asking(nn.Module):
    """Doubles what it has computed if `ask(module, h)` says so."""

    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3))
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(2 * h if self.ask(self, h) else h)  # type: ignore[no-any-return]


def square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def traced(ask: Any) -> tuple[Step, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, batch = Asking(ask).double(), torch.randn(6, 4, dtype=torch.float64)
    return trace(model, square, batch, training=True), model, batch


def written_in_place(m: Any, h: Tensor) -> bool:
    mask = torch.ones(3, 3)
    mask[1].fill_(0.0)
    mask.triu_()
    return bool((mask == torch.tensor([[1.0, 1, 1], [0, 0, 0], [0, 0, 1]])).all())


def as_a_number(m: Any, h: Tensor) -> bool:
    return (torch.arange(4).sum().item(), torch.ones(3).tolist()) == (6, [1.0, 1.0, 1.0])


def of_a_copy(m: Any, h: Tensor) -> bool:
    copy = m.table.clone()
    copy += 1
    return torch.equal(copy[:, 0], torch.tensor([1.0, 4.0], dtype=copy.dtype))


def without_an_effect(m: Any, h: Tensor) -> bool:
    mask = torch.ones(4)
    h = h.clone()
    h += mask  # another tensor is written to, and the mask only read
    return bool((mask == 1).all())


def of_no_chance(m: Any, h: Tensor) -> bool:
    """A layer that is dropped with probability 0, as speech models ask."""
    return not (torch.rand([]) < 0.0)


@pytest.mark.parametrize(
    "ask", [written_in_place, as_a_number, of_a_copy, without_an_effect, of_no_chance]
)
def test_answers_are_those_of_the_model(ask: Any) -> None:
    step, model, batch = traced(ask)
    assert not step.opaque, step.reason
    assert compare(model, square, batch, step).fault is None
    with torch.no_grad():
        h = model.first(batch)
        assert torch.equal(model(batch), model.second(2 * h))  # it says yes
    assert step.assumed.keys() == ({"table"} if ask is of_a_copy else set())
    assert torch.equal(model.table, torch.arange(6.0).reshape(2, 3).double())


def of_rows(m: Any, h: Tensor) -> bool:
    return bool((h > 0).all())


def of_parameters(m: Any, h: Tensor) -> bool:
    return bool((m.first.weight > 0).any())


def of_chance(m: Any, h: Tensor) -> bool:
    return bool((torch.rand(3) > 0.5).any())


def of_two_draws(m: Any, h: Tensor) -> bool:
    return bool(torch.rand([]) < torch.rand([]))


def of_a_distance(m: Any, h: Tensor) -> bool:
    return bool(((torch.rand([]) - 0.5).abs() < 0.2).all())


def after_rows_were_written(m: Any, h: Tensor) -> bool:
    mask = torch.ones(4)
    mask[1:].mul_(h.detach().mean())
    return bool((mask > 0).all())


@pytest.mark.parametrize(
    "ask",
    [of_rows, of_parameters, of_chance, of_two_draws, of_a_distance, after_rows_were_written],
)
def test_what_is_not_known_keeps_its_sentence(ask: Any) -> None:
    step, _, _ = traced(ask)
    assert step.opaque and "test_known_values.py" in step.reason


def while_warming_up(m: Any, h: Tensor) -> bool:
    early = bool((m.table < 1000).all())
    m.table.add_(1)
    return early


def test_a_branch_by_a_buffer_that_every_step_changes_is_not_followed() -> None:
    step, model, _ = traced(while_warming_up)
    assert step.opaque and "by the buffer table, which it changes" in step.reason
    assert torch.equal(model.table, torch.arange(6.0).reshape(2, 3).double())
