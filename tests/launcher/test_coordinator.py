"""What a coordinator decides of an elastic run, from what hosts tell."""

from dataclasses import replace

import pytest

from synchromesh.launcher import coordinator
from synchromesh.launcher.coordinator import Coordinator, HostRanks, Orders, RankState, Seat

MARKS = {"model": "1", "data": "2"}


class Hosts:
    """Hosts whose ranks do at once what they are to."""

    def __init__(self, *names: str, least: int = 1, most: int = 4) -> None:
        self.said: list[str] = []
        self.ranks: dict[Seat, RankState] = {}
        self.leaves: set[str] = set()
        self.stops: set[str] = set()
        self.own = Coordinator(names[0], "127.0.0.1", self.said.append, (least, most), ranks=0)
        for name in names:
            self.start(name)

    def start(self, host: str, slot: int = 0, marks: dict[str, str] | None = None) -> None:
        self.ranks[Seat(host, slot)] = RankState(slot, 0, marks or {})

    def change(self, host: str, slot: int = 0, **fields: object) -> None:
        seat = Seat(host, slot)
        self.ranks[seat] = replace(self.ranks[seat], **fields)  # type: ignore[arg-type]

    def decide(self) -> Orders:
        names = dict.fromkeys(seat.host for seat in self.ranks)
        return self.own.decide(
            [
                HostRanks(n, tuple(r for s, r in self.ranks.items() if s.host == n),
                          leaves=n in self.leaves, stops=n in self.stops)
                for n in names
            ]
        )  # fmt: skip

    def settle(self) -> Orders:
        """Ranks of the generation have built, and train."""
        orders = self.decide()
        for seat in orders.seats:
            if seat in self.ranks and not self.ranks[seat].why:
                self.change(seat.host, seat.slot, settled=orders.number, marks=MARKS)
        return self.decide()

    def leave(self) -> Orders:
        """Those that are to leave the generation do, and the next one begins."""
        orders = self.decide()
        assert orders.leave
        for seat in orders.seats:
            if seat in self.ranks and not self.ranks[seat].why:
                self.change(seat.host, seat.slot, ready=orders.number)
        return self.decide()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = coordinator.CoordinatorTuning(meet=0.0, gather=0.0, scarce=0.0)
    monkeypatch.setattr(coordinator, "LIMITS", limits)


def where(orders: Orders) -> list[str]:
    return [f"{seat.host}{seat.slot}" for seat in orders.seats]


def test_a_run_begins_when_enough_hosts_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "LIMITS", coordinator.CoordinatorTuning(gather=60.0))
    hosts = Hosts("b", "a", least=2, most=3)
    assert hosts.decide().number == 0  # more may come
    hosts.start("c")
    orders = hosts.decide()
    assert (orders.number, where(orders), orders.before) == (1, ["b0", "a0", "c0"], (-1, -1, -1))
    assert hosts.decide() == orders


def test_a_run_waits_for_its_least_hosts() -> None:
    hosts = Hosts("a", least=2)
    assert hosts.decide().number == 0
    hosts.start("b")
    assert hosts.decide().number == 1


def test_a_host_that_is_gone_has_lost_its_ranks() -> None:
    hosts = Hosts("a", "b", "c")
    hosts.settle()
    del hosts.ranks[Seat("b", 0)]
    assert [loss.rank for loss in hosts.decide().lost] == [1]
    orders = hosts.leave()
    assert (where(orders), orders.before) == (["a0", "c0"], (0, 2))
    assert [str(loss) for loss in orders.because] == ["rank 1 is of host b, which is gone"]
    assert hosts.said == ["rank 1 is of host b, which is gone"]
    hosts.start("b", 0)  # its launcher was only silent: the rank it had is of no generation
    hosts.change("b", ready=1, marks=MARKS)
    assert not hosts.settle().leave


def test_a_rank_that_came_and_was_lost_does_not_come_again() -> None:
    hosts = Hosts("a", "b")
    hosts.decide()
    hosts.start("c", marks=MARKS)
    hosts.settle()
    assert where(hosts.leave()) == ["a0", "b0", "c0"]
    hosts.settle()
    silent = hosts.ranks.pop(Seat("c", 0))  # it has not left a generation since it came
    hosts.decide()
    hosts.leave()
    hosts.ranks[Seat("c", 0)] = silent
    assert not hosts.settle().leave
    hosts.start("c", 1, marks=MARKS)  # which its launcher starts in its place
    assert hosts.decide().leave


def test_ranks_come_when_they_have_built_and_all_others_train() -> None:
    hosts = Hosts("a", "b")
    hosts.decide()
    hosts.start("c", marks=MARKS)
    assert not hosts.decide().leave  # a and b have not begun
    hosts.change("a", cuts=("b", "c"))
    orders = hosts.settle()
    assert orders.leave and not orders.lost and orders.cuts == ("b", "c")
    orders = hosts.leave()
    assert (where(orders), orders.before, orders.stay) == (["a0", "b0", "c0"], (0, 1, -1), 3)


def test_ranks_of_one_host_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "LIMITS", coordinator.CoordinatorTuning(gather=60.0))
    hosts = Hosts("a", most=1)
    hosts.own.most = 2
    hosts.own._begin([Seat("a", 0)], 1)
    hosts.settle()
    hosts.start("b", 0, MARKS)
    hosts.start("b", 1)
    assert not hosts.decide().leave
    hosts.change("b", 1, marks=MARKS)
    assert hosts.decide().leave


@pytest.mark.parametrize(
    ("marks", "why"),
    [({"model": "1", "data": "3"}, "it differs from the run in its data"),
     ({"model": "2"}, "it differs from the run in its model and data"),
     (MARKS, "there are 2 hosts, the most that are asked for")],
)  # fmt: skip
def test_who_cannot_come_is_told_why(marks: dict[str, str], why: str) -> None:
    hosts = Hosts("a", "b", most=2)
    hosts.settle()
    hosts.start("c", marks=marks)
    orders = hosts.decide()
    assert orders.why("c") == f"this host cannot come: {why}" and not orders.why("a")
    assert not orders.leave and hosts.said == [f"host c cannot come: {why}"]


def test_a_host_leaves_when_others_hold_what_it_has() -> None:
    hosts = Hosts("a", "b", "c")
    hosts.settle()
    hosts.leaves = {"b"}
    assert hosts.decide().leave
    orders = hosts.leave()
    assert (where(orders), orders.stay, orders.may_go) == (["a0", "c0", "b0"], 2, ())
    assert hosts.settle().may_go == ("b",)
    hosts.change("b", why="has left")
    orders = hosts.leave()
    assert (where(orders), orders.stay) == (["a0", "c0"], 2)
    assert not hosts.settle().leave


def test_hosts_are_asked_to_leave_by_their_address() -> None:
    hosts = Hosts("h1/1", "h2/1", "h2/2", "h3/1")
    hosts.own.asked |= {"h1", "h2", "h9", ""}  # the coordinator's is not
    assert hosts.settle().asked == ("h2/1", "h2/2")
    hosts.leaves |= {"h2/1", "h2/2"}
    orders = hosts.leave()
    assert (where(orders)[:2], orders.stay) == (["h1/10", "h3/10"], 2)
    for name in ("h2/1", "h2/2"):
        del hosts.ranks[Seat(name, 0)]
    assert hosts.decide().asked == () and hosts.own.asked == {"h1"}


def test_a_run_stops_where_a_host_leaves_without_which_others_do_not_go_on() -> None:
    hosts = Hosts("a", "b")
    hosts.settle()
    for name in ("a", "b"):
        hosts.change(name, marks={})
    hosts.leaves.add("b")
    for _ in range(2):
        assert hosts.decide().stop and not hosts.own.orders.leave
    assert hosts.said == ["a host leaves without which the others do not go on: the run stops"]


def test_with_too_few_hosts_a_run_waits_and_then_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "LIMITS", coordinator.CoordinatorTuning(gather=0, scarce=60))
    hosts = Hosts("a", "b", least=2, most=2)
    hosts.settle()
    del hosts.ranks[Seat("b", 0)]
    assert hosts.leave().number == 1
    monkeypatch.setattr(coordinator, "LIMITS", coordinator.CoordinatorTuning(gather=0, scarce=0))
    orders = hosts.decide()
    assert (orders.number, orders.stop, where(orders)) == (2, True, ["a0"])
    assert hosts.said[1:] == [
        "1 of at least 2 hosts are there: the run waits 60 s for others",
        "1 of at least 2 hosts are there: the run stops",
    ]


def test_a_run_that_waits_for_hosts_stops_when_it_is_told_to() -> None:
    hosts = Hosts("a", "b", "c", least=3, most=3)
    hosts.settle()
    del hosts.ranks[Seat("b", 0)]
    hosts.stops.add("a")
    orders = hosts.leave()
    assert (orders.number, where(orders)) == (2, ["a0", "c0"])


def test_a_run_that_is_over_is_not_begun_anew() -> None:
    hosts = Hosts("a", "b")
    hosts.settle()
    hosts.change("a", ended=True)
    hosts.change("b", ended=True)
    hosts.start("c")
    orders = hosts.decide()
    assert (orders.number, orders.over, orders.trains) == (1, True, False)


def test_a_failure_of_one_host_ends_all() -> None:
    hosts = Hosts("a", "b")
    hosts.settle()
    state = HostRanks("b", (), failed="rank 1 of host b failed")
    assert hosts.own.decide([state]).why("a") == "the run ended: rank 1 of host b failed"
    assert hosts.decide().end  # for good


def test_all_are_lost_and_begin_anew() -> None:
    hosts = Hosts("a", "b")
    hosts.settle()
    for name in "ab":
        hosts.change(name, why="was killed by SIGKILL")
    orders = hosts.decide()
    assert not orders.trains
    hosts.ranks = {}
    for name in "ab":
        hosts.start(name, 1)
    orders = hosts.decide()
    assert (orders.number, where(orders), orders.before) == (2, ["a1", "b1"], (-1, -1))
    generation = orders.generation(Seat("b", 1))
    assert generation is not None and (generation.rank, generation.came) == (1, 0)
    assert generation.anew


def test_a_rank_of_a_host_that_trains_is_refused_alone() -> None:
    hosts = Hosts("a", "b")
    hosts.settle()
    hosts.start("b", 1, {"model": "3", "data": "2"})
    orders = hosts.decide()
    assert not orders.leave and not orders.why("b") and not orders.end
    assert hosts.said == ["host b cannot come: it differs from the run in its model"]


def test_a_host_that_fails_before_it_has_come_is_on_its_own() -> None:
    hosts = Hosts("a", "b")
    hosts.settle()
    states = [HostRanks(n, (hosts.ranks[Seat(n, 0)],)) for n in "ab"]
    orders = hosts.own.decide([*states, HostRanks("c", (), failed="rank 0 of host c failed")])
    assert not orders.end and orders.why("c")
    assert hosts.said == ["rank 0 of host c failed; the others go on"]


def test_who_was_started_to_come_does_not_begin_a_run() -> None:
    hosts = Hosts("a")
    hosts.settle()
    hosts.change("a", why="was killed by SIGKILL")
    hosts.start("a", 1)
    hosts.change("a", 1, joins=True)
    assert hosts.decide().number == 1
    hosts.start("a", 2)
    assert where(hosts.decide()) == ["a2"]


def test_no_more_hosts_begin_than_are_asked_for() -> None:
    assert where(Hosts("a", "b", "c", most=2).decide()) == ["a0", "b0"]


def test_one_that_stands_still_while_all_others_wait_is_late() -> None:
    hosts = Hosts("a", "b", "c")
    hosts.settle()
    hosts.change("a", still=99.0)
    hosts.change("b", waits=99.0)
    assert not hosts.decide().late  # c does something
    hosts.change("c", waits=99.0)
    assert hosts.decide().late == (Seat("a", 0),)
    hosts.change("c", waits=0.0, still=99.0)
    assert hosts.decide().late == (Seat("a", 0),)  # one after the other
    hosts.change("b", waits=0.0, still=99.0)
    assert not hosts.decide().late  # nobody waits for anybody
