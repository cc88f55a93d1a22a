"""Nodes of an exported program: what each one writes and views, which modules and line made it."""

import torch
from torch import Tensor

from .export import HERE, TORCH

Node = torch.fx.Node
Owners = tuple[tuple[str, int], ...]  # modules from the outermost: (path, number of the call)


def schema(node: Node) -> torch._C.FunctionSchema:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema


def short_name(node: Node) -> str:
    """`add_` for aten.add_.Tensor, the empty string for Python functions."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    return node.target._schema.name.split("::")[1]


def has_gradients(dtype: torch.dtype) -> bool:
    """Whether tensors of this type can have gradients: real or complex, not counts or masks."""
    return dtype.is_floating_point or dtype.is_complex


def is_random(node: Node) -> bool:
    """Whether the node draws random numbers."""
    target = node.target
    tag = torch.Tag.nondeterministic_seeded
    return isinstance(target, torch._ops.OpOverload) and tag in target.tags


def writes(node: Node) -> bool:
    """Whether the node changes one of its arguments."""
    return any(a.is_write for a in schema(node).arguments)


def written(node: Node) -> list[Node]:
    """The arguments that the node changes."""
    places = [(i, a.name) for i, a in enumerate(schema(node).arguments) if a.is_write]
    given = [node.args[i] if i < len(node.args) else node.kwargs.get(n) for i, n in places]
    return [a for a in given if isinstance(a, Node)]


def viewed(node: Node) -> Node | None:
    """The argument whose memory the result of `node` may share."""
    if not any(r.alias_info is not None for r in schema(node).returns):
        return None
    first = node.args[0] if node.args else None
    return first if isinstance(first, Node) else None


def behind(*targets: Node) -> set[Node]:
    """The nodes and all that they depend on."""
    found: set[Node] = set()
    stack = list(targets)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def same_shape(a: Tensor, b: Tensor) -> bool:
    return [str(n) for n in a.shape] == [str(n) for n in b.shape]  # symbols are not to be compared


def owner(node: Node) -> Owners:
    """The modules that were running, outermost first: (path in the model, number of the call)."""
    stack = node.meta.get("nn_module_stack") or {}
    found = []
    for key, (path, _) in stack.items():
        if path == "model" or path.startswith("model."):
            call = key.rpartition("@")[2] if "@" in key else "0"
            found.append((path.removeprefix("model").removeprefix("."), int(call)))
    return tuple(found)


def line_of(node: Node) -> str:
    """file:line of the user's code that made the node, as far as torch keeps it: of modules."""
    trace = (node.meta.get("stack_trace") or "").splitlines()
    frames = [x for x in trace if 'File "' in x and 'File "<' not in x]
    if not frames:
        return "the model"
    lines = [x for x in frames if TORCH not in x and HERE not in x]
    if not lines:
        return "the loss"
    file, _, rest = lines[-1].partition('File "')[2].partition('", line ')
    return f"{file}:{rest.split(',')[0]}"
