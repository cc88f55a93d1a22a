"""Gradients of a loss, what they reach, and a run without dropout: the parts of a comparison."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from synchromesh.trace.step import Step

from .export import BadOutput, leaves

DROPOUTS = ("dropout", "dropout_", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


def tolerance(loss: Tensor, live: Mapping[str, Tensor], autocast: torch.dtype | None) -> float:
    """How far two computations of a loss may differ by rounding, relative to their size."""
    types = {loss.dtype, *(p.dtype for p in live.values()), *([autocast] if autocast else [])}
    if types & {torch.bfloat16, torch.float16}:
        return 2e-2
    return 1e-4 if types & {torch.float32, torch.complex64} else 1e-9


def gradients(loss: Tensor, parameters: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients by name, zeros where the loss does not depend on the parameter."""
    if not loss.requires_grad:
        return {n: torch.zeros_like(p) for n, p in parameters.items()}
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        n: torch.zeros_like(p) if g is None else g.detach().to_dense()
        for (n, p), g in zip(parameters.items(), found, strict=True)
    }


# -- what may be the reason --------------------------------------------------------------


def refuse_foreign(loss: Tensor, parameters: Iterable[Tensor]) -> None:
    """BadOutput where a backward would reach learnable tensors that are not the model's."""
    known = {id(p) for p in parameters}
    reached = (getattr(node, "variable", None) for node in backward_nodes(loss))
    foreign = [tuple(t.shape) for t in reached if t is not None and id(t) not in known]
    if foreign:
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


def cause_of(model: nn.Module, live: dict[str, nn.Parameter], custom: list[str]) -> str:
    if custom:
        return f": tracing loses the backward of the custom autograd.Function {custom[0]}"
    for name, parameter in live.items():
        if parameter._backward_hooks:
            return f": tracing loses the hook on the parameter {name}"
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return (
                f": tracing loses the backward hook of the module {name or type(model).__name__}"
            )
    return ": a hook on a tensor or a value that changes from call to call may be the reason"


# -- without chance -----------------------------------------------------------------------


def casting(batch: Any, autocast: torch.dtype | None) -> Any:
    return (
        torch.autocast(leaves(batch)[0].tensor.device.type, autocast)
        if autocast
        else nullcontext()
    )


class _NoDropout(TorchFunctionMode):
    """Functional dropout does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name.startswith("scaled_dot_product") and "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        elif name.startswith("scaled_dot_product") and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif name == "multi_head_attention_forward":  # its inner calls are not seen from here
            args, kwargs = without_argument(args, kwargs, 10, "dropout_p")
        elif name.rstrip("123d_") in (
            "dropout",
            "feature_dropout",
            "alpha_dropout",
            "feature_alpha_dropout",
        ):
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


def no_dropout(step: Step) -> Step:
    """The step with every dropout off."""
    assert step.graph is not None
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(step.graph, {}))
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name.split("::")[1]
        place = {a.name: i for i, a in enumerate(node.target._schema.arguments)}
        if name in DROPOUTS:
            node.args = (node.args[0], 0.0, False)
            node.kwargs = {}
        elif name == "scaled_dot_product_attention":
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "dropout_p"}
            if len(node.args) > 4:
                node.update_arg(4, 0.0)
        elif "dropout" in place and len(node.args) > place["dropout"]:
            node.update_arg(place["dropout"], 0.0)
    return replace(step, graph=graph)
