"""Moves between placements on one tensor axis: which exist, and the collectives each one runs.

This is the table of docs/design.md, "The local graph". Costs are of the same axis; what happens
between axes of different size is in `edges.py`."""

from synchromesh.values.component import Value
from synchromesh.values.placement import Placement
from synchromesh.values.traffic import Collective, CollectiveKind

# (source kind, target kind): collective in forward, collective in backward
TABLE: dict[tuple[str, str], tuple[CollectiveKind | None, CollectiveKind | None]] = {
    ("R", "r"): (None, "all_reduce"),
    ("P", "R"): ("all_reduce", None),
    ("P", "r"): ("all_reduce", "all_reduce"),
    ("R", "S"): (None, "all_gather"),
    ("r", "S"): (None, None),
    ("S", "R"): ("all_gather", None),
    ("S", "r"): ("all_gather", "reduce_scatter"),
    ("P", "S"): ("reduce_scatter", "all_gather"),
    ("S", "P"): (None, None),
    ("R", "P"): (None, None),
    ("r", "P"): (None, None),
    ("r", "R"): (None, None),
    ("S", "S"): ("all_to_all", "all_to_all"),
}


def collective(
    kind: CollectiveKind, direction: str, ranks: int, value: Value, sharded: Placement
) -> Collective:
    """A collective over all of `value`, or over the parts that ranks have of it where it is
    `sharded`: each counts as much as the largest (all-to-all counts one part)."""
    share = ranks if kind == "all_to_all" else 1
    size = sharded.padded_bytes(value.bytes(1), value.shape, ranks) // share
    if value.rows is None:
        return Collective(kind, direction, ranks, 0, size)  # type: ignore[arg-type]
    return Collective(kind, direction, ranks, size, 0, power=value.rows.power)  # type: ignore[arg-type]


def move_collectives(
    value: Value, source: Placement, target: Placement, ranks: int, backward: bool
) -> tuple[Collective, ...]:
    """The collectives of one move of `value`; `backward`: whether a gradient flows through it."""
    if source == target or ranks == 1:
        return ()
    forward_kind, backward_kind = TABLE[source.kind, target.kind]
    found = []
    if forward_kind:
        parts = source if source.sharded else target
        found.append(collective(forward_kind, "forward", ranks, value, parts))
    if backward and backward_kind:
        parts = target if target.sharded else source
        found.append(collective(backward_kind, "backward", ranks, value, parts))
    return tuple(found)
