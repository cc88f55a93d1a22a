"""Pieces that walk side by side compute what the whole batch computes; the quicker way is kept."""

from typing import Any

import pytest
import torch

from synchromesh.engine.overlap import BLOCK, ORDER, PIECES, Overlap
from synchromesh.engine.program import in_turns
from synchromesh.training.prepare import prepare
from tests.ranks import run
from tests.traces import shared
from tests.training.test_trainer import alone, build, largest, mixed

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")  # what cannot be sharded


def test_walks_take_turns() -> None:
    seen = []

    def walk(name: str, pauses: int) -> Any:
        for i in range(pauses):
            seen.append(f"{name}{i}")
            yield
        return name

    assert in_turns([walk("a", 2), walk("b", 3), walk("c", 0)]) == ["a", "b", "c"]
    assert " ".join(seen) == "a0 b0 a1 b1 b2"


class Alone:
    """A group of one rank."""

    def all_gather_json(self, value: Any) -> list[Any]:
        return [value]


@pytest.mark.parametrize(("many", "kept"), [(0.5, PIECES), (2.0, 1)])
def test_the_quicker_way_is_kept(many: float, kept: int) -> None:
    overlap = Overlap(Alone(), possible=True)  # type: ignore[arg-type]
    used = []
    for step in range(BLOCK * len(ORDER) + 2):
        used.append(overlap.pieces(least=8))
        first = step % BLOCK == 0
        overlap.tell(100.0 if first else many if used[-1] == PIECES else 1.0)
    assert used == [n for n in ORDER for _ in range(BLOCK)] + [kept, kept]


def test_few_rows_and_programs_without_traffic_stay_whole() -> None:
    assert Overlap(Alone(), possible=False).pieces(100) == 1  # type: ignore[arg-type]
    assert Overlap(Alone(), possible=True, chosen=PIECES).pieces(PIECES - 1) == 1  # type: ignore[arg-type]


def in_pieces(family: str, plan: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, loss, batches = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = prepare(model, optimizer, loss, batches[0], plan)
    assert trainer._execution.overlap.chosen == PIECES, "as the plan says: nothing is tried"
    losses = [trainer.step(trainer.shard(batch)).item() for batch in batches]
    state = trainer.state_dict()
    trainer.close()
    return losses, state


@pytest.mark.parametrize("family", ["bert", "padded"])
def test_pieces_compute_what_the_whole_batch_does(family: str) -> None:
    losses, _, state = alone(family)
    model, loss, (batch, *_) = build(family)
    plans = [f"{p}; @pieces={PIECES}" for p in ("tensor", "hybrid:tensor=2", mixed(family))]
    with shared(family, model, loss, batch, *plans):
        answers = [run(4 if "tensor=2" in plan else 2, in_pieces, family, plan) for plan in plans]
    for ranks in answers:
        for got in ranks:
            assert got[0] == pytest.approx(losses, rel=1e-10)
            assert largest(got[1], state) < 1e-10
