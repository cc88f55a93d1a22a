"""Constant masks: attention without a mask, or causal, is faster than with one that says so."""

import hashlib

import torch
from torch import Tensor
from torch.fx import Graph, Node

from synchromesh.trace import meta
from synchromesh.trace.nodes import ancestors, is_random

sdpa = torch.ops.aten.scaled_dot_product_attention.default


def fold_masks(
    graph: Graph, constants: dict[str, Tensor], buffers: dict[str, Tensor]
) -> dict[str, str]:
    """Fold masks made of constants alone: all-true becomes none, lower triangular `is_causal`.

    Returns the buffers that such a mask was made of, each with the digest of its content: with
    another content the graph is another one."""
    assumed: dict[str, str] = {}
    known = {**constants, **buffers}
    cache: dict[Node, str] = {}
    for node in graph.find_nodes(op="call_function", target=sdpa):
        args = list(node.args) + [None, 0.0, False][len(node.args) - 3 :]
        mask = node.kwargs.get("attn_mask", args[3])
        if not isinstance(mask, Node) or args[5] or node.kwargs.get("is_causal"):
            continue
        if mask not in cache:
            cache[mask] = kind(graph, mask, known)
        if cache[mask] == "other":
            continue
        for name in buffers_behind(mask):
            assumed[name] = digest(buffers[name])
        args[3], args[5] = None, cache[mask] == "causal"
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "is_causal")}
        args[4] = kwargs.pop("dropout_p", args[4])
        node.args, node.kwargs = tuple(args), kwargs
    return assumed


def buffers_behind(mask: Node) -> set[str]:
    """Names of the buffers that the mask is computed from."""
    return {meta.name(n) for n in ancestors(mask) if meta.role(n) == "buffer"}


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has a shape and no content."""
    return tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor)


def digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()[:16]


def kind(graph: Graph, mask: Node, known: dict[str, Tensor]) -> str:
    """What the mask hides, the same for two different numbers of rows: see `classify`."""
    kinds = {classify(evaluate(graph, mask, known, rows)) for rows in (2, 3)}
    return kinds.pop() if len(kinds) == 1 else "other"


def classify(mask: Tensor | None) -> str:
    """`all` where the mask hides nothing, `causal` where it hides what comes later, or `other`."""
    if mask is None or mask.dim() < 2:
        return "other"
    if mask.dtype == torch.bool:
        seen = mask
    else:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((hidden | (mask == 0)).all()):
            return "other"
        seen = ~hidden
    if bool(seen.all()):
        return "all"
    if mask.shape[-1] == mask.shape[-2] and bool((seen == torch.ones_like(seen).tril()).all()):
        return "causal"
    return "other"


def evaluate(graph: Graph, target: Node, known: dict[str, Tensor], rows: int) -> Tensor | None:
    """The value of a node that depends on constants and rows alone, None for others."""
    needed = ancestors(target)
    if not all(computable(node, known) for node in needed):
        return None
    values: dict[Node, object] = {}
    with torch.no_grad():
        for node in graph.nodes:
            if node in needed:
                values[node] = compute(node, values, known, rows)
    result = values[target]
    return result if isinstance(result, Tensor) else None


def computable(node: Node, known: dict[str, Tensor]) -> bool:
    """Whether the node's value depends on its inputs alone, or is known and stays."""
    if node.op == "placeholder":
        return meta.role(node) == "rows" or readable(node, known)
    return not meta.effect(node) and not is_random(node)


def compute(node: Node, values: dict[Node, object], known: dict[str, Tensor], rows: int) -> object:
    if node.op == "placeholder":
        return rows if meta.role(node) == "rows" else known[meta.name(node)]
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)  # type: ignore[arg-type]
    return node.target(*args, **kwargs)  # type: ignore[operator]


def readable(node: Node, known: dict[str, Tensor]) -> bool:
    """Whether the placeholder's value is known and stays: a constant, an unchanged buffer."""
    tensor = known.get(meta.name(node))
    unchanged = meta.role(node) == "buffer" and not any(map(meta.effect, node.users))
    return (
        (meta.role(node) == "constant" or unchanged) and tensor is not None and not is_fake(tensor)
    )
