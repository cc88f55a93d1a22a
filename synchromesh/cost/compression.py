"""What compressed buckets take: their collectives, seconds of their own computation, and bytes.

A pass takes as long as copying a bucket's gradients, for which a profile has the rate of its
devices: compressors read and write numbers in order, but for the search of the largest ones. How
quickly a device multiplies matrices (powersgd) it does not say."""

from collections.abc import Sequence
from dataclasses import dataclass

from synchromesh.values.compression import CompressedSizes
from synchromesh.values.holding import Holding, compressed_sizes
from synchromesh.values.traffic import CollectiveKind


@dataclass(frozen=True)
class Work:
    """Of one bucket, over its gradients' bytes in the type of residuals.

    first, rest: passes until its first collective begins, and from then on. alive: bytes besides
    what is kept and what is under way, at most."""

    first: float
    rest: float
    alive: float


@dataclass(frozen=True)
class WorkOf:
    """Measured on one core of a CPU, 16 MB in float32, four ranks (`benchmarks/compression`)."""

    fp16: Work = Work(5.4, 4.5, 1.75)
    int8: Work = Work(7.3, 5.6, 1.65)
    onebit: Work = Work(7.9, 7.8, 1.35)
    topk: Work = Work(50.0, 3.0, 1.0)
    powersgd: Work = Work(2.6, 6.7, 1.0)  # of rank 4

    def __call__(self, sizes: CompressedSizes) -> Work:
        work: Work = getattr(self, sizes.name)
        return work


WORK = WorkOf()


def collectives(bucket: Sequence[Holding]) -> tuple[tuple[CollectiveKind, int], ...]:
    """Of a bucket of which every rank gets all, with their payloads."""
    if bucket[0].compressor:
        return compressed_sizes(bucket).payloads
    return (("all_reduce", sum(h.local_bytes for h in bucket)),)


def passed_bytes(bucket: Sequence[Holding]) -> tuple[float, float]:
    """Bytes of copies that take as long as what a bucket computes: first, and in the end."""
    if not bucket[0].compressor:
        return 0.0, 0.0
    sizes = compressed_sizes(bucket)
    size, work = sizes.numbers * sizes.item_bytes, WORK(sizes)
    return work.first * size, work.rest * size


def kept_bytes(bucket: Sequence[Holding]) -> int:
    """Bytes that a bucket keeps from step to step beside its gradients."""
    return compressed_sizes(bucket).state_bytes if bucket[0].compressor else 0


def working_bytes(bucket: Sequence[Holding]) -> tuple[float, float]:
    """Bytes alive besides, at most, while it is compressed; and of what is under way from then
    on, sent and received."""
    if not bucket[0].compressor:
        return 0.0, 0.0
    sizes = compressed_sizes(bucket)
    kind, payload = sizes.payloads[0]
    # the largest numbers come with places of 8 bytes
    found = sizes.chosen * (sizes.item_bytes + 8) if sizes.name == "topk" else 0
    sent = {"all_to_all": 1.0, "all_gather": 1 / sizes.ranks}.get(kind, 0.0)  # beside what comes
    working = WORK(sizes).alive * sizes.numbers * sizes.item_bytes + found
    return working, (1.0 + sent) * payload
