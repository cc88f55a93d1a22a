"""Capture: a model, its loss and an example batch become a Step."""

from collections.abc import Container, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils import _pytree as pytree

from synchromesh.trace import meta
from synchromesh.trace.nodes import ancestors, outputs
from synchromesh.trace.step import Step
from synchromesh.values.component import Chain, Component, Parameter

from .batch import leaves, rows_of
from .components import ComponentModule, component_modules
from .coupling import coupling, row_dependent_buffers
from .export import NUMBER, Export, Function, Numbers, Untraceable, export
from .flatten import flatten, shared_names
from .known_values import fold_masks
from .loss_reduction import LossReduction
from .model_snapshot import in_mode
from .outputs import BadOutput, refuse_loss, refuse_metrics
from .rows import annotate
from .split import UnorderedRows, split
from .totals import names, with_loss_reduced

VALUE = "="  # in a signature, before what is no tensor


def trace(
    model: nn.Module, function: Function, batch: Any, *, training: bool, cuts: Sequence[str] = (),
    autocast: torch.dtype | None = None, rows: int | None = None, numbers: Numbers = (),
) -> Step:  # fmt: skip
    """The step of `function(model, batch)`: a scalar, a pair (sum, weight), or named scalars. In
    the modes that the modules have (`training_modes`), or in evaluation mode. rows: with how many
    it is traced, where it depends on their number. numbers: as of `export`. A model that cannot be
    traced gives an opaque Step with a `reason`. ValueError for a bad batch or unknown `cuts`."""
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise ValueError(f"autocast must be a torch.dtype like torch.bfloat16, not {autocast!r}")
    modules = component_modules(model, cuts)
    rows_of(batch)
    with in_mode(model, training):
        try:
            exported = export(model, function, batch, autocast, rows, numbers)
            if training:
                refuse_metrics(exported.outputs)
            elif exported.reports:
                raise BadOutput("a metric reports nothing beside itself: return one dict of sums")
            else:
                refuse_loss(exported.of_loss)
            return captured(exported, model, modules, training)
        except Untraceable as error:
            return opaque(model, batch, str(error))


def captured(
    exported: Export, model: nn.Module, modules: Sequence[ComponentModule], training: bool
) -> Step:
    """The step of an exported program; raises Untraceable."""
    graph, constants, symbols = flatten(exported, model)
    refuse_changing(exported.assumed, graph)
    fixed = {n: x for n, x in constants.items() if not n.startswith(NUMBER)}
    folded = fold_masks(graph, fixed, dict(model.named_buffers()))
    annotate(graph, symbols)
    reduction, totals = LossReduction(), None
    if training:
        mark_reported(graph, len(exported.outputs), len(exported.reports))
        graph, reduction, totals = with_loss_reduced(
            graph, len(exported.outputs), exported.reports
        )
    try:
        grouped, chain, merged = split(graph, model, modules, constants)
    except UnorderedRows as unordered:
        merged = str(unordered)
        grouped, chain, _ = split(graph, model, modules, constants, merge=True)
    added = () if totals is None else names(len(outputs(totals)))
    used = constants_of(grouped) | constants_of(totals)
    coupled = coupling(grouped, reduction.doubt)
    return Step(
        chain, grouped, {n: x for n, x in constants.items() if n in used},
        ("sum", "weight") if reduction.targets else exported.outputs,
        (*exported.leaves, *added), shared_names(model),
        guards=exported.guards, assumed={**exported.assumed, **folded},
        fed=row_dependent_buffers(grouped), merged=merged, coupled=coupled.why,
        coupling=tuple(n for i, n in enumerate(chain.names) if i in coupled.components),
        targets=reduction.targets, doubt=coupled.why if coupled.doubted else "",
        reports=reduction.reports, carry=exported.carry, totals=totals, read=exported.read,
    )  # fmt: skip


def mark_reported(graph: Graph, first: int, count: int) -> None:
    """Marks what only the `count` outputs from `first` on need: it is to change no training."""
    given = outputs(graph)
    effects = filter(meta.effect, graph.nodes)
    needed = ancestors(*given[:first], *given[first + count :], *effects)
    for node in ancestors(*given[first : first + count]) - needed:
        meta.reported.set(node, True)


def constants_of(graph: Graph | None) -> set[str]:
    return set() if graph is None else set(map(meta.name, meta.placeholders(graph, "constant")))


def refuse_changing(assumed: Container[str], graph: Graph) -> None:
    """Untraceable where a step changes a buffer that its own branches depend on."""
    changed = (name for node in graph.nodes for name in meta.effect(node))
    if name := next((n for n in changed if n in assumed), None):
        raise Untraceable(
            f"the forward takes a branch by the buffer {name}, which it changes in every step: "
            "write it with tensor operations alone (torch.where instead of a branch), or train it "
            "as it is under the plan 'data'"
        )


def opaque(model: nn.Module, batch: Any, reason: str) -> Step:
    """The step as one component that runs as the user's module."""

    def describe(name: str, tensor: Tensor) -> Parameter:
        dtype = str(tensor.dtype).removeprefix("torch.")
        buffer = not isinstance(tensor, nn.Parameter)
        return Parameter(name, tuple(tensor.shape), dtype, tensor.requires_grad, buffer)

    component = Component(
        "model", tuple(describe(n, p) for n, p in model.named_parameters()),
        tuple(describe(n, b) for n, b in model.named_buffers()), structure="opaque", opaque=True,
    )  # fmt: skip
    names = tuple(leaf.name for leaf in leaves(batch))
    doubt = "the model runs untraced, and nothing is seen of its loss"
    return Step(Chain((component,)), None, {}, (), names, shared_names(model), reason, doubt=doubt)


def signature(batch: Any) -> tuple[str, tuple[Any, ...]]:
    """What a trace depends on: structure (lists as tuples), types, shapes but for rows."""
    if type(batch) in (list, tuple) and all(isinstance(x, Tensor) for x in batch):
        given, tree = batch, _flat(len(batch))  # a quarter of the time of any structure
    else:
        given, structure = pytree.tree_flatten(as_tuples(batch))
        tree = str(structure)
    kinds = tuple(
        (str(x.dtype), tuple(x.shape[1:]), x.dim()) if isinstance(x, Tensor) else (VALUE, repr(x))
        for x in given
    )
    return tree, kinds


def changed(before: tuple[str, tuple[Any, ...]], batch: Any) -> str:
    """In words the first leaf whose signature is another than in `before`, and what to do."""
    tree, kinds = signature(batch)
    named = pytree.tree_flatten_with_path(as_tuples(batch))[0] if tree == before[0] else []
    for (path, leaf), old, new in zip(named, before[1], kinds, strict=False):
        if old != new:
            alike = old[0] == new[0]  # the type, or that neither is a tensor
            was, now = (x[1] if alike or x[0] == VALUE else x[0] for x in (old, new))
            what, remedy = "was", "give it in one type"
            if alike and new[0] != VALUE:
                what, remedy = "had rows of shape", "pad to a few lengths"
            elif alike:
                number = isinstance(leaf, (int, float))
                remedy = "give it as a 0-d tensor, or leave it out" if number else "leave it out"
            return f"batch{pytree.keystr(path)} {what} {was}, then {now}: {remedy}"
    return "they were nested otherwise, or had other keys: give all batches one structure"


@cache
def _flat(count: int) -> str:
    return str(pytree.tree_structure((0,) * count))


def as_tuples(batch: Any) -> Any:
    if isinstance(batch, (list, tuple)) and type(batch) in (list, tuple):
        return tuple(as_tuples(item) for item in batch)
    if type(batch) is dict:
        return {key: as_tuples(item) for key, item in batch.items()}
    return batch
