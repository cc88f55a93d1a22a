"""Losses of several terms, each with a denominator of its own, as models are trained with: under
every division of rows they are those of one process."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.trace.capture.capture import trace
from synchromesh.training.prepare import prepare
from tests.models import FAMILIES
from tests.models import traced as family_step
from tests.plain import Case, all_on_ranks, apart, plain, sgd
from tests.profiling.hurried import hurried
from tests.ranks import run

D = torch.float64
LENGTH, WORDS = 5, 4


class Net(nn.Module):
    """An encoder of tokens with heads for words, boxes and pairs of sentences."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8)
        self.words, self.boxes = nn.Linear(8, WORDS), nn.Linear(8, 3)
        self.pair = nn.Linear(8, 2)
        self.scales = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.double()

    def forward(self, x: Tensor) -> Any:
        h = self.a(x).tanh()
        k = self.b(h).tanh()
        found = SimpleNamespace(early=self.words(h), words=self.words(k), boxes=self.boxes(k))
        found.pair, found.scales = self.pair(k.mean(1)), self.scales
        return found


def batch(rows: int, seed: int) -> Any:
    """Of the example, which is the first one, nothing is ignored or masked."""
    g = torch.Generator().manual_seed(seed)
    b = {
        "x": torch.randn(rows, LENGTH, 6, generator=g, dtype=D),
        "t": torch.randint(0, WORDS, (rows, LENGTH), generator=g),
        "y": torch.randint(0, 2, (rows,), generator=g),
        "z": torch.randn(rows, LENGTH, 3, generator=g, dtype=D),
        "w": 0.5 + torch.rand(rows, generator=g, dtype=D),
        "mask": torch.ones(rows, LENGTH, dtype=D),
        "positive": torch.ones(rows, LENGTH, dtype=torch.bool),
    }
    if seed:
        place = torch.arange(rows * LENGTH).view(rows, LENGTH)
        b["t"][place % 3 == 1] = -100
        b["y"][torch.arange(rows) % 4 == 2] = -100
        b["mask"][place % 7 > 3] = 0
        b["positive"] = torch.rand(rows, LENGTH, generator=g) < 0.3
    return b


def words(o: Any, b: Any, **settings: Any) -> Tensor:
    return F.cross_entropy(o.words.flatten(0, 1), b.t.flatten(), **settings)


def pair(o: Any, b: Any) -> Tensor:
    return F.cross_entropy(o.pair, b.y)


def of_boxes(o: Any, b: Any) -> Tensor:
    return F.smooth_l1_loss(o.boxes, b.z, reduction="none").sum(-1)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


def focal(o: Any, b: Any) -> Tensor:
    p = o.words.sigmoid()
    wanted = F.one_hot(b.t.clamp(min=0), WORDS) * b.positive[..., None]
    return (-wanted * (1 - p) ** 2 * p.log() - (1 - wanted) * p**2 * (1 - p).log()).sum()


def distilled(o: Any, b: Any) -> Tensor:
    teacher = (b.z @ torch.ones(3, WORDS, dtype=D)).softmax(-1)
    return F.kl_div((o.words / 2).log_softmax(-1), teacher, reduction="none").sum(-1) * 4


def uncertain(o: Any, b: Any) -> Tensor:
    """Kendall et al. 2018 (arXiv 1705.07115): terms by learned scales."""
    first, second = words(o, b), F.mse_loss(o.boxes, b.z)
    return first * (-o.scales[0]).exp() + second * (-o.scales[1]).exp() + o.scales.sum()


def dice_of_rows(o: Any, b: Any) -> Tensor:
    p, wanted = o.words.sigmoid()[..., 0], b.positive.to(D)
    share = 2 * (p * wanted).sum(1) / (p.sum(1) + wanted.sum(1) + 1)
    return F.binary_cross_entropy(p, wanted) + (1 - share).mean()


def guarded(o: Any, b: Any) -> Tensor:
    count = b.positive.sum()
    fraction = (of_boxes(o, b) * b.positive).sum() / count
    return words(o, b) + torch.where(count > 0, fraction, torch.zeros_like(fraction))


def balanced_classes(o: Any, b: Any) -> Tensor:
    counts = F.one_hot(b.t.clamp(min=0), WORDS).sum((0, 1)) + 1
    each = F.cross_entropy(o.words.flatten(0, 1), b.t.clamp(min=0).flatten(), reduction="none")
    return (each / counts[b.t.clamp(min=0).flatten()]).sum()


def by_class(o: Any, b: Any) -> Tensor:
    member = F.one_hot(b.t.clamp(min=0), WORDS) + torch.tensor(0.1, dtype=D)
    return ((o.words.square() * member).sum((0, 1)) / member.sum((0, 1))).mean() + pair(o, b)


def span(o: Any, b: Any) -> Tensor:
    start, end = o.words[..., 0], o.words[..., 1]
    first = F.cross_entropy(start, b.y, ignore_index=-100)
    return (first + F.cross_entropy(end, b.t[:, 0].clamp(max=LENGTH - 1))) / 2


def decayed(o: Any, b: Any) -> Tensor:
    return words(o, b) + F.mse_loss(o.boxes, b.z) + 0.1 * o.scales.square().sum()


Form = Callable[[Any, Any], Tensor]
WEIGHT = torch.tensor([1.0, 5.0, 0.2, 1.0], dtype=D)
SHARES = torch.tensor([0.3, 0.7], dtype=D)
FORMS: dict[str, Form] = {
    "words and pairs": lambda o, b: words(o, b) + pair(o, b),
    "an auxiliary loss": lambda o, b: words(o, b) + 0.4 * F.cross_entropy(
        o.early.flatten(0, 1), b.t.clamp(min=0).flatten(), ignore_index=0),
    "the same targets twice": lambda o, b: words(o, b) + 0.4 * F.cross_entropy(
        o.early.flatten(0, 1), b.t.flatten()),
    "class weights": lambda o, b: words(o, b, weight=WEIGHT) + pair(o, b),
    "smoothed class weights": lambda o, b: words(o, b, weight=WEIGHT, label_smoothing=0.1),
    "smoothed": lambda o, b: words(o, b, label_smoothing=0.1) + pair(o, b) * 0.5,
    "distillation": lambda o, b: 0.5 * words(o, b) + 0.5 * masked(distilled(o, b), b.mask),
    "distillation of rows": lambda o, b: words(o, b) + distilled(o, b).sum() / len(b.x),
    "detection": lambda o, b: words(o, b)
    + (of_boxes(o, b) * b.positive).sum() / b.positive.sum().clamp(min=1),
    "focal": lambda o, b: focal(o, b) / b.positive.sum().clamp(min=1),
    "focal and boxes": lambda o, b: (focal(o, b) + (of_boxes(o, b) * b.positive).sum())
    / torch.clamp(b.positive.to(D).sum(), 1.0),
    "three parts": lambda o, b: F.binary_cross_entropy_with_logits(
        o.words[..., 0], b.positive.to(D))
    + (of_boxes(o, b) * b.positive).sum() / (b.positive.sum() + 1e-6) + pair(o, b),
    "two masks": lambda o, b: masked(of_boxes(o, b), b.mask)
    + masked(o.words.square().mean(-1), b.positive.to(D)),
    "z-loss": lambda o, b: words(o, b) + 1e-2 * o.words.logsumexp(-1).square().mean(),
    "masked z-loss": lambda o, b: words(o, b)
    + 1e-2 * masked(o.words.logsumexp(-1).square(), b.mask),
    "dice of rows": dice_of_rows,
    "dice of rows and words": lambda o, b: dice_of_rows(o, b) + words(o, b),
    "learned scales": uncertain,
    "decayed": decayed,
    "an epsilon": lambda o, b: (of_boxes(o, b) * b.mask).sum() / (b.mask.sum() + 1e-6),
    "a guard": guarded,
    "stacked": lambda o, b: torch.stack([words(o, b), pair(o, b)]).sum(),
    "stacked and weighed": lambda o, b: (torch.stack([words(o, b), pair(o, b)]) * SHARES).sum(),
    "three targets": lambda o, b: words(o, b) + pair(o, b)
    + F.nll_loss(o.early.log_softmax(-1).flatten(0, 1), b.t.clamp(min=0).flatten(), ignore_index=2
    ),
    "classes of the batch": balanced_classes,
    "fractions side by side": by_class,
    "entropy": lambda o, b: words(o, b)
    - 0.1 * -(o.words.softmax(-1) * o.words.log_softmax(-1)).sum(-1).mean(),
    "advantages": lambda o, b: (-(o.pair.log_softmax(-1)[:, 0]) * (b.w - b.w.mean())).mean()
    + 0.5 * F.mse_loss(o.boxes, b.z) + pair(o, b),
    "margins": lambda o, b: F.multi_margin_loss(o.pair, b.y.clamp(min=0)) + words(o, b),
    "weights of rows": lambda o, b: words(o, b)
    + (of_boxes(o, b).mean(1) * b.w).sum() / b.w.sum(),
    "weights of rows joined": lambda o, b: (of_boxes(o, b).mean(1) * (b.w / b.w.sum())).sum(),
    "weights joined in a fraction": lambda o, b: masked(
        of_boxes(o, b) * (b.w / b.w.sum())[:, None], b.positive.to(D)
    ),
    "span": span,
    "a sum": lambda o, b: of_boxes(o, b).sum(),
    "a sum that begins with 0": lambda o, b: sum([(of_boxes(o, b) * b.positive).sum()])
    / sum([b.positive.sum()]),
    "a sum and a mean": lambda o, b: 0.01 * of_boxes(o, b).sum() + words(o, b),
    "autoencoder": lambda o, b: of_boxes(o, b).sum() / len(b.x)
    - 0.5 * (1 + o.words - o.words.square()).sum(-1).mean() + pair(o, b),
    "replaced words": lambda o, b: words(o, b) + 50 * masked(F.binary_cross_entropy_with_logits(
        o.words[..., 0], b.positive.to(D), reduction="none"), b.mask),
}  # fmt: skip


def balancing(o: Any, b: Any) -> Tensor:
    """Of experts (Fedus et al. 2022, arXiv 2101.03961): a product of two means over tokens."""
    router = o.words.softmax(-1)
    load = F.one_hot(router.argmax(-1), WORDS).to(D).mean((0, 1))
    return words(o, b) + 0.1 * (load * router.mean((0, 1))).sum() * WORDS


def dice(o: Any, b: Any) -> Tensor:
    p, wanted = o.words.sigmoid()[..., 0], b.positive.to(D)
    return words(o, b) + 1 - 2 * (p * wanted).sum() / (p.sum() + wanted.sum() + 1)


def smoothed_as_transformers(o: Any, b: Any) -> Tensor:
    """Its `LabelSmoother`: of two fractions, by the number of tokens without those ignored."""
    each, ignored = -o.words.log_softmax(-1), b.t.eq(-100)
    of_target = each.gather(-1, b.t.clamp(min=0)[..., None])[..., 0].masked_fill(ignored, 0.0)
    of_all = each.sum(-1).masked_fill(ignored, 0.0)
    count = ignored.numel() - ignored.long().sum()
    return 0.9 * of_target.sum() / count + 0.1 * of_all.sum() / (count * WORDS)


def spread(b: Any) -> Tensor:
    return (b.w - b.w.mean()).square().sum()  # type: ignore[no-any-return]


# that are no sum of fractions, or whose totals are of rows that depend on each other
TOGETHER: dict[str, Form] = {
    "balancing": balancing,
    "smoothed as transformers": smoothed_as_transformers,
    "dice": dice,
    "root": lambda o, b: words(o, b) + F.mse_loss(o.boxes, b.z).sqrt(),
    "confident": lambda o, b: words(o, b) + masked(of_boxes(o, b), (o.words.amax(-1) > 0.1).to(D)),
    "explained": lambda o, b: of_boxes(o, b).sum() / spread(b),
    "above the mean": lambda o, b: masked(of_boxes(o, b).sum(-1), b.w > b.w.mean()) + words(o, b),
    "weights over their largest": lambda o, b: words(o, b) * (b.w / b.w.max()).sum(),
    "shifted by a spread": lambda o, b: (of_boxes(o, b) - 0.1 * spread(b)).square().mean(),
    "shifted by a count": lambda o, b: (
        of_boxes(o, b) - 0.1 * b.w.mean() * b.w.mean() * len(b.w)
    ).square().mean(),
}  # fmt: skip


def of_batch(form: Form) -> Any:
    return lambda model, b: form(model(b["x"]), SimpleNamespace(**b))


BATCHES = [batch(n, i) for i, n in enumerate((8, 7, 5))]
CASES = {name: Case(Net, of_batch(form), BATCHES) for name, form in FORMS.items()}


@pytest.mark.wide(13)
@pytest.mark.parametrize("name", FORMS)
def test_rows_of_such_a_loss_are_apart(name: str) -> None:
    step = trace(Net(), CASES[name].loss, BATCHES[0], training=True)
    assert not step.opaque and not step.coupled and not step.doubt, (step.reason, step.coupled)


def agree(cases: Mapping[str, Case], plan: str, ranks: int) -> None:
    """Asserts that each case under the plan is exact on every rank, and nothing is warned of."""
    expected = [plain(replace(case, micro_batches=1)) for case in cases.values()]
    for of_rank in all_on_ranks([(case, plan) for case in cases.values()], ranks):
        for name, found, wanted in zip(cases, of_rank, expected, strict=True):
            assert apart(found, wanted) <= 1e-10, (name, plan, found.losses, wanted.losses)
            assert not found.warned, (name, found.warned)


STAGES = "data; @stages=0:a/1:words; @micro_batches=2"


@pytest.mark.wide(1)
@pytest.mark.parametrize(
    ("plan", "ranks", "every"),
    [("data", 2, 3), ("tensor", 2, 4), ("hybrid:tensor=2", 4, 4), (STAGES, 2, 4)],
)
def test_several_terms_are_exact(plan: str, ranks: int, every: int) -> None:
    """every: which of the forms, for time."""
    agree(dict([*CASES.items()][::every]), plan, ranks)


@pytest.mark.parametrize(("plan", "every"), [("data", 2), ("single", 3)])
def test_several_terms_are_exact_in_micro_batches(plan: str, every: int) -> None:
    some = [*CASES.items()][::every]
    agree({name: replace(case, micro_batches=2) for name, case in some}, plan, 2)


def accumulated() -> tuple[float, dict[str, Tensor]]:
    """Two batches by hand, of 8 and 5 rows."""
    case = CASES["words and pairs"]
    model = case.build()
    trainer = prepare(model, sgd(model), case.loss, BATCHES[0], "data")
    trainer.backward(trainer.shard(BATCHES[0]), last=False)
    value = float(trainer.backward(trainer.shard(BATCHES[2])))
    trainer.update()
    state = trainer.state_dict()
    trainer.close()
    return value, state


def test_batches_that_a_caller_accumulates_weigh_as_their_rows() -> None:
    """As in one process: of the terms of the first batch no more is known than that batch."""
    case = CASES["words and pairs"]
    model = case.build()
    optimizer = sgd(model)
    value = sum(n / 13 * case.loss(model, b) for n, b in ((8, BATCHES[0]), (5, BATCHES[2])))
    value.backward()
    optimizer.step()
    with case.one_trace("data", 2):
        answers = run(2, accumulated)
    for found, state in answers:
        assert found == pytest.approx(float(value), rel=1e-10)
        for name, tensor in model.state_dict().items():
            assert torch.allclose(state[name], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.wide(5)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_loss_of_one_term_asks_for_no_totals(name: str) -> None:
    step = family_step(name)
    assert step.totals is None and not step.doubt


@pytest.mark.parametrize("name", ["words and pairs", "dice"])
def test_a_plan_that_is_found_for_such_a_loss_is_measured_and_exact(name: str) -> None:
    """Totals are leaves of the batch, of which a profile needs an example; of a dice over the
    batch the plan without data ranks has a price too."""
    case = found_case(name)
    with hurried(), case.one_trace("auto", 2):
        for unpriced, losses, warned in run(2, searched, name, timeout=110):
            assert not unpriced and not warned
            assert losses == pytest.approx(plain(case).losses, rel=1e-10)


def found_case(name: str) -> Case:
    return Case(Net, of_batch((FORMS | TOGETHER)[name]), BATCHES)


def searched(name: str) -> tuple[list[str], list[float], list[str]]:
    """The plain plans without a price, the losses of steps, and warnings."""
    case = found_case(name)
    model = case.build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = prepare(model, sgd(model), case.loss, BATCHES[0], "auto")
        losses = [float(trainer.step(trainer.shard(b))) for b in BATCHES]
    assert trainer.choice is not None
    unpriced = [c for c in trainer.choice.candidates if c.time is None]
    trainer.close()
    return [str(c.plan) for c in unpriced], losses, [str(w.message) for w in caught]


def test_what_is_no_sum_of_fractions_is_exact_too() -> None:
    cases = [Case(Net, of_batch(form), BATCHES) for form in TOGETHER.values()]
    expected = list(map(plain, cases))
    for of_rank in all_on_ranks([(case, "data") for case in cases], 2):
        for name, found, wanted in zip(TOGETHER, of_rank, expected, strict=True):
            assert apart(found, wanted) <= 1e-10, (name, found.losses, wanted.losses)
            assert not found.opaque
