"""The crossings of a partition: which values go from stage to stage, each straight from the ranks
that make it to those that read it, and where a carry goes behind a step."""

from collections.abc import Mapping

from synchromesh.values.exchange import Border, Exchange
from synchromesh.values.layout import stages_of
from synchromesh.values.placement import REPLICATED

from .local import Input, LocalComponent, Partition

Pair = tuple[int, int]  # of stages: the maker's, the reader's


def exchange_of(partition: Partition, local: LocalComponent, item: Input) -> Exchange:
    """How an input comes to a component."""
    if item.source is None:
        source = partition.leaf_layouts[local.layout.positions]
    else:
        source = partition.components[item.source].layout
    return Exchange(item.value, item.have, item.want, source, local.layout, item.flows)


def crossings(partition: Partition) -> Mapping[Pair, tuple[Exchange, ...]]:
    """By pair of stages, each form of a value once; also of stages on the same ranks, where
    nothing is sent."""
    components = partition.components
    stages = stages_of([local.layout for local in components])
    stage_of = {i: s for s, stage in enumerate(stages) for i in stage}
    found: dict[Pair, dict[Border, Exchange]] = {}
    for i, local in enumerate(components):
        for item in local.inputs:
            if item.source is None or stage_of[item.source] == stage_of[i]:
                continue
            exchange = exchange_of(partition, local, item)
            pair = stage_of[item.source], stage_of[i]
            form = exchange.read if exchange.crosses else exchange.made
            found.setdefault(pair, {}).setdefault(form, exchange)
    return {pair: tuple(items.values()) for pair, items in sorted(found.items())}


def deliveries(partition: Partition) -> tuple[tuple[str, tuple[Exchange, ...]], ...]:
    """Each leaf of the carry, with how its new value comes to where the next batch is read: to the
    ranks of each stage that reads the leaf, as they have the rows of a batch; nothing moves where
    these are the ranks that make it and have them so. What none reads stays with its maker's."""
    found = []
    for item in partition.carry:
        maker = partition.components[item.source].layout
        readers = {
            local.layout.positions: None
            for local in partition.components
            for read in local.inputs
            if read.source is None and read.value.name == item.leaf
        }
        found.append((item.leaf, tuple(
            Exchange(
                item.value, REPLICATED, REPLICATED, maker, partition.leaf_layouts[positions],
                flows=False,
            )
            for positions in readers or (maker.positions,)
        )))  # fmt: skip
    return tuple(found)
