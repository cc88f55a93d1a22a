"""An explanation: what a plan does to a model, component by component, before any process runs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import chain
from typing import Any

from synchromesh.trace.step import Step
from synchromesh.values.component import ITEM_BYTES
from synchromesh.values.holding import Holding, averaged, holdings
from synchromesh.values.layout import LEVELS, Layout, ShardStates, stages_of
from synchromesh.values.placement import REPLICATED
from synchromesh.values.plan import Plan
from synchromesh.values.traffic import (
    Collective,
    CollectiveKind,
    Direction,
    ExchangeBytes,
    TrafficCount,
    batch_norm_collectives,
    exchanges,
)
from synchromesh.values.weight_versions import counts, updates

from .gradient_traffic import component_sums, gradient_traffic
from .local import Communication, Input, LocalComponent, Partition, crossings, deliveries
from .moves import edge_collectives
from .shard_traffic import ShardTraffic, served_traffic, shard_traffic


@dataclass(frozen=True)
class SentCollective:
    """One collective, its bytes at the first position; of messages the most of a rank."""

    kind: CollectiveKind
    direction: Direction
    bytes: int
    ranks: int
    times: int = 1
    every: int = 1  # steps


@dataclass(frozen=True)
class ComponentExplanation:
    name: str
    data: int  # its layout
    tensor: int
    states: ShardStates  # sharded over its data ranks
    recompute: bool
    parameter_bytes: int
    parameter_bytes_per_rank: int  # that a rank keeps
    sharded_parameter_bytes: int  # global bytes of the parameters that are cut
    placements: dict[str, str]
    not_sharded: dict[str, str]  # parameter -> why it is replicated
    collectives: tuple[SentCollective, ...]
    stage: int  # counted from 0
    ranks: tuple[int, ...]  # of its stage


@dataclass(frozen=True)
class EdgeExplanation:
    """A value that goes from one component to another; `collective`: none where it stays."""

    source: str
    target: str
    value: str
    bytes: int
    have: str
    want: str
    collective: str


@dataclass(frozen=True)
class Explanation:
    """A plan applied to a traced step on so many ranks, none of which runs."""

    plan: str
    ranks: int
    rows: int
    components: tuple[ComponentExplanation, ...]
    edges: tuple[EdgeExplanation, ...]
    parameter_bytes_per_rank: tuple[int, ...]
    sent_bytes_per_step: tuple[int, ...]
    batch_norm: str  # how batch norm is counted: "synchronised" or "per row block"
    opaque: str  # why the model is one opaque component, or ""
    coupled: str  # where rows depend on each other, and why; or ""
    merged: str  # why components that might stand alone are one, or ""
    micro_batches: int  # that the plan cuts the global batch into
    schedule: str  # by which stages run them; "" where there is one stage
    versions: tuple[int, ...]  # of weights, kept by each stage; () where they are flushed
    data_ranks: int  # the largest data degree
    gradient_bytes: int  # that these sum, the most of a rank
    exchanges: tuple[ExchangeBytes, ...]  # what rings and servers send for that

    def document(self) -> dict[str, Any]:
        """The JSON form; its keys, which are the names of the fields, are interface."""
        form = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        form["edges"] = [
            {"from": edge.pop("source"), "to": edge.pop("target"), **edge}
            for edge in form["edges"]
        ]
        return form


def explain(
    step: Step, made: Partition, plan: Plan, world: int, rows: int, sync_batch_norm: bool = True
) -> Explanation:
    """What `plan` does with a global batch of `rows` rows on `world` ranks. sync_batch_norm:
    whether batch norm takes its statistics over all data ranks, as `verify` has it. Bytes on the
    edges between layouts are exact where the data degrees divide the rows."""
    ranks = plan.devices(world)
    sync_batch_norm = sync_batch_norm and not plan.sync.alone
    if sync_batch_norm:
        made = replace(made, components=tuple(_with_norms(c, made) for c in made.components))
    parameters = {p.name: p for c in step.chain.components for p in c.parameters}
    holding = holdings(parameters.values(), made.placements, len(ranks), plan)
    applied = _AppliedPlan(made, plan, rows, holding)
    sent, local_bytes = [0] * world, [0] * world
    for position, rank in enumerate(ranks):
        local_bytes[rank] = sum(h.bytes_at(position) for h in holding.values())
        sent[rank] = applied.sent_bytes(position)
    stages = stages_of([c.layout for c in made.components])
    data, size = _summed(holding.values(), plan)
    components = tuple(
        _component(applied, i, number, ranks) for number, stage in enumerate(stages) for i in stage
    )
    return Explanation(
        str(plan), world, rows, components,
        tuple(_edge(c, item, made, rows) for c in made.components for item in c.inputs),
        tuple(local_bytes), tuple(sent),
        "synchronised" if sync_batch_norm else "per row block", step.reason,
        f"{', '.join(step.coupling)}: {step.coupled}" if step.coupling else "",
        step.merged, len(applied.micro_batches), plan.schedule if len(stages) > 1 else "",
        counts(plan.kept),
        data, size, exchanges(size, data) if data > 1 and size else (),
    )  # fmt: skip


def _summed(held: Iterable[Holding], plan: Plan) -> tuple[int, int]:
    """The most workers, and the most bytes of gradients of theirs on the ranks of a stage."""
    trained = [h for h in held if h.tensor.trained]
    data = max((h.layout.data for h in trained), default=1)
    sizes: Counter[range] = Counter()
    for h in trained:
        sizes[h.layout.positions] += h.local_bytes * (h.layout.data == data)
    return data - len(plan.servers or ()), max(sizes.values(), default=0)


@dataclass(frozen=True)
class _AppliedPlan:
    """A partition under a plan, with a global batch of so many rows."""

    made: Partition
    plan: Plan
    rows: int
    holding: Mapping[str, Holding]

    @property
    def micro_batches(self) -> tuple[tuple[int, int], ...]:
        return self.plan.micro_rows(self.rows)

    @property
    def updates(self) -> int:
        return updates(self.plan.kept, len(self.micro_batches))

    def sent_bytes(self, position: int) -> int:
        gradients = [*gradient_traffic(self.made, self.holding, position)] * self.updates
        count, seldom = TrafficCount(), Fraction()
        for kind, payload, ranks in chain(self._moves(position), gradients):
            count.add(kind, payload, ranks)
        for s in self._shards(position):
            if s.every > 1:
                seldom += Fraction(s.times * s.collective.fixed_bytes, s.every)
                continue
            count.add(s.collective.kind, s.times * s.collective.fixed_bytes, s.collective.ranks)
        means = TrafficCount()
        for h in chain.from_iterable(averaged(self.holding.values())):
            if position in h.positions and self.plan.sync.steps:
                means.add("all_reduce", h.bytes_at(position), h.layout.data)
        every = self.plan.sync.steps or 1
        seldom += means.sent // every
        return int(count.sent + self._message_bytes(position) + seldom)

    def _moves(self, position: int) -> Iterator[tuple[CollectiveKind, int, int]]:
        here = [c for c in self.made.components if position in c.layout.positions]
        for start, stop in self.micro_batches:
            for local in here:
                for c in local.collectives:
                    if c.kind != "send":
                        block = self._block(c, local.layout, stop - start, position)
                        yield c.kind, c.payload(block), c.ranks

    def _message_bytes(self, position: int) -> int:
        crossing = chain.from_iterable(crossings(self.made).values())
        between = [x for x in crossing if x.crosses]
        delivered = chain.from_iterable(ways for _, ways in deliveries(self.made))
        carry = [x for x in delivered if x.source.mesh != x.target.mesh]
        messages = 0
        for start, stop in self.micro_batches:
            ranges = partial(self.plan.row_ranges, stop - start)
            messages += sum(x.sent_bytes(ranges, False, position) for x in (*between, *carry))
            messages += sum(x.sent_bytes(ranges, True, position) for x in between if x.flows)
        return messages

    def _shards(self, position: int) -> tuple[ShardTraffic, ...]:
        count, schedule = len(self.micro_batches), self.plan.schedule
        if self.plan.sync.asynchronous:
            return served_traffic(self.made, self.holding, self.plan.sync, position)
        return shard_traffic(self.made, self.holding, schedule, count, position)

    def _block(self, collective: Collective, layout: Layout, rows: int, position: int) -> int:
        """Rows of the data block that the payload counts; a rank without rows computes one."""
        if collective.kind == "send":  # counts rows of the blocks of another stage
            return max(b - a for a, b in self.plan.row_ranges(rows, collective.data))
        data = collective.data or layout.data
        block = Layout(data, layout.devices // data, first=layout.first)
        start, stop = self.plan.row_ranges(rows, block.data)[block.data_index(position)]
        return stop - start if collective.data else max(1, stop - start)

    def collectives(self, index: int) -> Iterator[SentCollective]:
        local = self.made.components[index]
        layout, first = local.layout, local.layout.first
        largest = max(stop - start for start, stop in self.micro_batches)
        for c in local.collectives:
            payload = c.payload(self._block(c, layout, largest, first))
            yield SentCollective(c.kind, c.direction, payload, c.ranks, len(self.micro_batches))
        yield from self._of_parameters(local)
        for s in self._shards(first):
            if s.component == index:
                c = s.collective
                of = c.kind, c.direction, c.fixed_bytes, c.ranks
                yield SentCollective(*of, s.times, s.every)

    def _of_parameters(self, local: LocalComponent) -> Iterator[SentCollective]:
        """Sums of gradients and means of parameters, by number of ranks."""
        own = [self.holding[p.name] for p in local.component.parameters if p.trainable]
        for kind, size, ranks in component_sums(own):
            yield SentCollective(kind, "gradient", size, ranks, self.updates)
        means, every = Counter[int](), self.plan.sync.steps  # bytes
        for h in own:
            means[h.layout.data] += h.local_bytes * h.averaged * (every > 0)
        for ranks, size in sorted(means.items()):
            if size:
                yield SentCollective("all_reduce", "parameters", size, ranks, every=every)


def _with_norms(local: LocalComponent, made: Partition) -> LocalComponent:
    if local.layout.data == 1:
        return local
    nodes = [n for n in local.graph.graph.nodes if n.op == "placeholder"]
    first = 2 + len(local.inputs)  # the axis and the rows come before
    names = dict(zip(nodes[first:], (*local.parameters, *local.buffers), strict=False))
    tensors = {t.name: t for t in (*local.component.parameters, *local.component.buffers)}
    sent: list[Collective] = []
    for node in local.graph.graph.find_nodes(op="call_method", target="batch_norm"):
        *own, training = node.args[2:7]  # weight, bias, running mean and variance
        known = [names[a] for a in own if a in names]
        if not training or not known:
            continue
        name = known[0]
        placement = made.placements.get((name, local.layout), REPLICATED)
        (channels,) = placement.local_shape(tensors[name].shape, local.layout.tensor)
        item = max(4, ITEM_BYTES[tensors[name].dtype])
        sent += batch_norm_collectives(channels, item, local.layout.data)
    return replace(local, events=(*local.events, Communication(tuple(sent), repeated=True)))


def _component(
    applied: _AppliedPlan, index: int, stage: int, ranks: Sequence[int]
) -> ComponentExplanation:
    local = applied.made.components[index]
    own = [applied.holding[p.name] for p in local.component.parameters]
    return ComponentExplanation(
        local.component.name, local.layout.data, local.layout.tensor, local.layout.shard_states,
        local.layout.recompute, local.component.parameter_bytes, sum(h.kept_bytes for h in own),
        sum(h.tensor.bytes for h in own if h.placement.sharded and h.layout.tensor > 1),
        {h.tensor.name: "whole" if h.partial_gradient else str(h.placement) for h in own},
        dict(local.unsharded), tuple(applied.collectives(index)), stage,
        tuple(ranks[p] for p in local.layout.positions),
    )  # fmt: skip


def _edge(local: LocalComponent, item: Input, made: Partition, rows: int) -> EdgeExplanation:
    name, source = "batch", made.leaf_layouts[local.layout.positions]
    if item.source is not None:
        maker = made.components[item.source]
        name, source = maker.component.name, maker.layout
    if source.mesh == local.layout.mesh:
        collective = "none" if item.have == item.want else f"{item.have} -> {item.want}"
    else:
        moves = edge_collectives(item.value, item.have, item.want, source, local.layout)
        assert moves is not None, f"{item} is not a move that edges know"
        collective = ", ".join(f"{c.kind} ({c.direction})" for c in moves) or "none"
    return EdgeExplanation(
        name, local.component.name, item.value.name, item.value.bytes(rows),
        f"{source.mesh} {item.have}", f"{local.layout.mesh} {item.want}", collective,
    )  # fmt: skip


def text(explanation: Explanation) -> str:
    """The explanation for a reader: a line per component, what is cut, sent, and why not."""
    out = _head(explanation)
    inputs: dict[str, list[EdgeExplanation]] = {}
    for edge in explanation.edges:
        inputs.setdefault(edge.target, []).append(edge)
    stage = -1
    for part in explanation.components:
        out.append("")
        if explanation.schedule and part.stage != stage:
            stage = part.stage
            out += [f"stage {stage} on ranks {', '.join(map(str, part.ranks))}", ""]
        placements = [] if explanation.opaque else _placements(part)
        out += _of_component(part, inputs.get(part.name, []), placements)
    return "\n".join(out)


def _head(explanation: Explanation) -> list[str]:
    out = [
        f"plan {explanation.plan} on {explanation.ranks} ranks, {explanation.rows} rows a step",
        f"parameter bytes per rank {_list(explanation.parameter_bytes_per_rank)}",
        f"bytes sent per rank and step {_list(explanation.sent_bytes_per_step)} "
        f"(batch norm {explanation.batch_norm})",
    ]
    if explanation.exchanges:
        ranks = f"over {explanation.data_ranks} data ranks, would send"
        out.append(f"{explanation.gradient_bytes:,} bytes of gradients a rank and step, {ranks}")
        out += map(str, explanation.exchanges)
    if explanation.opaque:
        out.append(f"one opaque component, of which nothing is sharded: {explanation.opaque}")
    if explanation.merged:
        out.append(f"components that might stand alone are one: {explanation.merged}")
    if explanation.coupled:
        out.append(f"rows depend on each other, each rank computes all: {explanation.coupled}")
    if explanation.micro_batches > 1 or explanation.versions:
        how = f", schedule {explanation.schedule}" if explanation.schedule else ""
        if explanation.versions:
            how += f" without a flush, {_list(explanation.versions)} versions of weights by stage"
        out.append(f"{explanation.micro_batches} micro-batches{how}")
    return out


def _of_component(
    part: ComponentExplanation, inputs: Sequence[EdgeExplanation], placements: Sequence[str]
) -> list[str]:
    share = part.sharded_parameter_bytes / (part.parameter_bytes or 1)
    over_tensor = f"{share:.0%} sharded over tensor ranks, " if part.tensor > 1 else ""
    out = [
        f"{part.name}  data({part.data}) x tensor({part.tensor}){_options(part)}  "
        f"{part.parameter_bytes:,} bytes of parameters, {over_tensor}"
        f"{part.parameter_bytes_per_rank:,} on a rank"
    ]
    out += [
        f"  <- {edge.value} from {edge.source}: {edge.bytes:,} bytes, {edge.have} to "
        f"{edge.want}, collective {edge.collective}"
        for edge in inputs
    ]
    out += placements
    for c in part.collectives:
        times = f", {c.times} times" if c.times > 1 else ""
        times += f", every {c.every} steps" if c.every > 1 else ""
        on = "" if c.kind == "send" else f" on {c.ranks} ranks"
        out.append(f"  {c.kind} of {c.bytes:,} bytes{on}, {c.direction}{times}")
    return out


def _options(part: ComponentExplanation) -> str:
    """What is sharded over data ranks; recomputation."""
    *before, last = LEVELS[part.states].sharded or ("",)
    what = f"{', '.join(before)} and {last}" if before else last
    sharded = f", {what} sharded over data ranks" if what and part.data > 1 else ""
    return sharded + (", recomputed" if part.recompute else "")


def _placements(part: ComponentExplanation) -> list[str]:
    """A line for each parameter; a reason that several have is said once, below them."""
    by_reason: dict[str, list[str]] = {}
    for name, why in part.not_sharded.items():
        by_reason.setdefault(why, []).append(name)
    out = []
    for name, placement in part.placements.items():
        why = part.not_sharded.get(name, "")
        alone = len(by_reason.get(why, ())) == 1
        out.append(f"  {name}: {placement}" + (f"  ({why})" if alone else ""))
    shared = ((why, names) for why, names in by_reason.items() if len(names) > 1)
    return out + [f"  not sharded, as {why}: {', '.join(names)}" for why, names in shared]


def _list(numbers: tuple[int, ...]) -> str:
    shown = [f"{n:,}" for n in numbers]
    return f"{shown[0]} (all)" if len({*shown}) == 1 else ", ".join(shown)
