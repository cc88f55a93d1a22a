"""The peak memory of a plan: bytes alive on each device, walked through a step.

    held         parameters, buffers, gradient buckets, optimizer state: always
    batch        this rank's rows of the batch's leaves
    kept         what forwards keep for backwards, and border values until their last reader
    gradients    of border values until their maker's backward; of parameters in no bucket
    working      the most that the component at work has alive besides
    update       what the optimizer's step has alive besides

The step's peak is the highest sum; with pieces, all of them are under way at once, so that kept
bytes are the same in total and working bytes those of one piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from synchromesh.component import Value
from synchromesh.cost.step_time import (
    Setting,
    Unmeasured,
    gradient_pattern,
    held_bytes,
)
from synchromesh.layout import Layout
from synchromesh.placement import Placement
from synchromesh.profile import Memory, Profile
from synchromesh.trace.local import LocalComponent

Form = tuple[str, int, Placement]  # value, tensor degree, placement


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of one device: always there, and at the highest moment of a step."""

    held: int
    peak: int


def peak_memory(setting: Setting, profile: Profile, position: int, pieces: int = 1) -> PeakMemory:
    """The memory of the device at `position`. Unmeasured: of which component nothing is known."""
    held = _held(setting, profile)
    walk = _Walk(setting, profile, position, pieces)
    update = walk.batch_bytes + _update(setting, profile)
    return PeakMemory(held, held + round(max(walk.peak(), update)))


def _update(setting: Setting, profile: Profile) -> float:
    """Bytes besides what is held while the optimizer steps: gradients in no bucket, its own."""
    trained = [h for h in setting.held.values() if h.tensor.trainable]
    sizes = [held_bytes(h) for h in trained]
    alone = sum(held_bytes(h) for h in trained if gradient_pattern(h).size == 1)
    return alone + profile.work_largest * max(sizes, default=0) + profile.work_byte * sum(sizes)


def _held(setting: Setting, profile: Profile) -> int:
    """Parameters, buffers, optimizer state, and the buckets in which gradients lie."""
    total = 0.0
    for held in setting.held.values():
        size = held_bytes(held)
        total += size
        if held.tensor.trainable:
            total += profile.state_factor * size
            if gradient_pattern(held).size > 1:
                total += size  # a bucket is there from the first step on
    return round(total)


class _Walk:
    """Bytes alive besides what is held, through forward and backward."""

    def __init__(self, setting: Setting, profile: Profile, position: int, pieces: int) -> None:
        self.setting, self.position, self.pieces = setting, position, pieces
        self.parts = setting.partition.components
        self.memory = [self._memory(local, profile) for local in self.parts]
        self.first: dict[str, int] = {}  # user of a parameter
        for i, local in enumerate(self.parts):
            for p in local.component.parameters:
                self.first.setdefault(p.name, i)
        self.last: dict[Form, int] = {}
        for i, local in enumerate(self.parts):
            for item in local.inputs:
                self.last[self._form(item.value, local.layout, item.want)] = i
                if item.source is not None:
                    maker = self.parts[item.source].layout
                    self.last[self._form(item.value, maker, item.have)] = i

    def _memory(self, local: LocalComponent, profile: Profile) -> Memory:
        key = self.setting.partition.program(local)
        if key not in profile.compute:
            raise Unmeasured(f"{local.component.name} ({local.layout}) was not measured")
        return profile.compute[key].memory

    def _form(self, value: Value, layout: Layout, placement: Placement) -> Form:
        return value.name, layout.tensor, placement

    def rows(self, layout: Layout) -> int:
        return self.setting.blocks(layout)[layout.data_index(self.position)]

    def _bytes(self, value: Value, layout: Layout, placement: Placement) -> float:
        size = value.bytes(self.rows(layout))
        return size / layout.tensor if placement.sharded else float(size)

    @property
    def batch_bytes(self) -> float:
        """This rank's rows of the batch's leaves."""
        found = {
            self._form(item.value, local.layout, item.want): self._bytes(
                item.value, local.layout, item.want
            )
            for local in self.parts
            for item in local.inputs
            if item.source is None
        }
        return sum(found.values())

    def peak(self) -> float:
        alive: dict[Form, float] = {}  # border values
        keepers: dict[Form, int] = {}  # the first component that keeps one for its backward
        kept = highest = 0.0
        for i, (local, memory) in enumerate(zip(self.parts, self.memory, strict=True)):
            rows, layout = self.rows(local.layout), local.layout
            for number, item in enumerate(local.inputs):
                form = self._form(item.value, layout, item.want)
                if item.source is not None:
                    alive.setdefault(form, self._bytes(item.value, layout, item.want))
                    if number in memory.kept_inputs:
                        keepers.setdefault(form, i)
            working = memory.forward(rows / self.pieces)
            done = 1 - 1 / self.pieces  # of the other pieces, what they keep is there already
            highest = max(highest, sum(alive.values()) + kept + done * memory.kept(rows) + working)
            kept += memory.kept(rows)
            for number, output in enumerate(local.outputs):
                form = self._form(output.value, layout, output.placement)
                size = self._bytes(output.value, layout, output.placement)
                # kept outputs are counted among what the component keeps
                alive[form] = 0.0 if number in memory.kept_outputs else size
            for form in [f for f in alive if self.last.get(f, i) <= i and f not in keepers]:
                del alive[form]
        values = [(keepers[form], size) for form, size in alive.items() if form in keepers]
        return self.batch_bytes + max(highest, self._backward(values, kept))

    def _backward(self, values: Sequence[tuple[int, float]], kept: float) -> float:
        """The most in backward. values: border values that are kept, each by which component at
        the front, with its bytes."""
        highest = kept + sum(size for _, size in values)
        staying: dict[str, float] = {}  # gradients that lie in no bucket
        for i in range(len(self.parts) - 1, -1, -1):
            local, memory, rows = self.parts[i], self.memory[i], self.rows(self.parts[i].layout)
            kept -= memory.kept(rows)
            mine = [
                self.setting.held[p.name]
                for p in local.component.parameters
                if p.trainable and p.name in self.setting.held
            ]
            alone = [h for h in mine if gradient_pattern(h).size == 1]
            working = (memory.staying if alone else memory.backward)(rows / self.pieces)
            working += (1 - 1 / self.pieces) * memory.kept(rows)
            there = sum(size for first, size in values if first <= i) + self._gradients(i)
            highest = max(highest, there + kept + working + sum(staying.values()))
            # until its first user is done, `_gradients` has it
            staying |= {
                h.tensor.name: float(held_bytes(h))
                for h in alone
                if self.first[h.tensor.name] == i
            }
        return highest

    def _gradients(self, at: int) -> float:
        """Gradients that wait while the component `at` is in backward: of border values and of
        parameters which later components use and earlier ones make, or use too."""
        found: dict[object, float] = {}
        for j in range(at + 1, len(self.parts)):
            local = self.parts[j]
            for item in local.inputs:
                if item.source is not None and item.source < at and item.value.differentiable:
                    form = self._form(item.value, local.layout, item.want)
                    found[form] = self._bytes(item.value, local.layout, item.want)
            for p in local.component.parameters:
                if p.trainable and p.name in self.setting.held and self.first[p.name] <= at:
                    found[p.name] = float(held_bytes(self.setting.held[p.name]))
        return sum(found.values())
