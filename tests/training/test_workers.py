"""Workers that train alone: what as many plain loops compute that take means."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.checkpoint.manifest import CheckpointError
from synchromesh.runs.trainer_events import memory_tracker
from synchromesh.training.fit import fit
from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from synchromesh.values.plan import Plan
from tests.ranks import run
from tests.targets import target
from tests.traces import known, shared

ROWS = (12, 12, 12, 12, 5, 1, 12, 12)  # the sixth batch leaves all workers but one without rows
LOCAL = "data; @synchronisation=local:3"
STAGES = "data; @stages=0-1:body.0/2-3:head; @synchronisation=local:3"
HYBRID = "hybrid:tensor=2; @synchronisation=local:3"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Tanh())
        self.head = nn.Linear(10, 4)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, dtype=torch.float64, generator=g)
    weights = torch.rand(rows, dtype=torch.float64, generator=g) + 0.5
    return x, torch.randint(4, (rows,), generator=g), weights


def loss(model: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    """Weighted: workers divide by sums of their own."""
    each = F.cross_entropy(model(b[0]), b[1], reduction="none")
    return (each * b[2]).sum(), b[2].sum()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Played:
    """So many models with optimizers of their own on one process."""

    def __init__(self, count: int) -> None:
        self.models = [copy.deepcopy(model()) for _ in range(count)]
        self.optimizers = [adamw(m) for m in self.models]

    def step(self, rows: int, seed: int, plan: str) -> None:
        given = batch(rows, seed)
        count = len(self.models)
        for index, (own, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            start, stop = Plan.parse(plan).row_ranges(rows, count)[index]
            if start == stop:
                continue
            value, weight = loss(own, [x[start:stop] for x in given])
            optimizer.zero_grad()
            (value / weight).backward()
            optimizer.step()

    def take_mean(self, states: bool = False, outer: Any = None) -> None:
        with torch.no_grad():
            for parameters in zip(*(m.parameters() for m in self.models), strict=True):
                _mean(parameters)
                if outer is not None and parameters[0].requires_grad:
                    _outer_step(parameters, outer)
                known = [
                    o.state.get(p, {}) for o, p in zip(self.optimizers, parameters, strict=True)
                ]
                for key in ("exp_avg", "exp_avg_sq") if states and all(known) else ():
                    _mean([state[key] for state in known])
                if states and all(known):
                    for state in known[1:]:
                        state["step"].copy_(known[0]["step"])


def _outer_step(parameters: Sequence[Tensor], outer: Any) -> None:
    """PyTorch's SGD with Nesterov momentum, as its documentation writes it."""
    begun, momentum = outer.pop(0)
    moved = begun - parameters[0]
    momentum = 0.9 * momentum + moved
    begun = begun - 0.7 * (moved + 0.9 * momentum)
    outer.append((begun, momentum))
    for p in parameters:
        p.copy_(begun)


def _mean(tensors: Sequence[Tensor]) -> None:
    mean = torch.stack([*tensors]).mean(0)
    for x in tensors:
        x.copy_(mean)


def expected(
    count: int,
    every: int = 3,
    means: Sequence[int] = (),
    states: Sequence[int] = (),
    word: str = "local",
) -> Any:
    played, apart = Played(count), False
    trained = [p.detach() for p in played.models[0].parameters() if p.requires_grad]
    outer = [(p.clone(), torch.zeros_like(p)) for p in trained] if word == "diloco" else None
    for index, rows in enumerate(ROWS, 1):
        played.step(rows, index, LOCAL)
        apart = not (index % every == 0 or index in (*means, *states))
        if not apart:
            played.take_mean(index in states, outer)
    if apart:
        played.take_mean(outer=outer)
    return played.models[0].state_dict()


def trainer(plan: str) -> Trainer:
    own = model()
    return prepare(own, adamw(own), loss, batch(12, 0), plan)


def go_on(of: Trainer, first: int, last: int = len(ROWS)) -> None:
    for index in range(first, last + 1):
        of.step(of.shard(batch(ROWS[index - 1], index)))


def close(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def trained(plan: str) -> Any:
    of = trainer(plan)
    go_on(of, 1)
    state = of.state_dict()
    of.close()
    return state


@pytest.mark.wide(4)
@pytest.mark.parametrize("word", ["local", "diloco"])
@pytest.mark.parametrize(
    ("plan", "ranks"), [(LOCAL, 1), (LOCAL, 2), (LOCAL, 3), (HYBRID, 4), (STAGES, 4)]
)
def test_workers_are_plain_loops_that_take_means(plan: str, ranks: int, word: str) -> None:
    workers = 2 if ranks == 4 else ranks
    plan = plan.replace("local", word)
    with shared("workers", model(), loss, batch(12, 0), plan, ranks=ranks):
        for found in run(ranks, trained, plan):
            close(found, expected(workers, word=word))


def test_one_step_alone_is_not_every_step() -> None:
    """Optimizer states are the workers' own."""
    plan = "data; @synchronisation=local:1"
    with shared("workers", model(), loss, batch(12, 0), plan, "data", ranks=2):
        found, exact = run(2, trained, plan)[0], run(2, trained, "data")[0]
    close(found, expected(2, every=1))
    with pytest.raises(AssertionError):
        close(found, exact)


def with_means(plan: str, evaluated: int, saved: int, folder: str) -> list[Any]:
    of = trainer(plan)
    go_on(of, 1, evaluated)
    of.evaluate([of.shard(batch(12, 99))], lambda m, b: {"n": m(b[0]).sum()})
    go_on(of, evaluated + 1, saved)
    of.save(folder)
    go_on(of, saved + 1)
    states = [of.state_dict()]
    of.close()
    of = trainer(plan)
    of.resume(folder)
    go_on(of, saved + 1)
    states.append(of.state_dict())
    of.close()
    return states


@pytest.mark.parametrize("word", ["local", "diloco"])
def test_one_model_is_evaluated_and_saved(tmp_path: Path, word: str) -> None:
    """Means are taken then, in a checkpoint of optimizer states, too, which has the momentum of
    the outer step."""
    plan = LOCAL.replace("local", word)
    with shared("workers", model(), loss, batch(12, 0), plan, ranks=2):
        for whole, resumed in run(2, with_means, plan, 2, 5, str(tmp_path / "saved")):
            close(whole, expected(2, means=[2], states=[5], word=word))
            close(resumed, whole)


def resumed(first: str, second: str, folder: str) -> Any:
    of = trainer(first)
    go_on(of, 1, 5)
    of.save(folder)
    of.close()
    of = trainer(second)
    of.resume(folder)
    go_on(of, 6, 6)
    state = of.state_dict()
    of.close()
    return state


@pytest.mark.parametrize("plans", [("diloco:3", "local:3"), ("local:3", "diloco:3")])
def test_another_word_resumes(plans: tuple[str, str], tmp_path: Path) -> None:
    first, second = (f"data; @synchronisation={word}" for word in plans)
    with shared("workers", model(), loss, batch(12, 0), LOCAL, ranks=2):
        one, other = run(2, resumed, first, second, str(tmp_path / "saved"))
    close(one, other)


def switched(plans: Sequence[str]) -> Any:
    of = trainer(plans[0])
    go_on(of, 1, 4)
    for plan in plans[1:]:
        of.switch(plan)
    go_on(of, 5)
    state = of.state_dict()
    of.close()
    return state


def test_switching_goes_from_one_model_to_others_and_back() -> None:
    with shared("workers", model(), loss, batch(12, 0), LOCAL, "data", "tensor", ranks=2):
        found = run(2, switched, [LOCAL, "tensor", "data", LOCAL])[0]
    close(found, expected(2, states=[4]))


def sent(plan: str, steps: int) -> int:
    of = trainer(plan)
    of.world.ledger.reset()
    for index in range(steps):
        of.step(of.shard(batch(12, index)))
    of.close()
    return of.world.ledger.sent


def test_a_mean_sends_what_a_sum_of_gradients_does() -> None:
    plans = ["data", "data; @synchronisation=local:1", "data; @synchronisation=local:8"]
    with shared("workers", model(), loss, batch(12, 0), *plans, ranks=2):
        ring, often, seldom = (run(2, sent, plan, 8) for plan in plans)
    assert often == ring
    assert [8 * n for n in seldom] == ring


def of_fit(plan: str) -> tuple[int, ...]:
    return fit(target("cnn"), plan, steps=4).sent_bytes_per_step


def test_a_run_says_what_a_step_has_sent() -> None:
    job = target("cnn")
    plans = ["data", "data; @synchronisation=local:4", "data; @synchronisation=diloco:2"]
    with shared("cnn", job.model(), job.loss, job.example(), *plans, ranks=2):
        ring, local, diloco = (run(2, of_fit, plan)[1] for plan in plans)
    size = sum(p.nbytes for p in job.model().parameters())
    assert ring == (size,) * 2  # 2 (N - 1) / N of it
    assert local == (size // 4,) * 2 and diloco == (size // 2,) * 2


def clipped(plan: str) -> list[float]:
    of = trainer(plan)
    of.backward(of.shard(batch(12, 1)))
    norm = float(of.clip(1e-3))
    after = float(torch.stack([g.square().sum() for g in of.gradients().values()]).sum().sqrt())
    of.close()
    return [norm, after]


def test_each_worker_clips_by_its_own_norm() -> None:
    with shared("workers", model(), loss, batch(12, 0), LOCAL, ranks=2):
        first, second = run(2, clipped, LOCAL)
    assert first[0] != second[0]
    assert first[1] == pytest.approx(1e-3, rel=1e-5) == second[1]


def measured(plan: str) -> tuple[int, int]:
    """Bytes of states at the peak of a step, and of all that is predicted to be there always."""
    of = trainer(plan)
    go_on(of, 1, 2)
    with memory_tracker(of) as memory:
        go_on(of, 3, 3)
    of.close()
    return memory.by_kind.states, sum(
        p.nbytes for p in of.model.parameters.values() if p.requires_grad
    )


def test_an_outer_step_keeps_two_tensors_a_parameter() -> None:
    plans = [LOCAL, LOCAL.replace("local", "diloco")]
    with shared("workers", model(), loss, batch(12, 0), *plans, ranks=2):
        (local, size), (diloco, _) = (run(2, measured, plan)[0] for plan in plans)
    assert diloco == local + 2 * size


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("zero1; @synchronisation=local:2", "whole optimizer state on each worker"),
        ("data; @synchronisation=local:2; @compression=int8", "send no gradients"),
    ],
)
def test_what_workers_cannot_do_is_said(plan: str, words: str) -> None:
    with known("workers"), pytest.raises(ValueError, match=words):
        trainer(plan)


def weighed(model: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    scores = model(b[0])
    return F.cross_entropy(scores, b[1], reduction="sum"), scores.exp().sum()


def with_weights(plan: str) -> str:
    own = model()
    of = prepare(own, adamw(own), weighed, batch(12, 0), plan)
    try:
        of.step(of.shard(batch(12, 1)))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plan", [LOCAL, STAGES, LOCAL.replace("data", "single")])
def test_a_weight_that_depends_on_parameters_is_refused_on_all_ranks(plan: str) -> None:
    for said in run(4, with_weights, plan):
        assert "no workers that train alone), or detach the weight" in said


class Scaled(nn.Module):
    """With a number that is trained, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = Net(), nn.Parameter(torch.tensor(1.5))
        self.extra = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale  # type: ignore[no-any-return]


def scaled() -> nn.Module:
    torch.manual_seed(0)
    return Scaled().double()


def state_of(of: Trainer, name: str) -> dict[str, Any]:
    return dict(of.optimizer.state[of.model.parameters[name]])


def left_after(plan: str, rows: Sequence[int], to: str) -> tuple[Any, list[dict[str, Any]]]:
    """The model after steps under `plan` and two under another one, and what the optimizer had
    behind the switch: of the scale and of a weight."""
    own = scaled()
    of = prepare(own, adamw(own), loss, batch(12, 0), plan)
    for index, n in enumerate(rows):
        of.step(of.shard(batch(n, index)))
    states = [copy.deepcopy(state_of(of, n)) for n in ("scale", "net.body.0.weight")]
    of.switch(to)
    states += [copy.deepcopy(state_of(of, n)) for n in ("scale", "net.body.0.weight")]
    for index in range(2):
        of.step(of.shard(batch(12, 10 + index)))
    found = {n: p.detach().clone() for n, p in of.model.parameters.items()}
    of.close()
    return found, states


@pytest.mark.parametrize("rows", [(12, 1, 12), (1,), (1, 12)])
def test_one_optimizer_is_left_behind_workers_without_rows(rows: tuple[int, ...]) -> None:
    """Counters are the first worker's, moments are means, of a number that is trained, too."""
    with shared("scaled", scaled(), loss, batch(12, 0), LOCAL, "data", ranks=2):
        (one, first), (other, second) = run(2, left_after, LOCAL, rows, "data")
    close(one, other)
    for number in (0, 1):
        for key in ("exp_avg", "exp_avg_sq"):
            zero = torch.zeros_like(first[number][key])
            mean = (first[number][key] + second[number].get(key, zero)) / 2
            torch.testing.assert_close(first[number + 2][key], mean)
        assert first[number + 2]["step"] == second[number + 2]["step"] == first[number]["step"]


def test_a_first_worker_without_state_gets_the_others() -> None:
    """Of `@rows=0,1` it never has rows."""
    plan = f"{LOCAL}; @rows=0,1"
    with shared("scaled", scaled(), loss, batch(12, 0), plan, "data", ranks=2):
        (one, first), (other, second) = run(2, left_after, plan, (12, 12), "data")
    close(one, other)
    assert not first[0] and not first[1]
    assert all(state["step"] == 2 for state in (*first[2:], *second[2:]))


def with_unused(plan: str) -> Any:
    own = scaled()
    of = prepare(own, adamw(own), loss, batch(12, 0), plan)
    go_on(of, 1, 3)
    state = of.state_dict()
    of.close()
    return state


def test_a_parameter_that_nothing_uses_is_no_workers() -> None:
    plans = [p for p in (HYBRID, STAGES.replace("body", "net.body").replace("head", "net.head"))]
    with shared("scaled", scaled(), loss, batch(12, 0), *plans, ranks=4):
        first, second = (run(4, with_unused, plan) for plan in plans)
    close(first[0], second[3])


def retraced(folder: str) -> list[Tensor]:
    """Momentum of diloco's outer step before and behind a retrace, and a resume that fails."""
    of = trainer(LOCAL.replace("local", "diloco"))

    def momentum() -> Tensor:
        return of._execution.workers.momentum()["outer/body.0.weight"].tensor.clone()

    go_on(of, 1, 4)
    found = [momentum()]
    of.model.module.head.bias.requires_grad_(True)  # type: ignore[union-attr]
    go_on(of, 5, 5)
    found.append(momentum())
    with pytest.raises(CheckpointError):
        of.resume(folder)
    found.append(momentum())
    of.close()
    return found


def test_an_outer_step_goes_on_behind_a_retrace_and_a_resume_that_fails(tmp_path: Path) -> None:
    with known("workers"):
        before, behind, failed = run(2, retraced, str(tmp_path / "nothing"))[0]
    assert before.any() and not torch.equal(before, behind)
    assert float((behind * before).sum() / before.square().sum()) > 0.5  # not begun anew
    assert torch.equal(behind, failed)


def on_other_ranks(plans: Sequence[str]) -> dict[str, Tensor]:
    of = trainer(plans[0])
    go_on(of, 1, 3)
    of.switch(plans[1])
    of.step(of.shard(batch(12, 4)))
    of.step(of.shard(batch(12, 5)))
    of.step(of.shard(batch(12, 6)))  # a mean
    found = {n: p.clone() for n, p in of.parameters().items() if not p.is_meta}
    of.close()
    return found


def test_an_outer_step_on_other_ranks_is_that_of_all_workers() -> None:
    plans = [f"data; @synchronisation=diloco:3; @ranks={ranks}" for ranks in ("0,1", "0,2")]
    with shared("workers", model(), loss, batch(12, 0), *plans, ranks=2):
        first, _, third = run(3, on_other_ranks, plans)
    close(first, third)


def adapting() -> list[str]:
    of = trainer("data")
    of.adapt()
    of.switch(LOCAL)
    go_on(of, 1, 5)
    plan = str(of.plan)
    of.close()
    return [plan, *(decision.plan_to for decision in of.decisions)]


def test_an_adapter_leaves_workers_alone() -> None:
    with shared("workers", model(), loss, batch(12, 0), LOCAL, "data", ranks=2):
        for plan, *others in run(2, adapting):
            assert plan == LOCAL and not others
