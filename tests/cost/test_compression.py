"""What compressed buckets are predicted to take: collectives, passes, bytes."""

from dataclasses import replace

import pytest

from synchromesh.cost.compression import WORK, WorkOf, working_bytes
from synchromesh.cost.gradients import GroupGradients, compressed_demands
from synchromesh.cost.peak_memory import peak_memory
from synchromesh.cost.planned_step import PlannedStep
from synchromesh.cost.step_time import step_time
from synchromesh.values.compression import QUANTISED, WORDS
from synchromesh.values.holding import compressed_sizes
from synchromesh.values.layout import Layout
from synchromesh.values.profile import Curve, Pattern
from tests.cost.plans import drawn, flat

NUMBERS = 1000


def planned(word: str, ranks: int = 2) -> PlannedStep:
    parts = [{"parameters": {"a": NUMBERS, "b": NUMBERS}}, {"parameters": {"c": NUMBERS}}]
    return drawn(parts, Layout(ranks, 1), plan=f"data; @compression={word}")


@pytest.mark.parametrize(
    ("word", "kinds"),
    [
        ("int8", ["all_to_all", "all_gather"]),
        ("topk:0.1", ["all_gather"]),
        ("none", []),
        ("c:onebit,*:fp16", ["all_to_all", "all_gather"] * 2),
    ],
)
def test_what_is_asked_for_is_what_buckets_send(word: str, kinds: list[str]) -> None:
    step = planned(word)
    demands = [*compressed_demands(step)]
    assert [kind for kind, _, _ in demands] == kinds
    assert {pattern for _, pattern, _ in demands} <= {Pattern(2)}
    buckets = GroupGradients(step, 0).buckets
    payloads = [p for b in buckets if b[0].compressor for p in compressed_sizes(b).payloads]
    assert [(kind, size) for kind, _, size in demands] == payloads


def test_seconds_are_those_of_collectives_and_passes() -> None:
    """One bucket: backward, a copy, what comes first, both collectives, the rest."""
    step = planned("int8")
    base = flat(step)
    links = {
        ("all_to_all", Pattern(2)): Curve(((0.0, 5.0), (1.0, 5.0))),
        ("all_gather", Pattern(2)): Curve(((0.0, 7.0), (1.0, 7.0))),
    }
    copies = 1e-3
    quick = replace(base, network=links)
    slow = replace(quick, copy_byte=copies)
    size = 4 * 3 * NUMBERS
    without = step_time(step, quick).seconds
    assert without == 2 + 4 + 5 + 7  # forwards, backwards
    passes = 1 + WORK.int8.first + WORK.int8.rest
    assert step_time(step, slow).seconds == pytest.approx(without + copies * size * passes)


@pytest.mark.parametrize(
    ("word", "beside"), [("fp16", 2.0), ("int8", 2.0), ("onebit", 2.0), ("topk:0.1", 1.5)]
)
def test_memory_has_what_is_kept_and_what_is_under_way(word: str, beside: float) -> None:
    exact, step = planned("none"), planned(word)
    (bucket,) = GroupGradients(step, 0).buckets
    before, after = (peak_memory(x, flat(x), 0) for x in (exact, step))
    kept = compressed_sizes(bucket).state_bytes
    assert after.resident - before.resident == kept
    assert after.by_kind["states"] - before.by_kind["states"] == kept
    working, under_way = working_bytes(bucket)
    assert under_way == beside * compressed_sizes(bucket).payloads[0][1]
    assert after.peak - after.resident == round(max(working, under_way))


def test_every_compressor_has_its_work() -> None:
    assert {*WorkOf.__dataclass_fields__} == {*WORDS} and {*QUANTISED} < {*WORDS}
