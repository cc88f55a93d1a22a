"""The trace's entries in `node.meta`, each with its type.

`meta.role(node)` reads an entry, `meta.role.set(node, "leaf")` writes it.
Nothing else of the package reads or writes these entries by their keys. docs/design.md says what
the entries of a finished step promise; the others serve while a step is captured."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.fx import Node

from synchromesh.values.component import Value

T = TypeVar("T")
Owners = tuple[tuple[str, int], ...]  # modules from the outermost: (path, number of the call)


@dataclass(frozen=True)
class MetaEntry(Generic[T]):
    """One entry of `node.meta`; a node without it has the default."""

    key: str
    default: T

    def __call__(self, node: Node) -> T:
        entry: T = node.meta.get(self.key, self.default)
        return entry

    def set(self, node: Node, value: T) -> None:
        node.meta[self.key] = value


# -- of placeholders
role = MetaEntry[str]("role", "")  # "rows", "leaf", "parameter", "buffer" or "constant"
name = MetaEntry[str]("name", "")  # the tensor's, in the model, the batch or among constants
example_rows = MetaEntry[int]("rows", 0)  # of "rows": how many the example has

# -- of all nodes
val = MetaEntry[Any]("val", None)  # export's fake tensor, a tuple of them, or an integer
value = MetaEntry[Any]("value", None)  # a `Value`, a tuple of `Value | None`, None for integers
owner = MetaEntry[Owners]("owner", ())  # the modules that were running
stack_trace = MetaEntry[str | None]("stack_trace", None)  # of the user's code, as torch keeps it
differentiable = MetaEntry[bool]("differentiable", False)  # a gradient may flow through it
component = MetaEntry[int]("component", -1)  # index in the chain; -1: not of any component

# -- of some nodes
effect = MetaEntry[tuple[str, ...]]("effect", ())  # names of the buffers that the node changes
reduced = MetaEntry[bool]("reduced", False)  # a value of a component that rows were reduced to
irregular = MetaEntry[Any]("irregular", None)  # see `why_irregular`; a tuple where `value` is one
coupling = MetaEntry[str]("coupling", "")  # a clause: the node makes rows depend on each other
reported = MetaEntry[bool]("reported", False)  # nothing but what a loss reports needs it
grouped = MetaEntry[bool]("grouped", False)  # what rows were reduced to says where groups end
sparse = MetaEntry[bool]("sparse", False)  # an embedding whose gradient is asked for as few rows

# -- of a local graph's placeholders
of_rows = MetaEntry[bool]("of_rows", False)  # what rows, or their number, enter
is_buffer = MetaEntry[bool]("buffer", False)


def describe(
    node: Node, val_: Any, owner_: Owners, differentiable_: bool, trace: str | None = None
) -> None:
    """Writes the entries that every node of a captured graph has, `value` aside."""
    val.set(node, val_)
    owner.set(node, owner_)
    stack_trace.set(node, trace)
    differentiable.set(node, differentiable_)


def copy(source: Node, target: Node) -> None:
    """Describes `target` as `source`, with neither its role and name nor its effects."""
    target.meta.update(source.meta)
    for entry in (role, name, effect):
        target.meta.pop(entry.key, None)


def tensors(node: Node) -> Iterator[tuple[int, Tensor]]:
    """The fake tensors that a node makes, with their places in a tuple."""
    made = val(node)
    for at, each in enumerate(made if isinstance(made, tuple | list) else (made,)):
        if isinstance(each, Tensor):
            yield at, each


def values_of(node: Node) -> tuple[Value | None, ...]:
    """The descriptions of all that a node makes: none for an integer, None for no tensor."""
    described = value(node)
    return described if isinstance(described, tuple) else () if described is None else (described,)


def has_rows(node: Node) -> bool:
    return any(v is not None and v.rows is not None for v in values_of(node))


def why_irregular(node: Node, at: int = 0) -> str | None:
    """Why the rows of a tensor may not be taken apart, a clause; None where they may."""
    reasons: str | tuple[str | None, ...] | None = irregular(node)
    return reasons[at] if isinstance(reasons, tuple) else reasons


def placeholders(graph: Any, wanted: str) -> list[Node]:
    return [n for n in graph.find_nodes(op="placeholder") if role(n) == wanted]
