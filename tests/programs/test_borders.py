"""Border values: what is recorded, tiled to more rows, cut for a rank, made up."""

import pytest
import torch
from torch import Tensor, nn

from synchromesh.programs.borders import StandIns, local_part, made_up, record, tiled
from synchromesh.programs.memory import LiveBytes
from synchromesh.trace.capture.capture import trace
from synchromesh.values.component import Chain, Component, Parameter, Rows
from synchromesh.values.placement import parse
from tests.models import FAMILIES, family, traced
from tests.threads import part

CPU = torch.device("cpu")


def text(letters: str) -> Tensor:
    return torch.tensor([ord(x) for x in letters])


@pytest.mark.parametrize(
    ("rows", "count", "before", "after"),
    [
        (Rows(), 7, "abc", "abcabca"),
        (Rows(), 2, "abc", "ab"),
        (Rows(inner=2), 3, "AaBb", "AaBbAa"),
        (Rows(segments=2), 3, "abAB", "abaABA"),  # as of a concatenation of two batches
        (Rows(segments=2, inner=2), 3, "AaBbXxYy", "AaBbAaXxYyXx"),
        (None, 3, "abc", "abc"),  # no rows
    ],
)
def test_rows_over_and_over(rows: Rows | None, count: int, before: str, after: str) -> None:
    assert torch.equal(tiled(text(before), rows, count), text(after))
    if rows is not None:  # the same in the middle
        wide = text(before)[:, None].repeat(1, 2)
        along = Rows(1, rows.segments, rows.inner)
        assert torch.equal(tiled(wide.t(), along, count), text(after).expand(2, -1))


@pytest.mark.parametrize("placement", ["S(0)", "S(1)", "S(1, 3)", "R", "r", "P"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_part_is_what_the_first_rank_holds(placement: str, size: int) -> None:
    whole = torch.arange(8.0 * 24).view(8, 24)
    state = parse(placement)
    mine = local_part(whole, state, size)
    assert torch.equal(mine, part(whole, state, size, 0) if state.sharded else whole)
    assert mine.shape == state.local_shape((8, 24), size)
    mine.zero_()
    assert whole[0, 1] == 1.0, "on storage of its own"


@pytest.mark.parametrize("name", ["gpt2", "unet", "resnet", "padded"])
def test_every_border_has_its_value_and_the_model_is_as_it_was(name: str) -> None:
    step, (model, _, make) = traced(name), family(name)
    held = {n: x.detach() for n, x in (*model.named_parameters(), *model.named_buffers())}
    before = {n: x.clone() for n, x in held.items()}
    batch = make(3, dtype=torch.float64)
    found = record(step, batch, held, CPU)
    assert found.keys() == {e.value.name for e in step.chain.edges}
    for edge in step.chain.edges:
        x, value = found[edge.value.name], edge.value
        shape = list(value.shape)
        if value.rows is not None:
            shape[value.rows.dim] *= 3
        assert list(x.shape) == shape and str(x.dtype) == f"torch.{value.dtype}"
        assert not x.requires_grad and x.nbytes == value.bytes(3)
        if x.is_floating_point():
            assert x.isfinite().all()
    leaves = batch.items() if isinstance(batch, dict) else enumerate(batch)
    assert all(torch.equal(found[str(key)], x) for key, x in leaves)
    assert all(torch.equal(x, before[n]) for n, x in held.items()), "effects write into copies"


def test_made_up_numbers_are_ordinary() -> None:
    def made(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return made_up(Parameter("p", (9, 9), dtype), shape, CPU, generator)

    weight = made((64, 256))
    assert weight.std() == pytest.approx(256**-0.5, rel=0.05)
    assert weight.abs().max() < 1, "values neither vanish nor grow"
    kernel = made((32, 16, 3, 3), "float64")
    assert kernel.dtype is torch.float64 and kernel.std() == pytest.approx(1 / 12, rel=0.05)
    assert made((4, 4), "bfloat16").isfinite().all()
    assert torch.equal(made((5,)), torch.ones(5)) and made(()) == 1.0  # norms: divided by
    assert torch.equal(made((3, 2), "int64"), torch.zeros(3, 2, dtype=torch.int64))
    assert made((0, 3)).shape == (0, 3) and made((3, 0)).shape == (3, 0)
    assert torch.equal(made((4, 4)), made((4, 4))) and not made((4, 4)).equal(made((4, 4), seed=1))


def test_tensors_that_are_here_stand_for_themselves() -> None:
    shapes = {"here": (4, 4), "cut": (4, 4), "meta": (4, 4), "bias": (4,)}
    parameters = {n: Parameter(n, s, "float64") for n, s in shapes.items()}
    one = Component("one", (parameters["here"], parameters["cut"]))
    other = Component("other", (parameters["here"], parameters["meta"]), (parameters["bias"],))
    here = torch.full((4, 4), 3.0, dtype=torch.float64, requires_grad=True)
    held = {
        "here": here,
        "cut": torch.zeros(2, 4, dtype=torch.float64),  # this rank's shard
        "meta": torch.empty(4, 4, dtype=torch.float64, device="meta"),
        "stranger": torch.zeros(1),
    }
    found = StandIns(Chain((one, other)), held, CPU)
    assert found.keys() == shapes.keys()
    assert found["here"].data_ptr() == here.data_ptr() and not found["here"].requires_grad
    for name in ("cut", "meta"):
        assert found[name].shape == (4, 4) and found[name].device == CPU
        assert found[name].isfinite().all() and found[name].std() > 0
    assert found.largest == 4 * 4 * 8 + 4 * 8, "meta and bias, of the other one"
    again = StandIns(Chain((one, other)), held, CPU)
    assert all(torch.equal(x, again[n]) for n, x in found.items()), "alike on all ranks"


@pytest.mark.parametrize("name", ["bert", "swin", "lstm"])
def test_a_model_that_is_nowhere_yet_gives_finite_values(name: str) -> None:
    found = record(
        traced(name), FAMILIES[name]()[2](3, dtype=torch.float64),
        StandIns(traced(name).chain, {}, CPU), CPU,
    )  # fmt: skip
    for value, x in found.items():
        assert not x.is_floating_point() or x.isfinite().all(), value


def test_what_is_made_up_is_there_for_one_component_at_a_time() -> None:
    """Of a model that nobody holds, the forward has one block's parameters alive, not all."""
    blocks, width = 6, 256
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(blocks)))

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).square().mean()

    batch = torch.ones(2, width)
    step = trace(
        model.to("meta"), loss, batch, training=True, cuts=[str(i) for i in range(blocks)]
    )
    assert len(step.chain.components) >= blocks
    with LiveBytes() as live:
        record(step, batch, StandIns(step.chain, {}, CPU), CPU)
    one = width * width * 4
    assert one <= live.peak < 3.5 * one, "a block's, and the numbers that are drawn for it"
