"""The reference: its noise floor bounds what other orders of the same operations do."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synchromesh.verify.deviation import MARGIN
from synchromesh.verify.reference import NoiseFloor, SingleProcess, computed
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
        assert excess(made, turned, kind) < MARGIN.times, kind
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
    assert 0 < excess(made, turned, "gradient") < MARGIN.times
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
