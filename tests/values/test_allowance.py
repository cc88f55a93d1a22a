"""What `auto` may choose besides exact plans."""

import pytest

from synchromesh.values.allowance import NOTHING, Allowance
from synchromesh.values.plan import Plan

ALL = Allowance.parse("local,compression,asynchronous")


def test_of_an_exact_plan_each_variant_replaces_one_field() -> None:
    plan = Plan.parse("data; head=tensor; @rows=1,2")
    made = [str(variant) for variant in ALL.variants(plan, 2)]
    assert made == [
        f"data; head=tensor; @{changed}"
        for changed in (
            "synchronisation=local:8; @rows=1,2",
            "compression=fp16; @rows=1,2",
            "compression=int8; @rows=1,2",
            "compression=powersgd:4; @rows=1,2",
            "synchronisation=stale:1; @rows=1,2",
            "synchronisation=downpour:2; @rows=1,2",
            "synchronisation=ssp:2,stale=3; @rows=1,2",
            "synchronisation=shat:2; @rows=1,2",
        )
    ]


def test_nothing_is_made_of_what_has_no_such_variant() -> None:
    for text in ("zero1", "data; @synchronisation=server:2", "data; @compression=int8"):
        assert not [*ALL.variants(Plan.parse(text), 4)], text
    assert not [*ALL.variants(Plan.parse("single"), 1)], "one worker agrees with nobody"
    assert not [*NOTHING.variants(Plan.parse("data"), 4)]


@pytest.mark.parametrize(
    ("allowed", "plan", "covered"),
    [
        ("", "data", True),
        ("", "data; @compression=int8", False),
        ("compression", "data; @compression=topk:0.1", True),
        ("compression", "data; @synchronisation=local:8", False),
        ("local", "data; @synchronisation=diloco:4", True),
        ("local", "data; @synchronisation=stale:2", False),
        ("asynchronous", "data; @synchronisation=stale:2", True),
        ("asynchronous", "data; @synchronisation=hogwild", True),
        ("local,compression,asynchronous", "data; @synchronisation=server:2", False),  # exact
    ],
)
def test_what_auto_may_take(allowed: str, plan: str, covered: bool) -> None:
    assert Allowance.parse(allowed).covers(Plan.parse(plan)) is covered


def test_words_are_read_in_any_order_and_others_get_a_sentence() -> None:
    assert str(Allowance.parse(" compression , local,local")) == "local,compression"
    for text in ("locl", "local,", "local;compression"):
        with pytest.raises(ValueError, match="is none of local, compression, asynchronous"):
            Allowance.parse(text)
