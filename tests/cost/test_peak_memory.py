"""The peak memory: chains whose bytes are added up by hand, laws, and a step that really runs."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from synchromesh.cost.alive_bytes import PeakMemory
from synchromesh.cost.peak_memory import peak_memories, peak_memory
from synchromesh.cost.planned_step import PlannedStep, Unmeasured
from synchromesh.programs.borders import StandIns, record
from synchromesh.programs.compute import Bench
from synchromesh.programs.memory import LiveBytes
from synchromesh.trace.partition.local import Division, Input, Output
from synchromesh.trace.partition.partition import partition
from synchromesh.training.prepare import prepare
from synchromesh.values.component import Rows, Value
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED, Placement, shard
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Compute, Curve, Memory, Profile
from tests.cost.plans import drawn, placed, planned_step
from tests.models import family, traced
from tests.ranks import run
from tests.traces import shared

ALONE, PAIR, CUT = Layout(1, 1), Layout(2, 1), Layout(1, 2)
X = Value("x", (1, 3), "float32", Rows(), False)  # 12 bytes a row
H = Value("h", (1, 5), "float32", Rows(), True)  # 20 bytes a row
Y = Value("y", (1, 2), "float32", Rows(), True)  # 8 bytes a row


def read(value: Value, source: int | None, placement: Placement = REPLICATED) -> Input:
    return Input(value, source, placement, placement)


def made(value: Value, placement: Placement = REPLICATED) -> Output:
    return Output(value, placement)


def line(bytes_at_4: float) -> Curve:
    """A quarter of `bytes_at_4` for every row."""
    return Curve(((0.0, 0.0), (4.0, float(bytes_at_4))))


def known(planned: PlannedStep, *memory: Memory, **more: Any) -> Profile:
    """The memory of each component in turn."""
    curve = (Curve(((1.0, 1.0),)),)
    locals_ = planned.partition.components
    compute = {
        local.program: Compute(curve, curve, m) for local, m in zip(locals_, memory, strict=True)
    }
    return Profile(planned.devices, compute, **more)


def memory(kept: float, forward: float, backward: float, staying: float, **more: Any) -> Memory:
    """At four rows; of which inputs and outputs autograd keeps as `more` says."""
    return Memory(*map(line, (kept, forward, backward, staying)), **more)


# x -> c0 -> h -> c1 -> y, four rows: x has 48 bytes, h 80, y 32; a 40 and b 24
PARTS: list[dict[str, Any]] = [
    {"parameters": {"a": 10}, "inputs": (read(X, None),), "outputs": (made(H),)},
    {"parameters": {"b": 6}, "inputs": (read(H, 0),), "outputs": (made(Y),)},
]
FIRST = memory(100, 150, 120, 160)
SECOND = memory(30, 60, 70, 94, kept_inputs=(0,))


def test_a_chain_by_hand() -> None:
    planned = drawn(PARTS, ALONE)
    found = peak_memory(planned, known(planned, FIRST, SECOND, state_factor=2.0), 0)
    held = 64 + 2 * 64  # parameters, AdamW's two states; one rank fills no buckets
    #             batch  h   kept  at work
    forward = max(48 + 0 + 0 + 150, 48 + 80 + 100 + 60)
    #                                     c1 with the gradient of b   c0 with a's, b's stays
    backward = max(48 + 80 + 100 + 94, 48 + 160 + 24)
    assert found == PeakMemory(held, held + max(forward, backward)) == PeakMemory(192, 192 + 322)


def test_what_the_bytes_of_the_highest_moment_are() -> None:
    planned = drawn(PARTS, ALONE)
    found = peak_memory(planned, known(planned, FIRST, SECOND, state_factor=2.0), 0)
    kinds = {"parameters": 64, "states": 128, "activations": 48 + 80 + 100 + 94, "gradients": 0}
    assert found.by_kind == {**kinds, "buffers": 0} and sum(kinds.values()) == found.peak
    profile = known(planned, FIRST, SECOND, work_largest=3.0, work_byte=4.0)
    update = peak_memory(planned, profile, 0)
    assert update.by_kind["gradients"] == 64 and update.by_kind["activations"] == 48
    assert sum(update.by_kind.values()) == update.peak


def test_buckets_are_held_and_gradients_in_them_do_not_stay() -> None:
    planned = drawn(PARTS, PAIR, rows=8)
    found = peak_memory(planned, known(planned, FIRST, SECOND), 1)
    held = 64 + 64  # parameters and their buckets
    assert found == PeakMemory(held, held + max(48 + 80 + 100 + 60, 48 + 80 + 100 + 70))


def test_the_optimizer_may_need_most() -> None:
    planned = drawn(PARTS, ALONE)
    profile = known(planned, FIRST, SECOND, work_largest=3.0, work_byte=4.0)
    update = 48 + 64 + 3 * 40 + 4 * 64  # batch, gradients, work for the largest and for all
    assert peak_memory(planned, profile, 0) == PeakMemory(64, 64 + update)


def test_an_output_that_its_maker_keeps_is_counted_once() -> None:
    planned = drawn(PARTS, ALONE)
    kept = replace(FIRST, kept_outputs=(0,))  # h is 80 of the 100 that c0 keeps
    apart, once = (peak_memory(planned, known(planned, m, SECOND), 0) for m in (FIRST, kept))
    assert apart.peak - once.peak == 80


def test_an_input_that_several_keep_is_counted_once_and_until_the_last_reader() -> None:
    parts = [*PARTS, {"inputs": (read(H, 0), read(Y, 1))}]
    planned = drawn(parts, ALONE)
    nothing = memory(0, 0, 0, 0)

    def peak(*kept: tuple[int, ...]) -> int:
        found = (nothing, *(replace(nothing, kept_inputs=k) for k in kept))
        return peak_memory(planned, known(planned, *found), 0).peak

    alive = 64 + 48  # parameters; the batch
    assert peak((), ()) == alive + 80 + 32, "h and y, in forward, before c2 is done"
    assert peak((0,), (0,)) == alive + 80 + 80, "h, and c2's gradient of it while c1 works"
    assert peak((0,), ()) == peak((0,), (0,)), "kept by one or by both"
    assert peak((), (0, 1)) == alive + 80 + 32, "gone with the last that keeps it"


def test_of_a_leaf_only_this_ranks_rows_count_and_once() -> None:
    reader = {"inputs": (read(X, None),), "outputs": (made(H),)}
    planned = replace(
        drawn([reader, {"inputs": (read(H, 0), read(X, None))}], PAIR, rows=8),
        plan=Plan.parse("data; @rows=3,1"),
    )
    nothing = memory(0, 0, 0, 0)
    profile = known(planned, nothing, nothing)
    assert [peak_memory(planned, profile, p).peak for p in (0, 1)] == [
        6 * (12 + 20), 2 * (12 + 20)
    ]  # fmt: skip


def test_a_sharded_value_is_a_part_on_each_rank() -> None:
    def peak(placement: Placement) -> int:
        parts = [
            {"inputs": (read(X, None),), "outputs": (made(Y, placement),)},
            {"inputs": (read(Y, 0, placement),)},
        ]
        planned = drawn(parts, CUT)
        nothing = memory(0, 0, 0, 0)
        return peak_memory(planned, known(planned, nothing, nothing), 0).peak

    assert peak(REPLICATED) == 48 + 32 and peak(shard(1)) == 48 + 16


def test_the_gradient_of_a_parameter_of_two_users_waits_for_the_first_and_counts_once() -> None:
    parts = [{"parameters": {"w": 10}}, {}, {"parameters": {"w": 10}}]
    planned = drawn(parts, ALONE)
    work = [memory(0, 0, 7, 7)] * 3
    # c1 works while the gradient that c2 made waits
    assert peak_memory(planned, known(planned, *work), 0) == PeakMemory(40, 40 + 40 + 7)
    planned = drawn(parts, PAIR, rows=8)  # with a bucket
    assert peak_memory(planned, known(planned, *work), 0) == PeakMemory(80, 80 + 40 + 7)


def test_micro_batches_work_on_their_rows_and_all_that_is_kept_is_there() -> None:
    planned = drawn(PARTS, ALONE)
    profile = known(planned, FIRST, SECOND)

    def peak(micro_batches: int) -> int:
        return peak_memory(planned, profile, 0, micro_batches).peak - 64

    assert peak(1) == 48 + 80 + 100 + 94
    #                  h   kept by c0 and by the other one of c1   half of the work
    assert peak(2) == 48 + 80 + 100 + 30 / 2 + 94 / 2
    # the second of four: its part of the work and of what is kept, the gradients a 40 and b 24 of
    # the first beside it, and of b the sum that is made
    assert peak(4) == round(48 + 60 + 75 + 15 + 94 / 4 + (40 + 24) + 24)
    assert peak(1000) >= 48 + 80 + 100 + 30, "never less than what is kept"


STAGES = [PARTS[0], {**PARTS[1], "inputs": (replace(read(H, 0), flows=True),)}]


def test_gradients_that_are_scattered_are_complete_once_in_a_backward() -> None:
    """Micro-batches that take turns share one: autograd adds up their gradients before they go
    into a bucket. 8 numbers, of which two ranks have a half each.

        backward of one            bucket 32, and what it is sent into 32
        of the second of two       bucket 32, sums 32 before and 32 after
    """
    planned = drawn([{"parameters": {"w": 8}}], replace(PAIR, shard_states="gradients"), rows=4)
    profile = known(planned, memory(0, 0, 0, 0))
    for pieces, expected in ((1, 64), (2, 96)):
        found = peak_memory(planned, profile, 0, pieces)
        assert found == PeakMemory(16, 16 + expected)


def staged(plan: str, rows: int) -> list[PeakMemory]:
    """c0 on one device, c1 on another."""
    planned = drawn(STAGES, [ALONE, Layout(1, 1, first=1)], rows, f"data; {plan}")
    return list(peak_memories(planned, known(planned, FIRST, SECOND)))


def test_two_stages_by_hand() -> None:
    """Two micro-batches of four rows: each as above."""
    first, second = staged("@micro_batches=2", 8)
    # 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 ...
    batch, handed = 2 * 48, 80 + 100  # h, and what c0 keeps
    # when the first backward begins: both gradients of h may have arrived
    assert first == PeakMemory(40, 40 + batch + 2 * handed + 2 * 80)
    # 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 ...
    #     the batch, of which it reads nothing, h, and the gradient that is sent, b's and what c1
    #     works with
    assert second == PeakMemory(24, 24 + batch + 80 + 80 + 24 + 70)


def test_1f1b_keeps_few_micro_batches_on_the_first_stage() -> None:
    def of(schedule: str, count: int) -> int:
        plan = f"@micro_batches={count}; @schedule={schedule}"
        return staged(plan, 4 * count)[0].peak - 48 * count  # but the batch

    assert of("1f1b", 2) < of("1f1b", 3) == of("1f1b", 4) == of("1f1b", 9)
    assert of("gpipe", 9) - of("gpipe", 8) == 80 + 100, "h, and what is kept"


@pytest.mark.parametrize(
    ("schedule", "count", "waiting"),
    [
        ("zero-bubble", 2, (1, 2)),  # 0B0 0W0 ..., 1B0 1F1 1B1 1W0 1W1
        ("zero-bubble", 8, (1, 2)),
        ("zero-bubble-2", 8, (2, 3)),  # 0B5 0B6 0W5, 1B0 1B1 1B2 1W0
        ("1f1b", 8, (0, 0)),
    ],
)
def test_what_weights_wait_for_is_there_until_their_gradients(
    schedule: str, count: int, waiting: tuple[int, int]
) -> None:
    def peaks(numbers: int) -> list[int]:
        left = Division(0.5, ((Value("d", (1, numbers), "float32", Rows(), True), REPLICATED),))
        parts = [{**part, "division": left} for part in STAGES]
        plan = f"data; @micro_batches={count}; @schedule={schedule}"
        planned = drawn(parts, [ALONE, Layout(1, 1, first=1)], 4 * count, plan)
        return [m.peak for m in peak_memories(planned, known(planned, FIRST, SECOND))]

    for some, more, most in zip(peaks(1000), peaks(2000), waiting, strict=True):
        assert more - some == most * 4 * 4 * 1000


@pytest.mark.parametrize(
    ("word", "versions"), [("pipedream", (2, 1)), ("pipedream-2bw", (2, 2)), ("1f1b", (1, 1))]
)
def test_versions_of_weights_are_always_there(word: str, versions: tuple[int, int]) -> None:
    parts = [{"parameters": {"a": 10}}, {"parameters": {"b": 2}}]
    plan = f"data; @stages=0:c0/1:c1; @micro_batches=2; @schedule={word}"
    planned = drawn(parts, [Layout(1, 1, first=p) for p in (0, 1)], 4, plan)
    found = peak_memories(planned, known(planned, *[memory(0, 0, 0, 0)] * 2))
    assert [f.resident for f in found] == [40 * versions[0], 8 * versions[1]]


SERVED = {  # of 48 bytes of parameters: what servers and others always have, and at most
    "server:1": ((144, 0), None),
    "server:2": ((72, 0), None),
    # parameters and two states, a replica, what comes, what three others were answered; an update:
    # the gradient, a vector for the server, one of it in one piece, its answer
    "downpour:1": ((144 + 48 + 48 + 3 * 48, 48), (384 + 48 + 2 * 48 + 48, 48 + 48 + 3 * 48)),
    "downpour:1,push=2": ((384 + 48, 48 + 48), None),
    "downpour:2; @servers=0,1": ((72 + 48 + 24 + 2 * 24, 48), (192 + 24, 48 + 48 + 6 * 24)),
}


@pytest.mark.parametrize("word", SERVED)
def test_servers_hold_what_others_do_not(word: str) -> None:
    always, most = SERVED[word]
    parts = [{"parameters": {"a": 12}}]
    planned = drawn(parts, [Layout(4, 1)], 8, f"data; @synchronisation={word}")
    found = peak_memories(planned, known(planned, memory(0, 0, 0, 0), state_factor=2.0))
    assert (found[0].resident, found[3].resident) == always
    assert most is None or (found[0].peak, found[3].peak) == most
    assert len({f.resident for f in found}) == 2


def test_each_device_holds_its_stages_parameters() -> None:
    tied = [{"parameters": {"w": 10, "a": 1}}, {"parameters": {"b": 2}}, {"parameters": {"w": 10}}]
    layouts = [Layout(1, 1, first=p) for p in (0, 1, 2)]
    planned = drawn(tied, layouts, 4)
    nothing = [memory(0, 0, 0, 0)] * 3
    found = peak_memories(planned, known(planned, *nothing))
    #                                        w with its bucket, which 0 and 2 sum; a
    assert [f.resident for f in found] == [40 + 40 + 4, 8, 40 + 40]


def some(planned: PlannedStep) -> Profile:
    """Every program keeps and works on bytes that grow with the rows, each on others."""
    found = {}
    curve = (Curve(((1.0, 1.0),)),)
    for i, local in enumerate(planned.partition.components):
        kept = 64.0 * (1 + i % 3)
        work = [kept * f for f in (1, 2, 2.5, 3)]
        inputs = tuple(range(0, len(local.inputs), 2))
        m = Memory(*map(line, work), kept_inputs=inputs)
        found[local.program] = Compute(curve, curve, m)
    return Profile(planned.devices, found, state_factor=2.0)


LAYOUTS: Iterable[Any] = (
    Layout(4, 1), Layout(1, 4), Layout(2, 2), lambda i: Layout(4, 1) if i % 2 else Layout(1, 4),
)  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "cnn"])
@pytest.mark.parametrize("layouts", LAYOUTS, ids=["4x1", "1x4", "2x2", "mixed"])
def test_laws_of_rows_micro_batches_and_places(name: str, layouts: Any) -> None:
    planned = placed(name, layouts, rows=8)
    profile = some(planned)

    def peaks(rows: int, micro_batches: int = 1) -> list[int]:
        asked = replace(planned, rows=rows)
        found = [peak_memory(asked, profile, p, micro_batches) for p in range(4)]
        assert len({f.resident for f in found}) == 1 and all(
            f.peak > f.resident > 0 for f in found
        )
        return [f.peak for f in found]

    by_rows = [peaks(rows) for rows in (8, 16, 64)]
    assert all(a < b for each in zip(*by_rows, strict=True) for a, b in pairwise(each))
    assert len(set(by_rows[0])) == 1, "equal blocks of rows"
    uneven = peaks(5)
    assert uneven[0] == max(uneven), "the first blocks are the larger ones"
    one, two, four = (peaks(16, micro_batches)[0] for micro_batches in (1, 2, 4))
    trained = sum(h.local_bytes for h in planned.holdings.values() if h.tensor.trainable)
    # earlier gradients lie beside their buckets while another one is added to them
    assert max(two, four) <= one + 2 * trained


SHARDED = (Layout(4, 1, shard_states="parameters"), Layout(2, 2, shard_states="gradients"))


@pytest.mark.parametrize("name", ["gpt2", "cnn"])
@pytest.mark.parametrize("layouts", [*LAYOUTS, *SHARDED])
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_few_micro_batches_tell_the_peak_of_many(
    name: str, layouts: Any, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = placed(name, layouts, rows=101)
    profile = some(planned)
    asked = [replace(planned, plan=replace(planned.plan, micro_batches=n)) for n in (2, 4, 9)]
    found = [peak_memories(each, profile, pieces) for each in asked]
    monkeypatch.setattr(PlannedStep, "shortened", property(lambda planned: planned))
    walked = [peak_memories(each, profile, pieces) for each in asked]
    assert found == walked
    assert [m.by_kind for m in found[-1]] == [m.by_kind for m in walked[-1]]


def test_what_was_not_measured_has_a_name() -> None:
    planned = drawn(PARTS, ALONE)
    with pytest.raises(Unmeasured, match=r"c0 \(1x1\) was not measured"):
        peak_memory(planned, Profile(1), 0)


def measured(name: str, planned: PlannedStep, batch: Any) -> Profile:
    """The memory of a family's programs, as the survey measures it."""
    step, (model, _, _) = traced(name), family(name)
    held = {n: x.detach() for n, x in (*model.named_parameters(), *model.named_buffers())}
    tensors = StandIns(step.chain, held, torch.device("cpu"))
    borders = record(step, batch, tensors, torch.device("cpu"))
    found = []
    for local in planned.partition.components:
        b = Bench(step, planned.partition, local, tensors, borders, 4, torch.device("cpu")).bytes()
        work = (b.kept, b.forward, b.backward, b.staying)
        found.append(Memory(*map(line, work), b.kept_inputs, b.kept_outputs))
    return known(planned, *found)


@pytest.mark.parametrize("name", ["odd_mlp", "gpt2", "cnn", "unet"])
def test_a_step_that_runs_has_as_much_alive(name: str) -> None:
    planned = placed(name, ALONE, rows=4)
    model, loss, make = family(name)
    batch = make(4, dtype=torch.float64)
    found = peak_memory(planned, measured(name, planned, batch), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = prepare(model, optimizer, loss, batch, "single; @pieces=1")
    mine = trainer.shard(batch)
    trainer.step(mine)
    with LiveBytes() as live:
        trainer.step(mine)
    trainer.close()
    leaves = mine.values() if isinstance(mine, dict) else mine
    really = live.peak + sum(cast(Tensor, x).nbytes for x in leaves)
    assert abs(found.peak - found.resident - really) <= 64, "but for single numbers"


def live_bytes(name: str, plan: str, rows: int) -> int:
    """What is alive at most in a step on this rank, but for what is always there."""
    model, loss, make = family(name)
    batch = make(rows, dtype=torch.float64)
    trainer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loss, batch, plan)
    mine = trainer.shard(batch)
    trainer.step(mine)
    with LiveBytes() as live:
        trainer.step(mine)
    trainer.close()
    return live.peak


@pytest.mark.parametrize(
    ("schedule", "apart"), [("1f1b", 0.0), ("zero-bubble", 0.07), ("zero-bubble-2", 0.07)]
)
def test_stages_that_run_have_as_much_alive(schedule: str, apart: float) -> None:
    """Where backwards are divided, which values share their memory is not known of all."""
    step = traced("gpt2")
    names = step.chain.names
    text = f"data; @stages=0:{names[0]}/1:{names[len(names) // 2]}; @micro_batches=4; "
    text += f"@schedule={schedule}"
    plan = Plan.parse(text)
    cut = partition(step, plan.layouts(names, 2), rows=16)
    staged = replace(planned_step(step, cut, 2, 16), plan=plan)
    model, loss, make = family("gpt2")
    found = peak_memories(staged, measured("gpt2", staged, make(4, dtype=torch.float64)))
    with shared("gpt2", model, loss, make(16, dtype=torch.float64), text):
        really = run(2, live_bytes, "gpt2", text, 16)
    for memory, live, local in zip(found, really, (0, -1), strict=True):
        leaves = {i.value for i in staged.partition.components[local].inputs if i.source is None}
        batch = sum(value.bytes(16) for value in leaves)
        assert abs(memory.peak - memory.resident - batch - live) <= 64 + apart * live
