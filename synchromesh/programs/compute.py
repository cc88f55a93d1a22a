"""Compute measured: seconds and memory of the local programs of a partition, on this rank.

A program is timed as it will run, its graph walked with the engine's own axis, on a silent group:
what moves between ranks costs nothing here and is measured apart. Where one thread computes, it
is timed by the processor's clock, which leaves out what a quota or another process takes; such
seconds times the rank's slowdown (`profiling/burst_speed.py`) pass on the wall. Elsewhere the
wall's clock is all there is: under a quota a short run is untouched or stopped for the rest of a
period, so runs are timed in blocks that hold several periods, and a block's mean counts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from synchromesh.programs.batch_norm import BatchNormPolicy
from synchromesh.programs.borders import local_part, tiled
from synchromesh.programs.clock import synchronised
from synchromesh.programs.collectives import GroupAxis
from synchromesh.programs.communicator import SilentGroup
from synchromesh.programs.memory import LiveBytes, storage_bytes
from synchromesh.programs.random import RandomStreams
from synchromesh.programs.walk import walking
from synchromesh.trace.partition.local import LocalComponent, Partition
from synchromesh.trace.step import Step
from synchromesh.values.placement import REPLICATED


@dataclass(frozen=True)
class TimingTuning:
    """How long programs are timed; chosen, not measured, where nothing else is said."""

    block_seconds: float = 0.006  # of a block of runs
    long_block_seconds: float = 0.2  # by the wall's clock, under a quota: two of its periods
    blocks: int = 3  # of which the median counts
    fewer: int = 2  # blocks that are enough where they agree
    agreed: float = 0.02  # share by which blocks may differ and agree
    watching_seconds: float = 150e-6  # that watching storages costs an operator, both directions
    negligible: float = 0.01  # share of a run's seconds


TUNING = TimingTuning()


@dataclass(frozen=True)
class ProgramTiming:
    """Seconds of one program at some rows (median of blocks) by this rank's clock."""

    forward: float
    backward: float
    spread: float


@dataclass(frozen=True)
class Bytes:
    """Memory of one program at some rows, as `profile.Memory` has it over rows."""

    kept: int
    forward: int
    backward: int
    staying: int
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]


class Bench:
    """One local program with tensors of its own, ready to run again and again at `rows` rows."""

    def __init__(
        self, step: Step, partition: Partition, local: LocalComponent,
        tensors: Mapping[str, Tensor], borders: Mapping[str, Tensor], rows: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.device, self.rows = device, rows
        self._now = synchronised(device)
        size = local.layout.tensor
        self.axis = GroupAxis(SilentGroup(size), RandomStreams(0, device), BatchNormPolicy(None))
        self.axis.real_rows = rows
        self.walk = walking(local.graph)
        self.operators = sum(n.op == "call_function" for n in local.graph.graph.nodes)
        self.watched: tuple[float, float] | None = None  # seconds of the run of `bytes`
        described = {p.name: p for p in (*local.component.parameters, *local.component.buffers)}
        self.tensors = []
        for name in (*local.parameters, *local.buffers):
            placement = partition.placements.get((name, local.layout), REPLICATED)
            own = local_part(tensors[name].to(device), placement, size)
            self.tensors.append(own.requires_grad_(described[name].trainable))
        self.constants = [step.constants[c.name].to(device) for c in local.constants]
        self.inputs = []
        for item in local.inputs:
            full = tiled(borders[item.value.name].to(device), item.value.rows, rows)
            x = local_part(full, item.want, size)
            flows = item.source is not None and item.value.differentiable
            self.inputs.append(x.requires_grad_(flows))

    @staticmethod
    def input_bytes(local: LocalComponent, borders: Mapping[str, Tensor], rows: int) -> float:
        """Bytes that making the inputs of so many rows takes: full ones, and this rank's part."""
        taken = 0.0
        for item in local.inputs:
            border, of = borders[item.value.name], item.value.rows
            here = border.shape[of.dim] // (of.segments * of.inner) if of else rows
            taken += 2 * border.nbytes * rows / here
        return taken

    def forward(self) -> tuple[Tensor, ...]:
        walk = self.walk(self.axis, self.rows, *self.inputs, *self.tensors, *self.constants)
        while True:
            try:
                next(walk)
            except StopIteration as end:
                return tuple(end.value)

    def seed(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, 1e-3, dtype=dtype, device=self.device)

    def seeds(self, outputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [(y, self.seed(y.shape, y.dtype)) for y in outputs if y.requires_grad]

    def backward(self, seeded: Sequence[tuple[Tensor, Tensor]]) -> None:
        if seeded:
            torch.autograd.backward([y for y, _ in seeded], [g for _, g in seeded])

    def clear(self) -> None:
        for x in (*self.inputs, *self.tensors):
            x.grad = None

    def once(self) -> tuple[float, float]:
        """Seconds of one forward and one backward."""
        began = self._now()
        outputs = self.forward()
        middle = self._now()
        seeded = self.seeds(outputs)
        del outputs
        start = self._now()
        self.backward(seeded)
        end = self._now()
        self.clear()
        return middle - began, end - start

    def block(self, least: float) -> tuple[float, float]:
        """Mean seconds of forward and backward over runs that take `least` seconds together."""
        forward = backward = 0.0
        runs = 0
        while runs == 0 or forward + backward < least:
            f, b = self.once()
            forward, backward, runs = forward + f, backward + b, runs + 1
        return forward / runs, backward / runs

    def timing(self, least: float = TUNING.block_seconds) -> ProgramTiming:
        """Seconds of blocks of at least `least` seconds each, after a first run, which allocates
        and may choose algorithms; of long runs the quickest of that of `bytes` and two more."""
        first = self.watched or self.once()
        watching = self.operators * TUNING.watching_seconds
        if watching < TUNING.negligible * sum(first):
            taken = [first, self.once(), self.once()]  # the first may find the heap too small
            return ProgramTiming(*min(taken, key=sum), _spread(taken))
        taken = [self.block(least) for _ in range(TUNING.fewer)]
        if _spread(taken) > TUNING.agreed:
            taken += [self.block(least) for _ in range(TUNING.blocks - TUNING.fewer)]
        forward, backward = (median(t) for t in zip(*taken, strict=True))
        return ProgramTiming(forward, backward, _spread(taken))

    def bytes(self, limit: float = float("inf")) -> Bytes:
        """What a forward and a backward have alive; see `profile.Memory`. limit: of the bytes of
        this bench and what it makes; MemoryError once they are more."""
        left = limit - storage_bytes((*self.inputs, *self.tensors))
        if left < 0:
            raise MemoryError(
                f"a program's inputs and parameters take more than {limit:.0f} bytes"
            )
        saved: dict[int, Any] = {}
        own = {x.untyped_storage()._cdata for x in (*self.tensors, *self.constants)}

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage._cdata not in own:
                saved[storage._cdata] = storage
            return x

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
            LiveBytes(limit=left) as live,
        ):
            began = self._now()
            outputs = self.forward()
            first = self._now() - began
        inputs = {x.untyped_storage()._cdata: i for i, x in enumerate(self.inputs)}
        kept = [s for key, s in saved.items() if key not in inputs]
        kept_inputs = tuple(sorted(inputs[key] for key in saved if key in inputs))
        made = enumerate(y.untyped_storage()._cdata for y in outputs)
        kept_outputs = tuple(i for i, key in made if key in saved)
        seeded = [y for y in outputs if y.requires_grad]
        # what backward begins from without keeping outputs or their gradients alive
        token = _Token.apply(self.seed, *seeded) if seeded else None
        total = sum(s.nbytes() for s in kept)
        saved.clear()
        del outputs, seeded
        backward, staying = self._watched(token, kept, first, left)
        return Bytes(total, live.peak, backward, staying, kept_inputs, kept_outputs)

    def _watched(
        self, token: Tensor | None, kept: list[Any], forward: float, limit: float
    ) -> tuple[int, int]:
        """The most bytes alive in backward, and where the gradients of parameters stay, as they do
        where no bucket takes them. kept: storages, forgotten here; forward: its seconds."""
        with LiveBytes(limit=limit) as live:

            def take(parameter: Tensor) -> None:
                assert parameter.grad is not None
                live.stays(parameter.grad)
                parameter.grad = None

            trained = [x for x in self.tensors if x.requires_grad]
            hooks = [x.register_post_accumulate_grad_hook(take) for x in trained]
            live.know(kept)
            kept.clear()
            began = self._now()
            self.backward([] if token is None else self.seeds([token]))
            self.watched = (forward, self._now() - began)
        for hook in hooks:
            hook.remove()
        self.clear()
        return int(live.peak), int(live.peak_staying)


def _spread(blocks: Sequence[tuple[float, float]]) -> float:
    """The largest distance of a block from the median of all, over that median."""
    totals = [sum(b) for b in blocks]
    middle = median(totals)
    return max(abs(t - middle) for t in totals) / middle if middle else 0.0


class _Token(torch.autograd.Function):
    """A number that depends on all outputs; its backward makes their gradients."""

    @staticmethod
    def forward(ctx: Any, seed: Callable[..., Tensor], *outputs: Tensor) -> Tensor:
        ctx.seed, ctx.like = seed, [(y.shape, y.dtype) for y in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *(ctx.seed(shape, dtype) for shape, dtype in ctx.like)
