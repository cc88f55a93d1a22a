"""Bytes that one rank sends in a collective, by the bandwidth-optimal (ring) algorithms.

With m ranks and n bytes of payload (source: Chan et al. 2007, "Collective communication: theory,
practice, and experience", section 7):

    all_reduce       2 (m-1)/m n    n: bytes of the tensor, equal on every rank
    reduce_scatter     (m-1)/m n    n: bytes of the tensor before it is scattered
    all_gather         (m-1)/m n    n: bytes of the tensor after it is gathered
    all_to_all         (m-1)/m n    n: bytes that one rank holds
    broadcast                  n    from its root only, 0 elsewhere (counted at the root)

Between two ranks go messages: `send` one way, `exchange` both ways at once. n: bytes that one of
them sends to the other.

The engine counts live calls with it and `explain` predicts with it, whichever way they run."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

MessageKind = Literal["send", "exchange"]
CollectiveKind = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send", "exchange"
]
MESSAGES: tuple[MessageKind, ...] = get_args(MessageKind)
Direction = Literal["forward", "backward", "gradient", "parameters"]


def sent_bytes(kind: CollectiveKind, payload: int, ranks: int) -> int:
    """Bytes one of `ranks` ranks sends for a collective over `payload` bytes, or for a message."""
    if ranks == 1:
        return 0
    if kind in MESSAGES:
        return payload
    return (2 if kind == "all_reduce" else 1) * payload * (ranks - 1) // ranks


@dataclass(frozen=True)
class Servers:
    """The first `count` of a group, each of which keeps one part of what all compute with.
    dedicated: they compute no rows, and so push nothing and fetch nothing."""

    count: int
    dedicated: bool = False

    @property
    def first(self) -> int:
        """The first of those that push and fetch."""
        return self.count * self.dedicated

    def sent(self, part: int, index: int, ranks: int) -> tuple[int, int]:
        """Bytes that rank `index` of so many sends in a push of gradients and in a fetch of
        parameters, of which each server keeps `part` bytes."""
        serves = index < self.count
        pushed = (self.count - serves) * part if index >= self.first else 0
        return pushed, (ranks - self.first - (not self.dedicated)) * part * serves


@dataclass(frozen=True)
class ExchangeBytes:
    """Bytes that a rank sends in a step so that all have the sum of gradients, or what has been
    made of it: one that is a server, and one that is none (None where there is no such rank)."""

    word: str  # of @synchronisation, with what stands behind it
    server: int | None
    worker: int | None

    def __str__(self) -> str:
        """A line of what ranks would send."""
        ranks = {"each server": self.server, "each worker": self.worker}
        if None in ranks.values():
            ranks = {"each rank": self.server or self.worker}
        sent = ", ".join(f"{size:,} from {name}" for name, size in ranks.items())
        return f"  {self.word + ':':<20} {sent}"


def exchanges(size: int, ranks: int) -> tuple[ExchangeBytes, ...]:
    """By a ring, by one, two and as many servers as ranks, and by one and two more ranks that
    serve alone, of gradients of `size` bytes."""
    made = [ExchangeBytes("every-step", None, sent_bytes("all_reduce", size, ranks))]
    shared = [Servers(n) for n in sorted({1, min(2, ranks), ranks})]
    for servers in (*shared, Servers(1, True), Servers(2, True)):
        n, part = ranks + servers.first, -(-size // servers.count)
        first, last = (sum(servers.sent(part, i, n)) for i in (0, n - 1))
        own = "; @servers" * servers.dedicated
        worker = last if servers.count < n else None
        made.append(ExchangeBytes(f"server:{servers.count}{own}", first, worker))
    return tuple(made)


@dataclass(frozen=True)
class Collective:
    """On one group, of `bytes_per_row * rows ** power + fixed_bytes`. rows: of a data block of the
    component, or of `data` degrees. stride: how far apart the ranks of a group are."""

    kind: CollectiveKind
    direction: Direction
    ranks: int
    bytes_per_row: int = 0
    fixed_bytes: int = 0
    data: int = 0
    stride: int = 1
    power: int = 1

    def payload(self, rows: int) -> int:
        return self.bytes_per_row * int(rows**self.power) + self.fixed_bytes


def batch_norm_collectives(channels: int, item_bytes: int, ranks: int) -> tuple[Collective, ...]:
    """What one batch norm that is synchronised over `ranks` data ranks sends in a step. channels:
    of one rank. item_bytes: of the type it computes in, at least float32."""
    numbers = 2 * channels
    return (
        Collective("all_gather", "forward", ranks, 0, (numbers + 1) * item_bytes * ranks),
        Collective("all_reduce", "backward", ranks, 0, numbers * item_bytes),
    )


class TrafficCount:
    """Payload bytes by kind and group size, which are rounded once: buckets do not show."""

    def __init__(self) -> None:
        self.payload: Counter[tuple[CollectiveKind, int]] = Counter()
        self.calls: Counter[CollectiveKind] = Counter()

    def add(self, kind: CollectiveKind, payload: int, ranks: int) -> None:
        if ranks > 1:
            self.payload[kind, ranks] += payload
            self.calls[kind] += 1

    def reset(self) -> None:
        self.payload.clear()
        self.calls.clear()

    @property
    def sent(self) -> int:
        return sum(sent_bytes(kind, n, ranks) for (kind, ranks), n in self.payload.items())
