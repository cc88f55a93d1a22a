"""The peak memory of a plan: bytes alive on each device, walked through a step.

    held         parameters, buffers, gradient buckets, optimizer state: always
    batch        this rank's rows of the batch's leaves
    kept         what forwards keep for backwards, and border values until their last reader
    working      the most that the component at work has alive besides

The step's peak is the highest sum; with pieces, all of them are under way at once, so that kept
bytes are the same in total and working bytes those of one piece.
"""

from collections.abc import Mapping
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


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of one device: always there, and at the highest moment of a step."""

    held: int
    peak: int


def peak_memory(setting: Setting, profile: Profile, position: int, pieces: int = 1) -> PeakMemory:
    """The memory of the device at `position`. Unmeasured: of which component nothing is known."""
    held = _held(setting, profile)
    walk = _Walk(setting, profile, position, pieces)
    return PeakMemory(held, held + round(walk.peak()))


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
        self.last: dict[tuple[str, int, Placement], int] = {}
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

    def _form(
        self, value: Value, layout: Layout, placement: Placement
    ) -> tuple[str, int, Placement]:
        return value.name, layout.tensor, placement

    def rows(self, layout: Layout) -> int:
        return self.setting.blocks(layout)[layout.data_index(self.position)]

    def _bytes(self, value: Value, layout: Layout, placement: Placement) -> float:
        size = value.bytes(self.rows(layout))
        return size / layout.tensor if placement.sharded else float(size)

    def peak(self) -> float:
        batch: dict[tuple[str, int, Placement], float] = {}
        alive: dict[tuple[str, int, Placement], float] = {}  # border values, by form
        kept_forms: set[tuple[str, int, Placement]] = set()
        kept = 0.0
        highest = 0.0
        for i, (local, memory) in enumerate(zip(self.parts, self.memory, strict=True)):
            rows, layout = self.rows(local.layout), local.layout
            for number, item in enumerate(local.inputs):
                form = self._form(item.value, layout, item.want)
                place = batch if item.source is None else alive
                place.setdefault(form, self._bytes(item.value, layout, item.want))
                if number in memory.kept_inputs:
                    kept_forms.add(form)
            working = memory.forward(rows / self.pieces)
            done = 1 - 1 / self.pieces  # of the other pieces, what they keep is there already
            highest = max(highest, sum(alive.values()) + kept + done * memory.kept(rows) + working)
            kept += memory.kept(rows)
            for number, output in enumerate(local.outputs):
                form = self._form(output.value, layout, output.placement)
                size = self._bytes(output.value, layout, output.placement)
                # kept outputs are counted among what the component keeps
                alive[form] = 0.0 if number in memory.kept_outputs else size
            for form in [f for f in alive if self.last.get(f, i) <= i and f not in kept_forms]:
                del alive[form]
        return sum(batch.values()) + max(highest, self._backward(alive, kept))

    def _backward(self, alive: Mapping[tuple[str, int, Placement], float], kept: float) -> float:
        values = dict(alive)
        highest = sum(values.values()) + kept
        alone = 0.0  # gradients that lie in no bucket
        for i in range(len(self.parts) - 1, -1, -1):
            local, memory, rows = self.parts[i], self.memory[i], self.rows(self.parts[i].layout)
            for p in local.component.parameters:
                held = self.setting.held.get(p.name)
                if held is not None and p.trainable and gradient_pattern(held).size == 1:
                    alone += held_bytes(held)
            working = memory.backward(rows / self.pieces)
            highest = max(highest, sum(values.values()) + kept + working + alone)
            kept -= memory.kept(rows)
            for output in local.outputs:
                values.pop(self._form(output.value, local.layout, output.placement), None)
        return highest
