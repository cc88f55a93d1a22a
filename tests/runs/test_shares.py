"""Shares of timelines that are drawn, so that each can be counted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synchromesh.runs.shares import mean, shares, waits
from synchromesh.runs.spans import Recording, Span
from synchromesh.runs.watches import steps_recorded
from tests.runs.drawn import drawn


def test_exposed_hidden_and_waiting() -> None:
    # rank 1 begins two seconds after rank 0, which waits for it while it computes nothing
    late, early = (
        drawn(1, compute="####......", all_reduce="...aaaa..."),
        drawn(0, compute="#.........", all_reduce=".aaaaaa..."),
    )
    first, second = shares([early, late])
    assert waits([early, late]) == [((1.0, 3.0),), ()]
    assert (first.computation, first.exposed, first.waiting) == (0.1, 0.6, 0.2)
    assert (first.hidden, first.other, first.exposed_by) == (
        0.0,
        pytest.approx(0.3),
        {"all_reduce": 0.6},
    )
    assert (second.computation, second.exposed, second.waiting) == (0.4, 0.3, 0.0)
    assert second.hidden == 0.1
    both = mean([first, second])
    assert both.exposed == pytest.approx(0.45) and both.exposed_by == {
        "all_reduce": pytest.approx(0.45)
    }


def test_what_waits_for_another_rank_hides_nothing() -> None:
    early, late = shares([
        drawn(0, compute="########", all_reduce=".aaaaaa."),
        drawn(1, compute="#####...", all_reduce=".....aa."),
    ])  # fmt: skip
    assert early.hidden == 2 / 8 and early.exposed == 0.0
    assert late.exposed == 2 / 8


def test_a_receive_waits_for_its_sender_and_a_send_for_nobody() -> None:
    sender, receiver = shares([
        drawn(0, (0, 1), compute="####..", send="....aa"),
        drawn(1, (0, 1), compute="#.....", receive=".aaaaa"),
    ])  # fmt: skip
    assert receiver.exposed == 5 / 6 and receiver.waiting == 3 / 6
    assert sender.exposed == 2 / 6 and sender.waiting == 0.0


def test_the_kth_of_a_name_and_its_ranks_is_the_same_on_all() -> None:
    first, _ = shares([
        drawn(0, all_reduce="aabb.cc."),
        drawn(1, all_reduce=".a..bb.c"),
    ])  # fmt: skip
    assert first.exposed == 6 / 8
    assert (
        first.waiting == 1 / 8 + 2 / 8 + 2 / 8
    )  # b had ended here before rank 1 began: all of it
    unmatched, _ = shares([drawn(0, all_reduce="aa.bb"), drawn(1, all_reduce="...aa")])
    assert unmatched.waiting == 0.0, "which is which is not known"


def test_time_shared_by_name_and_outside_of_steps() -> None:
    one = Recording(
        0, ((0.0, 4.0), (6.0, 10.0)),
        (
            Span(-1.0, 1.0, "computation", "mm", "a"),
            Span(2.0, 7.0, "communication", "all_reduce", "b"),
            Span(3.0, 7.0, "communication", "all_gather", "b"),
        ),
    )  # fmt: skip
    (found,) = shares([one])
    assert found.seconds == 8.0 and found.computation == 1 / 8 and found.exposed == 3 / 8
    assert found.exposed_by == {"all_gather": 1 / 8, "all_reduce": 2 / 8}
    with pytest.raises(ValueError, match="rank 0 recorded no step"):
        shares([Recording(0, (), one.spans)])


times = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted)
named = st.sampled_from(["all_reduce", "all_gather"])


@settings(max_examples=50)
@given(st.lists(times, max_size=8), st.lists(st.tuples(times, named), max_size=8), st.data())
def test_shares_add_up(
    computations: list[list[int]], traffic: list[object], data: st.DataObject
) -> None:
    def recording(rank: int) -> Recording:
        shift = data.draw(st.integers(0, 5))
        spans = [Span(a, b, "computation", "mm", "x") for a, b in computations]
        spans += [
            Span(a + shift, b + shift, "communication", name, "y", (0, 1))
            for (a, b), name in traffic  # type: ignore[misc]
        ]
        return Recording(rank, ((0.0, 30.0),), tuple(spans))

    for found in shares([recording(0), recording(1)]):
        assert found.computation + found.exposed + found.other == pytest.approx(1.0)
        assert found.hidden <= found.computation + 1e-12
        assert -1e-12 <= found.waiting <= found.exposed + 1e-12
        assert sum(found.exposed_by.values()) == pytest.approx(found.exposed)


def test_an_idle_rank_has_no_part_in_the_mean() -> None:
    works = drawn(0, compute="########..", all_reduce="........aa")
    waits_on = drawn(1, compute="..........", all_reduce="aaaaaaaaaa")
    recorded = steps_recorded([works, waits_on], [0, 0])
    assert recorded.share("computation") == 0.8 and recorded.share("exposed") == pytest.approx(0.2)
    assert recorded.shares[1]["exposed"] == pytest.approx(1.0)
