"""Nodes of a graph: their operators and arguments, what they depend on, write and view, and the
modules and lines of the user's code that made them."""

import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from . import meta

T = TypeVar("T")
TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent)

# operators (input, p, train) that do nothing where p is 0 or `train` is false
DROPOUTS = ("dropout", "dropout_", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def schema(node: Node) -> torch._C.FunctionSchema:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema


def short_name(node: Node) -> str:
    """`add_` for aten.add_.Tensor, the empty string for Python functions."""
    return schema(node).name.split("::")[1] if is_operator(node) else ""


def is_operator(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)


def has_tag(node: Node, tag: torch.Tag) -> bool:
    return tag in getattr(node.target, "tags", ())


def arguments(node: Node) -> dict[str, Any]:
    """Arguments by name, positional ones first; functions without a schema number theirs."""
    known = getattr(node.target, "_schema", None)
    names = [a.name for a in known.arguments] if known else map(str, range(len(node.args)))
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


class OperatorCall:
    """A node's operator and its arguments by name; `schema` is None for a Python function."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.schema = getattr(node.target, "_schema", None)
        self.name = self.schema.name.split("::")[1] if self.schema else str(node.target)
        self.overload: str = self.schema.overload_name if self.schema else ""
        self.arguments = arguments(node)

    def constant(self, name: str, default: Any = None) -> Any:
        """The argument `name`, else the schema's default, else `default`."""
        if name in self.arguments:
            return self.arguments[name]
        for a in self.schema.arguments if self.schema else ():
            if a.name == name and a.has_default_value():
                return a.default_value
        return default

    def takes(self, name: str) -> bool:
        return self.schema is not None and any(a.name == name for a in self.schema.arguments)


def all_arguments(node: Node) -> dict[str, Any]:
    """The operator's arguments by name, defaults included."""
    call = OperatorCall(node)
    names = [a.name for a in call.schema.arguments] if call.schema else call.arguments
    return {name: call.constant(name) for name in names}


class Reference(str):
    """The name of a node in the text of another one's arguments: printed without quotes."""

    def __repr__(self) -> str:
        return str(self)


def dim_of(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def dims_of(given: Any, rank: int) -> list[int]:
    return [dim_of(d, rank) for d in ([given] if isinstance(given, int) else given or ())]


def by_operator(table: Mapping[T, str]) -> dict[str, T]:
    """{function: "add sub"} as {"add": function, "sub": function}."""
    return {name: function for function, names in table.items() for name in names.split()}


def calls(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "call_function"]


def outputs(graph: Graph) -> tuple[Any, ...]:
    (output,) = graph.find_nodes(op="output")
    given: tuple[Any, ...] = output.args[0]
    return given


def has_gradients(dtype: torch.dtype) -> bool:
    """Whether tensors of this type can have gradients: real or complex, not counts or masks."""
    return dtype.is_floating_point or dtype.is_complex


def is_random(node: Node) -> bool:
    return is_operator(node) and has_tag(node, torch.Tag.nondeterministic_seeded)


def draws(node: Node) -> bool:
    """Whether the node draws random numbers with the arguments it has."""
    if not is_random(node):
        return False
    name, given = short_name(node), arguments(node)
    if name == "scaled_dot_product_attention":
        return bool(given.get("dropout_p", 0.0))
    if name in RECURRENT:
        return bool(given.get("dropout") and given.get("train") and given.get("num_layers") != 1)
    if "dropout" in name:
        return bool(given.get("p", 0.5) and given.get("train", given.get("training", True)))
    return True


def writes(node: Node) -> bool:
    return any(a.is_write for a in schema(node).arguments)


def written(node: Node) -> list[Node]:
    given = arguments(node)
    changed = (given.get(a.name) for a in schema(node).arguments if a.is_write)
    return [a for a in changed if isinstance(a, Node)]


def viewed(node: Node) -> Node | None:
    """The argument whose memory the result of `node` may share."""
    if not any(r.alias_info is not None for r in schema(node).returns):
        return None
    first = node.args[0] if node.args else None
    return first if isinstance(first, Node) else None


def memory_of(node: Node) -> Node:
    """The node whose memory the node's result may share, as views do; else the node itself."""
    while True:
        if node.target is operator.getitem:
            source = node.args[0]
        else:
            source = viewed(node) if is_operator(node) else None
        if not isinstance(source, Node):
            return node
        node = source


def same_shape(a: Tensor, b: Tensor) -> bool:
    """Whether two fake tensors have the same sizes, symbols by name: they cannot be compared."""
    return [str(n) for n in a.shape] == [str(n) for n in b.shape]


def ancestors(*targets: Node, among: Callable[[Node], bool] = lambda _: True) -> set[Node]:
    """The nodes and all that they depend on. among: which of all are reached and passed."""
    reached: set[Node] = set()
    stack = list(targets)
    while stack:
        node = stack.pop()
        if node not in reached and among(node):
            reached.add(node)
            stack.extend(node.all_input_nodes)
    return reached


def living(graph: Graph) -> set[Node]:
    return ancestors(*(n for n in graph.nodes if n.op == "output" or meta.effect(n)))


def is_number(node: Node) -> bool:
    return meta.value(node) is None and not isinstance(meta.val(node), Tensor | tuple)


def number(node: Any, rows: int) -> Any:
    if not isinstance(node, Node):
        return node
    if node.op == "placeholder":
        return rows
    return node.target(*(number(a, rows) for a in node.args))  # type: ignore[operator]


def exported_owner(node: Node) -> meta.Owners:
    """The modules that were running, outermost first: (path in the model, number of the call)."""
    owners = []
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        if path == "model" or path.startswith("model."):
            call = key.rpartition("@")[2] if "@" in key else "0"
            owners.append((path.removeprefix("model").removeprefix("."), int(call)))
    return tuple(owners)


def described(node: Node) -> str:
    """The operator and the user's line, for messages."""
    name = short_name(node) or getattr(node.target, "__name__", str(node.target))
    return f"{name} at {line_of(node)}"


def line_of(node: Node) -> str:
    """file:line of the user's code that made the node, as far as torch keeps it: of modules."""
    trace = (meta.stack_trace(node) or "").splitlines()
    frames = [x for x in trace if 'File "' in x and 'File "<' not in x]
    if not frames:
        return "the model"
    lines = [x for x in frames if TORCH not in x and HERE not in x]
    if not lines:
        return "the loss"
    file, _, rest = lines[-1].partition('File "')[2].partition('", line ')
    return f"{file}:{rest.split(',')[0]}"
