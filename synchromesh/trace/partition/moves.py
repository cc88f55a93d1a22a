"""Moves of values from one placement to another: which exist, and the collectives each one runs.

On one tensor axis `TABLE` has them, which is that of docs/design.md, "The local graph". On an edge
between components of different layouts, the producer's axis has `a` ranks and the consumer's `b`;
degrees nest when one divides the other.

    tensor shrinks (a = k b)     forward               backward              runs over
    R -> R                       slice of rows         all-gather of rows    k ranks
    P -> R        (b = 1)        reduce-scatter        all-gather            a ranks
    S(dim) -> R   (b = 1)        all-to-all            all-to-all            a ranks

    tensor grows (b = k a)       forward               backward              runs over
    R -> R                       all-gather of rows    slice                 k ranks
    R -> r        (a = 1)        all-gather of rows    reduce-scatter        b ranks
    R -> S(dim)   (a = 1)        all-to-all            all-to-all            b ranks

    degrees do not nest
    R -> R                       all-to-all of rows    all-to-all of rows    all devices

    values without rows
    R -> R, R -> r               nothing               all-reduce            a ranks
    r -> R, r -> r               nothing               nothing               -

    from stage to stage
    R or S -> R or S             messages              messages              pairs of ranks

Payloads follow `traffic.sent_bytes`, per row of the *producer's* data block (`rows /
source.data` rows). With rows that do not divide evenly the live bytes differ from rank to rank;
the mean is what stands here. Of parts that differ the largest counts."""

from math import ceil

from synchromesh.values.component import Value
from synchromesh.values.layout import Layout
from synchromesh.values.placement import Placement
from synchromesh.values.traffic import Collective, CollectiveKind, Direction

Pair = tuple[str, str]  # kinds of the placements that a value has and is wanted in
Kinds = tuple[CollectiveKind | None, CollectiveKind | None]  # forward, backward
TABLE: dict[Pair, Kinds] = {
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
    """A collective over `value`, or parts where `sharded`, each as large as the largest."""
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
    run = []
    if forward_kind:
        parts = source if source.sharded else target
        run.append(collective(forward_kind, "forward", ranks, value, parts))
    if backward and backward_kind:
        parts = target if target.sharded else source
        run.append(collective(backward_kind, "backward", ranks, value, parts))
    return tuple(run)


# -- between layouts ---------------------------------------------------------------------

SHRINKS: dict[Pair, Kinds] = {
    ("R", "R"): (None, "all_gather"),
    ("P", "R"): ("reduce_scatter", "all_gather"),
    ("S", "R"): ("all_to_all", "all_to_all"),
}
GROWS: dict[Pair, Kinds] = {
    ("R", "R"): ("all_gather", None),
    ("R", "r"): ("all_gather", "reduce_scatter"),
    ("R", "S"): ("all_to_all", "all_to_all"),
}
NOT_NESTED: dict[Pair, Kinds] = {("R", "R"): ("all_to_all", "all_to_all")}


def edge_collectives(
    value: Value, have: Placement, want: Placement, source: Layout, target: Layout,
    backward: bool = True,
) -> tuple[Collective, ...] | None:  # fmt: skip
    """What a rank runs to bring `value` from `source` to `target`; None: not allowed. In bytes per
    row of the producer's data block. `backward`: whether a gradient flows."""
    assert source.mesh != target.mesh, "equal layouts move along their axis"
    if source.positions != target.positions:
        return _messages(value, have, want, source, target, backward)
    if value.rows is None:
        return _rowless(value, have, want, source.tensor, backward)
    for state, degree in ((have, source.tensor), (want, target.tensor)):
        along_rows = state.sharded and state.dim == value.rows.dim
        if along_rows or not state.fits(value.shape, degree):
            return None
    return _rows_and_placement(value, have, want, source, target, backward)


def _rows_and_placement(
    value: Value, have: Placement, want: Placement, source: Layout, target: Layout, backward: bool
) -> tuple[Collective, ...] | None:
    a, b = source.tensor, target.tensor
    payload, pair = value.bytes(1), (have.kind, want.kind)
    if a % b == 0:  # the consumer's blocks have fewer rows
        table, k = SHRINKS, a // b
        payload = have.padded_bytes(payload, value.shape, a) // a if have.sharded else payload
    elif b % a == 0:  # k producers' blocks make one of the consumer's
        table, k = GROWS, b // a
        payload *= 1 if want.sharded else k
    else:
        table, k = NOT_NESTED, source.devices
    if pair not in table or (pair != ("R", "R") and min(a, b) > 1):
        return None
    stride = min(a, b) if k * min(a, b) == max(a, b) else 1
    kinds: dict[Direction, CollectiveKind | None] = {}
    kinds["forward"], kinds["backward"] = table[pair]
    return tuple(
        Collective(kind, direction, k, payload, 0, source.data, stride)
        for direction, kind in kinds.items()
        if kind is not None and (backward or direction == "forward")
    )


def _messages(
    value: Value, have: Placement, want: Placement, source: Layout, target: Layout, backward: bool
) -> tuple[Collective, ...] | None:
    """From the ranks of one stage to those of another: the most that one of them sends or gets.

    Each of the target's ranks gets its rows of the value, or of its shard, all sources send
    equally: received = rows / target.data, sent = received * target ranks / source ranks."""
    for state, layout in ((have, source), (want, target)):
        if state.sharded and (value.rows is None or state.dim == value.rows.dim):
            return None
        if state.kind not in "RS" or not state.fits(value.shape, layout.tensor):
            return None
    size = value.bytes(1) / (target.tensor if want.sharded else 1)
    most = size * max(1.0, target.devices / source.devices)
    stride = abs(target.first - source.first)
    flows = backward and value.differentiable
    directions: tuple[Direction, ...] = ("forward", "backward") if flows else ("forward",)
    per_row, fixed = 0, ceil(most)
    if value.rows is not None:
        per_row, fixed = ceil(most * source.data / target.data), 0
    of = per_row, fixed, source.data, stride
    return tuple(Collective("send", direction, 2, *of) for direction in directions)


def _rowless(
    value: Value, have: Placement, want: Placement, a: int, backward: bool
) -> tuple[Collective, ...] | None:
    if have.kind not in "Rr" or want.kind not in "Rr":
        return None
    if have.kind == "R" and backward and value.differentiable and a > 1:
        return (Collective("all_reduce", "backward", a, 0, value.bytes(1)),)
    return ()
