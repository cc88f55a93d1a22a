"""The peak memory of a plan: bytes alive on each device, walked through a step.

    resident     parameters, buffers, gradient buckets, optimizer state: always
    batch        this rank's rows of the batch's leaves
    kept         what forwards keep for backwards, and border values until their last reader
    gradients    of border values until their maker's backward; of parameters in no bucket
    working      the most that the component at work has alive besides
    update       what the optimizer's step has alive besides

The step's peak is the highest sum. Each of several interleaved micro-batches keeps its part of
the bytes from its own forward to its own backward, in the order of their schedule; and a
parameter's gradient lies beside its bucket from the backward of the first to that of the last.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from synchromesh.cost.step_time import Setting, measured
from synchromesh.cost.turns import Portion, walked
from synchromesh.trace.partition.local import LocalComponent
from synchromesh.values.component import Value
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout
from synchromesh.values.placement import Placement
from synchromesh.values.profile import Profile
from synchromesh.values.schedule import ActionKind, taking_turns

Form = tuple[str, int, Placement]  # value, tensor degree, placement


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of one device: always there, and at the highest moment of a step."""

    resident: int
    peak: int


VALUE, KEPT, WAITING, SUMMED = "value", "kept", "waiting", "summed"


def peak_memories(
    setting: Setting, profile: Profile, micro_batches: int = 1
) -> tuple[PeakMemory, ...]:
    """The memory of every device; those with equally many rows need equally much.

    micro_batches: how many are interleaved in a step.
    """
    layouts = list(dict.fromkeys(c.layout for c in setting.partition.components))
    blocks = [setting.blocks(layout) for layout in layouts]
    known: dict[tuple[int, ...], PeakMemory] = {}
    found = []
    for position in range(setting.devices):
        rows = tuple(b[x.data_index(position)] for b, x in zip(blocks, layouts, strict=True))
        if rows not in known:
            known[rows] = peak_memory(setting, profile, position, micro_batches)
        found.append(known[rows])
    return tuple(found)


def peak_memory(
    setting: Setting, profile: Profile, position: int, micro_batches: int = 1
) -> PeakMemory:
    """The memory of the device at `position`. Unmeasured: of which component nothing is known."""
    resident = _resident(setting, profile)
    walk = _MemoryWalk(setting, profile, position, micro_batches)
    update = walk.batch_bytes + _update(setting, profile)
    return PeakMemory(resident, resident + round(max(walk.peak(), update)))


def _update(setting: Setting, profile: Profile) -> float:
    """Bytes besides the resident ones while the optimizer steps: gradients in no bucket, its
    own."""
    trained = [h for h in setting.holdings.values() if h.tensor.trainable]
    sizes = [h.local_bytes for h in trained]
    alone = sum(h.local_bytes for h in trained if not h.summed)
    return alone + profile.work_largest * max(sizes, default=0) + profile.work_byte * sum(sizes)


def _resident(setting: Setting, profile: Profile) -> int:
    """Parameters, buffers, optimizer state, and the buckets in which gradients lie."""
    total = 0.0
    for holding in setting.holdings.values():
        size = holding.local_bytes
        total += size
        if holding.tensor.trainable:
            total += profile.state_factor * size
            if holding.summed:
                total += size  # a bucket is there from the first step on
    return round(total)


class _Alive:
    """Bytes alive at a moment of a step, by what they are, and the most there were."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[Any, ...], float] = {}  # (what, micro-batch, which): bytes
        self.now = self.highest = 0.0

    def set(self, key: tuple[Any, ...], size: float) -> None:
        """`key` has `size` bytes from now on."""
        self.now += size - self.bytes.get(key, 0.0)
        self.bytes[key] = size

    def free(self, key: tuple[Any, ...]) -> None:
        """`key` has no bytes any more, if it had."""
        self.now -= self.bytes.pop(key, 0.0)

    def meanwhile(self, working: float) -> None:
        """A component works, in `working` bytes more."""
        self.highest = max(self.highest, self.now + working)


class _MemoryWalk:
    """Bytes alive besides the resident ones, through forward and backward."""

    def __init__(
        self, setting: Setting, profile: Profile, position: int, micro_batches: int
    ) -> None:
        self.setting, self.position, self.micro_batches = setting, position, micro_batches
        self.parts = setting.partition.components
        self.memory = [measured(setting, local, profile).memory for local in self.parts]
        order = walked(setting.turns, taking_turns(micro_batches, len(setting.turns)))
        self.passes = dict.fromkeys(  # through components, as they begin
            (action.kind, action.micro_batch, item.component)
            for action, item in order
            if isinstance(item, Portion)
        )
        self.gradients = Counter(  # that are added up to a parameter's
            h.tensor.name for local in self.parts for h in self._trained(local) * micro_batches
        )
        self.last: dict[Form, int] = {}
        for i, local in enumerate(self.parts):
            for item in local.inputs:
                self.last[self._sized(item.value, local.layout, item.want)[0]] = i
                if item.source is not None:
                    maker = self.parts[item.source].layout
                    self.last[self._sized(item.value, maker, item.have)[0]] = i
        self.forms: dict[str, list[Form]] = {}  # of each value
        for form in self.last:
            self.forms.setdefault(form[0], []).append(form)

    def rows(self, layout: Layout) -> float:
        """Rows of a micro-batch on this device."""
        block = self.setting.blocks(layout)[layout.data_index(self.position)]
        return block / self.micro_batches

    def _passes(self, kind: ActionKind) -> list[tuple[int, int]]:
        """Micro-batch and component of each forward, or each backward, in their order."""
        return [(m, component) for k, m, component in self.passes if k == kind]

    def _sized(self, value: Value, layout: Layout, placement: Placement) -> tuple[Form, float]:
        """A form of a value, and its bytes for a micro-batch on this device."""
        whole = placement.padded_bytes(value.bytes(1), value.shape, layout.tensor)
        size = whole * (self.rows(layout) ** value.rows.power if value.rows else 1.0)
        form = value.name, layout.tensor, placement
        return form, size / layout.tensor if placement.sharded else size

    @property
    def batch_bytes(self) -> float:
        """This rank's rows of the batch's leaves."""
        found: dict[Form, float] = {}
        for local in self.parts:
            for item in local.inputs:
                if item.source is None:
                    form, size = self._sized(item.value, local.layout, item.want)
                    found[form] = size * (self.micro_batches if item.value.rows else 1)
        return sum(found.values())

    def peak(self) -> float:
        """The most bytes that are alive at a moment."""
        alive = _Alive()
        self._backward(alive, self._forward(alive))
        return self.batch_bytes + alive.highest

    def _forward(self, alive: _Alive) -> dict[Form, int]:
        """Returns which component is the first that keeps a border value for its backward."""
        keepers: dict[Form, int] = {}
        dies: dict[int, list[Form]] = {}
        for form, i in self.last.items():
            dies.setdefault(i, []).append(form)
        for m, i in self._passes("F"):
            local, memory = self.parts[i], self.memory[i]
            for number, item in enumerate(local.inputs):
                if item.source is not None:
                    form, size = self._sized(item.value, local.layout, item.want)
                    if (VALUE, m, form) not in alive.bytes:
                        alive.set((VALUE, m, form), size)
                    if number in memory.kept_inputs:
                        keepers.setdefault(form, i)
            rows = self.rows(local.layout)
            alive.meanwhile(memory.forward(rows))
            alive.set((KEPT, m, i), memory.kept(rows))
            made = []
            for number, output in enumerate(local.outputs):
                form, size = self._sized(output.value, local.layout, output.placement)
                # kept outputs are counted among what the component keeps
                alive.set((VALUE, m, form), 0.0 if number in memory.kept_outputs else size)
                made.append(form)
            for form in (*dies.get(i, ()), *(f for f in made if f not in self.last)):
                if form not in keepers:
                    alive.free((VALUE, m, form))
        return keepers

    def _backward(self, alive: _Alive, keepers: dict[Form, int]) -> None:
        left = Counter(self.gradients)
        kept: dict[int, list[Form]] = {}
        for form, i in keepers.items():
            kept.setdefault(i, []).append(form)
        for key in [k for k in alive.bytes if k[0] == VALUE and k[2] not in keepers]:
            alive.free(key)
        alive.meanwhile(0.0)
        for m, i in self._passes("B"):
            local, memory, rows = self.parts[i], self.memory[i], self.rows(self.parts[i].layout)
            trained = self._trained(local)
            alive.free((KEPT, m, i))
            for output in local.outputs:  # their gradients are among its working bytes
                for form in self.forms.get(output.value.name, ()):
                    alive.free((WAITING, m, form))
            alone = not all(h.summed for h in trained)
            added = sum(alive.bytes.get((SUMMED, h.tensor.name), 0.0) for h in trained)
            if self.micro_batches == 1:
                added = 0.0  # autograd adds in place where nobody else holds a gradient
            alive.meanwhile((memory.staying if alone else memory.backward)(rows) + added)
            self._leave(alive, left, m, local)
            for form in kept.get(i, ()):
                alive.free((VALUE, m, form))

    def _leave(self, alive: _Alive, left: Counter[str], m: int, local: LocalComponent) -> None:
        """The gradients that a component leaves: of what it read, and of its parameters."""
        for item in local.inputs:
            if item.source is not None and item.value.differentiable:
                form, size = self._sized(item.value, local.layout, item.want)
                alive.set((WAITING, m, form), size)
        for holding in self._trained(local):
            name = holding.tensor.name
            left[name] -= 1
            if left[name] or not holding.summed:
                alive.set((SUMMED, name), float(holding.local_bytes))
            else:
                alive.free((SUMMED, name))  # it lies in its bucket

    def _trained(self, local: LocalComponent) -> list[Holding]:
        """The trained parameters of a component."""
        return [
            self.setting.holdings[p.name]
            for p in local.component.parameters
            if p.trainable and p.name in self.setting.holdings
        ]
