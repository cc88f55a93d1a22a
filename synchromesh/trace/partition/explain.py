"""An explanation: what a plan does to a model, component by component, before any process runs."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from synchromesh.trace.partition.edges import edge_collectives
from synchromesh.trace.partition.local import Communication
from synchromesh.trace.partition.partition import Input, LocalComponent, Partition
from synchromesh.trace.step import Step
from synchromesh.values.component import ITEM_BYTES, Parameter
from synchromesh.values.holding import Holding, holdings
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED
from synchromesh.values.plan import Plan
from synchromesh.values.traffic import (
    Collective,
    CollectiveKind,
    Direction,
    TrafficCount,
    batch_norm_collectives,
)


@dataclass(frozen=True)
class Traffic:
    """One collective with the bytes of its tensor at the first position."""

    kind: CollectiveKind
    direction: Direction
    bytes: int
    ranks: int


@dataclass(frozen=True)
class Part:
    """What one component holds and sends."""

    name: str
    layout: Layout
    parameter_bytes: int
    held_bytes: int  # parameter bytes on one rank
    sharded_parameter_bytes: int  # global bytes of the parameters that are cut
    placements: dict[str, str]
    unsharded: dict[str, str]
    collectives: tuple[Traffic, ...]


@dataclass(frozen=True)
class Crossing:
    """A value that goes from one component to another; `collective` is none where it stays in
    place.
    """

    source: str
    target: str
    value: str
    bytes: int
    have: str
    want: str
    collective: str


@dataclass(frozen=True)
class Explanation:
    """A plan applied to a traced step on `world` pretended ranks."""

    plan: str
    world: int
    rows: int
    parts: tuple[Part, ...]
    crossings: tuple[Crossing, ...]
    parameter_bytes_per_rank: tuple[int, ...]
    sent_bytes_per_step: tuple[int, ...]
    batch_norm: str  # how batch norm is counted: "synchronised" or "per row block"
    reason: str  # why the model is one opaque component, or ""

    def document(self) -> dict[str, Any]:
        """The JSON form; its keys are interface."""
        return {
            "plan": self.plan,
            "ranks": self.world,
            "rows": self.rows,
            "components": [
                {
                    "name": p.name,
                    "data": p.layout.data,
                    "tensor": p.layout.tensor,
                    "parameter_bytes": p.parameter_bytes,
                    "parameter_bytes_per_rank": p.held_bytes,
                    "sharded_parameter_bytes": p.sharded_parameter_bytes,
                    "placements": p.placements,
                    "not_sharded": p.unsharded,
                    "collectives": [asdict(c) for c in p.collectives],
                }
                for p in self.parts
            ],
            "edges": [
                {"from": c.source, "to": c.target, "value": c.value, "bytes": c.bytes,
                 "have": c.have, "want": c.want, "collective": c.collective}
                for c in self.crossings
            ],
            "parameter_bytes_per_rank": list(self.parameter_bytes_per_rank),
            "sent_bytes_per_step": list(self.sent_bytes_per_step),
            "batch_norm": self.batch_norm,
            "opaque": self.reason,
        }  # fmt: skip


def explain(
    step: Step, made: Partition, plan: Plan, world: int, rows: int, sync_batch_norm: bool = True
) -> Explanation:
    """What `plan` does with a global batch of `rows` rows on `world` ranks.

    sync_batch_norm: whether batch norm takes its statistics over all data ranks, as `verify` has
    it. Bytes on the edges between layouts are exact where the data degrees divide the rows.
    """
    ranks = plan.devices(world)
    if sync_batch_norm:
        made = replace(made, components=tuple(_with_norms(c, made) for c in made.components))
    held = _held(step, made, len(ranks))
    layouts = [c.layout for c in made.components]
    finest = max(layout.data for layout in layouts)
    leaf_layout = Layout(finest, len(ranks) // finest)
    parts = tuple(_part(c, held, plan, rows) for c in made.components)
    crossings = tuple(
        _crossing(c, item, made, leaf_layout, rows) for c in made.components for item in c.inputs
    )
    sent, bytes_held = [0] * world, [0] * world
    for rank in range(world):
        tally = TrafficCount()
        if rank in ranks:
            position = ranks.index(rank)
            bytes_held[rank] = sum(h.local_bytes for h in held.values())
            for component in made.components:
                layout = component.layout
                for c in component.collectives:
                    tally.add(c.kind, c.payload(_rows(c, layout, plan, rows, position)), c.ranks)
            for h in held.values():
                if h.tensor.trainable and _used(h, made):
                    tally.add("all_reduce", h.local_bytes, len(h.gradient_positions(position)))
        sent[rank] = tally.sent
    return Explanation(
        str(plan),
        world,
        rows,
        parts,
        crossings,
        tuple(bytes_held),
        tuple(sent),
        "synchronised" if sync_batch_norm else "per row block",
        step.reason,
    )


def _with_norms(local: LocalComponent, made: Partition) -> LocalComponent:
    """The component with what its batch norms send when they are synchronised."""
    if local.layout.data == 1:
        return local
    nodes = [n for n in local.graph.graph.nodes if n.op == "placeholder"]
    first = 2 + len(local.inputs)  # the axis and the rows come before
    names = dict(zip(nodes[first:], (*local.parameters, *local.buffers), strict=False))
    tensors = {t.name: t for t in (*local.component.parameters, *local.component.buffers)}
    found: list[Collective] = []
    for node in local.graph.graph.find_nodes(op="call_method", target="batch_norm"):
        *own, training = node.args[2:7]  # weight, bias, running mean and variance
        known = [names[a] for a in own if a in names]
        if not training or not known:
            continue
        name = known[0]
        placement = made.placements.get((name, local.layout), REPLICATED)
        (channels,) = placement.local_shape(tensors[name].shape, local.layout.tensor)
        item = max(4, ITEM_BYTES[tensors[name].dtype])
        found += batch_norm_collectives(channels, item, local.layout.data)
    return replace(local, events=(*local.events, Communication(tuple(found))))


def _held(step: Step, made: Partition, devices: int) -> dict[str, Holding]:
    parameters: dict[str, Parameter] = {}
    for component in step.chain.components:
        parameters |= {p.name: p for p in component.parameters}
    return holdings(parameters.values(), made.placements, devices)


def _used(held: Holding, made: Partition) -> bool:
    return any(held.tensor.name in c.parameters for c in made.components)


def _part(local: LocalComponent, held: dict[str, Holding], plan: Plan, rows: int) -> Part:
    mine = [held[p.name] for p in local.component.parameters]
    collectives = [
        Traffic(c.kind, c.direction, c.payload(_rows(c, local.layout, plan, rows, 0)), c.ranks)
        for c in local.collectives
    ]
    summed: dict[int, int] = {}
    for h in mine:
        if h.tensor.trainable and h.summed:
            size = h.gradient_layout.data
            summed[size] = summed.get(size, 0) + h.local_bytes
    collectives += [
        Traffic("all_reduce", "gradient", n, size) for size, n in sorted(summed.items())
    ]
    return Part(
        local.component.name,
        local.layout,
        local.component.parameter_bytes,
        sum(h.local_bytes for h in mine),
        sum(h.tensor.bytes for h in mine if h.placement.sharded and h.layout.tensor > 1),
        {h.tensor.name: "whole" if h.home else str(h.placement) for h in mine},
        dict(local.unsharded),
        tuple(collectives),
    )


def _source(item: Input, made: Partition, leaf_layout: Layout) -> tuple[str, Layout]:
    if item.source is None:
        return "batch", leaf_layout
    source = made.components[item.source]
    return source.component.name, source.layout


def _crossing(
    local: LocalComponent, item: Input, made: Partition, leaf_layout: Layout, rows: int
) -> Crossing:
    name, layout = _source(item, made, leaf_layout)
    if layout.tensor == local.layout.tensor:
        collective = "none" if item.have == item.want else f"{item.have} -> {item.want}"
    else:
        moves = edge_collectives(item.value, item.have, item.want, layout, local.layout)
        assert moves is not None, f"{item} is not a move that edges know"
        collective = ", ".join(f"{c.kind} ({c.direction})" for c in moves) or "none"
    return Crossing(
        name, local.component.name, item.value.name, item.value.bytes(rows),
        f"{layout} {item.have}", f"{local.layout} {item.want}", collective,
    )  # fmt: skip


def _rows(collective: Collective, layout: Layout, plan: Plan, rows: int, position: int) -> int:
    """Rows of the data block at `position` that the payload counts; a rank without rows computes
    one.
    """
    block = (
        Layout(collective.data, layout.devices // collective.data) if collective.data else layout
    )
    start, stop = plan.row_ranges(rows, block.data)[block.data_index(position)]
    return stop - start if collective.data else max(1, stop - start)


def text(explanation: Explanation) -> str:
    """The explanation for a reader: a line per component, what is cut how, what is sent, and why
    not.
    """
    out = [
        f"plan {explanation.plan} on {explanation.world} ranks, {explanation.rows} rows a step",
        f"parameter bytes per rank {_list(explanation.parameter_bytes_per_rank)}",
        f"bytes sent per rank and step {_list(explanation.sent_bytes_per_step)} "
        f"(batch norm {explanation.batch_norm})",
    ]
    if explanation.reason:
        out.append(f"one opaque component: {explanation.reason}")
    arriving: dict[str, list[Crossing]] = {}
    for crossing in explanation.crossings:
        arriving.setdefault(crossing.target, []).append(crossing)
    for part in explanation.parts:
        share = (
            part.sharded_parameter_bytes / part.parameter_bytes if part.parameter_bytes else 0.0
        )
        out.append("")
        out.append(
            f"{part.name}  data({part.layout.data}) x tensor({part.layout.tensor})  "
            f"{part.parameter_bytes:,} bytes of parameters, {share:.0%} sharded, "
            f"{part.held_bytes:,} on a rank"
        )
        for c in arriving.get(part.name, []):
            out.append(
                f"  <- {c.value} from {c.source}: {c.bytes:,} bytes, {c.have} to {c.want}, "
                f"collective {c.collective}"
            )
        for name, placement in part.placements.items():
            why = part.unsharded.get(name, "")
            out.append(f"  {name}: {placement}" + (f"  ({why})" if why else ""))
        for t in part.collectives:
            out.append(f"  {t.kind} of {t.bytes:,} bytes on {t.ranks} ranks, {t.direction}")
    return "\n".join(out)


def _list(numbers: tuple[int, ...]) -> str:
    return (
        f"{numbers[0]:,} (all)" if len(set(numbers)) == 1 else ", ".join(f"{n:,}" for n in numbers)
    )
