"""The ledger of a rank: what it sent in collectives and in messages between two ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

from synchromesh.values.traffic import TrafficCount


class Ledger(TrafficCount):
    """What this rank sent for tensors of the step, and calls by kind; no control messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = 0  # bytes of communications of which the very size is known

    def add_messages(self, bytes_sent: int) -> None:
        """Counts one exchange of messages, of which `bytes_sent` left this rank."""
        self.messages += bytes_sent
        self.calls["send"] += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Counts nothing inside: measuring is no traffic of a step."""
        kept = self.payload.copy(), self.calls.copy(), self.messages
        try:
            yield
        finally:
            self.payload, self.calls, self.messages = kept

    def reset(self) -> None:
        super().reset()
        self.messages = 0

    @property
    def sent(self) -> int:
        return super().sent + self.messages
