"""A timeline against pictures whose numbers are exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synchromesh.cost.timeline import Spans, Timeline
from synchromesh.values.profile import BurstSpeed, DeviceModel, Overlap

HALF = {"k": Overlap(compute=0.5, network=0.25)}


def passed(spans: Spans) -> None:
    """All of the time goes by: nobody interrupts."""
    span = next(spans, None)
    while span is not None:
        try:
            span = spans.send(span)
        except StopIteration:
            return


class Alone(Timeline):
    """A timeline that no other one interrupts."""

    def compute(self, seconds: float) -> None:  # type: ignore[override]
        passed(super().compute(seconds))

    def arrive(self, key: object) -> None:  # type: ignore[override]
        passed(super().arrive(key))

    def finish(self) -> None:  # type: ignore[override]
        passed(super().finish())


def test_nothing_disturbs() -> None:
    line = Alone()
    line.compute(1.0)
    line.depart("a", "k", 2.0)
    line.compute(0.5)
    assert line.clock == 1.5  # [ 1.0 ][ 0.5 ]......
    line.arrive("a")  #                  ~~~~~~~~~~~ 2.0
    assert (line.clock, line.computed, line.waited) == (3.0, 1.5, 1.5)
    line.arrive("a")  # nothing is under way any more
    line.finish()
    assert line.clock == 3.0 and not line.under_way


def test_what_takes_no_time_never_departs() -> None:
    line = Alone()
    line.depart("a", "k", 0.0)
    line.compute(0.0)
    line.arrive("a")
    assert line.clock == 0.0 and not line.under_way


def test_two_flights_share_the_links_evenly() -> None:
    #   a  ~~~~~~~~ 1 at half speed: there at 2
    #   b  ~~~~~~~~~~~~ 3: 1 done by 2, 2 more alone: there at 4
    line = Alone()
    line.depart("a", "k", 1.0)
    line.depart("b", "k", 3.0)
    line.arrive("a")
    assert line.clock == pytest.approx(2.0)
    line.arrive("b")
    assert line.clock == pytest.approx(4.0)


def test_a_wait_for_one_lets_the_others_go_on() -> None:
    line = Alone()
    line.depart("a", "k", 3.0)
    line.depart("b", "k", 1.0)
    line.arrive("a")  # until 2 both at half speed, then 2 alone
    assert line.clock == pytest.approx(4.0) and not line.under_way


def test_overlap_slows_both() -> None:
    # computes at 0.5 while traffic goes at 0.25: traffic of 1 would be under way for 4
    line = Alone(HALF)
    line.depart("a", "k", 1.0)
    line.compute(1.0)  # takes 2; half of the traffic is left
    assert line.clock == pytest.approx(2.0)
    assert line.under_way["a"].left == pytest.approx(0.5)
    line.arrive("a")
    assert line.clock == pytest.approx(2.5) and line.waited == pytest.approx(0.5)


def test_computation_is_disturbed_only_while_traffic_is_under_way() -> None:
    line = Alone(HALF)
    line.depart("a", "k", 1.0)
    line.compute(3.0)  # 4 seconds at 0.5 make 2 of it, then 1 undisturbed
    assert line.clock == pytest.approx(5.0) and not line.under_way
    assert line.computed == 3.0 and line.waited == 0.0


def test_the_mean_of_kinds_disturbs() -> None:
    line = Alone({"k": Overlap(0.5), "l": Overlap(0.9)})
    line.depart("a", "k", 100.0)
    line.depart("b", "l", 100.0)
    line.depart("c", "unknown", 100.0)
    assert line.capacity == pytest.approx(0.8)
    line.compute(0.8)
    assert line.clock == pytest.approx(1.0)


def test_waiting_earns_credit_that_a_burst_spends() -> None:
    line = Alone(device=DeviceModel(BurstSpeed(speed=3.0, credit=0.5)))
    line.compute(1.0)  # no credit to begin with
    assert line.clock == 1.0
    line.depart("a", "k", 0.2)
    line.arrive("a")
    assert line.credit == pytest.approx(0.2)
    # credit lasts 0.2 / (3 - 1) = 0.1 s, in which 0.3 are done
    line.compute(0.5)
    assert line.clock == pytest.approx(1.2 + 0.1 + 0.2)
    assert line.credit == pytest.approx(0.0)
    line.depart("b", "k", 7.0)
    line.arrive("b")
    assert line.credit == 0.5  # no more than there is


def test_traffic_takes_credit_as_it_goes_quicker() -> None:
    # computing takes half of a second beside traffic at 0.8; alone, at 1, it takes 0.5 / 0.8
    line = Alone({"k": Overlap(0.5, 0.8)}, DeviceModel(BurstSpeed(speed=2.0, credit=1.0)))
    line.depart("a", "k", 0.4)
    line.arrive("a")
    assert line.credit == pytest.approx(0.4 * (1 - 0.5 / 0.8))
    # at 0.25 it takes 2 a second alone, more than there is: nothing is earned, none is owed
    line = Alone(HALF, DeviceModel(BurstSpeed(speed=2.0, credit=1.0)), credit=0.1)
    line.depart("a", "k", 0.5)
    line.arrive("a")
    assert line.credit == 0.0 and line.clock == pytest.approx(0.5)


def test_a_burst_goes_on_beside_traffic() -> None:
    line = Alone(HALF, DeviceModel(BurstSpeed(speed=2.0, credit=1.0)), credit=0.25)
    line.clock = 0.5
    line.depart("b", "k", 100.0)
    line.compute(1.0)  # 0.25 / (2 - 0.5) s at 2, then at 0.5
    quick = 0.25 / 1.5
    assert line.clock == pytest.approx(0.5 + quick + (1.0 - 2 * quick) / 0.5)


ACTIONS = st.lists(
    st.tuples(st.sampled_from("cda"), st.floats(1e-9, 1e3), st.integers(0, 3)), max_size=12
)
RATES = st.builds(Overlap, st.floats(0.05, 1.0), st.floats(0.05, 1.0))


def walked(
    actions: list[tuple[str, float, int]], overlap: Overlap, burst: BurstSpeed, factor: float = 1.0
) -> Alone:
    line = Alone({"k": overlap}, DeviceModel(burst))
    for what, seconds, key in actions:
        if what == "c":
            line.compute(seconds * factor)
        elif what == "a":
            line.arrive(key)
        elif key not in line.under_way:
            line.depart(key, "k", seconds * factor)
    line.finish()
    return line


def test_a_group_has_a_queue() -> None:
    line = Alone({})
    for key, seconds, lane in (("a", 1.0, "g"), ("b", 2.0, "g"), ("c", 1.0, "h")):
        line.depart(key, "k", seconds, lane)
    line.arrive("a")
    assert line.clock == pytest.approx(2.0), "half the links: the other group has the other half"
    assert "c" not in line.under_way, "as long as the first one of the other group"
    line.arrive("b")
    assert line.clock == pytest.approx(4.0), "alone from then on"


def test_a_late_one_leaves_the_links_to_others() -> None:
    line = Alone({"k": Overlap(delay=1.0)}, DeviceModel(BurstSpeed(2.0, 1.0)))
    line.depart("a", "k", 1.0, "g")
    line.depart("b", "other", 1.0, "h")
    line.arrive("b")
    assert line.clock == pytest.approx(1.0) and line.under_way["a"].left == 1.0
    line.arrive("a")
    assert line.clock == pytest.approx(2.0)


@given(ACTIONS, RATES, st.builds(BurstSpeed, st.floats(1.0, 8.0), st.floats(0.0, 1.0)))
def test_laws(actions: list[tuple[str, float, int]], overlap: Overlap, burst: BurstSpeed) -> None:
    line = walked(actions, overlap, burst)
    assert not line.under_way and 0.0 <= line.credit <= burst.credit
    computed = sum(s for what, s, _ in actions if what == "c")
    assert line.computed == pytest.approx(computed)
    assert line.waited <= line.clock * (1 + 1e-9)
    assert line.clock >= computed / burst.speed * (1 - 1e-9) - 1e-9
    # alone and undisturbed nothing takes longer than everything after the other
    free = walked(actions, Overlap(), BurstSpeed())
    assert free.clock >= computed * (1 - 1e-9)


@given(ACTIONS, RATES, st.floats(0.1, 10.0))
def test_time_has_no_unit(
    actions: list[tuple[str, float, int]], overlap: Overlap, factor: float
) -> None:
    one, other = (walked(actions, overlap, BurstSpeed(), f) for f in (1.0, factor))
    assert other.clock == pytest.approx(one.clock * factor, rel=1e-6, abs=1e-9)


def test_traffic_is_late_after_computation_and_not_after_a_rest() -> None:
    #   [ 1.0 ]  0.5 late  ~~~~ 2.0                        there at 3.5
    line = Alone({"k": Overlap(delay=0.5)})
    line.compute(1.0)
    line.depart("a", "k", 2.0)
    line.arrive("a")
    assert line.clock == pytest.approx(3.5)
    # the wait has earned half of the credit back, so what departs now is half as late
    line = Alone({"k": Overlap(delay=0.5)}, DeviceModel(BurstSpeed(2.0, 4.0)))
    line.compute(1.0)
    line.depart("a", "k", 1.5)
    line.arrive("a")
    line.depart("b", "k", 1.0)
    line.arrive("b")
    assert line.clock == pytest.approx(1.0 + 0.5 + 1.5 + 0.25 + 1.0)
