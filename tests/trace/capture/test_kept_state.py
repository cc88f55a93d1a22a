"""What a model keeps from call to call: buffers, frozen parameters, attributes, modes, masks."""

import random
import warnings
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.trace.capture.capture import trace
from synchromesh.trace.capture.comparison import changes, compare
from synchromesh.training.prepare import prepare
from tests.plain import Case, apart, exact, on_ranks, plain, sgd, under
from tests.ranks import RankFailed, run

D = torch.float64


def rows_of(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=g, dtype=D), torch.randint(0, 4, (rows,), generator=g)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Net(nn.Module):
    """`middle(model, h)` between its layers, with what that keeps."""

    def __init__(self, middle: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.learned = nn.Parameter(torch.full((8,), 0.5))
        self.register_buffer("kept", torch.full((8,), 0.25))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.loose = torch.full((8,), 0.25, dtype=D)
        self.calls = 1
        self.last: Tensor | None = None
        self.middle = middle
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.middle(self, self.a(x).tanh())).relu())  # type: ignore[no-any-return]


def frozen_follows(m: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.frozen.mul_(0.5).add_(m.learned, alpha=0.5)
    return h * m.frozen + m.learned


def buffer_assigned(m: Net, h: Tensor) -> Tensor:
    m.kept = m.kept * 0.9 + m.learned.detach() * 0.1
    return h * m.kept


def attribute_assigned(m: Net, h: Tensor) -> Tensor:
    m.loose = m.loose * 0.9 + m.learned.detach() * 0.1
    return h * m.loose


def attribute_in_place(m: Net, h: Tensor) -> Tensor:
    m.loose.mul_(0.9).add_(m.learned.detach(), alpha=0.1)
    return h * m.loose


def counter(m: Net, h: Tensor) -> Tensor:
    m.calls += 1
    return h * (1 + 1 / m.calls)


def buffer_in_place(m: Net, h: Tensor) -> Tensor:
    m.count.add_(1)
    with torch.no_grad():
        m.kept.mul_(0.9).add_(m.learned, alpha=0.1)
    return h * m.kept / m.count


def remembers_the_last(m: Net, h: Tensor) -> Tensor:
    """Something to look at, which nothing reads."""
    m.last = h.detach()
    return h


def data_assigned(m: Net, h: Tensor) -> Tensor:
    """As MoCo's own code moves its momentum encoder."""
    m.frozen.data = m.frozen.data * 0.5 + m.learned.data * 0.5
    return h * m.frozen + m.learned


STATEFUL = [
    frozen_follows, buffer_assigned, attribute_assigned, attribute_in_place, counter,
    data_assigned,
]  # fmt: skip
PLANS = [("single", 1), ("data", 2), ("tensor", 2)]


@pytest.mark.wide(6)
@pytest.mark.parametrize(("plan", "ranks"), PLANS)
@pytest.mark.parametrize("middle", STATEFUL)
def test_state_that_a_trace_forgets_is_kept(middle: Any, plan: str, ranks: int) -> None:
    batches = [rows_of(n, i) for i, n in enumerate((6, 7, 1, 6))]
    found = exact(Case(lambda: Net(middle), loss, batches), plan, ranks)
    assert found[0].opaque  # with its reason


@pytest.mark.parametrize(("plan", "ranks"), [*PLANS, ("data; b=tensor", 2), ("data", 3)])
def test_buffers_changed_in_place_stay_in_the_trace(plan: str, ranks: int) -> None:
    batches = [rows_of(n, i) for i, n in enumerate((6, 7, 1, 6))]
    found = exact(Case(lambda: Net(buffer_in_place), loss, batches), plan, ranks)
    assert not found[0].opaque and not found[0].warned


def test_what_nothing_reads_keeps_no_model_from_its_trace() -> None:
    def used() -> nn.Module:
        model = Net(remembers_the_last)
        model(rows_of(6, 0)[0])  # from now on the attribute is a tensor
        return model

    for build in (lambda: Net(remembers_the_last), used):
        (found,) = exact(Case(build, loss, [rows_of(6, 0), rows_of(5, 1)]), "single", 1)
        assert not found.opaque


@pytest.mark.parametrize("middle", [*STATEFUL, buffer_in_place])
def test_preparing_leaves_a_model_as_it_was(middle: Any) -> None:
    model = Net(middle)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    loose, held = model.loose, dict(model.named_buffers())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepare(model, sgd(model), loss, rows_of(6, 0), "single").close()
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(held[n] is b for n, b in model.named_buffers())
    assert model.loose is loose and bool((loose == 0.25).all()) and model.calls == 1


def width(m: Net, h: Tensor) -> Tensor:
    m.noted = h.shape[1]
    return h


def rows_noted(m: Net, h: Tensor) -> Tensor:
    m.noted = h.shape[0]
    return h


def cached(m: Net, h: Tensor) -> Tensor:
    if m.noted < h.shape[1]:
        m.noted, m.table = h.shape[1], torch.arange(h.shape[1], dtype=D)
    return h + m.table


@pytest.mark.parametrize("middle", [width, rows_noted, cached])
def test_what_is_only_noted_keeps_no_model_from_its_trace(middle: Any) -> None:
    def build() -> nn.Module:
        model = Net(middle)
        model.noted, model.table = 0, torch.zeros(8)
        return model

    batches = [rows_of(n, i) for i, n in enumerate((6, 5, 2))]
    assert not exact(Case(build, loss, batches), "data", 2)[0].opaque


HELD: dict[str, Any] = {
    "dict": lambda: {"n": 0},
    "object": lambda: SimpleNamespace(n=0),
    "deque": lambda: deque([torch.zeros(8, dtype=D)], 2),
    "list": lambda: [torch.zeros(8, dtype=D)],
}


def in_containers(kind: str) -> Any:
    def middle(m: Net, h: Tensor) -> Tensor:
        held = m.held
        if kind == "dict":
            held["n"] += 1
            return h * (2.0 if held["n"] > 3 else 1.0)
        if kind == "object":
            held.n += 1
            return h * (2.0 if held.n > 3 else 1.0)
        h = h + held[0]
        if kind == "deque":
            held.append(h.detach().mean(0))
        else:
            held[0].data.add_(0.1)
        return h

    return middle


@pytest.mark.parametrize("kind", HELD)
def test_state_in_containers_is_kept(kind: str) -> None:
    def build() -> nn.Module:
        model = Net(in_containers(kind))
        model.held = HELD[kind]()
        return model

    batches = [rows_of(6, i) for i in range(6)]
    (found,) = exact(Case(build, loss, batches), "single", 1)
    assert found.opaque


def test_preparing_draws_no_numbers_of_the_users() -> None:
    def draws(m: Net, h: Tensor) -> Tensor:
        chance = random.random() + np.random.random() + float(torch.rand((), generator=m.own))
        return h * chance

    model = Net(draws)
    model.own = torch.Generator().manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist(), model.own.get_state()
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepare(model, sgd(model), loss, rows_of(6, 0), "single").close()
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(model.own.get_state(), before[2])
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(5).get_state())


def test_comparing_finds_state_that_only_a_second_step_shows() -> None:
    """The first step of model and trace is the same."""

    def lazily(m: Net, h: Tensor) -> Tensor:
        if m.last is None:
            m.last = m.learned.detach().clone()
            return h
        return h * m.last

    model = Net(lazily)
    step = trace(model, loss, rows_of(6, 0), training=True)
    fault = compare(model, loss, rows_of(6, 0), step).fault
    assert fault is not None and "keeps state from call to call" in fault
    assert model.last is None


# Buffers that rows feed


def mean_of_rows(m: Net, h: Tensor) -> Tensor:
    m.kept.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return h - m.kept


def histogram(m: Net, h: Tensor) -> Tensor:
    m.count.add_((h.detach() > 0).sum())
    return h


@pytest.mark.parametrize(("plan", "ranks"), [("single", 1), ("tensor", 2), ("data; a=tensor", 2)])
@pytest.mark.parametrize("middle", [mean_of_rows, histogram])
def test_buffers_fed_by_rows_are_exact_where_the_data_degree_is_one(
    middle: Any, plan: str, ranks: int
) -> None:
    batches = [rows_of(n, i) for i, n in enumerate((6, 7, 1, 6))]
    found = exact(Case(lambda: Net(middle), loss, batches), plan, ranks)
    assert not any("computed from the rows" in w for w in found[0].warned)


def test_rows_that_read_what_rows_feed_stay_together() -> None:
    batches = [rows_of(n, i) for i, n in enumerate((6, 7, 1))]
    (told,) = exact(Case(lambda: Net(mean_of_rows), loss, batches), "data", 2)[0].warned
    assert "each of the 2 ranks computes all rows of" in told


@pytest.mark.parametrize(
    ("middle", "opaque"), [(histogram, False), (histogram, True), (mean_of_rows, True)]
)
def test_buffers_fed_by_rows_are_named_and_made_equal(middle: Any, opaque: bool) -> None:
    def build() -> nn.Module:
        return Net(lambda m, h: middle(m, h) * (1.0 if not opaque or float(h.sum()) < 1e9 else 2))

    case = Case(build, loss, [rows_of(6, i) for i in range(3)])
    found = on_ranks(case, "data", 2)
    name = "kept" if middle is mean_of_rows else "count"
    told = [w for w in found[0].warned if "computed from the rows" in w]
    assert len(told) == 1 and told[0].startswith(f"{name}: ") and bool(found[0].opaque) == opaque
    assert all(torch.equal(found[0].state[n], found[1].state[n]) for n in found[0].state)


def test_what_rows_feed_is_known_after_a_model_was_frozen() -> None:
    """Another trace in the middle of training tries other rows, as the first one did."""

    def uncut(m: Net, h: Tensor) -> Tensor:
        m.kept.copy_(h.detach().amax(0))  # the same for one row, however often it is repeated
        return h * (1.0 if float(h.sum()) < 1e9 else 2)

    model = Net(uncut)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = prepare(model, sgd(model), loss, rows_of(6, 0), "single")
        before = trainer.traced
        model.a.requires_grad_(False)
        trainer.step(trainer.shard(rows_of(6, 1)))
    after = trainer.traced
    trainer.close()
    assert before is not after and before.opaque and after.opaque
    assert before.fed == after.fed == ("kept",) and before.changed == after.changed


def test_the_mean_of_blocks_is_weighted_by_their_rows() -> None:
    """A linear statistic of unequal blocks is that of all rows; a rank without rows has none."""

    def means(m: Net, h: Tensor) -> Tensor:
        m.kept.add_(h.detach().mean(0))
        return h.detach() + m.learned

    case = Case(lambda: Net(means), loss, [rows_of(7, 0)])
    (expected, found) = plain(case), on_ranks(case, "data; @rows=5,2", 2)
    assert torch.allclose(found[0].state["kept"], expected.state["kept"], rtol=1e-12)
    case = Case(lambda: Net(means), loss, [rows_of(1, 0)])
    (expected, found) = plain(case), on_ranks(case, "data", 3)
    for outcome in found:
        assert torch.allclose(outcome.state["kept"], expected.state["kept"], rtol=1e-12)


def test_a_parameter_that_rows_change_is_refused_where_replicas_would_part() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.e, self.c = nn.Embedding(11, 8, max_norm=1.0), nn.Linear(8, 4)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.e((x.abs() * 3).long().clamp(max=10)).mean(1))  # type: ignore[no-any-return]

    case = Case(Words, loss, [rows_of(6, i) for i in range(3)])
    exact(case, "single", 1)
    exact(case, "tensor", 2)
    model = Words()
    assert changes(model, loss, rows_of(6, 0)).fed == ("e.weight",)
    with pytest.raises(RankFailed, match=r"changes e.weight by the rows .*max_norm"):
        on_ranks(case, "data", 2)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_by_frequency_are_those_of_all_rows(kind: Any) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.e, self.c = kind(11, 8, scale_grad_by_freq=True), nn.Linear(8, 4)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            h = self.e((x.abs() * 3).long().clamp(max=10))
            return self.c(h if h.dim() == 2 else h.mean(1))  # type: ignore[no-any-return]

    case = Case(Words, loss, [rows_of(6, i) for i in range(3)])
    assert not exact(case, "tensor", 2)[0].warned
    (told,) = exact(case, "data", 2)[0].warned
    assert "scale_grad_by_freq" in told and "all rows of e, as one process does" in told


# Updates at random


class Updating(nn.Module):
    """Three buffers and attributes, each updated in one of several ways before or after it is
    read; `rows` says whether rows enter."""

    WAYS = ("in place", "slice", "assigned", "attribute", "attribute in place", "copied")

    def __init__(self, seed: int, rows: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        g = torch.Generator().manual_seed(seed)

        def chance(n: int) -> int:
            return int(torch.randint(0, n, (), generator=g))

        self.ways = [(self.WAYS[chance(6)], bool(chance(2)), bool(chance(2))) for _ in range(3)]
        self.rows = rows
        for i, (way, _, _) in enumerate(self.ways):
            if way.startswith("attribute"):
                setattr(self, f"k{i}", torch.rand(8, generator=g, dtype=D))
            else:
                self.register_buffer(f"k{i}", torch.rand(8, generator=g), persistent=i != 1)
        self.double()

    def update(self, i: int, way: str, news: Tensor) -> None:
        name = f"k{i}"
        old = getattr(self, name)
        if way in ("in place", "attribute in place"):
            old.mul_(0.8).add_(news, alpha=0.2)
        elif way == "slice":
            old[: 4 + i] = old[: 4 + i] * 0.5 + news[: 4 + i]
        elif way == "copied":
            old.copy_(old * 0.7 + news * 0.1)
        else:
            setattr(self, name, old * 0.9 + news * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        with torch.no_grad():
            of_rows, of_weights = h.mean(0), self.a.bias.detach().clone()
        for i, (way, before, fed) in enumerate(self.ways):
            news = of_rows if fed and self.rows else of_weights
            if before:
                self.update(i, way, news)
            h = h + getattr(self, f"k{i}").clone()
            if not before:
                self.update(i, way, news)
        return self.b(h)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_updates_at_random(seed: int) -> None:
    """Without rows exact under every plan; with rows exact, or named, where rows are divided."""
    batches = [rows_of(n, i) for i, n in enumerate((6, 3, 1, 6))]
    for rows in (False, True):
        case = Case(lambda r=rows: Updating(seed, r), loss, batches)  # type: ignore[misc]
        for plan, ranks in (("single", 1), ("tensor", 2)):
            exact(case, plan, ranks)
        outcomes = on_ranks(case, "data", 2)
        named = [w for w in outcomes[0].warned if "computed from the rows" in w]
        worst = max(apart(found, plain(case)) for found in outcomes)
        assert worst <= 1e-10 or (rows and len(named) == 1), (seed, worst, outcomes[0].warned)


# Batch norm: modes and statistics


def normed(m: Net, h: Tensor) -> Tensor:
    return m.norm(h)  # type: ignore[no-any-return]


def with_modes(seed: int) -> nn.Module:
    """Random modes of all modules, dropout among them."""
    model = Net(lambda m, h: m.drop(m.norm(h)))
    model.drop = nn.Dropout(0.5)
    g = torch.Generator().manual_seed(seed)
    for module in model.modules():
        module.training = bool(torch.rand((), generator=g) < 0.5)
    model.drop.training = False  # its bits are no plain loop's
    with torch.no_grad():
        model.norm.running_mean.uniform_(-1, 1, generator=g)
    return model


@pytest.mark.parametrize("seed", range(4))
def test_modules_train_in_the_modes_that_they_have(seed: int) -> None:
    case = Case(lambda: with_modes(seed), loss, [rows_of(6, i) for i in range(3)])
    exact(case, "single", 1)
    exact(case, "tensor", 2)
    if not with_modes(seed).norm.training:
        exact(case, "data", 2)


def test_modes_may_change_between_steps() -> None:
    def between(model: nn.Module, i: int) -> None:
        model.train()
        if i >= 1:
            model.norm.eval()

    case = Case(lambda: Net(normed), loss, [rows_of(6, i) for i in range(3)], between=between)
    exact(case, "single", 1)
    exact(case, "tensor", 2)


def test_a_model_in_evaluation_mode_is_trained_and_that_is_said() -> None:
    case = Case(lambda: Net(normed).eval(), loss, [rows_of(6, i) for i in range(2)])
    found = under(case, "single")
    assert len(found.warned) == 1 and "is in evaluation mode" in found.warned[0]
    expected = plain(Case(lambda: Net(normed).train(), loss, case.batches))
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)


def statistics(plans: tuple[str, ...]) -> list[dict[str, Tensor]]:
    """Running statistics after each plan, with `state_dict` asked for or not."""
    model = Net(normed)
    trainer = prepare(model, sgd(model), loss, rows_of(8, 0), plans[0])
    found = []
    for i, plan in enumerate(plans):
        if i:
            trainer.switch(plan)
        trainer.step(trainer.shard(rows_of(8, i)))
        if i == len(plans) - 1:
            found.append(trainer.state_dict())
    trainer.close()
    return found


def blocks() -> dict[str, Tensor]:
    """The mean of what two halves of the rows do to the statistics, one after another batch."""
    model = Net(normed)
    optimizer = sgd(model)
    for i in range(2):
        kept = {n: b.clone() for n, b in model.named_buffers()}
        sums: dict[str, Tensor] = {}
        optimizer.zero_grad()
        x, y = rows_of(8, i)
        parts = ((x[:4], y[:4]), (x[4:], y[4:])) if i == 0 else ((x, y),)
        for part in parts:
            for n, b in model.named_buffers():
                b.copy_(kept[n])
            (loss(model, part) / len(parts)).backward()
            for n, b in model.named_buffers():
                sums[n] = sums.get(n, 0) + b.double() / len(parts)
        for n, b in model.named_buffers():
            b.copy_(sums[n])
        optimizer.step()
    return {n: b.clone() for n, b in model.named_buffers()}


@pytest.mark.parametrize("after", ["tensor", "single", "data; b=tensor"])
def test_a_switch_takes_the_statistics_of_all_ranks(after: str) -> None:
    found = [states[-1] for states in run(2, statistics, ("data", after))]
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
    if after != "data; b=tensor":  # there the second step has blocks of its own
        expected = blocks()
        for name in ("norm.running_mean", "norm.running_var"):
            assert torch.allclose(found[0][name], expected[name], rtol=1e-10), name


@pytest.mark.parametrize("options", [{}, {"sync_batch_norm": True}])
def test_statistics_of_instance_norms_are_those_of_all_ranks(options: dict[str, Any]) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        norm = nn.InstanceNorm1d(4, track_running_stats=True)
        return nn.Sequential(nn.Conv1d(2, 4, 3), norm, nn.Flatten(), nn.Linear(24, 4)).double()

    g = torch.Generator().manual_seed(0)
    batches = [(torch.randn(6, 2, 8, generator=g, dtype=D), rows_of(6, i)[1]) for i in range(3)]
    exact(Case(build, loss, batches, options=options), "data", 2)


@pytest.mark.parametrize("plan", ["single", "data"])
def test_freezing_and_modes_change_where_ranks_are_idle(plan: str) -> None:
    def between(model: nn.Module, i: int) -> None:
        model.a.requires_grad_(i % 2 == 0)
        model.norm.train(i == 3)

    case = Case(lambda: Net(normed), loss, [rows_of(6, i) for i in range(3)], between=between)
    exact(case, plan, 2)


def test_evaluation_mode_of_all_between_steps_is_told_once() -> None:
    def between(model: nn.Module, i: int) -> None:
        if i == 1:
            model.eval()

    case = Case(lambda: Net(normed), loss, [rows_of(6, i) for i in range(4)], between=between)
    found = under(case, "single")
    assert len(found.warned) == 1 and "is in evaluation mode" in found.warned[0]


# Masks that the trace has folded


class Attending(nn.Module):
    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.c = nn.Linear(6, 8), nn.Linear(8, 4)
        ones = torch.ones(5, 5, dtype=torch.bool)
        self.register_buffer("mask", ones.tril() if causal else ones)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        h = F.scaled_dot_product_attention(h, h, h, attn_mask=self.mask)
        return self.c(h.transpose(1, 2).flatten(2).mean(1))  # type: ignore[no-any-return]


def sequences(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, 6, generator=g, dtype=D), torch.randint(0, 4, (rows,), generator=g)


def another_mask(model: nn.Module, i: int) -> None:
    if i == 2:
        with torch.no_grad():
            model.mask.copy_(torch.eye(5, dtype=torch.bool))


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_a_mask_that_changes_is_followed(plan: str, ranks: int) -> None:
    batches = [sequences(6, i) for i in range(4)]
    exact(Case(Attending, loss, batches, between=another_mask), plan, ranks)


def resumed(path: Path, plan: str) -> float:
    first = Attending(causal=False)
    trainer = prepare(first, sgd(first), loss, sequences(6, 0), plan)
    trainer.save(path / "x")
    trainer.close()
    second = Attending()
    trainer = prepare(second, sgd(second), loss, sequences(6, 0), plan)
    assert trainer.traced.assumed.keys() == {"mask"}
    trainer.resume(path / "x")
    found = float(trainer.step(trainer.shard(sequences(6, 1))))
    trainer.close()
    return found


@pytest.mark.parametrize("plan", ["single", "data", "tensor"])
def test_a_resumed_mask_is_the_checkpoints(tmp_path: Path, plan: str) -> None:
    """Of idle ranks, which hold no mask, too."""
    (expected,) = plain(Case(lambda: Attending(False), loss, [sequences(6, 1)])).losses
    for found in run(2, resumed, tmp_path, plan):
        assert found == pytest.approx(expected, rel=1e-10)
