"""Capture: a model, its loss and an example batch become a Step."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from synchromesh.component import Chain, Component, Parameter

from .components import pieces
from .export import Function, Untraceable, export, leaves, rows_of
from .flatten import flatten, shared_names
from .gradients import compare_gradients
from .masks import fold_masks
from .rows import annotate
from .run import run
from .split import split
from .step import Step

__all__ = ["compare_gradients", "run", "signature", "trace"]


def trace(
    model: nn.Module,
    function: Function,
    batch: Any,
    *,
    training: bool,
    cuts: Sequence[str] = (),
    autocast: torch.dtype | None = None,
) -> Step:
    """The step of `function(model, batch)`: a scalar, a pair (sum, weight), or named scalars.

    A model that cannot be traced gives an opaque Step whose `reason` says why. ValueError for a
    bad batch or for `cuts` that name no module.
    """
    found = pieces(model, cuts)
    rows_of(batch)
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        exported = export(model, function, batch, autocast)
        graph, constants, symbols = flatten(exported, model)
        fold_masks(graph, constants, dict(model.named_buffers()))
        annotate(graph, symbols)
        graph, chain = split(graph, model, found, constants)
    except Untraceable as error:
        return opaque(model, batch, str(error))
    finally:
        for module, mode in modes.items():
            module.training = mode
    used = {
        n.meta["name"] for n in graph.find_nodes(op="placeholder") if n.meta["role"] == "constant"
    }
    kept = {name: tensor for name, tensor in constants.items() if name in used}
    return Step(chain, graph, kept, exported.outputs, exported.leaves, shared_names(model))


def opaque(model: nn.Module, batch: Any, reason: str) -> Step:
    """The step as one component that runs as the user's module."""

    def describe(name: str, tensor: Tensor) -> Parameter:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Parameter(name, tuple(tensor.shape), dtype, tensor.requires_grad)

    component = Component(
        "model",
        tuple(describe(n, p) for n, p in model.named_parameters()),
        tuple(describe(n, b) for n, b in model.named_buffers()),
        structure="opaque",
        opaque=True,
    )
    names = tuple(leaf.name for leaf in leaves(batch))
    return Step(Chain((component,)), None, {}, (), names, shared_names(model), reason)


def signature(batch: Any) -> Hashable:
    """What a trace depends on: structure, types, shapes but for rows, non-tensor leaves."""
    found, tree = pytree.tree_flatten(batch)
    kinds = tuple(
        (str(x.dtype), tuple(x.shape[1:]), x.dim()) if isinstance(x, Tensor) else ("=", repr(x))
        for x in found
    )
    return str(tree), kinds
