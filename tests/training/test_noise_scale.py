"""The gradient noise scale under every kind of plan: against what each row's gradient says, and
against the gradients of the same blocks in a plain loop; training itself stays as it is."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.engine import noise_scale
from synchromesh.engine.noise_averages import NoiseScale
from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from tests.plain import Case, adamw, traced
from tests.ranks import run

D = torch.float64
ROWS, BATCH, STEPS = 1024, 64, 200
CLASSES, IGNORED = 8, 3
Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it costs in steps that take a millisecond is of no interest here."""
    monkeypatch.setattr(
        noise_scale, "MEASURING", replace(noise_scale.MEASURING, share=float("inf"))
    )


def build() -> nn.Module:
    torch.manual_seed(1)
    first = nn.Sequential(nn.Linear(16, 12), nn.Tanh())
    return nn.Sequential(first, nn.Linear(12, CLASSES)).double()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def samples(count: int = ROWS) -> Batch:
    g = torch.Generator().manual_seed(count)
    x = torch.randn(count, 16, generator=g, dtype=D)
    return x + 0.7, x[:, :CLASSES].argmax(1) % 4


def fixed(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def gradient(model: Any, batch: Batch, of: Any = loss) -> Tensor:
    gradients = torch.autograd.grad(of(model, batch), [*model.parameters()])
    return torch.cat([g.flatten() for g in gradients])


def exact() -> NoiseScale:
    """From the gradient of each row."""
    model, (x, y) = build(), samples()
    of_rows = torch.stack([gradient(model, (x[i : i + 1], y[i : i + 1])) for i in range(ROWS)])
    whole = gradient(model, (x, y))
    squared, trace = float(whole @ whole), float((of_rows - whole).square().sum() / (ROWS - 1))
    return NoiseScale(trace / squared, squared_gradient=squared, trace=trace)


def measured(plan: str, micro_batches: int = 1, by_hand: int = 1) -> NoiseScale:
    """After 200 steps at one point. by_hand: backward calls of each of them."""
    model, (x, y) = build(), samples()
    example = x[:BATCH], y[:BATCH]
    trainer = prepare(model, fixed(model), loss, example, plan, noise_scale=True)
    loader = trainer.loader([*zip(x, y, strict=True)], BATCH // by_hand, shuffle=True)
    calls = 0
    while trainer.steps <= STEPS:  # what a step has measured is known with the next one
        for batch in loader:
            calls += 1
            if by_hand == 1:
                trainer.step(batch, micro_batches)
            else:
                trainer.backward(batch, last=not calls % by_hand)
                if not calls % by_hand:
                    trainer.update()
            if trainer.steps > STEPS:
                break
    known = trainer.noise_scale
    trainer.close()
    assert known is not None and known.steps == STEPS
    return known


def several(plans: Sequence[str]) -> list[NoiseScale]:
    return [measured(plan) for plan in plans]


TWO_BLOCKS = ("data", "data:states=parameters")
STAGES = "pipeline:stages=2,microbatches=4"
DIVIDED = f"{STAGES}; @schedule=zero-bubble"  # gradients come apart from their backward


def near(a: NoiseScale, b: NoiseScale, limit: float) -> bool:
    pairs = (a.value, b.value), (a.squared_gradient, b.squared_gradient), (a.trace, b.trace)
    return all(x is not None and x == pytest.approx(y, rel=limit) for x, y in pairs)


@pytest.mark.slow
def test_it_is_that_of_the_gradients_of_all_rows() -> None:
    example = samples(BATCH)
    two_ranks = (*TWO_BLOCKS, STAGES, DIVIDED)
    with traced(*((Case(build, loss, [example]), plan) for plan in two_ranks), ranks=2):
        first, other = run(2, several, two_ranks, timeout=120.0)
    assert first == other  # on all ranks
    four_ranks = run(4, measured, "hybrid:tensor=2")[0]
    alone, by_hand = [measured("single", n) for n in (2, 4)], measured("single", by_hand=2)
    true = exact()
    for of_plan in (*first, four_ranks, *alone, by_hand):
        assert near(of_plan, true, 0.05) and of_plan.measured_share == 1 and not of_plan.reason
        assert of_plan.low is not None and of_plan.high is not None and true.value is not None
        assert of_plan.low < true.value < of_plan.high
    for of_plan in (*first[:2], four_ranks):  # they see the same blocks
        assert near(of_plan, alone[0], 1e-9)
    assert near(first[2], alone[1], 1e-9) and near(first[3], alone[1], 1e-9)


# One step, against the same blocks in a plain loop


def branching(model: nn.Module, batch: Batch) -> Tensor:
    """A loss that runs untraced."""
    value = loss(model, batch)
    return value * 2 if value.item() > 1e9 else value


def of_pair(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Rows of class 3 do not count."""
    total = F.cross_entropy(model(batch[0]), batch[1], ignore_index=IGNORED, reduction="sum")
    return total, (batch[1] != IGNORED).sum().to(D)


class Tied(nn.Module):
    """Two layers with one weight, and biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def tied() -> nn.Module:
    torch.manual_seed(1)
    return Tied().double()


def one_step(make: Callable[[], nn.Module], of: Any, plan: str, rows: int) -> NoiseScale:
    model, example = make(), samples(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if of is branching else "error")
        trainer = prepare(model, fixed(model), of, example, plan, noise_scale=True)
    for count in (rows, 8):
        trainer.step(trainer.shard(samples(count)))
    known = trainer.noise_scale
    trainer.close()
    assert known is not None and known.steps == 1
    return known


def of_blocks(
    model: nn.Module, of: Any, rows: int, blocks: Sequence[int], names: Sequence[str] = ()
) -> tuple[float, float]:
    """|G|^2 and tr S of the parameters `names` (none: of all), in float64. blocks: the rows of
    each, in the order of the batch."""
    x, y = samples(rows)

    def summed(part: Batch) -> tuple[Tensor, float]:
        """The gradient of the loss's sum, and its weight."""
        value = of(model, part)
        total, weight = value if isinstance(value, tuple) else (value * len(part[0]), len(part[0]))
        named = [p for n, p in model.named_parameters() if not names or n in names]
        made = torch.autograd.grad(total, named)
        return torch.cat([g.flatten() for g in made]), float(weight)

    whole, weight = summed((x, y))
    g = whole / weight
    parts = zip(x.split(list(blocks)), y.split(list(blocks)), strict=True)
    between = sum(
        n * (rows / n * summed(part)[0] / weight - g).square().sum()
        for n, part in zip(blocks, parts, strict=True)
    )
    trace = float(between) / (len(blocks) - 1)  # as of a mean over groups of n rows
    return float(g @ g) - trace / rows, trace


@pytest.mark.parametrize(
    ("plan", "rows", "of", "blocks"),
    [
        ("data", 7, loss, [4, 3]),
        ("data", 7, of_pair, [4, 3]),
        ("data", 7, branching, [4, 3]),
        ("data; @micro_batches=2", 7, of_pair, [2, 2, 2, 1]),
        ("data:states=parameters; @micro_batches=2", 3, loss, [1, 1, 1]),  # and one without rows
        ("tensor; @micro_batches=3", 7, loss, [3, 2, 2]),
    ],
)
def test_blocks_of_unequal_sizes(plan: str, rows: int, of: Any, blocks: list[int]) -> None:
    with traced((Case(build, of, [samples(8)]), plan), ranks=2):
        found = run(2, one_step, build, of, plan, rows)[0]
    squared, trace = of_blocks(build(), of, rows, blocks)
    assert found.squared_gradient == pytest.approx(squared, rel=1e-9)
    assert found.trace == pytest.approx(trace, rel=1e-9) and found.measured_share == 1


def idle() -> NoiseScale | None:
    model = build()
    plan = "single; @micro_batches=2"
    trainer = prepare(model, fixed(model), loss, samples(8), plan, noise_scale=True)
    for _ in range(12):
        trainer.step(trainer.shard(samples(8)))
    known = trainer.noise_scale
    trainer.close()
    return known


def test_an_idle_rank_knows_what_the_others_have_measured() -> None:
    first, other = run(2, idle)
    assert first == other and first.steps == 11
    squared, trace = of_blocks(build(), loss, 8, [4, 4])
    assert first.squared_gradient == pytest.approx(squared, rel=1e-9)
    assert first.trace == pytest.approx(trace, rel=1e-9)


def test_a_parameter_of_several_layouts_is_left_out() -> None:
    plan = "data; second=tensor; @micro_batches=2"
    with traced((Case(tied, loss, [samples(8)]), plan), ranks=2):
        found = run(2, one_step, tied, loss, plan, 8)[0]
    first = of_blocks(tied(), loss, 8, [2, 2, 2, 2], ["first.bias"])
    second = of_blocks(tied(), loss, 8, [4, 4], ["second.bias"])  # every rank has all rows
    assert found.measured_share == pytest.approx(32 / (32 + 256))
    assert found.squared_gradient == pytest.approx(first[0] + second[0], rel=1e-9)
    assert found.trace == pytest.approx(first[1] + second[1], rel=1e-9)


# Training stays as it is


def build32() -> nn.Module:
    return build().float()


def samples32(rows: int) -> Batch:
    x, y = samples(rows)
    return x.float(), y


def trained(plan: str, noise_scale: bool, autocast: torch.dtype | None) -> list[Tensor]:
    """Losses, norms and this rank's parameters."""
    model, batches = build32(), [*map(samples32, (8, 7, 3, 8))]
    trainer = prepare(
        model, adamw(model), loss, batches[0], plan, noise_scale=noise_scale, autocast=autocast
    )
    made: list[Tensor] = []
    for batch in batches:
        made.append(trainer.backward(trainer.shard(batch)))
        made.append(trainer.clip(0.1))
        trainer.update()
    made += [p.clone() for p in trainer.parameters().values()]
    assert noise_scale == (trainer.noise_scale is not None)
    trainer.close()
    return made


def both(plans: Sequence[str], autocast: torch.dtype | None) -> bool:
    equal = True
    for plan in plans:
        off, on = trained(plan, False, autocast), trained(plan, True, autocast)
        equal &= len(on) == len(off) and all(map(torch.equal, on, off))
    return equal


def test_training_is_the_same_to_the_last_bit() -> None:
    plans = ("data", "data:states=parameters; @micro_batches=2", STAGES)
    with traced(*((Case(build32, loss, [samples32(8)]), plan) for plan in plans), ranks=2):
        assert run(2, both, plans, None) == [True, True]
    assert run(2, both, plans[:1], torch.bfloat16) == [True, True]


# What cannot be measured


def test_one_block_says_what_to_do() -> None:
    model = build()
    trainer = prepare(model, fixed(model), loss, samples(8), "single", noise_scale=True)
    assert trainer.noise_scale == NoiseScale(reason="no step has been measured yet")
    for _ in range(2):
        trainer.step(samples(8))
    known = trainer.noise_scale
    assert known is not None and known.value is None and known.steps == 0
    assert "two data ranks, or add @micro_batches=2" in known.reason
    trainer.switch("single; @micro_batches=2")
    for _ in range(2):
        trainer.step(samples(8))
    known = trainer.noise_scale
    trainer.close()
    assert known is not None and known.steps == 1 and "10 measured steps, and 1" in known.reason


def pairwise(model: nn.Module, batch: Batch) -> Tensor:
    """Tells each row's result from those of the others."""
    made = model(batch[0])
    return F.cross_entropy(made @ made.T, torch.arange(len(made)))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)).double()


@pytest.mark.parametrize(
    ("make", "of", "options", "why"),
    [
        (
            build,
            pairwise,
            {},
            "rows depend on each other (.*rows x rows.*), so that no block of them",
        ),
        (normed, loss, {"sync_batch_norm": True}, ".*batch norm is synchronised"),
        (build, {"a": loss, "b": loss}, {}, "losses take turns"),
    ],
)
def test_rows_that_depend_on_each_other_are_refused(
    make: Callable[[], nn.Module], of: Any, options: dict[str, Any], why: str
) -> None:
    model = make()
    with pytest.raises(ValueError, match=f"noise scale cannot be measured: {why}"):
        prepare(model, fixed(model), of, samples(8), "single", noise_scale=True, **options)


def asked_apart() -> str:
    model = build()
    apart = torch.distributed.get_rank() == 1
    try:
        prepare(model, fixed(model), loss, samples(8), "data", noise_scale=apart)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_are_asked_for_different_things() -> None:
    assert all("whether the noise scale is measured" in text for text in run(2, asked_apart))


@pytest.mark.parametrize("plan", ["single; @micro_batches=2", "single; @micro_batches=4"])
def test_averages_go_on_in_a_resumed_run(plan: str, tmp_path: Path) -> None:
    """In more micro-batches too: what is averaged is of the same parameters."""
    x, y = samples()

    def begun(plan: str, noise_scale: bool = True) -> Trainer:
        model = build()
        example = x[:BATCH], y[:BATCH]
        return prepare(model, fixed(model), loss, example, plan, noise_scale=noise_scale)

    first = begun("single; @micro_batches=2")
    for start in range(0, 12 * BATCH, BATCH):
        first.step((x[start : start + BATCH], y[start : start + BATCH]))
    first.save(tmp_path / "saved")
    known = first.noise_scale
    first.close()
    later = begun(plan)
    later.resume(tmp_path / "saved")
    assert known is not None and known.low is not None and later.noise_scale == known
    for _ in range(3):
        later.step((x[:BATCH], y[:BATCH]))
    more = later.noise_scale
    later.close()
    assert more is not None and more.steps == known.steps + 2
    other = begun("single", noise_scale=False)
    other.resume(tmp_path / "saved")
    assert other.noise_scale is None
    other.close()


def switching() -> tuple[int, int, float]:
    """Steps that count under `data`, after a switch and four steps more, and their share."""
    model, (x, y) = build(), samples()
    trainer = prepare(model, fixed(model), loss, (x[:BATCH], y[:BATCH]), "data", noise_scale=True)
    counted = []
    for plan in ("data", "data:states=parameters", "single; @micro_batches=2"):
        if str(trainer.plan) != plan:
            trainer.switch(plan)
        for start in range(0, 5 * BATCH, BATCH):
            trainer.step(trainer.shard((x[start : start + BATCH], y[start : start + BATCH])))
        known = trainer.noise_scale
        assert known is not None
        counted.append(known.steps)
    trainer.close()
    return counted[0], counted[-1], known.measured_share


def test_another_plan_that_measures_everything_too_goes_on() -> None:
    """What is known with the next step is lost with each switch."""
    assert run(2, switching)[0] == (4, 12, 1.0)
