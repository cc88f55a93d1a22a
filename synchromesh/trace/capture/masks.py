"""Constant masks: attention without a mask, or causal, is faster than with one that says so."""

import hashlib

import torch
from torch import Tensor

from .nodes import behind, is_random

Node = torch.fx.Node
sdpa = torch.ops.aten.scaled_dot_product_attention.default


def fold_masks(
    graph: torch.fx.Graph, constants: dict[str, Tensor], buffers: dict[str, Tensor]
) -> dict[str, str]:
    """Fold masks made of constants alone: all-true becomes none, lower triangular `is_causal`.

    Returns the buffers that such a mask was made of, each with the digest of its content: with
    another content the graph is another one.
    """
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
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "is_causal")}
        if "dropout_p" in node.kwargs:
            args[4] = node.kwargs["dropout_p"]
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "dropout_p"}
        node.args = tuple(args)
    return assumed


def buffers_behind(mask: Node) -> set[str]:
    """Names of the buffers that the mask is computed from."""
    return {
        n.meta["name"]
        for n in behind(mask)
        if n.op == "placeholder" and n.meta["role"] == "buffer"
    }


def digest(tensor: Tensor) -> str:
    """A digest of a tensor's content."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()[:16]


def kind(graph: torch.fx.Graph, mask: Node, known: dict[str, Tensor]) -> str:
    """ "all", "causal" or "other", the same for two different numbers of rows."""
    found = {
        classify(value) if (value := evaluate(graph, mask, known, rows)) is not None else "other"
        for rows in (2, 3)
    }
    return found.pop() if len(found) == 1 else "other"


def classify(mask: Tensor) -> str:
    if mask.dim() < 2:
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


def evaluate(
    graph: torch.fx.Graph, target: Node, known: dict[str, Tensor], rows: int
) -> Tensor | None:
    """The value of a node that depends on constants and rows alone, None for others."""
    past = behind(target)
    for node in past:
        if node.op == "placeholder" and node.meta["role"] != "rows" and not readable(node, known):
            return None
        if "effect" in node.meta or is_random(node):
            return None
    values: dict[Node, object] = {}
    with torch.no_grad():
        for node in graph.nodes:
            if node in past:
                values[node] = step(node, values, known, rows)
            if node is target:
                break
    result = values[target]
    return result if isinstance(result, Tensor) else None


def step(node: Node, values: dict[Node, object], known: dict[str, Tensor], rows: int) -> object:
    if node.op == "placeholder":
        return rows if node.meta["role"] == "rows" else known[node.meta["name"]]
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)  # type: ignore[arg-type]
    return node.target(*args, **kwargs)  # type: ignore[operator]


def readable(node: Node, known: dict[str, Tensor]) -> bool:
    """Whether the placeholder's value is known and stays: a constant, an unchanged buffer."""
    tensor = known.get(node.meta["name"])
    fixed = node.meta["role"] == "constant" or (
        node.meta["role"] == "buffer" and not any("effect" in user.meta for user in node.users)
    )
    fake = isinstance(tensor, torch._subclasses.FakeTensor)
    return fixed and tensor is not None and not fake and tensor.device.type != "meta"
