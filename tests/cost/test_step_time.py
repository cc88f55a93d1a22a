"""The step time: pictures with exact numbers, laws, and the order in which the engine runs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from synchromesh.cost import step_time as module
from synchromesh.cost.gradients import GroupGradients
from synchromesh.cost.planned_step import (
    ComputeShare,
    PlannedStep,
    Transmit,
    Unmeasured,
    turns_of,
    walked,
)
from synchromesh.cost.step_time import best_pieces, step_time
from synchromesh.engine import program
from synchromesh.engine.batches import GlobalRows
from synchromesh.programs.batch_norm import BatchNormPolicy
from synchromesh.programs.borders import StandIns, local_part, record, tiled
from synchromesh.programs.collectives import GroupAxis
from synchromesh.programs.communicator import SilentGroup
from synchromesh.programs.random import RandomStreams
from synchromesh.trace.capture.batch import take
from synchromesh.trace.partition.local import Communication, Computation
from synchromesh.values.component import Rows
from synchromesh.values.exchange import Exchange
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Calls, Compute, Curve, Overlap, Pattern, Profile
from synchromesh.values.schedule import taking_turns
from synchromesh.values.traffic import Collective
from tests.bucket_sizes import bucket_sizes
from tests.cost.plans import drawn, flat, placed
from tests.models import family, traced

CPU = torch.device("cpu")
ALONE, PAIR = Layout(1, 1), Layout(2, 1)


def profile(planned: PlannedStep, seconds: dict[str, tuple[float, float]], **more: Any) -> Profile:
    """Seconds forward and backward by component, whatever the rows."""
    compute = {}
    for local in planned.partition.components:
        f, b = seconds[local.component.name]
        compute[local.program] = Compute(
            (Curve(((0.0, f), (1.0, f))),), (Curve(((0.0, b), (1.0, b))),), cast(Any, None)
        )
    return Profile(planned.devices, compute, **more)


def constant(seconds: float) -> Curve:
    return Curve(((0.0, seconds), (1.0, seconds)))


@pytest.mark.parametrize(
    ("word", "seconds"),
    [  # of 1,600 bytes in one tensor; 1 s a message of 100 bytes
        ("server:1; @servers=4", 4 * 17), ("server:2; @servers=4,5", 4 * 17 / 2),
    ],
)  # fmt: skip
def test_servers_send_a_tensor_while_the_rest_of_it_comes(word: str, seconds: float) -> None:
    ranks = 4 + word.count(",") + 1
    planned = drawn(
        [{"parameters": {"a": 400}}], Layout(ranks, 1), ranks, f"data; @synchronisation={word}"
    )
    messages = {("send", Pattern(2)): Curve(((0.0, 0.0), (1e6, 1e4)))}
    with bucket_sizes(600, 200, served=1):
        told = step_time(planned, profile(planned, {"c0": (0.0, 0.0)}, network=messages))
    assert told.seconds == pytest.approx(seconds)


def test_where_nothing_is_sent_it_is_the_sum() -> None:
    planned = drawn([{"parameters": {"a": 10, "b": 20}}, {"parameters": {"c": 5}}], ALONE)
    told = step_time(
        planned,
        profile(
            planned, {"c0": (1.0, 2.0), "c1": (3.0, 4.0)},
            update_byte=0.01, update_tensor=0.5, copy_byte=100.0, host=0.25,
        ),
    )  # fmt: skip
    assert (told.forward, told.backward) == (4.0, 6.0)
    assert told.update == pytest.approx(35 * 4 * 0.01 + 3 * 0.5)
    assert told.seconds == pytest.approx(4.0 + 6.0 + told.update + 0.25)
    assert told.waited == 0.0 and told.communication_share == 0.0


def test_calls_of_components_count_for_each_and_others_once() -> None:
    planned = drawn([{}, {}, {}], ALONE)
    seconds = {"c0": (1.0, 2.0), "c1": (3.0, 4.0), "c2": (5.0, 0.25)}
    calls = Calls(0.5, -0.5, 0.125, 0.25, 2.0)
    told = profile(planned, seconds, calls=calls)
    found = step_time(planned, told)
    assert found.forward == 0.125 + 9.0 + 3 * 0.5
    assert found.backward == 0.25 + 1.5 + 3.5 + 0.0, "a call takes no less than nothing"
    assert found.seconds == found.forward + found.backward + 2.0
    twice = step_time(planned, told, 2)
    assert twice.forward == 2 * (0.125 + 10.5)
    assert twice.backward == 0.25 + 2 * 5.0, "micro-batches that take turns share a backward"
    accumulated = replace(planned, plan=Plan.parse("data; @micro_batches=2"))
    assert step_time(accumulated, told).forward == 2 * found.forward


GRADIENTS = {("all_reduce", Pattern(2)): constant(3.0)}


@pytest.mark.parametrize(
    ("c0", "c1", "backward", "waited"),
    [
        # backward of c1, then its gradients ~~~ (3 s) while c0 computes
        (5.0, 1.0, 1 + 5 + 3, 3.0),  # [c1][    c0    ]      c1's hidden whole, c0's ~~~ behind
        (1.0, 1.0, 1 + 1 + 5, 5.0),  # [c1][c0]              1 s hidden: 2 s left and 3 s
        (1.0, 5.0, 5 + 1 + 5, 5.0),
    ],
)
def test_gradient_traffic_hides_behind_backward(
    c0: float, c1: float, backward: float, waited: float
) -> None:
    planned = drawn([{"parameters": {"a": 10}}, {"parameters": {"b": 10}}], PAIR)
    made = profile(planned, {"c0": (0, c0), "c1": (0, c1)}, network=GRADIENTS)
    with bucket_sizes(1, 1):
        told = step_time(planned, made)
    assert told.backward == pytest.approx(backward) and told.waited == pytest.approx(waited)


def test_one_bucket_waits_for_the_last_gradient() -> None:
    planned = drawn([{"parameters": {"a": 10}}, {"parameters": {"b": 10}}], PAIR)
    told = step_time(planned, profile(planned, {"c0": (0, 5), "c1": (0, 1)}, network=GRADIENTS))
    assert told.backward == pytest.approx(1 + 5 + 3)


def test_workers_that_train_alone_wait_for_their_means() -> None:
    planned = drawn([{"parameters": {"a": 10}}, {"parameters": {"b": 10}}], PAIR)
    planned = replace(
        planned, plan=Plan.parse("data; @synchronisation=local:4"),
        holdings={n: replace(h, alone=True) for n, h in planned.holdings.items()},
    )  # fmt: skip
    made = profile(planned, {"c0": (0, 5), "c1": (0, 1)}, network=GRADIENTS, copy_byte=0.125)
    told = step_time(planned, made)
    assert told.backward == 6.0
    assert told.waited == (3.0 + 2 * 80 * 0.125) / 4 == told.seconds - 6.0


def test_a_shared_parameter_is_ready_when_its_first_user_is_done() -> None:
    planned = drawn([{"parameters": {"a": 1 << 20}}, {}, {"parameters": {"a": 1 << 20}}], PAIR)
    seconds = {"c0": (0, 1), "c1": (0, 5), "c2": (0, 1)}
    told = step_time(planned, profile(planned, seconds, network=GRADIENTS))
    assert told.backward == pytest.approx(1 + 5 + 1 + 3)


SENT = Communication((
    Collective("all_reduce", "forward", 2, 1), Collective("all_gather", "backward", 2, 1),
))  # fmt: skip
LINKS = {("all_reduce", Pattern(2)): constant(1.0), ("all_gather", Pattern(2)): constant(2.0)}


def test_micro_batches_hide_what_one_waits_for() -> None:
    planned = drawn([{"events": (Computation(1.0), SENT, Computation(3.0))}], Layout(1, 2))
    told = profile(planned, {"c0": (4.0, 8.0)}, network=LINKS)
    whole = step_time(planned, told, 1)
    # [1]~[ 3 ]   then   [  6  ]~~[2]
    assert (whole.forward, whole.backward) == (5.0, 10.0)
    # 0   [1]~[ 3 ]          the same seconds a micro-batch, whatever the rows, in this profile
    # 1      [1]   [ 3 ]     its ~ goes on while micro-batch 0 computes
    two = step_time(planned, told, 2)
    assert two.forward == pytest.approx(1 + 1 + 3 + 3)
    # 1   [  6  ]~~[2]       the first departs at 6, arrives at 12 at the latest
    # 0          [  6  ]~~[2]
    assert two.backward == pytest.approx(6 + 6 + 2 + 2)
    assert two.waited == 0.0


def test_an_operators_own_collective_is_waited_for() -> None:
    blocking = replace(SENT, pauses=False)
    planned = drawn([{"events": (Computation(1.0), blocking, Computation(3.0))}], Layout(1, 2))
    told = step_time(planned, profile(planned, {"c0": (4.0, 8.0)}, network=LINKS), 2)
    assert (told.forward, told.backward) == (10.0, 20.0) and told.waited == 6.0


def test_the_slowest_rank_counts_and_uneven_rows() -> None:
    planned = replace(drawn([{}], PAIR, rows=4), plan=Plan.parse("data; @rows=3,1"))
    key = planned.partition.components[0].program
    row, slow = Curve(((1.0, 1.0),)), Curve(((1.0, 5.0),))

    def seconds(*curves: Curve) -> float:
        none = (constant(0.0),) * len(curves)
        found = Profile(2, {key: Compute(curves, none, cast(Any, None))})
        return step_time(planned, found).seconds

    assert seconds(row, row) == 3.0
    assert seconds(row, slow) == 5.0
    assert seconds(row) == 3.0  # one curve stands for all ranks


def test_best_interleaving_asks_for_enough_rows() -> None:
    planned = drawn([{"events": (Computation(1.0), SENT, Computation(3.0))}], Layout(1, 2), rows=4)
    key = planned.partition.components[0].program
    row = Curve(((1.0, 1.0),))
    links = {
        link: Curve(((4.0, seconds),)) for link, seconds in zip(LINKS, (1.0, 2.0), strict=True)
    }
    told = Profile(2, {key: Compute((row,), (row,), cast(Any, None))}, links)
    assert best_pieces(planned, told, (4,)).pieces == 4
    assert best_pieces(planned, told, (8,)).pieces == 1
    assert best_pieces(replace(planned, overlaps=False), told, (4,)).pieces == 1
    assert best_pieces(replace(planned, rows=3), told, (4,)).pieces == 1


def test_what_was_not_measured_has_a_name() -> None:
    planned = drawn([{"events": (SENT,)}], Layout(1, 2))
    with pytest.raises(Unmeasured, match=r"c0 \(1x2\) was not measured"):
        step_time(planned, Profile(2))
    with pytest.raises(Unmeasured, match="all_reduce on 2 ranks"):
        step_time(planned, profile(planned, {"c0": (1, 1)}))


@pytest.mark.parametrize("family_name", ["cnn", "padded"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_more_of_anything_takes_no_less(family_name: str, micro_batches: int) -> None:
    planned = placed(family_name, Layout(2, 2))
    base = replace(flat(planned, 1.0, 0.3), overlap={"all_reduce": Overlap(0.7, 0.6)}, host=0.1)
    least = step_time(planned, base, micro_batches).seconds
    for key, found in base.compute.items():
        slower = replace(found, forward=tuple(c.scaled(1.5) for c in found.forward))
        more = replace(base, compute={**base.compute, key: slower})
        assert step_time(planned, more, micro_batches).seconds > least
    for key, curve in base.network.items():
        more = replace(base, network={**base.network, key: curve.scaled(2.0)})
        assert step_time(planned, more, micro_batches).seconds >= least * (1 - 1e-12)
    for more in (
        replace(base, host=0.2),
        replace(base, update_byte=1.0),
        replace(base, copy_byte=1.0),
    ):
        assert step_time(planned, more, micro_batches).seconds > least


# The engine's order


class Order:
    """The pauses of a real program on silent groups, by component."""

    def __init__(self, name: str, planned: PlannedStep, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, int]] = []
        step = traced(name)
        model, _, make = family(name)
        self.batch = make(planned.rows, dtype=torch.float64)
        held = {n: x.detach() for n, x in (*model.named_parameters(), *model.named_buffers())}
        whole = StandIns(step.chain, held, CPU)
        self.borders = record(step, self.batch, whole, CPU)
        tensors = {}
        for n, x in whole.items():
            h = planned.holdings[n]
            tensors[n] = local_part(x, h.placement, h.layout.tensor)
            if h.tensor.trainable:
                tensors[n].requires_grad_()
        stage = SimpleNamespace(position=0)

        def axis(layout: Layout, streams: RandomStreams) -> GroupAxis:
            group = SilentGroup(layout.tensor)
            return GroupAxis(cast(Any, group), streams, BatchNormPolicy(None))

        monkeypatch.setattr(program, "depart", self.depart)
        self.program = program.Program(
            step,
            planned.partition,
            cast(Any, stage),
            tensors,
            planned.holdings,
            axis,
            RandomStreams(0, CPU),
        )
        bound = [part for _, part in self.program._stages[0].parts]
        for i, part in enumerate(bound):
            part.walk = self.logged(i, part.walk)
        fetch = self.program._fetch
        parts = [part.fetches for part in bound]

        def logged(item: Any, *args: Any) -> Iterator[None]:
            i = next(i for i, fetches in enumerate(parts) if any(f is item for f in fetches))
            made = yield from self.told(i, fetch(item, *args))
            return made

        monkeypatch.setattr(self.program, "_fetch", logged)

    def told(self, i: int, walk: Any) -> Any:
        while True:
            try:
                next(walk)
            except StopIteration as end:
                return end.value
            self.seen.append(i)
            yield

    def logged(self, i: int, walk: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: self.told(i, walk(*args))

    def depart(self, x: Tensor, item: Exchange, stage: Any, ranges: Any) -> Any:
        """What would come over the border, from the recorded values."""
        start, stop = ranges(item.target.data)[0]
        whole = self.borders[item.value.name]
        if isinstance(item.value.rows, Rows):
            whole = tiled(whole, item.value.rows, max(1, stop - start))
        made = local_part(whole, item.want, item.target.tensor)
        return lambda: made.requires_grad_(x.requires_grad)


def mixed(i: int) -> Layout:
    return Layout(2, 1) if i % 3 else Layout(1, 2)


@pytest.mark.parametrize(
    ("name", "layouts"),
    [("gpt2", Layout(1, 2)), ("padded", Layout(1, 4)), ("bert", mixed), ("cnn", mixed)],
    ids=["gpt2-1x2", "padded-1x4", "bert-mixed", "cnn-mixed"],
)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_order_is_the_engines(
    name: str, layouts: Any, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = placed(name, layouts)
    order = Order(name, planned, monkeypatch)
    leaf = max((c.layout for c in planned.partition.components), key=lambda x: x.data)
    rows = [b - a for a, b in planned.plan.row_ranges(planned.rows, leaf.data)]
    cut = GlobalRows(tuple(rows), planned.plan)
    lanes, start = [], 0
    for part in cut.micro(micro_batches):
        lanes.append((take(order.batch, start, start + part.counts[0]), part))
        start += part.counts[0]
    order.program.run(lanes, 0)
    turns = turns_of(planned.partition.components)
    assert order.program._stages[0].turns == len(turns) > 1, "a plan without a pause says nothing"
    predicted = [
        item.component
        for action in taking_turns(micro_batches, len(turns)).groups[0]
        for item in walked(turns, action)
        if action.kind == "F"
        and isinstance(item, Transmit)
        and item.departs
        and item.communication.pauses
    ]
    assert predicted == order.seen


def test_backward_is_the_reverse() -> None:
    planned = placed("gpt2", Layout(1, 2))
    events: list[tuple[str, Any]] = []

    class Spy:
        def __init__(self, *args: Any) -> None:
            self.line = module_timeline(*args)

        def __getattr__(self, name: str) -> Any:
            if name in ("compute", "depart", "arrive"):
                return lambda *args: (
                    events.append((name, args)),
                    getattr(self.line, name)(*args),
                )[-1]
            return getattr(self.line, name)

    module_timeline = module.Timeline
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Timeline", Spy)
        step_time(planned, flat(planned, 1.0, 0.0), 2)
    computed = [args[0] for name, args in events if name == "compute" and args[0]]
    half = len(computed) // 2
    assert computed[half:] == [2 * s for s in reversed(computed[:half])]


@pytest.mark.parametrize("name", ["gpt2", "cnn"])
@pytest.mark.parametrize(
    "layouts", [Layout(4, 1), Layout(2, 2), lambda i: Layout(4, 1) if i % 2 else Layout(2, 2)],
    ids=["4x1", "2x2", "mixed"],
)  # fmt: skip
def test_every_shared_gradient_is_sent_once(name: str, layouts: Any) -> None:
    planned = placed(name, layouts)
    shared = [
        h
        for h in planned.holdings.values()
        if h.tensor.trainable and len(h.gradient_positions(0)) > 1
    ]
    with bucket_sizes(6000, 1500):
        made = GroupGradients(planned, 0).buckets
    assert sorted(h.tensor.name for bucket in made for h in bucket) == sorted(
        h.tensor.name for h in shared
    )
    for bucket in made:
        assert len({(h.gradient_layout.data, h.tensor.dtype) for h in bucket}) == 1
    assert len(made) >= 2


def test_runs_are_shares_of_a_component() -> None:
    planned = placed("bert", Layout(1, 2))
    shares: dict[int, float] = {}
    for turn in turns_of(planned.partition.components):
        for item in turn:
            if isinstance(item, ComputeShare):
                shares[item.component] = shares.get(item.component, 0.0) + item.share
    count = len(planned.partition.components)
    assert shares == pytest.approx(dict.fromkeys(range(count), 1.0))


@pytest.mark.parametrize(("traffic", "seconds"), [(1.0, 9.0), (6.0, 12.0)])
def test_late_sums_are_waited_for_where_they_take_longer_than_a_step(
    traffic: float, seconds: float
) -> None:
    parts = [{"parameters": {"a": 10}}, {"parameters": {"c": 5}}]
    late = drawn(parts, PAIR, plan="data; @synchronisation=stale:1")
    links = {("all_reduce", Pattern(2)): constant(traffic)}
    with bucket_sizes(first=1, full=1):  # two buckets
        told = profile(late, {"c0": (1.0, 2.0), "c1": (2.0, 4.0)}, network=links)
        found = step_time(late, told)
    assert (found.seconds, found.waited, found.exchanged) == (seconds, seconds - 9, seconds - 9)
