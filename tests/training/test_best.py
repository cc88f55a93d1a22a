"""The best epoch, by any number; early stopping; how many checkpoints stay."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

import synchromesh as sm
from synchromesh.training.best import Best
from synchromesh.training.events import EpochEnded, EpochStarted, FitEvent, Saved
from tests.training.test_loop import TINY, seen, traced_once

__all__ = ["traced_once"]  # a fixture


@pytest.mark.parametrize(
    ("text", "least"),
    [("accuracy", False), ("valid_loss", True), ("Perplexity", True), ("reward:max", False),
     ("accuracy:min", True), ("loss:max", False)],
)  # fmt: skip
def test_which_is_better(text: str, least: bool) -> None:
    by = Best.parse(text)
    assert by.least == least and by.name == text.partition(":")[0]
    assert by.better(1.0, 2.0) == least and by.better(2.0, 1.0) != least
    assert by.better(1.0, None) and not by.better(math.nan, None) and not by.better(1.0, 1.0)


def test_what_an_epoch_is_judged_by() -> None:
    metrics = {"accuracy": 0.5, "top5": 0.9}
    assert Best().value(3.0, metrics) == 0.5 and Best("top5").value(3.0, metrics) == 0.9
    assert (
        Best("loss").value(3.0, metrics) == 3.0 and Best("loss").value(3.0, {"loss": 4.0}) == 4.0
    )
    assert math.isnan(Best().value(3.0, {})) and math.isnan(Best("loss").value(None, {}))
    with pytest.raises(ValueError, match=r"best=f1: there is no .* there are accuracy, top5"):
        Best("f1").value(3.0, metrics)
    for text in (":min", "loss:least"):
        with pytest.raises(ValueError, match="should be a metric's name"):
            Best.parse(text)


def test_the_best_by_loss_and_the_newest_stay() -> None:
    events: list[FitEvent] = []
    result = sm.fit(
        TINY, "single", checkpoints="saved", keep=2, best="loss", on_event=events.append, epochs=4
    )
    losses = [event.loss for event in seen(EpochEnded, events)]
    assert losses == sorted(losses, reverse=True), "so that each epoch is the best"
    assert result.best == losses[-1]
    names = sorted(p.name for p in Path("saved").iterdir() if not p.name.startswith("."))
    assert names == ["best", "epoch-3", "epoch-4"], "no best.previous either"
    assert sum(event.path.name == "best" for event in seen(Saved, events)) == 4


def test_training_ends_where_no_epoch_is_better_and_goes_on_with_that_count() -> None:
    told: list[str] = []
    first = sm.fit(
        TINY, "single", checkpoints="saved", best="loss:max", patience=2, epochs=9, say=told.append
    )
    assert (first.epochs, first.stopped) == (3, "")
    assert told[-1] == "training ends: 2 epochs brought no better one"
    again = sm.fit(TINY, "single", best="loss:max", patience=3, epochs=9, resume=first.checkpoint)
    assert again.epochs == 4 and again.best == first.best


def test_a_part_of_an_epoch_is_not_counted_twice() -> None:
    part = sm.fit(TINY, "single", checkpoints="saved", best="loss:max", steps=9)
    assert part.epochs == 1
    whole = sm.fit(TINY, "single", best="loss:max", patience=2, epochs=9, resume=part.checkpoint)
    assert whole.epochs == 3, "of which the second and the third brought no better one"


def test_an_unknown_metric_is_refused_before_the_first_step() -> None:
    events: list[FitEvent] = []
    with pytest.raises(ValueError, match="best=f1: there is no such metric; there are accuracy,"):
        sm.fit(TINY, "single", checkpoints="saved", best="f1", on_event=events.append)
    assert not seen(EpochStarted, events)
    unvalidated = replace(TINY, valid_data=None)
    with pytest.raises(ValueError, match=r"best=accuracy: there is no .* there are loss$"):
        sm.fit(unvalidated, "single", best="accuracy", on_event=events.append)
    assert not seen(EpochStarted, events)
    assert sm.fit(TINY, "single", best="accuracy", steps=1).best is not None
    with pytest.raises(ValueError, match=r"keep needs a folder.*|patience must be"):
        sm.fit(TINY, "single", keep=2, patience=0)
