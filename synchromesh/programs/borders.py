"""Border values: a few real rows of every value that components hand to each other.

Programs are timed on them, tiled to the rows wanted: label values stay valid, integers index what
they should, and no number is so small that arithmetic slows down."""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from synchromesh.programs.collectives import part
from synchromesh.trace import meta
from synchromesh.trace.capture.batch import rows_of
from synchromesh.trace.capture.run import leaf_values, totals_of
from synchromesh.trace.step import Step
from synchromesh.values.component import Chain, Parameter, Rows, Value
from synchromesh.values.placement import Placement

DRAWN = 99_991  # numbers of a made-up weight; prime, so that no two rows of it are alike


def record(
    step: Step, batch: Any, tensors: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Every leaf and every value of the traced step for `batch`, by name, detached. tensors:
    parameters and buffers by name, unsharded; they are not changed, and each is asked for when its
    first operator runs and let go of behind its last one."""
    assert step.graph is not None, "an opaque step has no values"
    wanted = {e.value.name for e in step.chain.edges}
    given = leaf_values(batch, rows_of(batch), totals_of(step))
    env: dict[Any, Any] = {}
    recorded: dict[str, Tensor] = {}

    def value_of(node: Node) -> Any:
        if node not in env:
            name = meta.name(node)
            match meta.role(node):
                case "rows":
                    env[node] = rows_of(batch)
                case "leaf":
                    env[node] = given[name].to(device)
                case "constant":
                    env[node] = step.constants[name].to(device)
                case "buffer":  # effects write into buffers: into a copy of them here
                    env[node] = tensors[name].detach().clone()
                case _:
                    env[node] = tensors[name].detach()
        return env[node]

    users = {node: len(node.users) for node in step.graph.nodes}
    with torch.no_grad():
        for node in step.graph.nodes:
            if node.op == "output":
                break
            if node.op != "placeholder":
                args, kwargs = (map_arg(a, value_of) for a in (node.args, node.kwargs))
                env[node] = node.target(*args, **kwargs)
                del args, kwargs
            value = meta.value(node)
            if isinstance(value, Value) and value.name in wanted:
                recorded[value.name] = value_of(node).detach()
            for used in node.all_input_nodes:
                users[used] -= 1
                if not users[used]:
                    del env[used]
    return recorded


def tiled(x: Tensor, rows: Rows | None, count: int) -> Tensor:
    """`x`, which has a few rows, with `count` rows: its own over and over."""
    if rows is None:
        return x
    apart: Tensor = x.unflatten(rows.dim, (rows.segments, -1, rows.inner))
    have = apart.shape[rows.dim + 1]
    index = torch.arange(count, device=x.device) % have
    made: Tensor = apart.index_select(rows.dim + 1, index).flatten(rows.dim, rows.dim + 2)
    return made


class StandIns(Mapping[str, Tensor]):
    """Parameters and buffers of a chain by name, unsharded: those of `given` that are, else ones
    that are made up, alike on all ranks, whenever one is asked for. Nothing is kept of these, so
    that a model that no device holds can be measured component by component."""

    def __init__(self, chain: Chain, given: Mapping[str, Tensor], device: torch.device) -> None:
        self.device = device
        tensors = [t for c in chain.components for t in (*c.parameters, *c.buffers)]
        self.described = {t.name: t for t in tensors}
        self._given = {
            name: known.detach()
            for name, described in self.described.items()
            if (known := given.get(name)) is not None
            and tuple(known.shape) == described.shape
            and not known.is_meta
        }
        self.largest = max(  # bytes of what may have to be made up at once, of a component
            (sum(t.bytes for t in (*c.parameters, *c.buffers) if t.name not in self._given)
             for c in chain.components),
            default=0,
        )  # fmt: skip

    def __getitem__(self, name: str) -> Tensor:
        if name in self._given:
            return self._given[name]
        described = self.described[name]
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return made_up(described, described.shape, self.device, generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)


def made_up(
    described: Parameter, shape: tuple[int, ...], device: torch.device, generator: torch.Generator
) -> Tensor:
    """A tensor of `shape` with ordinary numbers in place of the one described. Made-up weights
    have the scale of usual initialisers, so that values neither vanish nor grow; large ones repeat
    what was drawn, as drawing takes longer than running a program with them."""
    dtype: torch.dtype = getattr(torch, described.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(shape, dtype=dtype, device=device)
    if len(shape) < 2:
        return torch.ones(shape, dtype=dtype, device=device)
    fan_in = max(1, torch.Size(shape[1:]).numel())
    made = torch.empty(shape, dtype=dtype, device=device)
    flat = made.view(-1)
    drawn = torch.randn(min(flat.numel(), DRAWN), generator=generator) / fan_in**0.5
    drawn = drawn.to(device, dtype)
    times = flat.numel() // DRAWN
    if times:
        flat[: times * DRAWN].view(times, DRAWN).copy_(drawn)
    flat[times * DRAWN :].copy_(drawn[: flat.numel() - times * DRAWN])
    return made


def local_part(x: Tensor, placement: Placement, size: int) -> Tensor:
    """What the first of `size` ranks, which has most, holds of `x`, on storage of its own."""
    return (part(x, placement, size, 0) if placement.sharded and size > 1 else x).clone()
