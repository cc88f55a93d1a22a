"""A holding: which boxes of a parameter or buffer each position has, and over which positions its
gradient is summed.

What a position computes with follows from the placement on the tensor axis. Where states are
sharded (ZeRO), it is the optimizer's step that has parts alone: each of the positions that sum the
gradient keeps one part of the parameter, and gathers the others for as long as it computes.

    data(2) x tensor(2), S(0), states sharded        position    computes with    keeps
                                                        0          rows 0-3      rows 0-1
                                                        1          rows 4-7      rows 4-5
                                                        2          rows 0-3      rows 2-3
                                                        3          rows 4-7      rows 6-7"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from synchromesh.values.boxes import Box, Boxes
from synchromesh.values.buckets import fill
from synchromesh.values.component import Parameter
from synchromesh.values.compression import NONE, CompressedSizes, assigned, refuse_rank
from synchromesh.values.layout import STATES, Layout, ShardStates
from synchromesh.values.placement import REPLICATED, REPLICATED_PARTIAL_GRADIENT, Placement, shard
from synchromesh.values.plan import Plan
from synchromesh.values.synchronisation import Synchronisation
from synchromesh.values.traffic import Servers


@dataclass(frozen=True)
class Holding:
    """One tensor over the positions of a stage: `placement` on the tensor axis of `layout`; or
    over those of several stages that use it, each of which has all of it (`shared`)."""

    tensor: Parameter
    layout: Layout
    placement: Placement = REPLICATED
    shared: tuple[int, ...] = ()
    states: ShardStates = "none"  # sharded over the positions that sum its gradient
    alone: bool = False  # each data index steps by its own gradient, and takes means at times
    in_common: bool = False  # data indices have one memory of it
    servers: int = 0  # the first so many of the positions that sum its gradient keep it; 0: all
    dedicated: bool = False  # these compute no rows
    compressor: str = ""  # a word of `values/compression.py`; "": its gradient is sent whole

    @property
    def positions(self) -> Sequence[int]:
        """Those that hold it, in ascending order; other positions have nothing of it."""
        return self.shared or self.layout.positions

    @property
    def partial_gradient(self) -> bool:
        """Whether every position computes with the global tensor, and has a partial sum of its
        gradient."""
        return self.placement == REPLICATED_PARTIAL_GRADIENT

    @cached_property
    def gradient_layout(self) -> Layout:
        """The layout whose data ranks sum this tensor's gradient (docs/design.md, "Gradients")."""
        if self.alone:
            degree = self.layout.tensor if self.partial_gradient else 1
            return Layout(degree, self.layout.devices // degree, first=self.layout.first)
        if not self.partial_gradient:
            return self.layout
        return Layout(len(self.positions), 1, first=self.positions[0])

    @cached_property
    def parts(self) -> int:
        """Into how many parts what a position computes with is cut."""
        sharing = len(self.sharing(self.positions[0]))
        if self.servers:
            return min(self.servers, sharing)
        return 1 if self.states == "none" else sharing

    @property
    def serving(self) -> Servers | None:
        """Those who keep the parts, where they are servers."""
        return Servers(self.parts, self.dedicated) if self.servers else None

    @cached_property
    def parted(self) -> bool:
        """Whether a position keeps one of these parts or nothing, not all it computes with."""
        return self.parts > 1 or self.replica or (self.servers > 0 and self.summed)

    @property
    def scattered(self) -> bool:
        """Whether its gradient is summed in parts, by those who keep them."""
        return self.parted and not self.replica

    @property
    def replica(self) -> bool:
        """Whether each worker computes with a copy of its own of what servers keep."""
        return self.alone and self.servers > 0

    def sharing(self, position: int) -> tuple[int, ...]:
        """The positions that could keep a part of what `position` computes with, in order: the
        first of them do where there are servers. Of what all tensor ranks of a worker that steps
        alone compute with, one column's."""
        if not self.replica:
            return self.gradient_positions(position)
        of = position if self.placement.sharded else self.positions[0]
        return tuple(self.layout.data_positions(of))

    def kept_at(self, position: int) -> bool:
        """Whether a position that holds it keeps some of it: where servers do, only they."""
        return not self.servers or position in self.sharing(position)[: self.parts]

    @property
    def each_backward(self) -> bool:
        """Whether its gradient is summed after each backward, not after the last one alone."""
        return self.parted and self.states in ("gradients", "parameters")

    @cached_property
    def part_placement(self) -> Placement:
        """Along which dimension that is: the one whose largest part is the smallest fraction."""
        if not self.parted:
            return REPLICATED
        shape = self.local_shape
        return shard(min(range(len(shape)), key=lambda d: -(-shape[d] // self.parts) / shape[d]))

    def boxes(self, position: int) -> tuple[Box, ...]:
        """The boxes of the tensor that `position` keeps, in local order."""
        if position not in self.positions:
            return ()
        if self.partial_gradient:  # what it computes with
            computed = REPLICATED.boxes(self.tensor.shape, 1, 0)
        else:
            index = self.layout.tensor_index(position)
            computed = self.placement.boxes(self.tensor.shape, self.layout.tensor, index)
        if not self.parted:
            return computed
        d, cut = self.placement.dim if self.placement.sharded else -1, self.part_placement.dim
        length = sum(b[cut][1] - b[cut][0] for b in (computed if d == cut else computed[:1]))
        sharing = self.sharing(position)[: self.parts]
        if position not in sharing:
            return ()
        index = sharing.index(position)
        start, stop = self.part_placement.share(length, self.parts, index)
        boxes, before = [], 0
        for box in computed:
            low, high = box[cut]
            first, last = max(start, before), min(stop, before + high - low)
            if first < last:
                own = (low + first - before, low + last - before)
                boxes.append((*box[:cut], own, *box[cut + 1 :]))
            before += (high - low) * (d == cut)
        return tuple(boxes)

    def sides(self, ranks: Sequence[int], size: int) -> Boxes:
        """The boxes of each of `size` ranks, of which `ranks` are at the positions; none at idle
        ones."""
        at = {rank: position for position, rank in enumerate(ranks)}
        return tuple(self.boxes(at[r]) if r in at else () for r in range(size))

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what a position computes with at most, as the first one does."""
        return self.placement.local_shape(self.tensor.shape, self.layout.tensor)

    @cached_property
    def local_bytes(self) -> int:
        """Bytes of what a position computes with at most: what a plan is priced by."""
        return replace(self.tensor, shape=self.local_shape).bytes

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes of what a position keeps at most."""
        shape = self.part_placement.local_shape(self.local_shape, self.parts)
        return replace(self.tensor, shape=shape).bytes

    def local_shape_at(self, position: int) -> tuple[int, ...]:
        """Shape of what a position that holds it computes with."""
        index = self.layout.tensor_index(position)
        return self.placement.local_shape(self.tensor.shape, self.layout.tensor, index)

    def computed_bytes_at(self, position: int) -> int:
        """Bytes of what a position that holds it computes with."""
        return replace(self.tensor, shape=self.local_shape_at(position)).bytes

    def bytes_at(self, position: int) -> int:
        """Bytes of what `position` keeps."""
        volumes = (prod(b - a for a, b in box) for box in self.boxes(position))
        return replace(self.tensor, shape=(sum(volumes),)).bytes

    def part_entries_at(self, position: int) -> int:
        """Of the largest part of what a position computes with, which all send alike."""
        return prod(self.part_placement.local_shape(self.local_shape_at(position), self.parts))

    def part_bytes_at(self, position: int) -> int:
        """Bytes of these."""
        return replace(self.tensor, shape=(self.part_entries_at(position),)).bytes

    @property
    def summed(self) -> bool:
        """Whether several positions sum its gradient, which then lies in a bucket."""
        return self.gradient_layout.data > 1

    @property
    def own_gradient(self) -> bool:
        """Whether a position has all of its gradient, as backward makes it."""
        return self.layout.tensor == 1 and not (self.summed or self.parted)

    @property
    def averaged(self) -> bool:
        """Whether several positions that trained alone take the mean of it."""
        return self.alone and not self.replica and self.layout.data > 1

    def gradient_positions(self, position: int) -> tuple[int, ...]:
        """Positions over which its gradient is summed, of which `position` is one."""
        if self.alone:
            partial = self.partial_gradient
            return tuple(self.layout.tensor_positions(position)) if partial else (position,)
        if self.partial_gradient:
            return tuple(self.positions)
        return self.layout.data_positions(position)

    @property
    def copies(self) -> int:
        """How many positions keep an equal copy of what one position keeps, those that train
        alone left out."""
        if self.replica:
            return 1
        alike = self.layout.data if self.placement.sharded else len(self.positions)
        if self.alone:
            return alike // self.layout.data
        return alike // (self.gradient_layout.data if self.parted else 1)


def holdings(
    tensors: Iterable[Parameter], placements: Mapping[tuple[str, Layout], Placement],
    devices: int, plan: Plan | None = None,
) -> dict[str, Holding]:  # fmt: skip
    """Where each tensor lies: as its one layout uses it; where layouts differ replicated on all
    positions of the stages that use it; where none uses it, on all `devices`. plan: how workers
    agree, and what compresses gradients; None: as on one device. ValueError: its compression is
    not of these tensors."""
    sync = Synchronisation() if plan is None else plan.sync
    dedicated = plan is not None and plan.servers is not None
    uses: dict[str, dict[Layout, Placement]] = {}
    for (name, layout), placement in placements.items():
        uses.setdefault(name, {})[layout] = placement
    made = {}
    for t in tensors:
        users = uses.get(t.name, {})
        trained = t.trained and t.name in uses
        held = _holding(t, users, devices, sync.alone and trained)
        if sync.servers and trained and _cuttable(t, users):
            held = replace(held, servers=sync.servers, dedicated=dedicated)
        made[t.name] = replace(held, in_common=True) if sync.in_common and held.alone else held
    compression = NONE if plan is None else plan.compression
    return made | _compressed([h for h in made.values() if h.tensor.name in uses], compression)


def _compressed(used: Iterable[Holding], compression: str) -> dict[str, Holding]:
    """Those of trained parameters that are compressed."""
    trained = {h.tensor.name: h for h in used if h.tensor.trained}
    words = assigned(
        compression, {n: (h.tensor.shape, h.tensor.dtype) for n, h in trained.items()}
    )
    made = {name: _by(trained[name], word) for name, word in words.items()}
    refuse_rank((h.compressor, h.local_shape) for h in made.values())
    return made


def _by(holding: Holding, word: str) -> Holding:
    """With a compressor. Copies on tensor ranks stay equal by one sum over all of them: gradients
    that differ by rounding may have other signs, and so would two sums."""
    copies = holding.placement == REPLICATED and holding.layout.tensor > 1
    placement = REPLICATED_PARTIAL_GRADIENT if copies else holding.placement
    return replace(holding, placement=placement, compressor=word)


def _holding(
    tensor: Parameter, users: Mapping[Layout, Placement], devices: int, alone: bool
) -> Holding:
    states = _states(tensor, users)
    match [*{(layout.mesh, placement) for layout, placement in users.items()}]:
        case [(mesh, placement)]:
            return Holding(tensor, mesh, placement, states=states, alone=alone)
        case [(mesh, _), *_] if alone and len({layout.mesh for layout in users}) == 1:
            return Holding(tensor, mesh, REPLICATED_PARTIAL_GRADIENT, alone=True)
    held = sorted({p for layout in users for p in layout.positions})
    everywhere = held or range(devices)
    layout = Layout(len(everywhere), 1, first=everywhere[0])
    shared = () if tuple(layout.positions) == tuple(everywhere) else tuple(everywhere)
    return Holding(tensor, layout, REPLICATED_PARTIAL_GRADIENT, shared, states, alone)


def compressed_sizes(bucket: Sequence[Holding], position: int | None = None) -> CompressedSizes:
    """What a bucket of gradients of one compressor sends; at a position, or at most."""
    first, ranks = bucket[0], bucket[0].gradient_layout.data
    at_most = position is None or first.partial_gradient
    shapes = [h.local_shape if at_most else h.local_shape_at(position or 0) for h in bucket]
    return CompressedSizes.of(first.compressor, shapes, first.tensor.dtype, ranks)


def averaged(held: Iterable[Holding]) -> list[list[Holding]]:
    """Parameters of which workers that trained alone take the mean, by collective: in buckets, as
    gradients would be."""
    means = [h for h in held if h.averaged]
    return fill(means, lambda h: (h.layout.mesh, h.tensor.dtype), lambda h: h.local_bytes)


def _states(tensor: Parameter, users: Iterable[Layout]) -> ShardStates:
    """What is sharded of a tensor: as much as all layouts that use it say.

    Nothing where several stages use it, which come to it at different times; of a frozen parameter
    there are neither gradients nor optimizer state."""
    layouts = list(users)
    if not _cuttable(tensor, layouts):
        return "none"
    least = min((layout.shard_states for layout in layouts), key=STATES.index)
    return least if tensor.trainable or least == "parameters" else "none"


def _cuttable(tensor: Parameter, users: Iterable[Layout]) -> bool:
    """Whether positions could keep parts of it."""
    one_stage = len({layout.positions for layout in users}) == 1
    return one_stage and not tensor.buffer and bool(tensor.shape) and prod(tensor.shape) > 0
