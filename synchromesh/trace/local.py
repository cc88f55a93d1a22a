"""A local component: the graph every rank of an axis runs, its borders, tensors and traffic."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule

from synchromesh.component import Component, Value
from synchromesh.layout import Layout
from synchromesh.placement import Placement
from synchromesh.traffic import Collective


@dataclass(frozen=True)
class Input:
    """A value that a component reads: its maker, the state it comes in and is read in."""

    value: Value
    source: int | None  # index of the producing component; None: a leaf of the batch
    have: Placement  # on the producer's axis
    want: Placement  # on this component's axis


@dataclass(frozen=True)
class Output:
    """A value that a component hands out, in one state."""

    value: Value
    placement: Placement


@dataclass(frozen=True)
class Span:
    """Computation between two moves: rough operations per batch row, for shares of measured time."""

    work: float


@dataclass(frozen=True)
class Hop:
    """A move: the collectives it runs, maybe none; other pieces of the rows run meanwhile."""

    collectives: tuple[Collective, ...] = ()


Event = Span | Hop


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
    constants: tuple[str, ...]
    events: tuple[Event, ...]  # what one walk through the graph computes and sends, in order
    unsharded: Mapping[str, str]  # parameter -> why every rank holds it whole

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All that it sends, per row of the data block (on edges: the producer's)."""
        return tuple(c for e in self.events if isinstance(e, Hop) for c in e.collectives)


@dataclass(frozen=True)
class Partition:
    """The local components of a step, and where its tensors lie under each layout."""

    components: tuple[LocalComponent, ...]
    placements: Mapping[tuple[str, Layout], Placement]
    outputs: tuple[Output, ...]
