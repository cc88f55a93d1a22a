"""Targets: what a metric should reach, and when it did."""

import pytest

from synchromesh.results.run import Epoch
from synchromesh.study.target import Target

EPOCHS = [Epoch(i, 10 * i, i * 2.0, None, {"accuracy": a, "loss": 1 - a})
          for i, a in enumerate((0.5, 0.8, 0.7, 0.9), 1)]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "epoch"),
    [
        ("accuracy=0.8", 2), ("accuracy >= 0.5", 1), ("accuracy=0.95", None), ("loss<=0.25", 2),
        ("accuracy=9e-1", 4),
    ],
)  # fmt: skip
def test_the_first_epoch_that_reaches_it(text: str, epoch: int | None) -> None:
    found = Target.parse(text).reached(EPOCHS)
    assert found.epochs == epoch and found.seconds == (None if epoch is None else 2.0 * epoch)


@pytest.mark.parametrize("text", ["accuracy", "=1", "accuracy=high", "a=1=2", "accuracy=nan", ""])
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"as accuracy=0\.9"):
        Target.parse(text)


def test_a_metric_that_is_not_there_is_named() -> None:
    Target.parse("accuracy=1").check(("loss", "accuracy"))
    with pytest.raises(ValueError, match=r"gives accuracy, not 'acuracy'.*accuracy"):
        Target.parse("acuracy=1").check(("accuracy",))
