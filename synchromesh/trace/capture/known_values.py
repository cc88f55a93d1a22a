"""Known values: what traced code asks of tensors without rows and parameters; constant masks.

    mask = generate_square_subsequent_mask(length)
    is_causal = bool((mask == causal).all())        <- export knows the mask's shape alone

What was traced so far says how such a tensor is computed, so it is computed once more."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from synchromesh.trace import meta

from ..nodes import ancestors, is_operator, is_random, memory_of, short_name, writes, written

# functions that make Python's numbers, lists and truths of tensors
QUESTIONS = {
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__complex__,
    Tensor.item, Tensor.tolist, Tensor.equal, Tensor.allclose, Tensor.is_nonzero,
    torch.equal, torch.allclose, torch.is_nonzero,
}  # fmt: skip

# operators that keep the order of their first argument, or turn it around
MONOTONE = {"lt", "le", "gt", "ge", "logical_not", "to", "detach", "any", "all"}
CALL = "call_function"
Tensors = Mapping[str, Tensor]
sdpa = torch.ops.aten.scaled_dot_product_attention.default


class KnownValues(TorchFunctionMode):
    """Answers the questions that a traced forward asks of known tensors. buffers: what the model's
    buffers hold. read: those that an answer depends on, each with the digest of its content."""

    def __init__(self, model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model, self.buffers = model, buffers
        self.read: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in QUESTIONS:
            given, tree = pytree.tree_flatten((args, kwargs))
            known = {i: self.content(x) for i, x in enumerate(given) if isinstance(x, Tensor)}
            if not any(x is None for x in known.values()):
                with_content = [known.get(i, x) for i, x in enumerate(given)]
                args, kwargs = pytree.tree_unflatten(with_content, tree)
                with outside_the_trace():
                    return func(*args, **kwargs)
        return func(*args, **kwargs)

    def content(self, tensor: Tensor) -> Tensor | None:
        """What a traced tensor holds; None where rows, parameters or chance enter it."""
        mode = get_proxy_mode()
        slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
        if mode is None or slot is None:
            return None if is_fake(tensor) else tensor
        target: Node = slot.proxy.node
        slots = ((n, get_proxy_slot(b, mode.tracer, None)) for n, b in self.model.named_buffers())
        names = {slot.proxy.node: name for name, slot in slots if slot is not None}
        needed = history(target)
        inputs = self._inputs(needed, names, getattr(mode.tracer, "root", None))
        if inputs is None or not bounded(needed):
            return None
        with outside_the_trace(), torch.no_grad():
            low, high = (
                computed(target, needed, {n: x.clone() for n, x in inputs.items()}, draw)
                for draw in (0.0, 1.0)
            )
            if not torch.equal(low, high):  # which number is drawn matters
                return None
            read = needed & names.keys()
            self.read |= {names[n]: digest(self.buffers[names[n]]) for n in read}
        known: Tensor = low
        return known

    def _inputs(
        self, needed: set[Node], names: Mapping[Node, str], root: nn.Module | None
    ) -> dict[Node, Tensor] | None:
        inputs: dict[Node, Tensor] = {}
        for node in needed:
            held = self.buffers.get(names.get(node, ""))
            if node.op == "get_attr":
                held = getattr(root, str(node.target), None)
            if node.op != CALL:
                if not isinstance(held, Tensor) or is_fake(held):
                    return None
                inputs[node] = held
        return inputs


def computed(target: Node, needed: set[Node], given: Mapping[Node, Any], draw: float = 0.0) -> Any:
    """The value of a node, where every random number is `draw`. needed: what it is computed of."""
    values = dict(given)
    for node in target.graph.nodes:
        if node in needed and node.op == CALL:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
            if is_random(node):
                values[node] = torch.full_like(values[node], draw)
    return values[target]


def bounded(needed: set[Node]) -> bool:
    """Whether no number is drawn, or one between 0 and 1 that is compared with others: where both
    ends give the same answer, so does all between (layers dropped with probability 0)."""
    random = [n for n in needed if n.op == CALL and is_random(n)]
    if not random:
        return True
    if len(random) > 1 or short_name(random[0]) != "rand":
        return False
    drawn = set(random)
    for node in random[0].graph.nodes:
        above = drawn.intersection(node.all_input_nodes) if node in needed else ()
        if above:
            if len(above) > 1 or short_name(node) not in MONOTONE:
                return False
            drawn.add(node)
    return True


@contextmanager
def outside_the_trace() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def history(target: Node) -> set[Node]:
    """The nodes that a value is computed from, with those that wrote to its memory or theirs."""
    reached = ancestors(target)
    writers = {n for n in target.graph.nodes if is_operator(n) and writes(n)}
    while True:
        memory = set(map(memory_of, reached))
        more = {n for n in writers - reached if memory & set(map(memory_of, written(n)))}
        if not more:
            return reached
        reached |= ancestors(*more)


# -- masks: attention without one, or causal, is faster than with one that says so --------


def fold_masks(graph: Graph, constants: Tensors, buffers: Tensors) -> dict[str, str]:
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
        if mask not in cache:  # what it hides is the same for two different numbers of rows
            kinds = {classify(evaluate(mask, known, rows)) for rows in (2, 3)}
            cache[mask] = kinds.pop() if len(kinds) == 1 else "other"
        if cache[mask] == "other":
            continue
        read = {meta.name(n) for n in ancestors(mask) if meta.role(n) == "buffer"}
        assumed |= {name: digest(buffers[name]) for name in read}
        args[3], args[5] = None, cache[mask] == "causal"
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "is_causal")}
        args[4] = kwargs.pop("dropout_p", args[4])
        node.args, node.kwargs = tuple(args), kwargs
    return assumed


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has a shape and no content."""
    return tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor)


def digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()[:16]


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


def evaluate(target: Node, known: Mapping[str, Tensor], rows: int) -> Tensor | None:
    """The value of a node that depends on constants and rows alone, None for others."""
    needed = ancestors(target)
    if not all(computable(node, known) for node in needed):
        return None
    inputs = {
        node: rows if meta.role(node) == "rows" else known[meta.name(node)]
        for node in needed
        if node.op == "placeholder"
    }
    with torch.no_grad():
        value = computed(target, needed, inputs)
    return value if isinstance(value, Tensor) else None


def computable(node: Node, known: Mapping[str, Tensor]) -> bool:
    """Whether the node's value depends on its inputs alone, or is known and stays: of rows, a
    constant, an unchanged buffer."""
    if node.op != "placeholder":
        return not meta.effect(node) and not is_random(node)
    if meta.role(node) == "rows":
        return True
    tensor = known.get(meta.name(node))
    unchanged = meta.role(node) == "buffer" and not any(map(meta.effect, node.users))
    stays = meta.role(node) == "constant" or unchanged
    return stays and tensor is not None and not is_fake(tensor)
