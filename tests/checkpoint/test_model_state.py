"""Where a model's tensors come from and lie: the meta device, weights on disk, ranks that
differ.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synchromesh.checkpoint.initial import initial_values, refuse_uninitialised
from synchromesh.checkpoint.model_state import checksum
from synchromesh.programs.model import Model
from synchromesh.training.prepare import prepare
from synchromesh.verify.verify import parameter_bytes
from tests.models import FAMILIES
from tests.ranks import run
from tests.traces import shared

CPU = torch.device("cpu")
TOKEN_FAMILIES = ("llama", "bert")


def built(family: str, device: str = "cpu", seed: int = 0) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(seed)
    with torch.device(device):
        model, loss, make = FAMILIES[family](seed)
    return model.double(), loss, make


def test_checksums_tell_tensors_apart() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert checksum(x) == checksum(x.clone()) != checksum(x.t().contiguous())
    assert checksum(x.t()) == checksum(x.t().contiguous())
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(2.0))
    assert checksum(torch.empty(0)) == checksum(torch.empty(3, device="meta")) == 0
    assert checksum(torch.ones(3, dtype=torch.bfloat16)) != 0


@pytest.mark.parametrize(
    "family", ["bert", "gpt2", "llama", "t5", "resnet", "swin", "unet", "lstm"]
)
def test_a_model_on_the_meta_device_initialises_itself(family: str) -> None:
    """Every tensor is filled; those that no chance decides have the value of an ordinary model."""
    usual, _, _ = built(family)
    meta, _, _ = built(family, "meta")
    assert all(p.is_meta for p in meta.parameters())
    values = dict(initial_values(Model(meta), 3, CPU))
    assert all(p.is_meta for p in meta.parameters()), "the model itself stays as it was"
    again = dict(initial_values(Model(meta), 3, CPU))
    known = Model(usual)
    assert values.keys() == known.described.keys()
    for name, value in values.items():
        there = known.local(name).detach()
        assert value.shape == there.shape and value.dtype == there.dtype
        assert torch.equal(value, again[name]), "equal seeds, equal values"
        if name in known.buffers or (there.numel() and there.min() == there.max()):
            assert torch.equal(value, there), name
        elif there.numel() > 50:  # drawn from the same distribution, more or less
            assert 0.5 < float(value.std() / there.std()) < 2.0, name
            assert not torch.equal(value, there)


class Bare(nn.Module):
    """A parameter that nothing initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Rotary(nn.Module):
    """A buffer that the constructor computes, which state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", 1.0 / torch.arange(1, 4.0), persistent=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inverse * self.mask  # type: ignore[operator]


class Filled(Rotary):
    """The same with an initialiser, whose values another module's must not change."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.inverse = 1.0 / torch.arange(1, 4.0, device=self.inverse.device)  # type: ignore[arg-type]
            self.mask.fill_(True)  # type: ignore[operator]


class Table(nn.Module):
    """A tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = 1.0 / torch.arange(1, 4.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 3), kind())


def test_a_tensor_that_nothing_initialises_is_named() -> None:
    model = Model(on_meta(Bare))
    named = r"1\.scale of 1 \(Bare\): .* reset_parameters.*weights="
    with pytest.raises(ValueError, match=named):
        dict(initial_values(model, 0, CPU))
    with pytest.raises(ValueError, match=named):
        refuse_uninitialised(model, CPU)
    refuse_uninitialised(model, CPU, without=["1.scale"])
    with pytest.raises(ValueError, match=r"1\.inverse of 1 .*1\.mask of 1 .* weights do"):
        refuse_uninitialised(Model(on_meta(Rotary)), CPU)
    refuse_uninitialised(Model(on_meta(Filled)), CPU)


@pytest.mark.parametrize("family", TOKEN_FAMILIES)
def test_models_that_initialise_themselves_are_not_refused(family: str) -> None:
    model, _, _ = built(family, "meta")
    refuse_uninitialised(Model(model), CPU)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers())), "it is as it was"


@pytest.mark.parametrize(("kind", "named"), [(Bare, r"1\.scale"), (Table, r"1\.table: tensors")])
def test_it_is_named_before_anything_is_measured(kind: type[nn.Module], named: str) -> None:
    model, said = on_meta(kind), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def squares(m: nn.Module, batch: Tensor) -> Tensor:
        return m(batch).square().mean()  # type: ignore[no-any-return]

    with (
        warnings.catch_warnings(),
        pytest.raises(ValueError, match=named),
    ):
        warnings.filterwarnings("ignore", "the model runs whole")
        prepare(model, optimizer, squares, torch.ones(4, 2), "single", say=said.append)
    assert not any("measur" in text for text in said)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


def test_weights_that_a_recurrent_module_refers_to_come_into_being() -> None:
    model, rows = on_meta(Recurrent), torch.ones(4, 5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = prepare(model, optimizer, lambda m, b: m(b).square().mean(), rows)
    first, second = (float(trainer.step(rows)) for _ in range(2))
    trainer.close()
    assert 0 < second < first
    referred = [weight() for weight in model[1].lstm._flat_weight_refs]
    assert all(w is p for w, p in zip(referred, model[1].parameters(), strict=True))


def test_what_has_values_keeps_them_where_the_rest_is_initialised() -> None:
    torch.manual_seed(0)
    known = nn.Linear(2, 3)
    model = nn.Sequential(known, on_meta(Filled)[1])
    weight = known.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = prepare(model, optimizer, lambda m, b: m(b).square().mean(), torch.ones(4, 2))
    state = trainer.state_dict()
    assert torch.equal(state["0.weight"], weight) and state["1.mask"].all()
    expected = known(torch.ones(4, 2)).detach() / torch.arange(1, 4.0)
    assert float(trainer.step(torch.ones(4, 2))) == pytest.approx(float(expected.square().mean()))
    trainer.close()


def trained(
    family: str, plan: str, start: str, folder: str
) -> tuple[list[float], dict[str, Tensor], int, int]:
    """Losses, weights, and bytes of parameters here and in all, of two steps."""
    model, loss, make = built(family, "cpu" if start == "usual" else "meta")
    if start == "usual":
        model.load_state_dict(torch.load(f"{folder}/{family}.pt"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    example = make(8, dtype=torch.float64)
    weights = None if start == "usual" else f"{folder}/{family}.{start}"
    trainer = prepare(model, optimizer, loss, example, plan, weights=weights)
    losses = [float(trainer.step(trainer.shard(make(8, i, torch.float64)))) for i in (1, 2)]
    held = [p for p in model.parameters()]
    assert not any(t.is_meta for t in (*held, *model.buffers()))
    here = sum(p.untyped_storage().nbytes() for p in held)
    state = trainer.state_dict()
    trainer.close()
    return losses, state, here, parameter_bytes(trainer)


def write(family: str, folder: str) -> None:
    """Weights of a model as state_dict, safetensors and checkpoint."""
    model, loss, make = built(family, seed=5)
    torch.save(model.state_dict(), f"{folder}/{family}.pt")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = prepare(model, optimizer, loss, make(8, dtype=torch.float64))
    trainer.export(f"{folder}/{family}.safetensors")
    trainer.save(f"{folder}/{family}.checkpoint")
    trainer.close()


@pytest.mark.parametrize("family", TOKEN_FAMILIES)
def test_a_meta_model_from_weights_trains_like_one_that_was_loaded(
    family: str, tmp_path: Path
) -> None:
    model, loss, make = built(family)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    with (
        shared(
            family, built(family, "meta")[0], loss, make(8, dtype=torch.float64), "tensor", ranks=2
        ),
        shared(family, model, loss, make(8, dtype=torch.float64), "tensor", ranks=2),
    ):
        run(1, write, family, str(tmp_path))
        usual = run(2, trained, family, "tensor", "usual", str(tmp_path))
        answers = [
            run(2, trained, family, "tensor", start, str(tmp_path))
            for start in ("safetensors", "checkpoint")
        ]
    for answer in answers:
        for got, expected in zip(answer, usual, strict=True):
            assert got[0] == expected[0]
            assert all(torch.equal(got[1][n], t) for n, t in expected[1].items())
            # what a rank holds is its pieces and nothing behind them
            assert got[2] == got[3] < 0.65 * whole


def started(plan: str) -> tuple[float, dict[str, Tensor]]:
    model, loss, make = built("llama", "meta")
    trainer = prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss,
        make(8, dtype=torch.float64),
        plan,
    )
    state = trainer.state_dict()
    value = float(trainer.step(trainer.shard(make(8, 1, torch.float64))))
    trainer.close()
    return value, state


def test_initial_values_are_the_same_under_every_plan() -> None:
    model, loss, make = built("llama", "meta")
    with shared("llama", model, loss, make(8, dtype=torch.float64), "data"):
        (value, state), *others = [
            *run(1, started, "data"),
            *run(2, started, "tensor"),
            *run(2, started, "data"),
        ]
    for other, there in others:
        assert other == pytest.approx(value, rel=1e-6)  # rotary tables are float32
        assert all(torch.equal(t, there[n]) for n, t in state.items())


def other_weights(plan: str, moments: bool) -> tuple[int, dict[str, Tensor], list[float]]:
    """Ranks begin with weights of their own; one tensor is alike everywhere."""
    rank = torch.distributed.get_rank()
    model, loss, make = built("cnn", seed=rank)
    with torch.no_grad():
        model.hidden.weight.fill_(0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if moments:  # state that exists before prepare
        torch.manual_seed(rank)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.zero_grad()
    trainer = prepare(model, optimizer, loss, make(8, dtype=torch.float64), plan)
    differing = len(trainer.state.firsts)
    losses = [float(trainer.step(trainer.shard(make(8, i, torch.float64)))) for i in (1, 2)]
    state = trainer.state_dict()
    trainer.close()
    return differing, state, losses


@pytest.mark.parametrize("moments", [False, True])
def test_rank_0s_weights_and_optimizer_state_count(moments: bool) -> None:
    model, loss, make = built("cnn")
    with shared("cnn", model, loss, make(8, dtype=torch.float64), "data"):
        ((_, state, losses),) = run(1, other_weights, "data", moments)
        answers = [a for p in ("data", "tensor") for a in run(2, other_weights, p, moments)]
    for left, there, found in answers:
        assert left == 0, "what differed is settled"
        assert found == pytest.approx(losses, rel=1e-12)
        assert all(torch.allclose(t, there[n], rtol=1e-10) for n, t in state.items())


def moved_first() -> int:
    """Bytes that this rank sent to make two models alike that differ in one bias."""
    model, loss, make = built("cnn")
    if torch.distributed.get_rank():
        with torch.no_grad():
            model.hidden.bias.add_(1.0)
    trainer = prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss, make(8, dtype=torch.float64),
        "data",
    )  # fmt: skip
    sent = trainer.world.ledger.payload["send", 2]
    trainer.close()
    return sent


def test_only_what_differs_is_sent() -> None:
    model, loss, make = built("cnn")
    with shared("cnn", model, loss, make(8, dtype=torch.float64), "data"):
        assert run(2, moved_first) == [32 * 8, 0]


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.3}),
    "fused adagrad": (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
}


def from_meta(name: str, plan: str, meta: bool) -> list[float]:
    """The first steps with an optimizer that makes its state when it is made."""
    model, loss, make = built("cnn", "meta" if meta else "cpu")
    if not meta:
        values = dict(initial_values(Model(built("cnn", "meta")[0]), 3, CPU))
        model.load_state_dict(values)
    kind, settings = OPTIMIZERS[name]
    optimizer = kind([{"params": [p], "lr": 0.05 + i / 50} for i, p in
                      enumerate(model.parameters())], **settings)  # fmt: skip
    trainer = prepare(model, optimizer, loss, make(8, dtype=torch.float64), plan, seed=3)
    batches = [trainer.shard(make(8, i, torch.float64)) for i in range(3)]
    losses = [float(trainer.step(b)) for b in batches]
    trainer.close()
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_an_optimizer_makes_at_first_leaves_the_meta_device(name: str) -> None:
    model, loss, make = built("cnn")
    example = make(8, dtype=torch.float64)
    with (
        shared("cnn", model, loss, example, "data"),
        shared("cnn", built("cnn", "meta")[0], loss, example, "data"),
    ):
        (expected,) = run(1, from_meta, name, "data", False)
        answers = run(1, from_meta, name, "data", True)
        for plan in ("data", "tensor"):
            answers += run(2, from_meta, name, plan, True)
    for losses in answers:
        assert losses == pytest.approx(expected, rel=1e-9)


class Peculiar(torch.optim.Adagrad):
    """Cannot be made of its groups' settings alone."""

    def __init__(self, parameters: Any, secret: object) -> None:
        super().__init__(parameters)


def test_an_optimizer_whose_first_state_is_not_known_is_named() -> None:
    model, loss, make = built("cnn", "meta")
    optimizer = Peculiar(model.parameters(), object())
    with pytest.raises(ValueError, match="Peculiar made its state while the model was"):
        prepare(model, optimizer, loss, make(8, dtype=torch.float64), "data")


def gone_back(folder: str, plan: str) -> tuple[list[float], list[float]]:
    """The first steps, and once more after what was saved before them is resumed."""
    model, loss, make = built("cnn")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trainer = prepare(model, optimizer, loss, make(8, dtype=torch.float64), plan)
    trainer.save(folder)
    batches = [trainer.shard(make(8, i, torch.float64)) for i in range(3)]
    first = [float(trainer.step(b)) for b in batches]
    trainer.resume(folder)
    assert not optimizer.state and trainer.steps == 0
    again = [float(trainer.step(b)) for b in batches]
    trainer.close()
    return first, again


@pytest.mark.parametrize(("ranks", "plan"), [(1, "data"), (2, "tensor")])
def test_a_start_can_be_resumed_after_steps(ranks: int, plan: str, tmp_path: Path) -> None:
    model, loss, make = built("cnn")
    with shared("cnn", model, loss, make(8, dtype=torch.float64), plan):
        for first, again in run(ranks, gone_back, str(tmp_path / "start"), plan):
            assert again == first
