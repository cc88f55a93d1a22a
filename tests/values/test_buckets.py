"""Gradient buckets: a picture of how they fill, and laws of every assignment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synchromesh.values.buckets import (
    RULES,
    BucketKind,
    BucketSizes,
    Sending,
    SendingRules,
    completing,
    fill,
)
from synchromesh.values.schedule import Action, pipeline, taking_turns
from tests.bucket_sizes import bucket_sizes

Parameter = tuple[str, str, int]  # name, kind, bytes


def filled(parameters: list[Parameter], full: int, first: int) -> list[list[Parameter]]:
    with bucket_sizes(full, first):
        return fill(parameters, lambda p: p[1], lambda p: p[2])


def picture(text: str, full: int, first: int) -> str:
    """Parameters as `name:bytes`, of the kind that their first letter is."""
    split = [item.split(":") for item in text.split()]
    made = filled([(n, n[0], int(size)) for n, size in split], full, first)
    return " | ".join(" ".join(name for name, _, _ in bucket) for bucket in made)


def test_buckets_fill_from_the_last_parameter_and_the_first_one_is_small() -> None:
    assert picture("p0:2 p1:2 p2:2 p3:2 p4:2 p5:2", full=4, first=2) == "p5 | p4 p3 | p2 p1 | p0"


def test_each_kind_has_its_buckets_and_its_small_first_one() -> None:
    assert picture("a0:2 b0:2 a1:2 b1:2 a2:2", full=4, first=2) == "a2 | b1 | a1 a0 | b0"


def test_sizes_are_those_of_ddp() -> None:
    assert BucketSizes() == BucketSizes(25 << 20, 1 << 20)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 20)), max_size=30),
    st.integers(1, 30),
    st.integers(1, 30),
)
def test_every_parameter_is_in_one_bucket_of_its_kind(
    drawn: list[tuple[str, int]], full: int, first: int
) -> None:
    parameters = [(str(i), kind, size) for i, (kind, size) in enumerate(drawn)]
    made = filled(parameters, full, first)
    assert sorted(p for bucket in made for p in bucket) == sorted(parameters)
    for kind in "ab":
        own = [bucket for bucket in made if bucket[0][1] == kind]
        assert [p for b in own for p in b] == [p for p in parameters[::-1] if p[1] == kind]
        for i, bucket in enumerate(own[:-1]):  # full, and not before its last parameter
            limit = full if i else first
            sizes = [p[2] for p in bucket]
            assert sum(sizes) >= limit > sum(sizes[:-1])


@pytest.mark.parametrize("size", [25 << 20, 1])
def test_nothing_falls_into_no_bucket(size: int) -> None:
    assert filled([], size, size) == []


def sent(text: str, *kinds: BucketKind, rules: SendingRules = RULES) -> str:
    """The events of each of `text`: `a0` is a gradient of bucket 0, `/` the end of a backward of
    stage 0, `.` that of the step. Buckets have gradients a and b."""
    sending = Sending([(kind, "ab") for kind in kinds], rules)
    lines = []
    for word in text.split():
        if word == "/":
            events = sending.end_backward(0)
        elif word == ".":
            events = sending.finish()
        else:
            bucket = int(word[1])
            events = [*sending.open(bucket), *sending.fill(bucket, word[0])]
        lines.append("+".join(f"{event.verb[0]}{event.bucket}" for event in events) or "-")
    return " ".join(lines)


ONCE = BucketKind("all", "float32")
EACH = BucketKind("all", "float32", scattered=True, stages=(0,))


def test_buckets_are_sent_when_full_and_in_their_order() -> None:
    assert sent("a0 b0 a1 b1", ONCE, ONCE) == "- s0 - s1"
    assert sent("a1 b1 a0 b0", ONCE, ONCE) == "- - - s0+s1"
    assert sent("a0 a1 b1 .", ONCE, ONCE) == "- - - s0+s1", "a gradient that never came"


def test_those_of_each_backward_are_sent_in_each() -> None:
    assert sent("a0 b0 / a0 b0 /", EACH) == "- s0 - a0 s0 -"
    assert sent("a0 / a0 b0 /", EACH) == "- s0 a0 s0 -"
    assert sent("a0 b0 a1 b1 / .", EACH, ONCE) == "- s0 - s1 - -", "each kind in an order"


def test_few_scattered_buckets_are_under_way() -> None:
    text = " ".join(f"a{n} b{n}" for n in range(4))
    assert sent(text, *[EACH] * 4) == "- s0 - s1 - s2+a0 - s3+a1"
    assert sent(text, *[ONCE] * 4) == "- s0 - s1 - s2 - s3"


def test_what_is_left_out_of_the_rules() -> None:
    late = SendingRules(late=True)
    assert sent("a0 b0 /", EACH, rules=late) == "- - s0"
    assert sent("a0 b0 .", ONCE, rules=late) == "- - s0"
    assert sent("a1 b1 a0 b0", ONCE, ONCE, rules=SendingRules(in_order=False)) == "- s1 - s0"
    apart = SendingRules(reuse=False)
    assert sent("a0 b0 / " * 4, EACH, rules=apart) == "- s0 - - s0 - - s0+a0 - - s0+a0 -"
    several = BucketKind("all", "float32", scattered=True, stages=(0, 2))
    assert sent("a0 b0 a0 b0 /", several) == "- - - - s0"
    assert sent("a0 b0 /", several, rules=SendingRules(of_stages=False)) == "- s0 -"


def test_a_step_that_failed_leaves_nothing() -> None:
    sending = Sending([(ONCE, "ab"), (EACH, "ab")])
    for item in "ab":
        sending.fill(1, item)
    sending.fill(0, "a")
    sending.abandon()
    assert not sending.open(1) and not sending.fill(0, "b")
    assert [str(event) for event in sending.fill(0, "a")] == ["send 0"]


def test_a_gradient_is_complete_after_the_last_backward_of_its_first_user() -> None:
    """`tied` is used by the stages 0 and 2 of a group, whose backwards are 2B0 2B1 0B0 0B1."""
    actions = pipeline("gpipe", (0, 1, 0), 2).groups[0]
    users = {"tied": (0, 0), "early": (0, 1), "late": (2, 5)}
    found = completing(actions, users, each={"early"})
    assert {str(a): its for a, its in found.items()} == {
        "2B0": {}, "2B1": {5: ("late",)}, "0B0": {1: ("early",)},
        "0B1": {0: ("tied",), 1: ("early",)},
    }  # fmt: skip


def test_gradients_are_complete_when_those_of_weights_are() -> None:
    actions = pipeline("zero-bubble", (0, 1), 2).groups[1]
    assert list(map(str, actions)) == ["1F0", "1B0", "1F1", "1B1", "1W0", "1W1"]
    found = completing(actions, {"early": (1, 0), "late": (1, 1)}, each={"early"})
    assert {str(a): its for a, its in found.items()} == {
        "1W0": {0: ("early",)}, "1W1": {0: ("early",), 1: ("late",)},
    }  # fmt: skip


def test_micro_batches_that_share_a_backward_count_as_one() -> None:
    actions = dict.fromkeys(a.of_all(2) for a in taking_turns(4, 3, 2).groups[0])
    assert list(map(str, actions)) == ["0F0", "0B0", "0F1", "0B1"]
    assert completing([*actions], {"a": (0, 7)}) == {
        Action(0, "B", 0): {}, Action(0, "B", 1): {7: ("a",)},
    }  # fmt: skip
