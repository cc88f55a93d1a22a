"""The ledger of a rank: what it sent in collectives and in messages between two ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

from synchromesh.values.traffic import TrafficCount


class Ledger(TrafficCount):
    """What this rank sent for tensors of the step, and calls by kind; no control messages."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Counts nothing inside: measuring is no traffic of a step."""
        kept = self.payload.copy(), self.calls.copy()
        try:
            yield
        finally:
            self.payload, self.calls = kept
