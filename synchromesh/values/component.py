"""A component, a named part of the training step; a chain, all of them in order with edges."""

from dataclasses import dataclass
from math import prod

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "complex128": 16, "complex64": 8, "complex32": 4,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Where the batch rows of a value lie: dimension `dim` has `segments x rows x inner`
    entries. power: 2 where every row meets every row, as in the logits of a contrastive loss."""

    dim: int = 0
    segments: int = 1
    inner: int = 1
    power: int = 1


@dataclass(frozen=True)
class Value:
    """`shape` is that of one batch row: `segments x inner` stands at `rows.dim`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rows: Rows | None  # None: the value has no batch dimension
    differentiable: bool

    def bytes(self, rows: int) -> int:
        times = rows**self.rows.power if self.rows else 1
        return prod(self.shape) * ITEM_BYTES[self.dtype] * times


@dataclass(frozen=True)
class Parameter:
    """A parameter or buffer by its name in the model and its global shape."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    buffer: bool = False

    @property
    def trained(self) -> bool:
        """Whether the optimizer changes it."""
        return self.trainable and not self.buffer

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Component:
    """A named part of the step, with its parameters and buffers."""

    name: str
    parameters: tuple[Parameter, ...] = ()
    buffers: tuple[Parameter, ...] = ()
    structure: str = ""  # equal for components that compute the same function of other parameters
    opaque: bool = False  # not traced: runs as the user's module, with data layouts only

    @property
    def parameter_bytes(self) -> int:
        return sum(p.bytes for p in self.parameters)


@dataclass(frozen=True)
class Edge:
    """A value made by one component (or the batch, None) and read by later ones."""

    value: Value
    source: str | None
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Chain:
    """The components of a step in the order in which they run, and every edge between them."""

    components: tuple[Component, ...]
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        order = {c.name: i for i, c in enumerate(self.components)}
        assert len(order) == len(self.components), "component names are unique"
        for edge in self.edges:
            source = -1 if edge.source is None else order[edge.source]
            assert all(order[t] > source for t in edge.targets), f"edge {edge} runs backwards"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.components)
