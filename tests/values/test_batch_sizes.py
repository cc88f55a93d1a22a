"""Batches that change while training, in words."""

import pytest

from synchromesh.values.batch_sizes import BatchRange, BatchSchedule, batches_of


@pytest.mark.parametrize(
    ("words", "base", "samples", "sizes"),
    [
        ("auto", 64, None, [64, 128, 256, 512, 1024, 2048]),
        ("auto", 64, 1437, [64, 128]),  # ten updates of an epoch
        ("auto", 64, 100, [64]),
        ("auto:16-100", 64, None, [16, 32, 64, 100]),
        ("auto:48-1000", 64, 500, [48, 64, 128, 256, 500]),
        ("auto:7-7", 64, None, [7]),
        ("auto:1-4", 3, None, [1, 3, 4]),
    ],
)
def test_sizes_are_powers_of_two_times_the_first_and_both_ends(
    words: str, base: int, samples: int | None, sizes: list[int]
) -> None:
    among = BatchRange.parse(words)
    assert among.sizes(base, samples) == sizes and str(among) == words


def test_batches_grow_behind_epochs() -> None:
    schedule = BatchSchedule.parse("30:x5, 60:x2.5")
    assert [schedule.grown(n) for n in (0, 29, 30, 59, 60, 90)] == [1, 1, 5, 5, 12.5, 12.5]
    assert batches_of(str(schedule)) == schedule and str(schedule) == "30:x5,60:x2.5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("automatic", "'automatic' is no batch size: give a number, auto or auto:MIN-MAX"),
        ("auto:8", "no batch size"), ("auto:9-8", "at most MAX"), ("auto:0-8", "at least 1"),
        ("auto:-1-8", "no batch size"),
        ("30", "'30' is no schedule of batches"), ("30:5", "no schedule"),
        ("60:x5,30:x5", "ascending"), ("30:x5,30:x5", "ascending"), ("0:x5", "from 1"),
        ("30:x1", "more than 1"), ("30:x0.5", "more than 1"), ("", "no schedule"),
        ("30:x5,", "no schedule"), ("30:xinf", "no schedule"),
    ],
)  # fmt: skip
def test_bad_words_have_their_sentence(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batches_of(text)


def test_data_that_is_smaller_than_the_least_batch() -> None:
    with pytest.raises(ValueError, match="batches of 64 rows or more, of data that has 50"):
        BatchRange.parse("auto:64-128").sizes(64, 50)
