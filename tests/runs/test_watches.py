"""What looks at steps: which it records, and that it begins once."""

from types import SimpleNamespace
from typing import Any

import torch

from synchromesh.runs.watches import RecordedSteps, StepWatch


def test_a_short_batch_is_left_out_of_what_is_recorded() -> None:
    sent = iter([0, 10, 10, 11, 31])
    watch = RecordedSteps(torch.device("cpu"), lambda: next(sent))
    watch.begin()
    for left, full in [(2, True), (1, True), (1, False), (0, True)]:
        torch.ones(9).sum()
        watch.after_step(left, full)
    found = watch.end()
    assert len(found.recording.steps) == 2 and found.sent == 15


def test_bytes_that_are_not_known_are_not_counted() -> None:
    watch = RecordedSteps(torch.device("cpu"), lambda: None)
    watch.begin()
    for left in (1, 0):
        watch.after_step(left, True)
    assert watch.end().sent is None


def test_a_step_that_is_announced_twice_is_recorded_once() -> None:
    """As at the end of an epoch whose length nobody knew: after its last step, and before the
    next epoch's first one."""
    barriers: list[None] = []
    everyone = SimpleNamespace(barrier=lambda: barriers.append(None))
    ledger = SimpleNamespace(sent=0)
    world = SimpleNamespace(device=torch.device("cpu"), ledger=ledger, everyone=everyone)
    trainer: Any = SimpleNamespace(world=world)
    watch = StepWatch(trainer, 3, 3)
    for step in (2, 3, 3):
        watch.ahead(step)
    watch.close()
    assert len(barriers) == 1 and [watch.special(step) for step in (2, 3, 4, 5)] == [
        False, True, True, False,
    ]  # fmt: skip
