"""What a partition asks a profile for: its collectives, and the rows of its programs."""

from collections.abc import Collection, Iterator

from synchromesh.trace.partition.local import Partition
from synchromesh.values.buckets import MIB, SIZES
from synchromesh.values.layout import Layout
from synchromesh.values.profile import Pattern
from synchromesh.values.schedule import INTERLEAVED

GRADIENT_BYTES = SIZES.full + MIB  # of a bucket, up to which all-reduces are asked for

Demand = tuple[str, Pattern, int]  # kind of a collective, its groups, bytes of payload


def collectives_of(partition: Partition, rows: int, devices: int) -> Iterator[Demand]:
    """Kinds, patterns and payloads of what a partition sends for global batches of `rows`;
    gradients over all data ranks."""
    for local in partition.components:
        for c in local.collectives:
            if c.ranks > 1:
                data = c.data or local.layout.data
                yield c.kind, Pattern(c.ranks, c.stride), c.payload(-(-rows // data))
        layout = local.layout
        bytes_ = sum(p.bytes for p in local.component.parameters if p.trainable)
        for pattern in {Pattern(layout.data, layout.tensor), Pattern(devices)}:
            if pattern.size > 1 and bytes_:
                yield "all_reduce", pattern, min(bytes_, GRADIENT_BYTES)
            if pattern.size > 1 and layout.shard_states != "none":
                yield "all_gather", pattern, local.component.parameter_bytes
                yield "reduce_scatter", pattern, min(bytes_, GRADIENT_BYTES)


def scattering(partition: Partition) -> set[Pattern]:
    """The groups that scatter gradients, which have ways of their own to do it."""
    layouts = {local.layout for local in partition.components}
    return {Pattern(x.data, x.tensor) for x in layouts if x.shard_states != "none" and x.data > 1}


def program_rows(
    rows: int, layout: Layout, micro_batches: Collection[int] = (1,)
) -> tuple[int, ...]:
    """The rows at which a program is asked for, ascending: of a data block where global batches of
    `rows` are cut into any of so many micro-batches, and of an interleaved part of the largest."""
    blocks = {-(-rows // (parts * layout.data)) for parts in micro_batches}
    return tuple(sorted({*blocks, -(-max(blocks) // INTERLEAVED)}))
