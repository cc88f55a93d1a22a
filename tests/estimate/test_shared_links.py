"""Links that several kinds of traffic take at once."""

from functools import cache

import pytest

from synchromesh.cost.planned_step import PlannedStep
from synchromesh.cost.step_time import recorded
from synchromesh.cost.timeline import Spans, Timeline, Timelines
from synchromesh.estimate.shared_links import SharedLinks
from synchromesh.planner.candidate import planned_step
from synchromesh.planning.session import PlanningSession
from synchromesh.values.cluster import Cluster, Device, Host, Link
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Pattern, Profile, ServerMessages
from synchromesh.values.topology import Level
from tests.estimate.sessions import session_of, stack

ALL = SharedLinks.ALL


def racks(over: float, devices: int = 1, lanes: int = 1) -> Cluster:
    """Two racks of two hosts, whose uplinks carry what their hosts do, over `over`."""
    device = Device("gpu", 1 << 34, {"float32": 1e13}, 1e12)
    hosts = tuple(Host(f"host{i}", (device,) * devices) for i in range(4))
    inside, link = Link("*", "*", 1e11, 1e-6), Link("*", "*", 1e8, 1e-5, lanes=lanes)
    levels = (Level("host", devices, inside), Level("rack", 2, link, over), Level("core", 2))
    return Cluster("racks", hosts, topology=levels)


@cache
def session(cluster: Cluster) -> PlanningSession:
    return session_of(stack(256), 256, cluster)


def placed(cluster: Cluster, text: str) -> tuple[PlannedStep, Profile]:
    asked = session(cluster)
    candidate, known = asked.priced(Plan.parse(text), None)
    assert candidate.time is not None and known is not None, candidate.reason
    return planned_step(asked.partitions, candidate.plan), known


STAGES = "pipeline:stages=2,microbatches=4"


def test_lanes_that_stay_inside_of_hosts_take_no_link() -> None:
    planned, _ = placed(racks(1.0, devices=2), "hybrid:tensor=2")
    links = SharedLinks(racks(1.0, devices=2), planned)
    assert links.lane(0, Pattern(2, 1)) is None
    assert links.lane(0, Pattern(4, 2)) == (0, Pattern(4, 2))


def test_messages_and_sums_share_a_hosts_link() -> None:
    """A stage of two hosts in a rack: each host's sums go out and in at its full link, and so do
    its messages to the other stage; in that direction they halve each other."""
    cluster = racks(1.0)
    links = SharedLinks(cluster, placed(cluster, STAGES)[0])
    sums, there, back = (0, Pattern(2, 1)), (ALL, ("F", 0, 1)), (ALL, ("B", 0, 1))
    assert links.shares(frozenset([sums])) == {sums: 1.0}
    assert links.shares(frozenset([there, back])) == {there: 1.0, back: 1.0}
    assert links.shares(frozenset([sums, there])) == {sums: 0.5, there: 0.5}
    others = (1, Pattern(2, 1))
    assert links.shares(frozenset([sums, others])) == {sums: 1.0, others: 1.0}


def test_a_servers_link_carries_the_messages_of_all_workers() -> None:
    """Three push into host 0, whose link has a quarter for each beside a ring; its answers go the
    other way. Two servers of four have two workers each."""
    cluster = racks(1.0)
    links, ring = SharedLinks(cluster, placed(cluster, STAGES)[0]), (ALL, Pattern(4, 1))
    pushes, fetches = ((ALL, ServerMessages(x, Pattern(4, 1), 1)) for x in ("push", "fetch"))
    assert links.shares(frozenset([pushes, fetches])) == {pushes: 1.0, fetches: 1.0}
    assert links.shares(frozenset([pushes, ring])) == pytest.approx({pushes: 0.75, ring: 0.25})
    two = (ALL, ServerMessages("push", Pattern(4, 1), 2))
    assert links.shares(frozenset([two, ring])) == pytest.approx({two: 2 / 3, ring: 1 / 3})


def test_a_narrow_uplink_takes_from_what_crosses_it_alone() -> None:
    """Uplinks of a quarter of what hosts carry: messages have half of a host's link each, alone.
    Beside them sums inside the rack get what they leave of a host's link, the other half."""
    cluster = racks(4.0)
    links = SharedLinks(cluster, placed(cluster, STAGES)[0])
    sums, there = (0, Pattern(2, 1)), (ALL, ("F", 0, 1))
    shares = links.shares(frozenset([sums, there]))
    assert shares[there] == pytest.approx(1.0)  # of its own speed, a quarter of a host's link
    assert shares[sums] == pytest.approx(0.75)


def test_sums_over_two_stages_share_links_too() -> None:
    """The first layer is the last one, too, so that all four hosts sum its gradient, through the
    uplinks that messages take."""
    cluster, layers = racks(4.0), stack(256)
    asked = session_of([*layers, layers[0]], 256, cluster)
    candidate, known = asked.priced(Plan.parse(STAGES), None)
    assert candidate.time is not None and known is not None, candidate.reason
    planned = planned_step(asked.partitions, candidate.plan)
    links, sums = SharedLinks(cluster, planned), Pattern(4, 1)
    assert links.lane(0, sums) == links.lane(1, sums) == (ALL, sums)
    both = links.shares(frozenset([(ALL, sums), (ALL, ("F", 0, 1))]))
    assert both[ALL, sums] < 1.0 and both[ALL, ("F", 0, 1)] < 1.0
    shared = recorded(planned, known, 1, links).time.seconds
    assert shared >= recorded(planned, known, 1, Free()).time.seconds * (1 - 1e-9)


class Free:
    """Each lane has links to itself."""

    def lane(self, group: int, of: object) -> tuple[int, object] | None:
        return group, of

    def shares(self, lanes: frozenset[tuple[int, object]]) -> dict[tuple[int, object], float]:
        return dict.fromkeys(lanes, 1.0)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_step_takes_as_long_as_its_links_let_it(lanes: int) -> None:
    """Where hosts have two adapters for one device, messages and sums have one each."""
    cluster = racks(1.0, lanes=lanes)
    planned, known = placed(cluster, "pipeline:stages=2,microbatches=4; *=data:states=parameters")
    free = recorded(planned, known, 1, Free()).time.seconds
    shared = recorded(planned, known, 1, SharedLinks(cluster, planned)).time.seconds
    if lanes == 2:
        assert shared == pytest.approx(free, rel=1e-9)
    else:
        assert shared > 1.01 * free


class Halves:
    """One link for all lanes, shared evenly."""

    def lane(self, group: int, of: object) -> tuple[int, object] | None:
        return group, of

    def shares(self, lanes: frozenset[tuple[int, object]]) -> dict[tuple[int, object], float]:
        return dict.fromkeys(lanes, 1.0 / len(lanes))


def test_groups_that_never_meet_slow_each_other_down_on_their_links() -> None:
    """The first sends for 2 s from 0 s, the second for 1 s from 1 s: alone until then, at half
    the speed until the second's third second, then alone again."""
    lines = [Timeline(), Timeline()]
    timelines = Timelines(lines, Halves())

    def walk(line: Timeline, before: float, seconds: float) -> Spans:
        yield from line.compute(before)
        line.depart("it", "all_reduce", seconds, "ranks")
        yield from line.arrive("it")

    timelines.walk([walk(lines[0], 0.0, 2.0), walk(lines[1], 1.0, 1.0)])
    assert lines[0].clock == pytest.approx(3.0)
    assert lines[1].clock == pytest.approx(3.0)


def test_a_lane_that_ends_leaves_its_links_to_the_others() -> None:
    """1 s and 3 s from 0 s: both at half until 2 s, the second alone for its last 2 s."""
    lines = [Timeline(), Timeline()]
    timelines = Timelines(lines, Halves())

    def walk(line: Timeline, seconds: float) -> Spans:
        line.depart("it", "all_reduce", seconds, "ranks")
        yield from line.arrive("it")

    timelines.walk([walk(lines[0], 1.0), walk(lines[1], 3.0)])
    assert [line.clock for line in lines] == pytest.approx([2.0, 4.0])
