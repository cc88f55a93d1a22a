"""Dimensions that are made of equal groups of neighbours, which stay together on a rank: channels
of grouped operators, query heads that share a key head.

A state is found for the groups; each tensor's own has as many units, a group's entries in each:

    2 groups of 3 channels on 2 ranks    groups 0 1    S(0)       channels 0 1 2 | 3 4 5    S(1)
    3 groups of 2 channels on 2 ranks    groups 0 1 | 2    S(0)    0 1 2 3 | 4 5    S(1, 1, 2)"""

from collections.abc import Iterable

from synchromesh.values.placement import Placement, shard, shard_units


def group_states(
    groups: int, m: int, known: Iterable[tuple[int, Iterable[Placement]]]
) -> list[Placement]:
    """States of a dimension with an entry for each of the groups, over m ranks.

    known: lengths of dimensions that are made of the groups, and states that shard them."""
    found = {shard(0)}
    for length, states in known:
        inner = length // groups
        for s in states:
            if s.even(length, m):
                found.add(shard(0, s.segments))
            elif s.unit % inner == 0:
                found.add(shard(0, s.segments, s.unit // inner))
    return sorted(s for s in found if s.fits((groups,), m))


def spread(state: Placement, groups: int, length: int, dim: int, m: int) -> Placement:
    """The state of dimension `dim`, of so many entries, in which each of m ranks has the groups
    that it has in `state`."""
    return shard_units(length, m, dim, state.segments, state.unit * (length // groups))
