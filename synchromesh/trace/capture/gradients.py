"""Gradients of a loss, what they reach, and steps without dropout: the parts of a comparison."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from synchromesh.trace.nodes import DROPOUTS, OperatorCall, calls, schema, short_name
from synchromesh.trace.step import Step

from .outputs import BadOutput

REENTRANT = "CheckpointFunction"  # of torch.utils.checkpoint(use_reentrant=True)


def tolerance(
    dtype: torch.dtype, parameters: Mapping[str, Tensor], autocast: torch.dtype | None = None
) -> float:
    """How far a loss may differ by rounding, relatively: for the lowest precision among these."""
    types = {dtype, *(p.dtype for p in parameters.values()), *([autocast] if autocast else [])}
    if types & {torch.bfloat16, torch.float16}:
        return 2e-2
    return 1e-4 if types & {torch.float32, torch.complex64} else 1e-9


def gradients(loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients by name, zeros where the loss does not depend on the parameter."""
    if not loss.requires_grad or not parameters:
        return {n: torch.zeros_like(p) for n, p in parameters.items()}
    given = list(parameters.values())
    if REENTRANT in custom_functions(loss):
        by_parameter = tuple(_gradients_by_backward(loss, given))
    else:
        by_parameter = torch.autograd.grad(loss, given, allow_unused=True)
    return {
        n: torch.zeros_like(p) if g is None else g.detach().to_dense()
        for (n, p), g in zip(parameters.items(), by_parameter, strict=True)
    }


def _gradients_by_backward(loss: Tensor, parameters: list[Tensor]) -> Iterator[Tensor | None]:
    """As `torch.autograd.grad`, which reentrant activation checkpoints refuse."""
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        loss.backward()
        yield from [p.grad for p in parameters]
    finally:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad


def largest_entry(x: Tensor) -> float:
    """The largest absolute entry that is finite."""
    largest = float(x.abs().max()) if x.numel() else 0.0
    if isfinite(largest):
        return largest
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def largest_gap(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors; entries that are finite in neither count as equal."""
    gap = a - b
    largest = float((gap.abs() if gap.is_complex() else gap.abs_()).max()) if a.numel() else 0.0
    if isfinite(largest):
        return largest
    finite = b.isfinite()
    return largest_entry(a[finite] - b[finite]) if torch.equal(finite, a.isfinite()) else inf


class OwnLeaves(TorchFunctionMode):
    """Notes the tensors of which a forward itself asks gradients (`x.requires_grad_()`, as a model
    does of its input for the sake of activation checkpoints): they are made anew in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = func in (Tensor.requires_grad.__set__, Tensor.requires_grad_)  # type: ignore[attr-defined]
        if asked and not args[0].requires_grad:
            self.leaves.append(args[0])
        return func(*args, **(kwargs or {}))


def refuse_foreign(loss: Tensor, own: Iterable[Tensor]) -> None:
    """BadOutput where a backward would reach learnable tensors that are none of `own`."""
    known = {id(p) for p in own}
    reached = (getattr(node, "variable", None) for node in backward_nodes(loss))
    if foreign := [tuple(t.shape) for t in reached if t is not None and id(t) not in known]:
        raise BadOutput(
            f"the loss has {len(foreign)} learnable parameters of its own (shapes {foreign[:3]}), "
            "which would not be trained: make them part of the model"
        )


def backward_nodes(loss: Tensor) -> Iterator[Any]:
    """Every node of the loss's backward graph, once."""
    stack, seen = [loss.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(n for n, _ in node.next_functions)


def custom_functions(loss: Tensor) -> list[str]:
    """Names of the custom autograd Functions that the loss went through."""
    names = {
        type(node).__name__.removesuffix("Backward")
        for node in backward_nodes(loss)
        if isinstance(node, torch.autograd.function.BackwardCFunction)
    }
    return sorted(names - {"BackwardHookFunction"})


def likely_cause(model: nn.Module, trained: dict[str, nn.Parameter], loss: Tensor) -> str:
    """A clause about what of the model's backward a trace loses."""
    custom = custom_functions(loss)
    if REENTRANT in custom:
        return ": tracing loses activation checkpoints that are not made with use_reentrant=False"
    if custom:
        return f": tracing loses the backward of the custom autograd.Function {custom[0]}"
    for name, parameter in trained.items():
        if parameter._backward_hooks:
            return f": tracing loses the hook on the parameter {name}"
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            owner = name or type(model).__name__
            return f": tracing loses the backward hook of the module {owner}"
    return ": a hook on a tensor or a value that changes from call to call may be the reason"


class _NoDropout(TorchFunctionMode):
    """Functional dropout does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name.startswith("scaled_dot_product"):
            if len(args) > 4 or "dropout_p" in kwargs:
                args, kwargs = without_argument(args, kwargs, 4, "dropout_p")
        elif name == "multi_head_attention_forward":  # its inner calls are not seen from here
            args, kwargs = without_argument(args, kwargs, 10, "dropout_p")
        elif name.rstrip("123d_") in DROPOUTS:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


def without_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with 0 for the argument `name`, which is number `place`."""
    if len(args) > place:
        return (*args[:place], 0.0, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: 0.0}


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Every dropout of the model is off: modules, functional calls, recurrent layers."""
    recurrent = [(m, m.dropout) for m in model.modules() if isinstance(m, nn.RNNBase)]
    for module, _ in recurrent:
        module.dropout = 0.0
    try:
        with _NoDropout():
            yield
    finally:
        for module, p in recurrent:
            module.dropout = p


def deterministic(step: Step) -> Step:
    """The step with every dropout off."""
    assert step.graph is not None
    graph = Graph()
    graph.output(graph.graph_copy(step.graph, {}))
    for node in calls(graph):
        name, call = short_name(node), OperatorCall(node)
        if name in DROPOUTS:
            node.args, node.kwargs = (node.args[0], 0.0, False), {}
        elif name == "scaled_dot_product_attention":
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "dropout_p"}
            zero_argument(node, "dropout_p")
        elif call.takes("dropout"):
            zero_argument(node, "dropout")
    return replace(step, graph=graph)


def zero_argument(node: Node, name: str) -> None:
    """Puts 0 for a positional argument, where it is given."""
    place = [a.name for a in schema(node).arguments].index(name)
    if len(node.args) > place:
        node.update_arg(place, 0.0)
