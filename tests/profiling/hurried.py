"""Measuring in a hurry: for tests of what follows from a profile, whatever its numbers are."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from synchromesh.profiling import burst_speed as sprint
from synchromesh.profiling import optimizer as update
from synchromesh.profiling import overlap


@contextmanager
def hurried() -> Iterator[None]:
    """Inside, also in ranks that are forked, what is measured besides programs takes a tenth."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sprint, "PAUSE", 0.003)
        patch.setattr(sprint, "SECONDS", 0.02)
        patch.setattr(sprint, "SETTLED", 0.004)
        patch.setattr(sprint, "FASTER", 1e9)  # no device sprints: short blocks of runs suffice
        patch.setattr(overlap, "DELAYS", 1)
        patch.setattr(overlap, "TIRING", 0.003)
        patch.setattr(update, "BYTES", 1 << 18)
        yield
