"""Bytes by their kind: alive at a moment of a step, and held whatever it computes; how long border
values stay.

x -> [c0] -> h -> [c1] -> y        h is dropped after c1's forward, its last reader; where c1's
                                   backward reads it, after that; where another stage reads
                                   it, after the backward of its maker's stage"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from synchromesh.trace.partition.local import LocalComponent
from synchromesh.values.boxes import lent, volume
from synchromesh.values.component import Value
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout
from synchromesh.values.memory_by_kind import KINDS
from synchromesh.values.placement import Placement
from synchromesh.values.profile import Memory, Profile

Kinds = Mapping[str, float]  # bytes


class AliveBytes:
    """Bytes by what they are, the most that there were at once, and of which kinds these were.

    kinds: of a key's first entry; activations where it is not there."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self.bytes: dict[tuple[Any, ...], float] = {}  # (what, micro-batch, which): bytes
        self.now = self.highest = 0.0
        self.of_highest: Mapping[str, float] = {}
        self._kinds = kinds
        self._by_kind: dict[str, float] = defaultdict(float)

    def set(self, key: tuple[Any, ...], size: float) -> None:
        """`key` has `size` bytes from now on."""
        self._add(key, size - self.bytes.get(key, 0.0))
        self.bytes[key] = size

    def free(self, key: tuple[Any, ...]) -> None:
        """`key` has no bytes any more, if it had."""
        self._add(key, -self.bytes.pop(key, 0.0))

    def _add(self, key: tuple[Any, ...], more: float) -> None:
        self.now += more
        self._by_kind[self._kinds.get(key[0], "activations")] += more

    def meanwhile(self, working: float) -> None:
        """A component works, in `working` bytes more."""
        if self.now + working > self.highest:
            self.highest = self.now + working
            activations = self._by_kind["activations"] + working
            self.of_highest = {**self._by_kind, "activations": activations}


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of one device: always there, and at the highest moment of a step; by kind, what these
    are."""

    resident: int
    peak: int
    by_kind: Mapping[str, int] = field(default_factory=dict, compare=False)

    def beside(self, buffers: float) -> "PeakMemory":
        """Where so many bytes more are always there."""
        more = round(buffers)
        by_kind = {**self.by_kind, "buffers": self.by_kind.get("buffers", 0) + more}
        return PeakMemory(self.resident + more, self.peak + more, by_kind)


Form = tuple[str, int, Placement]  # value, tensor degree, placement


def form_of(value: Value, layout: Layout, placement: Placement) -> Form:
    return value.name, layout.tensor, placement


class Lifetimes:
    """Until when the forms of border values are there for one micro-batch, as the program drops
    them and autograd keeps them.

    parts: the components of a device group by their place in the chain, with the memory of each.
    handed: the forms that other stages read, with the stage of their maker."""

    def __init__(
        self, parts: Mapping[int, LocalComponent], memory: Mapping[int, Memory],
        handed: Mapping[Form, int],
    ) -> None:  # fmt: skip
        self._handed = handed
        self._last: dict[Form, int] = {}  # the last component that reads a form
        keeper: dict[Form, int] = {}  # the first one that keeps it for its backward
        for i, local in parts.items():
            for number, item in enumerate(local.inputs):
                form = form_of(item.value, local.layout, item.want)
                self._last[form] = i
                if item.source is None:
                    continue
                if number in memory[i].kept_inputs or local.layout.recompute:
                    keeper.setdefault(form, i)
                if item.source in parts:
                    maker = parts[item.source].layout
                    self._last[form_of(item.value, maker, item.have)] = i
        unread = {
            form: i
            for i, local in parts.items()
            for o in local.outputs
            if (form := form_of(o.value, local.layout, o.placement)) not in self._last
        }
        # what is gone after a component's forward, and after its backward
        self.after_forward = self._by_component({**self._last, **unread}, but=keeper)
        self.after_backward = self._by_component(keeper)

    def _by_component(
        self, ends: Mapping[Form, int], but: Collection[Form] = ()
    ) -> Mapping[int, list[Form]]:
        forms = defaultdict[int, list[Form]](list)
        for form, i in ends.items():
            if form not in self._handed and form not in but:
                forms[i].append(form)
        return forms

    def after_stage(self, stage: int) -> Collection[Form]:
        """What is gone after a stage's backward."""
        return [form for form, maker in self._handed.items() if maker == stage]

    def forms_of(self, values: Collection[str]) -> Collection[Form]:
        """The forms in which components read values."""
        return [form for form in self._last if form[0] in values]


def update_bytes(held: Sequence[Holding], position: int, profile: Profile) -> Kinds:
    """Bytes besides the resident ones while the optimizer steps: gradients in no bucket, its
    own; what a worker exchanges with servers."""
    trained = [h for h in held if h.tensor.trainable and h.kept_at(position)]
    sizes = [h.kept_bytes for h in trained]
    alone = float(sum(_exchanged_bytes(h, position) for h in held if h.replica))
    alone += sum(h.kept_bytes for h in trained if not h.replica and (not h.summed or h.scattered))
    own = profile.work_largest * max(sizes, default=0) + profile.work_byte * sum(sizes)
    return {"gradients": alone, "states": own}


def _exchanged_bytes(holding: Holding, position: int) -> int:
    """Of what a replica's step has made, of a vector for each server, there and back, as it comes
    and in one piece; of what a server answers its own worker."""
    serves = holding.kept_at(position)
    computed = 0
    if not (serves and holding.dedicated):
        vectors = 3 * holding.parts - serves
        computed = holding.local_bytes + vectors * holding.kept_bytes
    return computed + holding.kept_bytes * serves


def held_bytes(
    held: Iterable[Holding], state_factor: float, gradients: Iterable[Holding]
) -> Kinds:
    """Bytes of the parameters, buffers and optimizer state of what one device holds, with the
    gradients of those among `gradients`. state_factor: bytes of state for one of a parameter."""
    by_kind = dict.fromkeys(KINDS, 0.0)
    for h in held:
        by_kind["buffers" if h.tensor.buffer else "parameters"] += h.kept_bytes
        by_kind["states"] += state_factor * h.kept_bytes * h.tensor.trainable
    by_kind["gradients"] += sum(h.kept_bytes for h in gradients if h.tensor.trainable)
    return by_kind


def copies_bytes(
    held: Iterable[Holding], state_factor: float, ranks: Sequence[int], hosts: Sequence[str],
    copies: int = 2,
) -> list[float]:  # fmt: skip
    """On each rank, copies behind steps of what it has, and of what it keeps for others: nothing
    where no host alone has anything (checkpoint/peer_copies.py, which keeps so many). ranks: of
    the plan's positions; hosts: of each rank."""
    sizes, needed = [0.0] * len(hosts), False
    for h in held:
        have = h.sides(ranks, len(hosts))
        kept = lent(have, hosts)
        needed |= any(kept)
        of_one = replace(h.tensor, shape=(1,)).bytes * (1 + state_factor * h.tensor.trainable)
        for rank, own in enumerate(zip(have, kept, strict=True)):
            sizes[rank] += copies * of_one * sum(volume(box) for side in own for box in side)
    return sizes if needed else [0.0] * len(hosts)
