"""A local component: the graph every rank of an axis runs, its borders, tensors and traffic, what
of the graph recomputation repeats, and what goes from stage to stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from synchromesh.values.component import Component, Parameter, Value
from synchromesh.values.exchange import Border, Exchange
from synchromesh.values.layout import Layout, stages_of
from synchromesh.values.placement import REPLICATED, Placement
from synchromesh.values.traffic import Collective


@dataclass(frozen=True)
class Input:
    """A value that a component reads: its maker, the state it comes in and is read in."""

    value: Value
    source: int | None  # index of the producing component; None: a leaf of the batch
    have: Placement  # on the producer's axis
    want: Placement  # on this component's axis
    flows: bool = False  # whether a gradient goes back


@dataclass(frozen=True)
class Output:
    """A value that a component hands out, in one state."""

    value: Value
    placement: Placement


@dataclass(frozen=True)
class PlacedOutput:
    """An output that stays with the component that makes it, whole there: the value of a leaf of
    the carry for the next batch, or of what is reported (`Step.reported`)."""

    of: Any
    value: Value
    source: int  # index of the component


@dataclass(frozen=True)
class Computation:
    """Computation between two moves: rough operations per batch row, for shares of time."""

    work: float


@dataclass(frozen=True)
class Communication:
    """A move: the collectives it runs, maybe none; other micro-batches run meanwhile.

    pauses: whether they do. An operator's own collectives are waited for where they stand.
    repeated: whether it runs again in backward where the component is recomputed."""

    collectives: tuple[Collective, ...] = ()
    pauses: bool = True
    repeated: bool = False


Event = Computation | Communication


@dataclass(frozen=True)
class Division:
    """What of a backward can come later, as a pipeline's schedule may have it (`division.py`).

    weights: the share of its work that makes the gradients of weights; half where no graph says
    it. waiting: the values and gradients, on one rank, that are there until then."""

    weights: float = 0.5
    waiting: tuple[tuple[Value, Placement], ...] = ()


@dataclass(frozen=True)
class LocalComponent:
    """One component as one rank runs it; the same for every rank of the axis."""

    component: Component
    layout: Layout
    graph: GraphModule  # (axis, rows, *inputs, *parameters, *buffers, *constants) -> outputs
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[Value, ...]
    events: tuple[Event, ...]  # what one walk through the graph computes and sends, in order
    unsharded: Mapping[str, str]  # parameter -> why it is replicated
    program: str  # what it computes, whatever its names: `program_of`
    arrivals: int = 0  # how many of the first events bring inputs over the border
    division: Division = Division()

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All that it sends, per row of the data block (on edges: the producer's)."""
        sent = [c for e in self.events if isinstance(e, Communication) for c in e.collectives]
        return (*sent, *self.repeats)

    @property
    def repeats(self) -> tuple[Collective, ...]:
        """What it sends once more in backward because it is recomputed."""
        return tuple(
            replace(c, direction="backward")
            for e in self.events
            if self.layout.recompute and isinstance(e, Communication) and e.repeated
            for c in e.collectives
            if c.direction == "forward"
        )


@dataclass(frozen=True)
class Partition:
    """The local components of a step, and where its tensors lie under each layout."""

    components: tuple[LocalComponent, ...]
    placements: Mapping[tuple[str, Layout], Placement]
    outputs: tuple[Output, ...]
    leaf_layouts: Mapping[range, Layout]  # in which the batch is there, by positions of a stage
    reports: tuple[PlacedOutput, ...] = ()
    carry: tuple[PlacedOutput, ...] = ()

    def under(self, layouts: Sequence[Layout]) -> "Partition":
        """The same under layouts of equal meshes, sharded and recomputed in another way."""
        components, placements = [], {}
        for local, layout in zip(self.components, layouts, strict=True):
            assert local.layout.mesh == layout.mesh, f"{local.layout} is not {layout}"
            components.append(replace(local, layout=layout))
            for name in (*local.parameters, *local.buffers):
                placements[name, layout] = self.placements[name, local.layout]
        return replace(self, components=tuple(components), placements=placements)

    def local_shape(self, local: LocalComponent, name: str) -> tuple[int, ...]:
        """The shape of one rank's part of parameter or buffer `name`, as `local` uses it."""
        tensors = (*local.component.parameters, *local.component.buffers)
        shape = next(t.shape for t in tensors if t.name == name)
        placement = self.placements.get((name, local.layout), REPLICATED)
        return placement.local_shape(shape, local.layout.tensor)


def program_of(
    form: str, inputs: Sequence[Input], tensors: Sequence[tuple[Parameter, Placement]],
    constants: Sequence[Value], layout: Layout,
) -> str:  # fmt: skip
    """A key that components share whose local graphs compute the same on the same shapes, in every
    process: stored measurements are found by it. form: of the graph. tensors: and placements."""
    values = ((i.value, str(i.want)) for i in inputs)
    read = [(v.shape, v.dtype, v.rows, v.differentiable, want) for v, want in values]
    types = [(p.local_shape(t.shape, layout.tensor), t.dtype, t.trainable) for t, p in tensors]
    key = (form, read, types, [(v.shape, v.dtype) for v in constants], layout.tensor)
    return blake2b(repr(key).encode(), digest_size=10).hexdigest()


def flow(local: LocalComponent) -> tuple[Sequence[str], bool]:
    """The parameters that a component uses, and whether a gradient flows back through it."""
    return local.parameters, any(output.value.differentiable for output in local.outputs)


def _name(target: Any) -> str:
    """The same in every process: a function's own text has its address."""
    qualified = getattr(target, "__qualname__", None)
    return f"{target.__module__}.{qualified}" if qualified else str(target)


def form_of(graph: Graph) -> str:
    return blake2b(repr(structure(graph)).encode(), digest_size=10).hexdigest()


def structure(graph: Graph) -> list[Any]:
    """The graph without names: what each node does with which earlier ones."""
    place: dict[Node, int] = {}

    def plain(x: Any) -> Any:
        if isinstance(x, Node):
            return ("node", place[x])
        if isinstance(x, list | tuple):
            return [plain(y) for y in x]
        if isinstance(x, dict):
            return [(k, plain(v)) for k, v in x.items()]
        if isinstance(x, torch.device):
            return x.type  # every rank has a GPU of another number
        return repr(x)

    nodes = []
    for node in graph.nodes:
        target = "" if node.op == "placeholder" else _name(node.target)
        nodes.append((node.op, target, plain(node.args), plain(node.kwargs)))
        place[node] = len(place)
    return nodes


# -- recomputation -----------------------------------------------------------------------

# Operators of whose inputs and outputs autograd keeps nothing: backward is linear in the gradient.
# A test runs each of them.
KEEP_NOTHING = {
    "add", "sub", "neg", "alias", "cat", "chunk", "clone", "contiguous", "detach", "expand",
    "flatten", "narrow", "permute", "reshape", "select", "slice", "split", "split_with_sizes",
    "squeeze", "stack", "t", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view",
}  # fmt: skip
# methods of the axis of which it keeps nothing either
MOVES = ("move", "stream", "joined")


def repeated(graph: Graph) -> int:
    """How many nodes are walked again in recomputation: until the last that autograd keeps."""
    count = 0
    for i, node in enumerate(graph.nodes, 1):
        if node.op != "output" and _keeps(node):
            count = i
    return count


def _keeps(node: Node) -> bool:
    if node.op == "call_method":
        return node.target not in MOVES
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__module__", "") != "_operator"  # arithmetic of sizes
    return schema.name.partition("::")[2] not in KEEP_NOTHING


def shortened(graph: Graph) -> Graph:
    made, copies = Graph(), dict[Node, Node]()
    again = list(graph.nodes)[: repeated(graph)]
    for node in dict.fromkeys((*again, *graph.find_nodes(op="placeholder"))):
        copies[node] = made.node_copy(node, copies.__getitem__)
    made.output(())
    return made


# -- what goes from stage to stage, and where a carry goes behind a step -------------------

Pair = tuple[int, int]  # of stages: the maker's, the reader's


def exchange_of(partition: Partition, local: LocalComponent, item: Input) -> Exchange:
    if item.source is None:
        source = partition.leaf_layouts[local.layout.positions]
    else:
        source = partition.components[item.source].layout
    return Exchange(item.value, item.have, item.want, source, local.layout, item.flows)


def crossings(partition: Partition) -> Mapping[Pair, tuple[Exchange, ...]]:
    """By pair of stages, each form of a value once; also of stages on the same ranks."""
    components = partition.components
    stages = stages_of([local.layout for local in components])
    stage_of = {i: s for s, stage in enumerate(stages) for i in stage}
    exchanges: dict[Pair, dict[Border, Exchange]] = {}
    for i, local in enumerate(components):
        for item in local.inputs:
            if item.source is None or stage_of[item.source] == stage_of[i]:
                continue
            exchange = exchange_of(partition, local, item)
            pair = stage_of[item.source], stage_of[i]
            form = exchange.read if exchange.crosses else exchange.made
            exchanges.setdefault(pair, {}).setdefault(form, exchange)
    return {pair: tuple(items.values()) for pair, items in sorted(exchanges.items())}


def deliveries(partition: Partition) -> tuple[tuple[str, tuple[Exchange, ...]], ...]:
    """Each leaf of the carry, with how its new value comes to where the next batch is read: to the
    ranks of each stage that reads the leaf, as they have the rows of a batch; nothing moves where
    these are the ranks that make it and have them so. What none reads stays with its maker's."""
    delivered = []
    for item in partition.carry:
        maker = partition.components[item.source].layout
        readers = {
            local.layout.positions: None
            for local in partition.components
            for read in local.inputs
            if read.source is None and read.value.name == item.of
        }
        delivered.append((item.of, tuple(
            Exchange(
                item.value, REPLICATED, REPLICATED, maker, partition.leaf_layouts[positions],
                flows=False,
            )
            for positions in readers or (maker.positions,)
        )))  # fmt: skip
    return tuple(delivered)


def users_of(components: Sequence[LocalComponent]) -> dict[str, tuple[int, ...]]:
    """The stages that use each parameter that is trained, by its name."""
    users: dict[str, dict[int, None]] = {}
    for number, stage in enumerate(stages_of([local.layout for local in components])):
        for described in (p for i in stage for p in components[i].component.parameters):
            if described.trainable:
                users.setdefault(described.name, {})[number] = None
    return {name: (*stages,) for name, stages in users.items()}
