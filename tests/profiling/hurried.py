"""Measuring in a hurry: for tests of what follows from a profile, whatever its numbers are."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from synchromesh.profiling import burst_speed, calls, overlap
from synchromesh.programs import optimizer


@contextmanager
def hurried() -> Iterator[None]:
    """Inside, also in ranks that are forked, what is measured besides programs takes a tenth."""
    with pytest.MonkeyPatch.context() as patch:
        # `faster`: no device has a burst, so that short blocks of runs suffice
        short = {"pause": 0.003, "seconds": 0.02, "settled": 0.004, "faster": 1e9}
        patch.setattr(burst_speed, "TUNING", replace(burst_speed.TUNING, **short))
        few = replace(
            overlap.TUNING, delay_calls=2, delay_calls_at_once=2, delay_compute_seconds=0.003
        )
        patch.setattr(overlap, "TUNING", few)
        patch.setattr(optimizer, "TRIAL", optimizer.StateTrial(bytes=1 << 18))
        patch.setattr(calls, "TUNING", replace(calls.TUNING, runs=2, steps=2, cold_bytes=1 << 10))
        yield
