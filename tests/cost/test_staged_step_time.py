"""The step time of stages: pictures whose numbers are exact, and lengths without traffic."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from synchromesh.cost.planned_step import PlannedStep, Unmeasured
from synchromesh.cost.step_time import DIVIDED, Traffic, best_pieces, recorded, step_time
from synchromesh.simulator.replay import Variation
from synchromesh.simulator.step import simulated
from synchromesh.trace.partition.local import Division, Input, Output
from synchromesh.values.component import Rows, Value
from synchromesh.values.layout import Layout
from synchromesh.values.messages import Message
from synchromesh.values.placement import REPLICATED
from synchromesh.values.profile import Compute, Curve, Overlap, Pattern, Profile
from tests.cost.plans import drawn


def at(first: int, data: int = 1) -> Layout:
    return Layout(data, 1, first=first)


HALF = Division(0.5)


def chained(
    layouts: Sequence[Layout], plan: str, rows: int = 16, parameters: Sequence[Any] = (),
    division: Division = HALF,
) -> PlannedStep:  # fmt: skip
    """Components each of which reads what the one before makes, 20 bytes a row."""
    parts: list[dict[str, Any]] = []
    for i in range(len(layouts)):
        value = Value(f"h{i}", (1, 5), "float32", Rows(), True)
        before = Value(f"h{i - 1}", (1, 5), "float32", Rows(), True)
        reads = (Input(before, i - 1, REPLICATED, REPLICATED, True),) if i else ()
        part: dict[str, Any] = {
            "inputs": reads, "outputs": (Output(value, REPLICATED),), "division": division,
        }  # fmt: skip
        if parameters:
            part["parameters"] = parameters[i]
        parts.append(part)
    return drawn(parts, layouts, rows, f"data; {plan}")


def constant(seconds: float) -> Curve:
    return Curve(((0.0, seconds), (1.0, seconds)))


def told(planned: PlannedStep, message: float = 0.0, **more: Any) -> Profile:
    """Every component takes 1 second forward and 2 backward, every message `message`."""
    forward, backward = (constant(1.0),), (constant(2.0),)
    programs = {c.program for c in planned.partition.components}
    network = {("send", Pattern(2, s)): constant(message) for s in range(1, planned.devices)}
    network |= {("all_reduce", Pattern(2)): constant(3.0)}
    compute = {key: Compute(forward, backward, cast(Any, None)) for key in programs}
    return Profile(planned.devices, compute, network, **more)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_equal_stages_without_traffic(schedule: str, stages: int, count: int) -> None:
    plan = f"@micro_batches={count}; @schedule={schedule}"
    planned = chained([at(s) for s in range(stages)], plan)
    found = step_time(planned, told(planned, host=0.5))
    assert found.seconds == (count + stages - 1) * (1 + 2) + 0.5
    assert found.computed == 3 * count and found.forward + found.backward == found.seconds - 0.5
    idle = (stages - 1) / (count + stages - 1)
    assert found.waited / (found.seconds - 0.5) == pytest.approx(idle)


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 4), (3, 2), (4, 1)])
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_a_pipeline_that_stays_filled_waits_for_nothing(
    schedule: str, stages: int, count: int
) -> None:
    """m (f + b); simulated, it is as long."""
    cuts = "/".join(f"{s}:c{s}" for s in range(stages))
    planned = chained(
        [at(s) for s in range(stages)],
        f"@stages={cuts}; @micro_batches={count}; @schedule={schedule}",
    )
    told_of = told(planned, host=0.5)
    made = recorded(planned, told_of)
    assert made.time == step_time(planned, told_of)
    assert made.time.seconds == pytest.approx(count * 3 + 0.5) and made.time.waited == 0.0
    walked = simulated(planned, made, Variation())
    assert walked.seconds == pytest.approx(made.time.seconds)
    assert walked.shares["bubble"] == 0.0 and sum(walked.shares.values()) == pytest.approx(1)
    assert {(spans[0].begin, spans[-1].end) for spans in made.groups} == {(0.0, 3.0 * count)}


@pytest.mark.parametrize("count", [2, 4, 8])
def test_interleaved_stages_wait_less(count: int) -> None:
    """m (f + b) + (p - 1)(f + b) / v, of two groups with two stages of 1 + 2 seconds each."""
    planned = chained(
        [at(0), at(1), at(0), at(1)], f"@micro_batches={count}; @schedule=interleaved"
    )
    assert step_time(planned, told(planned)).seconds == count * 6 + 6 / 2


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("count", [4, 7])
@pytest.mark.parametrize("weights", [0.5, 0.25])
def test_divided_backwards_wait_less(stages: int, count: int, weights: float) -> None:
    """m (f + b + w) + (p - 1) max(f + b - w, f, b), where dividing a backward has its cost."""
    plan = f"@micro_batches={count}; @schedule="
    layouts = [at(s) for s in range(stages)]
    lengths = []
    for schedule in ("zero-bubble", "zero-bubble-2"):
        planned = chained(layouts, plan + schedule, division=Division(weights))
        found = step_time(planned, told(planned))
        w = 2 * weights * DIVIDED.seconds
        b = 2 * DIVIDED.seconds - w
        assert found.computed == pytest.approx(count * (1 + b + w))
        lengths.append(found.seconds)
    waits = (stages - 1) * max(1 + b - w, 1, b)
    assert lengths[0] == pytest.approx(count * (1 + b + w) + waits)
    assert lengths[1] <= lengths[0] + 1e-9
    recomputed = chained([replace(x, recompute=True) for x in layouts], plan + "zero-bubble")
    assert step_time(recomputed, told(recomputed)).computed == pytest.approx(
        count * (2 + 2 * DIVIDED.seconds)
    )


@pytest.mark.parametrize(
    ("schedule", "count", "seconds"),
    [
        # F0 ~ F0 B0 . ~ B0
        ("1f1b", 1, 8.0),
        # 0  F0 F1 .  .  .  .  B0 B0 .  B1 B1      a message under way is no letter of the row
        # 1  .  .  F0 B0 B0 F1 B1 B1
        ("1f1b", 2, 11.0),
        ("gpipe", 2, 11.0),
        # 0  F0 F1 .  .  .  .  B0 B0 F2 B1 B1 F3 .  .  B2 B2 .  .  B3 B3
        # 1  .  .  F0 B0 B0 F1 B1 B1 .  .  F2 B2 B2 .  F3 B3 B3
        #                      the receive of F3 stands behind the send of B2, which ends at 13
        ("1f1b", 4, 20.0),
        # 0  F0 F1 F2 F3 .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
        # 1  .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3
        ("gpipe", 4, 17.0),
    ],
)
def test_messages_of_a_second(schedule: str, count: int, seconds: float) -> None:
    planned = chained([at(0), at(1)], f"@micro_batches={count}; @schedule={schedule}")
    found = step_time(planned, told(planned, 1.0))
    assert found.seconds == seconds
    assert found.waited == seconds - 3 * count, "on the first stage, which ends last"


def test_messages_slow_both_ends_down() -> None:
    # 0  [F0][  F1 ]              F1 at half speed while F0 is under way, from 1 to 2
    #        ~~~   ~~~
    # 1          [  F0  ][F1][  B0  ][    B1   ]     F0 while F1 comes, B1 while B0 goes
    #                                 ~~~       ~~~
    # 0                                  [   B0    ][  B1  ]
    planned = chained([at(0), at(1)], "@micro_batches=2; @schedule=gpipe")
    profile = told(planned, 1.0, overlap={"send": Overlap(compute=0.5)})
    assert step_time(planned, profile).seconds == pytest.approx(12.0)


def test_messages_both_ways_between_two_groups_slow_each_other_down() -> None:
    # 0  [F0][F1]                                           [B0]         [B1]
    #        ~~~10~~~     ~~2~~ 16 at half the rate ~~
    # 1              [F0][   B0 ]~16 at half the rate ~~~2~~         ~~10~~
    #                                                 [F1][B1]
    planned = chained([at(0), at(1)], "@micro_batches=2")
    found = step_time(planned, told(planned, 10.0, overlap={"send": Overlap(both=0.5)}))
    assert found.seconds == pytest.approx(1 + 10 + 1 + 2 + 16 + 3 + 10 + 2)
    assert step_time(planned, told(planned, 10.0)).seconds == pytest.approx(37.0)


def test_messages_of_one_way_share_the_links() -> None:
    """What 0 makes is read by 1 and by 2, and 2 reads nothing of 1."""
    value = Value("h", (1, 5), "float32", Rows(), True)
    reads = (Input(value, 0, REPLICATED, REPLICATED, True),)
    parts = [{"outputs": (Output(value, REPLICATED),)}, {"inputs": reads}, {"inputs": reads}]
    planned = drawn(parts, [at(0), at(1), at(2)])
    found = step_time(planned, told(planned, 10.0)).seconds
    # [0F0]~~~ two at half speed ~~~[1F0, 2F0][1B0, 2B0]~~~ two at half speed ~~~[0B0]
    assert found == 1 + 20 + 1 + 2 + 20 + 2


def test_messages_in_and_out_do_not() -> None:
    # 0  [F0][F1]                                                       [B0]    [B1]
    #        ~~~~~~10~~~~~ ~~~~~~10~~~~~
    # 1                   [F0]        [F1]             [B0]      [B1]~~~~~~~~~~
    #                         ~~~~~~~~~~~~ ~~~~~~~~~~~          ~~~~~~~~ ~~~~~~~~
    # 2                                   [F0]       [F1][B0][B1]
    planned = chained([at(0), at(1), at(2)], "@micro_batches=2; @schedule=gpipe")
    found = step_time(planned, told(planned, 10.0)).seconds
    assert found == (1 + 10) + (1 + 10) + 10 + 1 + 2 + (10 + 2) + (10 + 10) + 2


def test_gradients_of_a_stage_are_summed_when_its_last_backward_is_done() -> None:
    # 0  F0 F1 .  B0 B0 .  B1 B1           two data ranks a stage, ~ the sum of its gradients
    # 1  .  F0 B0 B0 F1 B1 B1 ~  ~  ~
    parameters = [{"a": 10}, {"b": 10}]
    planned = chained([at(0, 2), at(2, 2)], "@micro_batches=2", parameters=parameters)
    found = step_time(planned, told(planned, update_byte=0.01))
    assert found.seconds == pytest.approx((2 + 1) * 3 + 3 + 0.4)
    assert found.update == pytest.approx(10 * 4 * 0.01), "of the tensors of the slowest group"


def test_a_parameter_of_several_stages_is_summed_by_all_of_them_at_once() -> None:
    # 0  F0 F1 .  B0 B0 .  B1 B1  ~  ~  ~        the other one has waited since 7
    # 1  .  F0 B0 B0 F1 B1 B1 .  .
    tied = chained([at(0), at(1)], "@micro_batches=2", parameters=[{"a": 10}, {"a": 10}])
    assert tied.holdings["a"].positions == range(2)
    assert step_time(tied, told(tied)).seconds == (2 + 1) * 3 + 3
    apart = chained([at(0), at(1)], "@micro_batches=2", parameters=[{"a": 10}, {"b": 10}])
    assert step_time(apart, told(apart)).seconds == (2 + 1) * 3, "each on one rank: no sum"


def test_the_slowest_rank_of_each_stage_counts_with_its_rows_of_a_micro_batch() -> None:
    planned = chained([at(0, 3), at(3)], "@micro_batches=2", rows=14)
    profile = told(planned)
    row = Curve(((1.0, 1.0),))
    own = {
        key: Compute((row, row, row.scaled(2.0), row), (constant(0.0),) * 4, cast(Any, None))
        for key in profile.compute
    }
    # 7 rows a micro-batch: 3 on rank 0, 2 on 1 and on 2, of half the speed; all of them on 3
    assert step_time(planned, replace(profile, compute=own)).seconds == 4 + 2 * 7


def test_a_message_is_as_long_as_the_most_that_a_rank_sends_or_receives() -> None:
    size = Curve(((0.0, 0.0), (1000.0, 1000.0)))
    for data, here in ((3, 0), (1, 0)):
        planned = chained([at(0, data), at(3)], "@micro_batches=2", rows=12)
        stride = 3 - here
        profile = Profile(4, network={("send", Pattern(2, stride)): size})
        for kind in ("F", "B"):
            message = Message("F" if kind == "F" else "B", 0, 1, 0)
            assert Traffic(planned, profile, 1).message(message) == 6 * 20, "rank 3 gets 6 rows"
    with pytest.raises(Unmeasured, match=r"send on 2 ranks \(stride 3\) was not measured"):
        step_time(planned, replace(told(planned), network={}))


def test_stages_do_not_interleave() -> None:
    planned = chained([at(0), at(1)], "@micro_batches=2", rows=64)
    assert best_pieces(planned, told(planned), (4,)).pieces == 1


def test_micro_batches_of_one_stage_are_accumulated() -> None:
    planned = chained([at(0), at(0)], "@micro_batches=3", rows=12)
    assert step_time(planned, told(planned)).seconds == 3 * (2 + 4)
    assert step_time(planned, told(planned), 2).seconds == 2 * 3 * (2 + 4)
