"""Messages: pictures, one order for each pair of groups, and no step that waits for ever."""

import random
from collections.abc import Iterator

import pytest

from synchromesh.values.messages import Instruction, Message, Receive, Run, Send, instructions
from synchromesh.values.schedule import PIPELINES, Schedule, forward_only, pipeline
from tests.values.test_schedule import drawn

Lists = tuple[tuple[Instruction, ...], ...]
Crossings = frozenset[tuple[int, int]]


def chain(stages: int, *skips: tuple[int, int]) -> Crossings:
    """From each stage to the next, and those that skip some."""
    return frozenset([*((s, s + 1) for s in range(stages - 1)), *skips])


def shown(lists: Lists) -> str:
    return "\n".join(" ".join(map(str, found)) for found in lists)


def test_two_stages() -> None:
    assert shown(instructions(pipeline("1f1b", (0, 1), 2), chain(2))) == drawn("""
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1
        1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1""")
    assert shown(instructions(pipeline("gpipe", (0, 1), 2), chain(2))) == drawn("""
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1
        1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1""")


def test_gradients_of_weights_stand_between_messages() -> None:
    assert shown(instructions(pipeline("zero-bubble", (0, 1), 2), chain(2))) == drawn("""
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0W0 0B1 0W1
        1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1W0 1W1""")


def test_a_value_that_skips_stages_goes_straight_to_its_reader() -> None:
    assert shown(instructions(pipeline("1f1b", (0, 1, 2), 1), chain(3, (0, 2)))) == drawn("""
        0F0 0SEND_F0 0SEND_F0>2 0RECV_B0<2 0RECV_B0 0B0
        1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0
        2RECV_F0<0 2RECV_F0 2F0 2B0 2SEND_B0>0 2SEND_B0""")


def test_a_group_sends_nothing_to_itself() -> None:
    again = pipeline("interleaved", (0, 1, 0), 1)
    assert shown(instructions(again, chain(3, (0, 2)))) == drawn("""
        0F0 0SEND_F0 2RECV_F0 2F0 2B0 2SEND_B0 0RECV_B0 0B0
        1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0""")
    assert shown(instructions(pipeline("1f1b", (0,), 2), frozenset())) == "0F0 0B0 0F1 0B1"


def test_an_evaluation_sends_nothing_back() -> None:
    assert shown(instructions(forward_only((0, 1), 2), chain(2))) == drawn("""
        0F0 0SEND_F0 0F1 0SEND_F1
        1RECV_F0 1RECV_F1 1F0 1F1""")


def test_values_go_to_later_stages() -> None:
    for pair in ((1, 0), (1, 1), (0, 2), (-1, 1)):
        with pytest.raises(ValueError, match="values go from a stage to a later one, not from"):
            instructions(pipeline("1f1b", (0, 1), 2), frozenset([pair]))


def drawn_at_random(count: int) -> Iterator[tuple[Schedule, Crossings]]:
    """Stages on groups that may come again, whose values skip some, under every schedule."""
    rng = random.Random(0)
    for _ in range(count):
        stages = rng.randint(2, 8)
        groups = rng.randint(2, stages)
        of = [*range(groups), *(rng.randrange(groups) for _ in range(stages - groups))]
        if rng.random() < 0.5:
            rng.shuffle(of)
        pairs = [(s, t) for t in range(stages) for s in range(t)]
        crossings = chain(stages, *rng.sample(pairs, rng.randint(0, len(pairs))))
        m = rng.randint(1, 16)
        name = rng.choice([*PIPELINES, "forward only"])
        made = forward_only(tuple(of), m) if name not in PIPELINES else None
        yield made or pipeline(name, tuple(of), m), crossings


DRAWN = [(s, c, instructions(s, c)) for s, c in drawn_at_random(120)]


def messages(schedule: Schedule, crossings: Crossings) -> set[Message]:
    """All that are to be sent."""
    return {
        Message("F" if kind == "F" else "B", s, t, m)
        for s, t in crossings
        for m in range(schedule.micro_batches)
        for kind in ("FB" if schedule.trains else "F")
        if schedule.of[s] != schedule.of[t]
    }


def test_each_message_is_sent_and_received_once() -> None:
    for schedule, crossings, lists in DRAWN:
        for kind, stage in ((Send, "sender"), (Receive, "receiver")):
            found = [(i.message, g) for g, own in enumerate(lists) for i in own if type(i) is kind]
            assert all(schedule.of[getattr(m, stage)] == g for m, g in found)
            assert len(found) == len(set(found))
            assert {m for m, _ in found} == messages(schedule, crossings)
        runs = tuple(tuple(i.action for i in own if isinstance(i, Run)) for own in lists)
        assert runs == schedule.groups


def test_the_order_is_the_same_on_both_groups() -> None:
    """Of both directions together: NCCL pairs what two ranks send and receive by its order."""
    for schedule, _, lists in DRAWN:
        orders: dict[tuple[int, int], list[Message]] = {}
        for g, own in enumerate(lists):
            for i in own:
                if not isinstance(i, Run):
                    ends = {schedule.of[i.message.sender], schedule.of[i.message.receiver]}
                    orders.setdefault((g, *(ends - {g})), []).append(i.message)
        for (here, there), order in orders.items():
            assert order == orders[there, here]


def test_a_send_follows_its_action() -> None:
    for _, _, lists in DRAWN:
        for own in lists:
            last = None
            for i in own:
                last = i.action if isinstance(i, Run) else last
                assert not isinstance(i, Send) or i.message.made_by == last


def test_a_receive_is_posted_one_action_ahead() -> None:
    """Or earlier; later where the order between the two groups asks for it, and then in time."""
    for schedule, _, lists in DRAWN:
        for own in lists:
            place = {i.action: n for n, i in enumerate(i for i in own if isinstance(i, Run))}
            begun, sent = 0, {}
            for i in own:
                if isinstance(i, Run):
                    begun += 1
                elif isinstance(i, Send):
                    sent[schedule.of[i.message.receiver]] = begun
                else:
                    needed = place[i.message.needed_by]
                    after = sent.get(schedule.of[i.message.sender], 0)
                    assert begun <= max(0, needed - 1, after) and begun <= needed


def stuck(schedule: Schedule, lists: Lists, rng: random.Random) -> list[str]:
    """Runs the groups in any order, each send waiting until its receive is posted; what they wait
    for in the end."""
    at = [0] * len(lists)
    posted: set[Message] = set()
    sent: set[Message] = set()
    needs: dict[object, set[Message]] = {}
    for own in lists:
        for i in own:
            if isinstance(i, Receive):
                needs.setdefault(i.message.needed_by, set()).add(i.message)
    moved = True
    while moved:
        moved = False
        for g in rng.sample(range(len(lists)), len(lists)):
            while at[g] < len(lists[g]):
                i = lists[g][at[g]]
                if isinstance(i, Send) and i.message not in posted:
                    break
                if isinstance(i, Run) and not needs.get(i.action, set()) <= sent:
                    break
                if isinstance(i, Receive):
                    posted.add(i.message)
                elif isinstance(i, Send):
                    sent.add(i.message)
                at[g], moved = at[g] + 1, True
                if rng.random() < 0.3:
                    break
    return [str(own[n]) for own, n in zip(lists, at, strict=True) if n < len(own)]


def test_nothing_waits_for_ever() -> None:
    rng = random.Random(1)
    for schedule, _, lists in DRAWN:
        assert not stuck(schedule, lists, rng)
    first, second = instructions(pipeline("1f1b", (0, 1), 1), chain(2))
    late = (*second[1:2], second[0], *second[2:])  # 1F0 in front of its receive
    assert stuck(pipeline("1f1b", (0, 1), 1), (first, late), rng) == ["0SEND_F0", "1F0"]
