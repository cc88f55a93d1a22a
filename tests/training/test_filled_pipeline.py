"""Pipelines without a flush (`@schedule=pipedream`, `pipedream-2bw`): what a plain loop computes
that keeps older parameters for each stage."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synchromesh.cost.planned_step import PlannedStep
from synchromesh.engine.unflushed_walk import UnderWay, UnflushedWalk
from synchromesh.training.events import EpochTrained, FitEvent, Losses, Started
from synchromesh.training.fit import fit
from synchromesh.training.loss_sums import LateLoss
from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from tests.ranks import run
from tests.targets import target
from tests.traces import shared
from tests.training.test_late_sums import momentum
from tests.training.test_workers import adamw, batch, loss, model

ROWS = (12, 12, 5, 12, 1, 12)  # the fifth batch has one micro-batch, fewer than stages
THREE = "data; @stages=0:body.0/1:body.1/2:head; @micro_batches=4"
TWO = "data; @stages=0-1:body.0/2-3:head; @micro_batches=3"  # with two data ranks each
Make = Callable[[nn.Module], torch.optim.Optimizer]
OWN, ONE, DOUBLE = (
    "@schedule=pipedream", "@schedule=pipedream; @versions=one", "@schedule=pipedream-2bw",
)  # fmt: skip


class Plain:
    """A loop on one process. behind: updates that each parameter's gradient does not know of;
    micro: into how many parts batches are cut, each of which is an update, or all `together`."""

    def __init__(self, make: Make) -> None:
        self.net = model()
        self.optimizer = make(self.net)
        self.losses: list[float] = []

    def train(
        self, rows: Sequence[int], behind: Mapping[str, int], micro: int, together: bool
    ) -> None:
        """From a pipeline that is empty to one that is again."""
        versions = [self._now()]
        for seed, n in enumerate(rows):
            cuts = [-(-n * i // micro) for i in range(micro + 1)]
            parts = [(a, b) for a, b in pairwise(cuts) if a < b]
            sums = torch.zeros(2, dtype=torch.float64)
            for update in [parts] if together else [[part] for part in parts]:
                self.optimizer.zero_grad()
                for name, p in self.net.named_parameters():
                    p.data = versions[max(0, len(versions) - 1 - behind[name])][name].clone()
                for start, stop in update:
                    value, weight = loss(self.net, tuple(x[start:stop] for x in batch(n, seed)))
                    share = (stop - start) / (update[-1][1] - update[0][0])
                    (share * value / weight).backward()
                    sums += torch.stack([value, weight]).detach()
                for name, p in self.net.named_parameters():
                    p.data = versions[-1][name].clone()
                self.optimizer.step()
                versions.append(self._now())
            self.losses.append(float(sums[0] / sums[1]))

    def _now(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.net.named_parameters()}


def behind(of_stages: Sequence[int], firsts: Sequence[str]) -> dict[str, int]:
    """Of each parameter, by that of its stage. firsts: where stages begin."""
    found, stage = {}, -1
    for name, _ in model().named_parameters():
        if stage + 1 < len(firsts) and name.startswith(firsts[stage + 1]):
            stage += 1
        found[name] = of_stages[stage]
    return found


def train(trainer: Trainer, rows: Sequence[int]) -> list[Tensor]:
    return [trainer.step(trainer.shard(batch(n, seed))) for seed, n in enumerate(rows)]


def steps(plan: str, make: Make, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Without a flush, a switch to one that has it, back, a checkpoint, more, and it again."""
    net = model()
    trainer = prepare(net, make(net), loss, batch(12, 0), plan)
    losses = train(trainer, ROWS)
    trainer.switch("data")
    losses += train(trainer, ROWS[:1])
    trainer.switch(plan)
    losses += train(trainer, ROWS[:2])
    trainer.save(folder)
    train(trainer, ROWS[:1])
    trainer.resume(folder)
    losses += train(trainer, ROWS[:1])
    found = [float(x) for x in losses], trainer.state_dict()
    trainer.close()
    return found


@pytest.mark.parametrize(
    ("plan", "word", "of_stages", "make"),
    [
        (THREE, OWN, (2, 1, 0), momentum),
        (THREE, ONE, (2, 2, 2), adamw),
        (TWO, DOUBLE, (1, 1), momentum),
    ],
)
def test_stages_compute_with_older_parameters(
    plan: str, word: str, of_stages: Sequence[int], make: Make, tmp_path: Path
) -> None:
    plain, firsts, micro = Plain(make), ["body.0", "body.1", "head"], 4
    if plan == TWO:
        firsts, micro = ["body.0", "head"], 3
    of, together = behind(of_stages, firsts), word == DOUBLE
    plain.train(ROWS, of, micro, together)
    plain.train(ROWS[:1], dict.fromkeys(of, 0), 1, True)
    plain.train(ROWS[:2], of, micro, together)
    plain.train(ROWS[:1], of, micro, together)
    whole, ranks = f"{plan}; {word}", 3 if plan == THREE else 4
    with shared("filled", model(), loss, batch(12, 0), whole):
        found = run(ranks, steps, whole, make, str(tmp_path / "saved"), timeout=110)
    for losses, state in found:
        assert losses == pytest.approx(plain.losses, abs=1e-10)
        for name, expected in plain.net.state_dict().items():
            assert torch.allclose(state[name], expected, atol=1e-10), name


def fitted(plan: str, folder: str) -> tuple[Any, ...]:
    """A run of two epochs, and another plan that goes on with its checkpoint."""
    sizes: list[tuple[int, int]] = []
    losses: list[float] = []

    def note(event: FitEvent) -> None:
        if isinstance(event, Started):
            trainers.append(event.trainer)
        elif isinstance(event, Losses):
            assert event.first == len(losses) + 1
            losses.extend(event.values)
        elif isinstance(event, EpochTrained):
            trainer, (filled,) = trainers[0], [t.workers.filled for t in trainers]
            assert filled is not None
            planned = PlannedStep(trainer.partition, trainer.state.holdings, trainer.plan, 2, 12)
            sizes.append((filled.stash.most_bytes, planned.stashed_bytes(trainer.rank)))

    trainers: list[Trainer] = []
    result = fit(target("cnn"), plan, steps=14, checkpoints=folder, on_event=note)
    more = fit(target("cnn"), "data", epochs=6, checkpoints=folder, resume=folder)
    return losses == list(result.losses), result.staleness, result.updates, sizes, more.steps


def test_fit_drains_saves_and_resumes(tmp_path: Path) -> None:
    """12, 12 and 6 rows an epoch in 4 micro-batches; losses are read steps later, none is lost."""
    plan = "pipeline:stages=2,microbatches=4; @schedule=pipedream"
    with shared("cnn", target("cnn").model(), target("cnn").loss, target("cnn").example(), plan):
        found = run(2, fitted, plan, str(tmp_path), timeout=110)
    for rank, (alike, staleness, updates, sizes, steps) in enumerate(found):
        assert alike and updates == 14 * 4 and steps == 18
        assert staleness["max"] == 1 and sum(staleness["histogram"]) == 2 * updates
        assert staleness["histogram"][0] == updates + 5, "the last stage, and first ones of epochs"
        assert all(really == predicted for really, predicted in sizes)
        assert (sizes[0][0] > 0) == (rank == 0)


def ahead(folder: str) -> list[bool]:
    """Steps that the last of three stages begins when the first one has run two forwards of it."""
    usual = UnflushedWalk._forward

    def forward(walk: UnflushedWalk, new: UnderWay) -> Any:
        results = usual(walk, new)
        if walk.stage == 0:
            Path(folder, str(new.number)).touch()
        return results

    UnflushedWalk._forward = forward  # type: ignore[method-assign]  # of this process
    net, come, values = model(), list[bool](), list[Tensor]()
    trainer = prepare(net, adamw(net), loss, batch(12, 0), f"{THREE}; {OWN}")
    for step in range(5):
        until = time.monotonic() + 20
        second = Path(folder, str(4 * step + 1))
        while trainer.rank == 2 and step and not second.exists() and time.monotonic() < until:
            time.sleep(0.01)
        come.append(trainer.rank < 2 or step == 0 or second.exists())
        values.append(trainer.step(trainer.shard(batch(12, step))))
    assert all(isinstance(x, LateLoss) and x.isfinite() for x in values)
    trainer.close()
    return come


def test_no_stage_waits_until_the_others_have_begun_a_step(tmp_path: Path) -> None:
    with shared("filled", model(), loss, batch(12, 0), f"{THREE}; {OWN}"):
        assert all(map(all, run(3, ahead, str(tmp_path), timeout=110)))


def refused(plan: str, what: str) -> str:
    """Why `plan` cannot be, or `what` not under it."""
    net: nn.Module = Tied().double() if what == "tied" else model()
    carry = {"carry": lambda rows: torch.zeros(rows, 1)} if what == "carry" else {}
    try:
        trainer = prepare(net, adamw(net), loss, batch(12, 0), plan, **carry)
    except ValueError as error:
        return str(error)
    try:
        given: Any = trainer.shard(batch(12, 0))
        if what == "clip":
            trainer.backward(given)
            trainer.clip(1.0)
        else:
            trainer.backward(given, last=False)
    except ValueError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6)
        self.head.weight = self.body[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


HALVES = "data; @stages=0:body.0/1:head; @micro_batches=2; @schedule=pipedream"


@pytest.mark.parametrize(
    ("plan", "what", "why"),
    [
        ("data; @schedule=pipedream", "", "is of stages: write pipeline:stages=2"),
        (HALVES.replace("pipedream", "1f1b; @versions=one"), "", "write that, or leave it out"),
        (f"{HALVES}; @synchronisation=local:2", "", "leave sharded states"),
        (f"{HALVES}; @versions=two", "", "unknown versions 'two'"),
        (HALVES, "clip", "leave clip out, or write @schedule=1f1b"),
        (HALVES, "accumulation", "leave last= and share= out"),
        (HALVES, "tied", "is used in several stages, which would have different versions of it"),
    ],
)
def test_what_cannot_be_asked_for(plan: str, what: str, why: str) -> None:
    assert all(why in text for text in run(2, refused, plan, what))


def test_idle_ranks_cannot_follow() -> None:
    assert all("1 ranks would be idle" in text for text in run(3, refused, HALVES, ""))
