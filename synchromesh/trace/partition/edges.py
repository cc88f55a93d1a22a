"""Border edges between components of different layouts: what is allowed, and the collectives
each runs.

The producer's axis has `a` ranks, the consumer's `b`; degrees nest when one divides the other.

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

Payloads follow `traffic.sent_bytes`, per row of the *producer's* data block (`rows /
source.data` rows). With rows that do not divide evenly the live bytes differ from rank to rank;
the mean is what stands here.
"""

from synchromesh.values.component import Value
from synchromesh.values.layout import Layout
from synchromesh.values.placement import Placement
from synchromesh.values.traffic import Collective, CollectiveKind, Direction


def edge_collectives(
    value: Value,
    have: Placement,
    want: Placement,
    source: Layout,
    target: Layout,
    backward: bool = True,
) -> tuple[Collective, ...] | None:
    """What a rank runs to bring `value` from `source` to `target`; None: not allowed.

    `bytes_per_row` is per row of the producer's data block. `backward`: whether a gradient flows.
    """
    a, b = source.tensor, target.tensor
    assert a != b, "equal layouts move along their axis"
    if value.rows is None:
        return _rowless(value, have, want, a, backward)
    each = value.bytes(1)
    pair = (have.kind, want.kind)
    for state, degree in ((have, a), (want, b)):
        if state.sharded and (
            state.dim == value.rows.dim or not state.divides(value.shape, degree)
        ):
            return None
    forward: CollectiveKind | None
    back: CollectiveKind | None
    if a % b == 0:  # shrinks: the consumer's blocks have fewer rows
        k, payload = a // b, each
        if pair == ("R", "R"):
            forward, back = None, "all_gather"
        elif pair == ("P", "R") and b == 1:
            forward, back = "reduce_scatter", "all_gather"
        elif pair == ("S", "R") and b == 1:
            forward, back, payload = "all_to_all", "all_to_all", each // a
        else:
            return None
    elif b % a == 0:  # grows: k producers' blocks make one of the consumer's
        k, payload = b // a, each * (b // a)
        if pair == ("R", "R"):
            forward, back = "all_gather", None
        elif pair == ("R", "r") and a == 1:
            forward, back = "all_gather", "reduce_scatter"
        elif pair == ("R", "S") and a == 1:
            forward, back, payload = "all_to_all", "all_to_all", each
        else:
            return None
    elif pair == ("R", "R"):
        k, payload, forward, back = source.devices, each, "all_to_all", "all_to_all"
    else:
        return None
    stride = min(a, b) if k * min(a, b) == max(a, b) else 1

    def one(kind: CollectiveKind, direction: Direction) -> Collective:
        return Collective(kind, direction, k, payload, 0, source.data, stride)

    found = [] if forward is None else [one(forward, "forward")]
    if backward and back is not None:
        found.append(one(back, "backward"))
    return tuple(found)


def _rowless(
    value: Value, have: Placement, want: Placement, a: int, backward: bool
) -> tuple[Collective, ...] | None:
    if have.kind not in "Rr" or want.kind not in "Rr":
        return None
    if have.kind == "R" and backward and value.differentiable and a > 1:
        return (Collective("all_reduce", "backward", a, 0, value.bytes(1)),)
    return ()
