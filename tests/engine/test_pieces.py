"""Interleaved micro-batches compute what one batch computes; the quicker number is kept."""

from typing import Any

import pytest
import torch

from synchromesh.engine.pieces import TRIAL, PieceCount
from synchromesh.programs.walk import run_forwards
from synchromesh.training.prepare import prepare
from synchromesh.values.schedule import PIECES, taking_turns
from tests.ranks import run
from tests.traces import shared
from tests.training.test_trainer import alone, build, largest, mixed

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")  # what cannot be sharded


def test_walks_run_in_the_order_of_the_schedule() -> None:
    seen = []

    def walk(name: str, turns: int) -> Any:
        for i in range(turns):
            seen.append(f"{name}{i}")
            if i < turns - 1:
                yield
        return name

    assert run_forwards([walk(x, 3) for x in "abc"], taking_turns(3, 3)) == ["a", "b", "c"]
    assert " ".join(seen) == "a0 b0 c0 a1 b1 c1 a2 b2 c2"


class Alone:
    """A group of one rank."""

    def all_gather_json(self, value: Any) -> list[Any]:
        return [value]


@pytest.mark.parametrize(("many", "kept"), [(0.5, PIECES), (2.0, 1)])
def test_the_quicker_way_is_kept(many: float, kept: int) -> None:
    interleaving = PieceCount(Alone(), possible=True)  # type: ignore[arg-type]
    used = []
    for step in range(TRIAL.block * len(TRIAL.order) + 2):
        used.append(interleaving.micro_batches(least=8))
        first = step % TRIAL.block == 0
        interleaving.add(100.0 if first else many if used[-1] == PIECES else 1.0)
    assert used == [n for n in TRIAL.order for _ in range(TRIAL.block)] + [kept, kept]


def test_few_rows_and_programs_without_traffic_are_one_micro_batch() -> None:
    alone: Any = Alone()
    assert PieceCount(alone, possible=False).micro_batches(100) == 1
    given = PieceCount(alone, possible=True, chosen=PIECES)
    assert given.micro_batches(PIECES - 1) == 1


def in_micro_batches(family: str, plan: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, loss, batches = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = prepare(model, optimizer, loss, batches[0], plan)
    assert trainer._execution.pieces.chosen == PIECES, "as the plan says: nothing is tried"
    losses = [trainer.step(trainer.shard(batch)).item() for batch in batches]
    state = trainer.state_dict()
    trainer.close()
    return losses, state


@pytest.mark.parametrize("family", ["bert", "padded"])
def test_micro_batches_compute_what_the_whole_batch_does(family: str) -> None:
    losses, _, state = alone(family)
    model, loss, (batch, *_) = build(family)
    plans = [f"{p}; @pieces={PIECES}" for p in ("tensor", "hybrid:tensor=2", mixed(family))]
    with shared(family, model, loss, batch, *plans, ranks=4):
        answers = [
            run(4 if "tensor=2" in plan else 2, in_micro_batches, family, plan) for plan in plans
        ]
    for ranks in answers:
        for got in ranks:
            assert got[0] == pytest.approx(losses, rel=1e-10)
            assert largest(got[1], state) < 1e-10
