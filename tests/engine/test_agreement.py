"""Agreement: what a rank reports of a step arrives as it was, and whatever ranks differ in is one
sentence on all of them."""

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from synchromesh.engine.agreement import (
    DIFFERENCES,
    LoneRankFailed,
    LossState,
    LossSum,
    Marks,
    RankReport,
    RowAgreement,
    require_alike,
)
from synchromesh.engine.control_channel import LIMITS
from synchromesh.engine.world import World
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan
from tests.ranks import run

PLAN = Plan.parse("data")
REPORT = RankReport(3, 11, True, 2**62, 4, 5, 6, 7, 8, LossState.FAILED, (1, 2, 3, 4, 5), (9, -10))


def test_a_report_arrives_as_it_was() -> None:
    assert RankReport.unpacked(REPORT.packed()) == REPORT
    few = RankReport(0, 0, False, 0, 0, 0, 0, 0, 0)
    assert RankReport.unpacked(few.packed()) == few
    assert len(few.packed()) + 3 <= LIMITS.numbers, "there is room for what a trainer sends"


@pytest.mark.parametrize("name", [field.name for field in fields(RankReport)])
def test_no_field_of_a_report_is_another_ones(name: str) -> None:
    """Of two reports that differ in one field, nothing else differs when they have arrived."""
    others = {"outdated": False, "numbers": (9, 0), "loss": LossState.SENT, "sums": (0,) * 5}
    change = {name: others.get(name, -1)}
    other = RankReport.unpacked(replace(REPORT, **change).packed())  # type: ignore[arg-type]
    names = (f.name for f in fields(RankReport))
    assert [n for n in names if getattr(other, n) != getattr(REPORT, n)] == [name]


def test_reports_of_one_trainer_are_equally_long() -> None:
    """A message of another size than the others wait for would hang them."""
    lengths = [len(r.packed()) for r in (REPORT, replace(REPORT, loss=LossState.SENT, rows=-1))]
    assert all(a == b for a, b in pairwise(lengths))


def test_sums_of_a_loss_keep_all_their_bits() -> None:
    sums = torch.tensor([0.1, -0.0, float("inf"), 2.0**-1074, 1.0], dtype=torch.float64)
    bits = tuple(sums.view(torch.int64).tolist())
    sent = RankReport.unpacked(replace(REPORT, loss=LossState.SENT, sums=bits).packed())
    assert torch.tensor(sent.sums).view(torch.float64).view(torch.int64).tolist() == [*bits]
    assert sums[LossSum.GRADIENT] == 1.0


def opened(tensor: int = 1, ranks: tuple[int, ...] = (0, 1), plan: Plan = PLAN) -> RowAgreement:
    world = World.open()
    layout = Layout(len(ranks) // tensor, tensor)
    return RowAgreement(world.everyone, ranks, [layout], plan)


def said(do: Callable[[], Any]) -> Any:
    """What a call returns, or the text of its error."""
    try:
        return do()
    except (ValueError, LoneRankFailed) as error:
        return str(error)


def batch(rows: int, value: float = 1.0) -> tuple[torch.Tensor]:
    return (torch.full((rows, 2), value),)


def agreed(rows: tuple[int, ...], tensor: int) -> tuple[int, ...]:
    agree = opened(tensor)
    counts = agree(batch(rows[agree.group.index]), Marks(), (agree.group.index, 7)).counts
    assert agree.numbers == [(0, 7), (1, 7)] and not agree.outdated
    agree.group.world.close()
    return counts


def test_ranks_tell_each_other_their_rows() -> None:
    assert run(2, agreed, (3, 1), 1) == [(3, 1)] * 2
    assert run(2, agreed, (3, 3), 2) == [(3,)] * 2


def looked_at() -> dict[str, Any]:
    """What is said of batches that ranks may have chosen without the plan."""
    agree = opened()
    rank = agree.group.index
    border = torch.zeros(64, 1, 32, 32)
    border[:, :, 2:-2, 2:-2] = 1.0 + rank
    border[-1, 0, 5, 5] = 9.0
    numbers, few = torch.arange(32.0).view(4, 8), torch.arange(4.0).view(2, 2)
    cases = {
        "same": numbers,
        "other": numbers + rank,
        "constant": torch.ones(4, 8),
        "images with a border": border,
        "few entries": few,
        "one row": numbers[:1].repeat(1, 2),
        "one constant row": torch.ones(1, 32),
        "none": numbers[:0],
    }
    told = {name: said(lambda: agree((x,), Marks(), unknown=True)) for name, x in cases.items()}  # noqa: B023
    agree.group.world.close()
    return told


def test_equal_rows_of_all_data_ranks_are_refused() -> None:
    first, second = run(2, looked_at)
    refused = {name for name, told in first.items() if isinstance(told, str)}
    assert refused == {"same", "one row"} and all(first[name] == second[name] for name in refused)
    assert "all given the same 4 rows" in first["same"] and "trainer.loader" in first["same"]


def differing() -> dict[str, str]:
    """What is said where rank 1 differs from rank 0 in one thing at a time, and where it does not
    after all of these."""
    agree, shards = opened(), opened(tensor=2)
    rank = agree.group.index
    one = torch.zeros(2), torch.zeros(3)
    faults = {
        mark: said(lambda: agree(batch(2), replace(Marks(), **{mark: rank})))  # noqa: B023
        for mark in DIFFERENCES
    }
    faults["no rows"] = said(lambda: agree(one if rank else batch(2), Marks()))
    faults["data"] = said(lambda: agree(batch(2), Marks(data="reads a" if rank else "")))
    faults["same rows"] = said(lambda: shards(batch(2, value=1.0 + rank), Marks()))
    faults["none"] = str(said(lambda: agree(batch(2), Marks(), outdated=bool(rank)).counts))
    assert agree.outdated
    agree.group.world.close()
    return faults


def test_what_ranks_differ_in_is_said_on_all_and_the_next_step_is_agreed_on() -> None:
    first, second = run(2, differing)
    assert first == second
    for mark, difference in DIFFERENCES.items():
        assert first[mark] == f"ranks [1] {difference.format(0)}"
    assert first["no rows"].startswith("rank 1: ") and "[2, 3]" in first["no rows"]
    assert first["data"].startswith("ranks read different data: rank 0 nothing, rank 1 reads a")
    assert first["same rows"].startswith("ranks [0, 1] work on the same rows but were given")
    assert first["none"] == "(2, 2)"


def shares() -> str:
    agree = opened(plan=Plan.parse("data;@micro_batches=2"))
    counts = said(lambda: agree(batch((4, 4)[agree.group.index]), Marks()).counts)
    assert counts == (4, 4)
    text = said(lambda: agree(batch((5, 3)[agree.group.index]), Marks()))
    agree.group.world.close()
    return str(text)


def test_micro_batches_need_the_plans_shares() -> None:
    for text in run(2, shares):
        assert text.startswith("rank 0 was given 5 rows, but of a global batch of 8 rows the plan")


def alone(fails: str) -> list[Any]:
    """Rank 0 works alone: two steps that all meet for, then one in which it tells the others."""
    agree = opened(ranks=(0,), plan=Plan.parse("single"))
    rank = agree.group.index
    sums = torch.tensor([1.5, 2.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    seen: list[Any] = []
    for step in range(4):
        refused = step == 2 and fails == "check"
        marks = Marks(alike=1, data="reads a" if rank and refused else "")
        rows = said(lambda: agree(batch(3), marks).counts)  # noqa: B023
        seen.append(rows)
        if step == 2 and rank == 0 and fails == "forward":
            agree.give_up()
        elif isinstance(rows, tuple):
            told = said(lambda: agree.exchanged(sums))
            seen[-1] = told.tolist() if isinstance(told, torch.Tensor) else told
            assert agree.refused == refused
    agree.group.world.close()
    return seen


def test_a_rank_that_works_alone_tells_its_loss_to_the_others() -> None:
    sums = [1.5, 2.0, 0.0, 0.0, 1.0]
    assert run(2, alone, "never") == [[None, sums, sums, sums]] * 2


def test_a_failure_of_the_rank_that_works_alone_is_told_and_the_next_step_is_agreed_on() -> None:
    sums = [1.5, 2.0, 0.0, 0.0, 1.0]
    first, second = run(2, alone, "forward")
    assert first == [None, sums, (3,), sums]
    assert second == [None, sums, str(LoneRankFailed()), sums]


def test_what_differs_where_one_works_alone_is_found_behind_its_forward() -> None:
    sums = [1.5, 2.0, 0.0, 0.0, 1.0]
    for seen in run(2, alone, "check"):
        refused = seen.pop(2)
        assert seen == [None, sums, sums] and refused.startswith("ranks read different data")


def described() -> tuple[str, str]:
    world = World.open()
    fine = said(lambda: require_alike(world.everyone, {"a": 1}))
    text = said(lambda: require_alike(world.everyone, {"b": [1, [2, world.rank]]}))
    world.close()
    return str(fine), str(text)


def test_the_first_difference_is_named() -> None:
    for fine, text in run(2, described):
        assert fine == "None"
        assert text.startswith(
            "ranks disagree about b: 0 on rank 0, 1 on rank 1; start every rank"
        )
