"""Known values: what traced code asks of tensors that neither rows nor parameters enter.

    mask = generate_square_subsequent_mask(length)
    is_causal = bool((mask == causal).all())        <- export knows the mask's shape alone

What was traced so far says how such a tensor is computed, so it is computed once more."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from synchromesh.trace.nodes import (
    ancestors,
    is_operator,
    is_random,
    memory_of,
    short_name,
    writes,
    written,
)

from .masks import digest, is_fake

# functions that make Python's numbers, lists and truths of tensors
QUESTIONS = {
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__complex__,
    Tensor.item, Tensor.tolist, Tensor.equal, Tensor.allclose, Tensor.is_nonzero,
    torch.equal, torch.allclose, torch.is_nonzero,
}  # fmt: skip

# operators that keep the order of their first argument, or turn it around
MONOTONE = {"lt", "le", "gt", "ge", "logical_not", "to", "detach", "any", "all"}
CALL = "call_function"


class KnownValues(TorchFunctionMode):
    """Answers the questions that a traced forward asks of known tensors.

    buffers: what the model's buffers hold. read: those that an answer depends on, each with the
    digest of its content."""

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
                found = [known.get(i, x) for i, x in enumerate(given)]
                args, kwargs = pytree.tree_unflatten(found, tree)
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
        needed, names = history(target), self._buffer_names(mode.tracer)
        root = getattr(mode.tracer, "root", None)
        inputs: dict[Node, Tensor] = {}
        for node in needed:
            if node.op != CALL:
                held = self._held(node, names, root)
                if held is None:
                    return None
                inputs[node] = held
        if not bounded(needed):
            return None
        with outside_the_trace(), torch.no_grad():
            low, high = (computed(target, needed, inputs, draw) for draw in (0.0, 1.0))
            if not torch.equal(low, high):  # which number is drawn matters
                return None
            self.read |= {names[n]: digest(self.buffers[names[n]]) for n in needed if n in names}
        return low

    def _buffer_names(self, tracer: Any) -> dict[Node, str]:
        """Names of the model's buffers, by their nodes in the trace."""
        slots = ((n, get_proxy_slot(b, tracer, None)) for n, b in self.model.named_buffers())
        return {slot.proxy.node: name for name, slot in slots if slot is not None}

    def _held(
        self, node: Node, names: Mapping[Node, str], root: nn.Module | None
    ) -> Tensor | None:
        """What a buffer or a constant holds; None for other inputs of the trace."""
        held = self.buffers.get(names.get(node, ""))
        if node.op == "get_attr":
            held = getattr(root, str(node.target), None)
        return None if not isinstance(held, Tensor) or is_fake(held) else held


def computed(
    target: Node, needed: set[Node], inputs: Mapping[Node, Tensor], draw: float
) -> Tensor:
    """The value of a node, where every random number is `draw`."""
    values: dict[Node, Any] = {n: x.clone() for n, x in inputs.items()}
    for node in target.graph.nodes:
        if node in needed and node.op == CALL:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
            if is_random(node):
                values[node] = torch.full_like(values[node], draw)
    made: Tensor = values[target]
    return made


def bounded(needed: set[Node]) -> bool:
    """Whether no number is drawn, or one between 0 and 1 that is compared with others: where both
    ends give the same answer, so does all between (layers that are dropped with probability 0)."""
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
    """Inside, operators run as they do outside of a trace, on real tensors."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def history(target: Node) -> set[Node]:
    """The nodes that a value is computed from, with those that wrote to its memory or theirs."""
    found = ancestors(target)
    writers = [n for n in target.graph.nodes if is_operator(n) and writes(n)]
    while True:
        memory = set(map(memory_of, found))
        more = [n for n in writers if n not in found and memory & set(map(memory_of, written(n)))]
        if not more:
            return found
        found |= ancestors(*more)
