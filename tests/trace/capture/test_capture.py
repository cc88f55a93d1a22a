"""The traced step computes what the model computes; what cannot be traced says so."""

import copy
import random
import re
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from synchromesh.trace.capture.batch import row_count
from synchromesh.trace.capture.capture import changed, signature, trace
from synchromesh.trace.capture.comparison import compare, mean
from synchromesh.trace.capture.outputs import flat_outputs
from synchromesh.trace.capture.run import run
from synchromesh.trace.step import Step
from tests.models import FAMILIES, family, traced


def results(
    model: nn.Module, outputs: tuple[Tensor, ...]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The loss (or several metrics), and its gradients by name; a mean over targets is given as
    (sum, weight) by the trace."""
    outputs = (mean(outputs), *outputs[2:]) if len(outputs) <= 2 else outputs
    named = dict(model.named_parameters())
    live = {n: p for n, p in named.items() if p.requires_grad}
    found = torch.autograd.grad(outputs[0], list(live.values()), allow_unused=True)
    gradients = {n: g for n, g in zip(live, found, strict=True) if g is not None}
    return [o.detach() for o in outputs], gradients


def assert_same(model: nn.Module, loss: Any, step: Step, batch: Any, tolerance: float) -> None:
    """Outputs, gradients and buffers of eager and trace, relative to the largest gradient."""
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    outputs, gradients = results(model, flat_outputs(loss(model, batch))[1])
    torch.manual_seed(1)
    traced_outputs, traced_gradients = results(twin, run(step, twin, batch))
    assert gradients.keys() == traced_gradients.keys()
    for mine, theirs in zip(traced_outputs, outputs, strict=True):
        assert abs(float(mine - theirs)) <= tolerance * max(1.0, abs(float(theirs)))
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        assert float((traced_gradients[name] - gradient).abs().max()) <= tolerance * largest, name
    for (name, a), b in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.allclose(a, b, rtol=tolerance), name


EVALUATED = ["vit", "bert", "gpt2", "resnet", "unet", "lstm", "odd_mlp", "padded", "cnn"]


@pytest.mark.wide(10)
@pytest.mark.parametrize(
    ("name", "training"),
    [(name, True) for name in FAMILIES] + [(name, False) for name in EVALUATED],
)
def test_a_step_is_its_model_for_any_number_of_rows(name: str, training: bool) -> None:
    model, loss, make = family(name)
    step = traced(name, training)
    assert step.reason == "" and step.graph is not None
    step.graph.lint()
    for rows in (1, 7):
        twin = copy.deepcopy(model).train(training)
        assert_same(twin, loss, step, make(rows, seed=rows, dtype=torch.float64), 1e-12)


def test_outputs_leaves_and_shared_names() -> None:
    assert traced("padded", True).outputs == ("sum", "weight")
    assert traced("padded", True).leaves == ("x", "mask", "t")
    assert traced("vit", True).outputs == ("sum", "weight")  # a mean over targets
    assert traced("vit", True).leaves == ("0", "1")
    assert traced("gpt2", True).shared == {"lm_head.weight": "transformer.wte.weight"}
    names = {p.name for c in traced("gpt2", True).chain.components for p in c.parameters}
    assert "transformer.wte.weight" in names and "lm_head.weight" not in names


@pytest.mark.wide(1)
@pytest.mark.parametrize("name", ["vit", "llama", "padded"])
def test_autocast_is_in_the_graph_as_casts(name: str) -> None:
    model, loss, make = FAMILIES[name]()
    batch = make(5)
    step = trace(model, loss, batch, training=True, autocast=torch.bfloat16)
    assert step.reason == ""

    def under_autocast(model: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    assert_same(model.train(), under_autocast, step, make(3, seed=1), 1e-2)
    outputs = run(step, model, batch)
    plain = run(trace(model, loss, batch, training=True), model, batch)
    assert outputs[0].detach() != plain[0].detach()  # it did compute in lower precision
    assert compare(model, loss, batch, step, torch.bfloat16).fault is None


@pytest.mark.parametrize("name", ["gpt2", "cnn"])
def test_a_model_on_the_meta_device_has_the_same_step(name: str) -> None:
    with torch.device("meta"):
        model, loss, make = FAMILIES[name]()
    model.double()
    step = trace(model, loss, make(5, dtype=torch.float64), training=True)
    assert all(p.device.type == "meta" for p in model.parameters())
    assert step.chain == traced(name, True).chain
    assert step.graph is not None
    assert not any("meta" in str(n.kwargs) for n in step.graph.nodes)
    real, _, _ = family(name)
    assert_same(copy.deepcopy(real).train(), loss, step, make(3, dtype=torch.float64), 1e-12)


# -- batches -----------------------------------------------------------------------------


def test_leaves_common_to_all_rows_and_leaves_that_are_no_tensors() -> None:
    model = nn.Linear(4, 3).double()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch["x"]) * batch["options"]["scale"] * batch["options"]["factor"]
        return out.square().mean() if batch["kind"] == "square" else out.mean()

    def make(rows: int, factor: float = 2.0) -> dict[str, Any]:
        scale = torch.tensor(3.0, dtype=torch.float64)
        options = {"scale": scale, "factor": factor, "nothing": None}
        return {
            "x": torch.randn(rows, 4, dtype=torch.float64),
            "options": options,
            "kind": "square",
        }

    step = trace(model, loss, make(2), training=True)
    assert step.leaves == ("x", "options.scale")
    assert step.chain.names == ("linear",)
    assert_same(model, loss, step, make(5), 1e-12)
    assert signature(make(2)) == signature(make(5))
    assert signature(make(2)) != signature(make(2, factor=4.0))


def test_a_batch_may_be_a_tensor_and_metrics_a_dict() -> None:
    model = nn.Linear(4, 3).double()

    def metric(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        out = model(batch)
        return {"sum": out.sum(), "rows": torch.tensor(batch.shape[0]), "input": batch.sum()}

    step = trace(model, metric, torch.randn(1, 4, dtype=torch.float64), training=False)
    batch = torch.randn(9, 4, dtype=torch.float64)
    assert step.outputs == ("sum", "rows", "input") and step.leaves == ("batch",)
    expected = [model(batch).sum().item(), 9, batch.sum().item()]
    assert [x.item() for x in run(step, model, batch)] == pytest.approx(expected, rel=1e-12)


def test_signature_ignores_rows_alone() -> None:
    def of(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
        return signature({"x": torch.zeros(*shape, dtype=dtype)})

    assert of(2, 8) == of(5, 8)
    assert len({of(2, 8), of(2, 9), of(2), of(2, 8, dtype=torch.float64)}) == 4
    assert signature(torch.zeros(2)) != signature((torch.zeros(2),))


def test_what_has_changed_in_a_batch_is_named() -> None:
    x = torch.zeros(4, 3)
    first = signature({"x": [x, x], "k": 3})
    for batch, said in [
        (
            {"x": [x, x], "k": 4},
            "batch['k'] was 3, then 4: give it as a 0-d tensor, or leave it out",
        ),
        ({"x": [x, x], "k": "a"}, "batch['k'] was 3, then 'a': leave it out"),
        (
            {"x": [x, x[:, 1:]], "k": 3},
            "batch['x'][1] had rows of shape (3,), then (2,): pad to a",
        ),
        (
            {"x": [x.int(), x], "k": 3},
            "batch['x'][0] was torch.float32, then torch.int32: give it",
        ),
        ({"x": [x, x], "k": x}, "batch['k'] was 3, then torch.float32: give it in one type"),
        ({"x": [x], "k": 3}, "they were nested otherwise, or had other keys"),
    ]:
        assert changed(first, batch).startswith(said)


def test_bad_batches_and_losses_get_their_sentence() -> None:
    model = nn.Linear(4, 3)
    x = torch.randn(6, 4)
    with pytest.raises(ValueError, match=r"disagree about the number of rows \(0: 6, 1: 5\)"):
        trace(model, lambda m, b: m(b[0]).sum(), (x, x[:5]), training=True)
    with pytest.raises(ValueError, match=r"\(dict\) holds no tensor with rows"):
        trace(model, lambda m, b: m(x).sum(), {"a": 1}, training=True)
    with pytest.raises(ValueError, match=r"no rows \(0\)"):
        trace(model, lambda m, b: m(b).sum(), x[:0], training=True)
    with pytest.raises(ValueError, match=r"no module 'wight'"):
        trace(model, lambda m, b: m(b).sum(), x, training=True, cuts=["wight"])
    with pytest.raises(ValueError, match="loss has 2 dimensions: return a scalar"):
        trace(model, lambda m, b: m(b), x, training=True)
    for result in (lambda m, b: m(b).sum(), lambda m, b: (m(b).sum(), b.sum())):
        with pytest.raises(ValueError, match="a scalar or a pair, as losses do: return"):
            trace(model, result, x, training=False)
    with pytest.raises(ValueError, match=r"returned a dict \(a, b\), as metrics do: return the"):
        trace(model, lambda m, b: {"a": m(b).sum(), "b": b.sum()}, x, training=True)


@dataclass
class Pair:
    x: Tensor


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (UserDict(x=torch.ones(6, 4)), r"UserDict \(batch\) .* give dict\(batch\)"),
        ([Pair(torch.ones(6, 4))], r"Pair \(0\) .* a dict or a tuple of its tensors"),
        ({"x": torch.ones(6, 4), "w": np.ones(6)}, r"ndarray \(w\) .*torch.as_tensor"),
        ((torch.ones(6, 4), torch.eye(6).to_sparse()), r"Tensor \(1\) .* dense tensor"),
    ],
)
def test_what_hides_its_rows_is_not_taken_as_common_to_all(batch: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"the rows of {words}"):
        row_count(batch)
    assert row_count((torch.ones(6, 4), np.float64(1), SimpleNamespace(n=1), {"a": "text"})) == 6


# -- traps of tracing --------------------------------------------------------------------


class Trap(nn.Module):
    """Two linears with `middle(module, h, x)` between them."""

    def __init__(self, middle: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.constant = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.middle(self, self.first(x), x))  # type: ignore[no-any-return]


def square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


class Inside(Trap):
    """Nothing but the loss reads what the middle makes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self, self.first(x), x)  # type: ignore[no-any-return]


def no_grad(m: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.abs() + 1
    return h * scale


def in_place(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h += x
    h *= 2
    h.masked_fill_(x > 0.5, 0.1)
    return h.clamp_(max=1)


def in_place_through_views(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h[:, 0] = 3.0
    h[1:, 1:3].mul_(2)
    h[:, 3] += h[:, 1]
    return h


def copied(m: Any, h: Tensor, x: Tensor) -> Tensor:
    z = torch.zeros_like(h)
    z.copy_(x)
    z[:, 1:] = h[:, 1:]
    return h + z


def constants(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=h.dtype) + m.constant


def moving_average(m: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.mean.mul_(0.9).add_(h.mean(0) * 0.1)
    return m.norm(h) + m.mean  # type: ignore[no-any-return]


def normalised_twice(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return m.norm(m.second(m.norm(h)))  # type: ignore[no-any-return]


def sizes(m: Any, h: Tensor, x: Tensor) -> Tensor:
    rows = x.shape[0]
    return h / rows * rows**0.5 + (rows + 3) // 2 + torch.arange(rows)[:, None] % (2 * rows - 1)


def time_first(m: Any, h: Tensor, x: Tensor) -> Tensor:
    y = torch.stack([h, h, h], 0).flatten(0, 1)
    return m.second(y).view(3, -1, 4).mean(0)  # type: ignore[no-any-return]


def twice_as_many(m: Any, h: Tensor, x: Tensor) -> Tensor:
    a, b = torch.cat([h, x], 0).chunk(2, 0)
    return a * b


def noise(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return F.dropout(h + torch.randn_like(h), 0.3, training=m.training)


def casts(m: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = m.second(h.float())
    return y.to(h.dtype)  # type: ignore[no-any-return]


def pieces_in_place(m: Any, h: Tensor, x: Tensor) -> Tensor:
    values, places = h.topk(2, dim=-1)
    values /= 2
    return h + values.sum(-1, keepdim=True) + h.gather(1, places).sum(-1, keepdim=True)


def along(m: Any, h: Tensor, x: Tensor) -> Tensor:
    largest = torch.take_along_dim(h, h.topk(2, -1).indices, dim=-1)
    first = h[:, None].expand(-1, 3, -1).take_along_dim(x.argmax(1)[:, None, None] // 2, 1)
    pieces = torch.take_along_dim(h[:, None], torch.zeros(1, 1, 1, dtype=torch.long), -1)
    return h + largest.sum(-1, keepdim=True) * first[:, 0] + pieces[:, 0]


# whose result depends on where a row is in its batch: it may not cross to another component
PLACED = {in_place_through_views: "slice_scatter along dimension 0", sizes: "the number of rows"}


@pytest.mark.parametrize("middle", PLACED)
def test_what_depends_on_the_place_of_rows_stays_in_its_component(middle: Any) -> None:
    step = trace(Trap(middle), square, torch.randn(5, 4), training=True)
    assert step.chain.names == ("first",) and PLACED[middle] in step.merged
    assert "between the components first and second" in step.merged
    assert "test_capture.py:" in step.merged


@pytest.mark.parametrize(
    "middle",
    [
        along, no_grad, in_place, in_place_through_views, copied, constants, moving_average,
        normalised_twice, pieces_in_place, sizes, time_first, twice_as_many, noise, casts,
    ],
)  # fmt: skip
def test_traps(middle: Any) -> None:
    model = (Inside if middle in PLACED else Trap)(middle).double().train()
    if middle is casts:
        model.second.float()
        model.middle = lambda m, h, x: casts(m, h, x).float()
    x = torch.randn(5, 4, dtype=torch.float64)
    step = trace(model, square, x, training=True)
    assert step.reason == ""
    tolerance = 1e-2 if middle is casts else 1e-12
    assert_same(model, square, step, torch.randn(8, 4, dtype=torch.float64), tolerance)


def test_where_rows_lie() -> None:
    step = trace(Trap(time_first), square, torch.randn(5, 4), training=True)
    rows = {(e.value.rows.segments, e.value.rows.inner) for e in step.chain.edges if e.value.rows}
    assert rows == {(1, 1), (3, 1)}  # (3, rows, 4) -> (3 rows, 4) crosses from first to second

    def row_first(m: Any, h: Tensor, x: Tensor) -> Tensor:
        y = torch.stack([h, h], 1).flatten(0, 1)
        return m.second(y).view(-1, 2, 4).sum(1)  # type: ignore[no-any-return]

    step = trace(Trap(row_first), square, torch.randn(5, 4), training=True)
    rows = {(e.value.rows.segments, e.value.rows.inner) for e in step.chain.edges if e.value.rows}
    assert rows == {(1, 1), (1, 2)}


def test_constant_masks_are_folded() -> None:
    """Attention masks of transformers are computed while tracing though they say nothing."""
    sdpa = torch.ops.aten.scaled_dot_product_attention.default
    for name, mask, causal in [
        ("vit", False, False),
        ("llama", False, True),
        ("bert", True, False),
    ]:
        graph = traced(name, True).graph
        assert graph is not None
        nodes = graph.find_nodes(op="call_function", target=sdpa)
        assert len(nodes) == 2
        for node in nodes:
            given = dict(enumerate(node.args))
            assert (given.get(3) is not None, bool(given.get(5))) == (mask, causal), name


def test_frozen_and_unused_parameters() -> None:
    model = Trap(lambda m, h, x: h).double()
    model.first.weight.requires_grad_(False)
    step = trace(model, square, torch.randn(5, 4, dtype=torch.float64), training=True)
    assert_same(model, square, step, torch.randn(3, 4, dtype=torch.float64), 1e-12)
    trainable = {p.name: p.trainable for c in step.chain.components for p in c.parameters}
    assert trainable == {
        "first.weight": False,
        "first.bias": True,
        "second.weight": True,
        "second.bias": True,
    }  # the norm is not used
    assert compare(model, square, torch.randn(5, 4, dtype=torch.float64), step).fault is None


def test_training_mode_is_restored() -> None:
    model = Trap(noise)
    model.first.eval()
    trace(model, lambda m, b: {"s": square(m, b)}, torch.randn(5, 4), training=False)
    assert model.training and not model.first.training


# -- what cannot be traced ---------------------------------------------------------------


def branch(m: Any, h: Tensor, x: Tensor) -> Tensor:
    if h.sum() > 0:  # the line that the message names
        return h * 2
    return h


def select(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.unique(h).sum()


def fixed(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if x.shape[0] == 6 else h


def counted(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h / torch.tensor(float(len(x)))


def view_then_write(m: Any, h: Tensor, x: Tensor) -> Tensor:
    view = h.view(-1, 2, 2)
    h.add_(1)
    return h + view.reshape(-1, 4)


@pytest.mark.parametrize(
    ("middle", "words"),
    [
        (branch, r"test_capture\.py:{line} could not be traced \('if h.sum\(\) > 0:.*plan 'data'"),
        (select, "a size depends on values of the batch"),
        (fixed, r"rows was fixed to 6 while tracing, at .*test_capture\.py:{line} \('return"),
        (counted, r"rows was fixed to \d while tracing, at .*test_capture\.py:{line} \('return"),
        (
            view_then_write,
            r"test_capture\.py:\d+ changes a tensor in place .*view is read afterwards",
        ),
    ],
)
def test_an_untraceable_model_is_one_opaque_component(middle: Any, words: str) -> None:
    line = middle.__code__.co_firstlineno + 1
    model = Trap(middle)
    step = trace(model, square, torch.randn(5, 4), training=True)
    assert step.opaque and step.graph is None
    assert step.chain.names == ("model",) and step.chain.components[0].opaque
    assert {p.name for p in step.chain.components[0].parameters} == set(
        dict(model.named_parameters())
    )
    assert re.search(words.replace("{line}", str(line)), step.reason), step.reason


def test_a_model_that_does_not_run_is_not_told_to_be_traceable() -> None:
    """A norm for other channels than it gets, as a wrong configuration makes it."""
    model = Trap(lambda m, h, x: m.norm(h))
    model.norm = nn.BatchNorm1d(6)
    step = trace(model, square, torch.randn(5, 4), training=True)
    assert step.opaque and "traced or not" in step.reason and "6 rows" in step.reason
    assert "running_mean should contain 4 elements" in step.reason
    assert "test_capture.py" in step.reason and "torch.where" not in step.reason


# -- comparison of gradients -------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """Identity whose backward doubles the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


def compared(model: nn.Module, loss: Any = square) -> str | None:
    batch = torch.randn(5, 4)
    before = copy.deepcopy(model.state_dict())
    found = compare(model, loss, batch, trace(model, loss, batch, training=True)).fault
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(p.grad is None for p in model.parameters())
    return found


def test_equal_gradients_though_the_model_draws_random_numbers() -> None:
    assert compared(Trap(noise)) is None
    assert compared(Trap(moving_average)) is None


def test_models_that_change_what_they_are_given_are_compared_on_copies() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.mul_(2)).square().mean()  # type: ignore[no-any-return]

    model, batch = Trap(lambda m, h, x: h), torch.randn(5, 4)
    before = batch.clone()
    step = trace(model, loss, batch, training=True)
    assert compare(model, loss, batch, step).fault is None
    assert torch.equal(batch, before)


def test_infinite_losses_are_equal() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() / 0.0  # type: ignore[no-any-return]

    model = Trap(lambda m, h, x: h)
    assert compared(model, loss) is None


def test_reentrant_activation_checkpoints_are_compared_and_named() -> None:
    found = compared(Trap(lambda m, h, x: checkpoint(torch.tanh, h, use_reentrant=True)))
    assert found is not None and "that are not made with use_reentrant=False" in found
    assert compared(Trap(lambda m, h, x: checkpoint(torch.tanh, h, use_reentrant=False))) is None


def test_custom_functions_and_hooks_are_found() -> None:
    found = compared(Trap(lambda m, h, x: Doubled.apply(h)))
    assert found is not None and "the gradient of first.weight differs" in found
    assert "custom autograd.Function Doubled" in found

    model = Trap(lambda m, h, x: h)
    model.first.weight.register_hook(lambda g: 3 * g)
    found = compared(model)
    assert found is not None and "the hook on the parameter first.weight" in found

    model = Trap(lambda m, h, x: h)
    model.second.register_full_backward_hook(lambda m, i, o: (i[0] * 2,))
    found = compared(model)
    assert found is not None and "the backward hook of the module second" in found


def test_spectral_norm_and_attention_modules() -> None:
    spectral = Trap(lambda m, h, x: h)
    spectral.second = nn.utils.parametrizations.spectral_norm(spectral.second)
    assert compared(spectral) is None
    step = trace(spectral.double(), square, torch.randn(5, 4).double(), training=True)
    assert_same(spectral, square, step, torch.randn(3, 4).double(), 1e-12)

    attention = Trap(lambda m, h, x: m.attend(*[h[:, None]] * 3, need_weights=False)[0][:, 0])
    attention.attend = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    assert compared(attention) is None


def test_random_numbers_of_python_are_found() -> None:
    found = compared(Trap(lambda m, h, x: h * random.random()))
    assert found is not None and "draws random numbers outside of torch" in found


@pytest.mark.parametrize("name", ["bert", "lstm"])
def test_dropout_does_not_hide_equality(name: str) -> None:
    model, loss, make = FAMILIES[name](dropout=0.2)
    batch = make(4)
    step = trace(model, loss, batch, training=True)
    assert compare(model, loss, batch, step).fault is None


def test_the_length_of_a_tensor_is_that_of_any_batch() -> None:
    model = nn.Linear(4, 2)
    step = trace(model, lambda m, b: m(b).sum() / len(b), torch.randn(6, 4), training=True)
    assert not step.opaque, step.reason
    x = torch.randn(9, 4)
    assert torch.allclose(run(step, model, x)[0], model(x).sum() / 9)
    assert len(x) == 9 and len.__module__ == "builtins"


def with_gradient(h: Tensor) -> Tensor:
    h = h[:, None]
    h.requires_grad = True
    return h[:, 0]


@pytest.mark.parametrize("ask", [with_gradient, lambda x: x.requires_grad_()])
def test_a_forward_may_ask_for_the_gradient_of_its_input(ask: Any) -> None:
    """As speech models do for the sake of activation checkpoints: that is no parameter."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(ask(x)).square().mean()  # type: ignore[no-any-return]

    assert compared(Trap(lambda m, h, x: h), loss) is None
    scale = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match="learnable parameters of its own"):
        compared(Trap(lambda m, h, x: h), lambda m, x: (loss(m, x) * scale).sum())
