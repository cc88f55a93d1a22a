"""Prices of instances: the newest, of a region and date, with their source."""

import pytest

from synchromesh.catalogue.prices import price, prices


def test_every_price_says_where_and_when_it_held() -> None:
    assert len(prices()) > 30
    for p in prices():
        assert p.dollars_per_hour > 0 and p.devices >= 1
        assert p.name and p.region and p.date and p.source and p.device
    keys = [(p.name, p.region, p.date) for p in prices()]
    assert len(set(keys)) == len(keys)


def test_the_newest_price_is_taken_unless_another_date_is_asked_for() -> None:
    newest = price("p4d.24xlarge")
    assert newest.dollars_per_hour == 21.957642 and newest.date == "2026-09-24"
    assert newest.devices == 8 and newest.dollars(3600, 9) == 2 * newest.dollars_per_hour
    before = price("p4d.24xlarge", date="2025-05")
    assert before.dollars_per_hour == 32.7726 and "before the price cut" in before.source
    assert price("p3.2xlarge", "us-east-1").dollars_per_hour == 3.06


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("p3.2xlrge",), "no price of an instance 'p3.2xlrge'.*p3.2xlarge.*--hourly-price"),
        (("p3.2xlarge", "mars"), "p3.2xlarge for mars: the table has us-east-1 of 2026-09-24"),
        (("p3.2xlarge", None, "1999"), "p3.2xlarge for 1999: the table has us-east-1"),
    ],
)
def test_what_the_table_lacks_is_said(asked: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        price(*asked)
