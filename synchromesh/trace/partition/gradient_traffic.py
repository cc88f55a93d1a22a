"""What sums of gradients send in a step: all of them whole, or their buckets compressed."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from synchromesh.values.buckets import BucketKind, fill
from synchromesh.values.holding import Holding, compressed_sizes
from synchromesh.values.traffic import CollectiveKind

from .local import Partition, users_of


def gradient_traffic(
    made: Partition, held: Mapping[str, Holding], position: int
) -> Iterator[tuple[CollectiveKind, int, int]]:
    """Collectives of the device at a position: kind, payload bytes, ranks. Those of which each
    rank gets a part are `shard_traffic`'s."""
    used = map(held.__getitem__, users_of(made.components))
    here = [h for h in used if not h.scattered and position in h.positions]

    def kind(h: Holding) -> BucketKind:
        ranks = h.gradient_positions(position)
        return BucketKind.of(ranks, h.tensor.dtype, h.part_placement, (), False, h.compressor)

    for bucket in fill(here, kind, lambda h: h.local_bytes):
        ranks = len(bucket[0].gradient_positions(position))
        yield from _sent(
            bucket, sum(h.computed_bytes_at(position) for h in bucket), ranks, position
        )


def component_sums(held: Sequence[Holding]) -> Iterator[tuple[CollectiveKind, int, int]]:
    """The same of the parameters of one component, as if they had buckets of their own."""

    def kind(h: Holding) -> tuple[int, str, str]:
        return h.gradient_layout.data, h.compressor, h.tensor.dtype * bool(h.compressor)

    summed = sorted((h for h in held if h.summed and not h.scattered), key=kind)
    for (ranks, *_), alike in groupby(summed, kind):
        bucket = [*alike]
        yield from _sent(bucket, sum(h.local_bytes for h in bucket), ranks)


def _sent(
    bucket: Sequence[Holding], whole: int, ranks: int, position: int | None = None
) -> Iterator[tuple[CollectiveKind, int, int]]:
    """whole: bytes of the gradients."""
    if not bucket[0].compressor:
        yield "all_reduce", whole, ranks
    elif ranks > 1:
        for kind, payload in compressed_sizes(bucket, position).payloads:
            yield kind, payload, ranks
