"""The reference: its noise floor bounds what other orders of the same operations do, for every
result that depends on parameters moves in its last place and nothing else does."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synchromesh.verify.deviation import MARGIN
from synchromesh.verify.reference import NoiseFloor, RandomRounding, SingleProcess, computed
from synchromesh.verify.verify import cast_model, global_batches
from tests.targets import target

CPU = torch.device("cpu")


def reference(family: str) -> tuple[SingleProcess, Any]:
    """The family on one process in float64, and a batch."""
    job = target(family)
    model = cast_model(job.model(), torch.float64)
    return SingleProcess(model, job, CPU), next(global_batches(job, 1, torch.float64))


def backwards(batch: Any) -> Any:
    """The batch with its rows in reverse order."""
    parts = batch.items() if isinstance(batch, dict) else enumerate(batch)
    turned = {key: x.flip(0) for key, x in parts}
    return turned if isinstance(batch, dict) else tuple(turned.values())


def in_parts(norm: Any, hidden: Tensor) -> Tensor:
    """T5's norm as a plan computes it that shards the hidden dimension over four ranks."""
    squares = hidden.to(torch.float32).pow(2)
    sums = [part.sum(-1, keepdim=True) for part in squares.chunk(4, -1)]
    variance = torch.stack(sums).sum(0) / squares.shape[-1]
    scaled: Tensor = norm.weight * (hidden * torch.rsqrt(variance + norm.variance_epsilon))
    return scaled


def excess(made: Any, values: dict[str, dict[str, Tensor]], kind: str) -> float:
    """The largest difference of `values` over the floor of its tensor."""
    largest = 0.0
    for name, x in values[kind].items():
        apart = float((x - made.values[kind][name]).abs().max())
        largest = max(largest, apart / made.floors[kind][name] if apart else 0.0)
    return largest


@pytest.mark.parametrize("family", ["mobilenet", "bert", "lstm", "experts"])
def test_rows_in_another_order_stay_within_the_margin(family: str) -> None:
    alone, batch = reference(family)
    other = copy.deepcopy(alone.model)
    made = alone.backward(batch)
    turned = computed(other, target(family).loss, [backwards(batch)])
    for kind in ("loss", "gradient"):
        assert excess(made, turned, kind) < MARGIN, kind
        assert max(made.floors[kind].values()) < 1e-12, "float64 throughout"
    assert excess(made, turned, "gradient") > 0


def test_norms_summed_in_parts_stay_within_the_margin() -> None:
    alone, batch = reference("t5")
    other = copy.deepcopy(alone.model)
    for module in other.modules():
        if type(module).__name__ == "T5LayerNorm":
            module.__dict__["forward"] = lambda hidden, norm=module: in_parts(norm, hidden)
    made = alone.backward(batch)
    turned = computed(other, target("t5").loss, [batch])
    assert 0 < excess(made, turned, "gradient") < MARGIN
    assert max(made.floors["gradient"].values()) > 1e-10, "single precision inside"


def test_a_gradient_that_cancels_has_a_floor_of_its_own_size() -> None:
    """A key's bias changes nothing in a softmax: its gradient is what rounding leaves."""
    alone, batch = reference("bert")
    made = alone.backward(batch)
    sizes = {n: float(g.abs().max()) for n, g in made.values["gradient"].items()}
    bias = next(n for n in sizes if n.endswith("key.bias"))
    floors = made.floors["gradient"]
    assert floors[bias] > 0.05 * sizes[bias]
    other = next(n for n in sizes if n.endswith("value.bias"))
    assert floors[other] < 1e-12 * sizes[other]


def tensors(**gradients: float) -> dict[str, dict[str, Tensor]]:
    return {"gradient": {n: torch.tensor([x, 0.5 * x]) for n, x in gradients.items()}}


def test_floors_are_the_most_of_all_steps_and_at_least_the_median() -> None:
    noise = NoiseFloor()
    first = noise.add(tensors(a=1.0, b=1.0, c=1.0), tensors(a=1.0, b=1.25, c=1.5))["gradient"]
    assert first == {"a": 0.25, "b": 0.25, "c": 0.5}, "a agrees by chance"
    later = noise.add(tensors(a=4.0, b=4.0, c=4.0), tensors(a=4.0, b=4.0, c=4.0))["gradient"]
    assert later == {"a": 1.0, "b": 1.0, "c": 2.0}


def test_infinities_and_whole_numbers_have_no_noise() -> None:
    x = {"buffer": {"mask": torch.tensor([-torch.inf, 2.0]), "n": torch.tensor(3)}}
    x["buffer"]["seen"] = torch.tensor([True, False])
    assert NoiseFloor().add(x, x) == {"buffer": {"mask": 0.0, "n": 0.0, "seen": 0.0}}


def test_the_optimizer_takes_the_gradients_that_it_is_given() -> None:
    alone, batch = reference("odd_mlp")
    other = copy.deepcopy(alone.model)
    made = alone.backward(batch)
    given = {n: g * 2 for n, g in made.values["gradient"].items()}
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    for name, p in other.named_parameters():
        p.grad = given[name].clone()
    optimizer.step()
    alone.update(given)
    found = alone.trained()
    for name, p in other.named_parameters():
        assert torch.equal(found.values["parameter"][name], p)
        assert 0 < found.floors["parameter"][name] < 1e-14


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(13, 5), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def test_a_parameter_without_a_gradient_stays_without_an_update() -> None:
    job = target("odd_mlp")
    alone = SingleProcess(cast_model(HalfUsed(), torch.float64), job, CPU)
    before = alone.model.get_parameter("other.weight").clone()
    made = alone.backward(next(global_batches(job, 1, torch.float64)))
    assert not made.values["gradient"]["other.weight"].any()
    alone.update(made.values["gradient"])
    assert torch.equal(alone.model.get_parameter("other.weight"), before), "not even decayed"


def test_the_reference_computes_what_it_would_alone() -> None:
    """The moved copy leaves neither buffers nor random numbers of the reference changed."""
    alone, batch = reference("mobilenet")
    plain = copy.deepcopy(alone.model)
    torch.manual_seed(1)
    made = alone.backward(batch)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))
    expected = computed(plain, target("mobilenet").loss, [batch])
    for kind in ("loss", "gradient", "buffer"):
        for name, x in expected[kind].items():
            assert torch.equal(made.values[kind][name], x), name


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_move_by_one_rounding_and_zeros_stay(dtype: torch.dtype) -> None:
    x = torch.randn(1000).to(dtype)
    x[::10] = 0
    moved = x.clone()
    RandomRounding(CPU).move_(moved)
    apart = ((moved - x).abs() / x.abs())[x != 0].double()
    eps = torch.finfo(dtype).eps
    assert apart.min() > 0 and apart.max() <= 1.5 * eps  # the product rounds, too
    larger = (moved.abs() > x.abs())[x != 0]
    assert 0.4 < larger.double().mean() < 0.6 and (moved[::10] == 0).all()


def test_the_largest_numbers_stay_finite() -> None:
    x = torch.full((50,), torch.finfo(torch.float32).min)
    x[0] = -torch.inf
    RandomRounding(CPU).move_(x)
    assert x[1:].isfinite().all() and x[0] == -torch.inf


def test_what_depends_on_no_parameter_is_left_alone() -> None:
    weight, x = nn.Parameter(torch.ones(64)), torch.rand(64)
    with RandomRounding(CPU):
        mask, product, view = x * 3, weight * x, (weight * x).view(8, 8)
        index = (weight * x).argmax()
    assert torch.equal(mask, x * 3) and not torch.equal(product, x)
    assert index.dtype is torch.int64 and view.shape == (8, 8)
    assert torch.equal(weight, torch.ones(64))


def test_a_view_moves_nothing() -> None:
    weight = nn.Parameter(torch.rand(64))
    with RandomRounding(CPU):
        views = weight.view(8, 8).t()[1:].detach()
    assert torch.equal(views, weight.view(8, 8).t()[1:])


def gradient(function: Callable[[Tensor], Tensor], seed: int | None) -> Tensor:
    weight = nn.Parameter(torch.linspace(1, 2, 64, dtype=torch.float64))
    if seed is None:
        function(weight).backward()
    else:
        with RandomRounding(CPU, seed):
            function(weight).backward()
    assert weight.grad is not None
    return weight.grad


def test_gradients_move_and_the_seed_repeats_them() -> None:
    def inverse(w: Tensor) -> Tensor:
        return (1 / w.detach() * w).sum()  # its forward has nothing to do with its gradient

    exact = gradient(inverse, None)
    first, again, other = (gradient(inverse, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert 0 < ((first - exact) / exact).abs().max() < 1e-15


def test_single_precision_inside_shows_as_that() -> None:
    def inside(dtype: torch.dtype) -> float:
        def norm(w: Tensor) -> Tensor:
            return (w * w.to(dtype).pow(2).mean().rsqrt().to(w.dtype)).pow(3).sum()

        exact = gradient(norm, None)
        return float((gradient(norm, 0) - exact).abs().max() / exact.abs().max())

    assert inside(torch.float64) < 1e-13 and 1e-9 < inside(torch.float32) < 1e-5


def test_in_place_operators_move_too() -> None:
    weight = nn.Parameter(torch.rand(64))
    with RandomRounding(CPU):
        x = weight.detach().clone().requires_grad_() * 1.0
        before = x.detach().clone()
        x.mul_(2.0)
    assert 0 < (x / before - 2).abs().max() < 1e-6


def test_a_cast_to_single_precision_rounds() -> None:
    weight = nn.Parameter(torch.rand(64, dtype=torch.float64))
    with RandomRounding(CPU):
        x = weight.to(torch.float32)
    assert (x - weight.float()).abs().max() > 1e-9


def test_what_is_chosen_or_whole_stays_exact() -> None:
    weight = nn.Parameter(torch.rand(64))
    with RandomRounding(CPU):
        x = weight * 10
        best, places = x.topk(5)
        kept = (x >= best[-1]).sum()
        counted = (x / 2).round().long()
    assert kept == 5 and torch.equal(best, x[places])
    assert torch.equal(counted, (x.detach() / 2).round().long())


def test_batch_norm_shows_what_the_order_of_its_sums_does() -> None:
    """On a CPU it adds 65,536 values one after another, and is off by far more than its last
    place: a synchronised batch norm, or one on another device, adds otherwise."""
    torch.manual_seed(0)
    x = torch.rand(16, 4, 64, 64, dtype=torch.float64) + 1
    weight = nn.Parameter(torch.ones(4, 1, 1, dtype=torch.float64))

    def run(norm: nn.Module) -> tuple[Tensor, Tensor]:
        weight.grad = None
        y = norm(x * weight)
        (y.sigmoid() * torch.linspace(0, 1, 64)).sum().backward()
        assert weight.grad is not None
        return norm.running_mean, y.detach()

    plain, moved = (nn.BatchNorm2d(4, momentum=1.0, dtype=torch.float64) for _ in range(2))
    mean, y = run(plain)
    with RandomRounding(CPU):
        other_mean, other_y = run(moved)
    off = (mean / x.mean((0, 2, 3)) - 1).abs().max()
    apart = (mean / other_mean - 1).abs().max()
    assert off > 10 * torch.finfo(torch.float64).eps and off / 3 < apart < 1e-12
    assert torch.allclose(y, other_y, rtol=0, atol=1e-11)
