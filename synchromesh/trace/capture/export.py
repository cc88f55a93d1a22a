"""An export: the training step as torch.export sees it, with a symbol for the batch's rows."""

import builtins
import io
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from synchromesh.trace.nodes import HERE, TORCH
from synchromesh.trace.step import Guard, guards_of
from synchromesh.values.fault import message

from .batch import autocast_for, copy_of, example, leaves, rows_of
from .known_values import KnownValues, is_fake
from .model_snapshot import Attributes, preserved, restored, untraced
from .outputs import BadOutput, carried, flat_outputs, of_loss, reported
from .readings import Reads, ReadValue

Function = Callable[[nn.Module, Any], Any]
Numbers = Sequence[tuple[ReadValue, Tensor]]  # that code reads, each with an input for it
NUMBER = "given_number_"  # before the place of one, in the names of constants
# how `transformers` computes the products of experts, as a setting of their model says
LOOP = "eager"  # over the experts that have tokens: it cannot be traced
BATCHED = "batched_mm"  # for each token with its expert's weights, in any dtype
REMEDY = (
    f'set experts_implementation="{BATCHED}" in the configuration, as '
    f'model.set_experts_implementation("{BATCHED}") does'
)


class Untraceable(Exception):
    """A step that cannot become a graph; the message is one sentence for the user."""


@dataclass(frozen=True)
class Export:
    """The exported program, the names of its outputs, and of the batch's leaves.

    guards: the conditions on the number of rows under which it is the model.
    assumed: buffers that its branches depend on, each with the digest of its content.
    of_loss: whether they are a loss or a pair, not values by name.
    fixed: the user's line, and its source, that made a number of the rows; empty where none did.
    reports: names of what follows the outputs. carry: the leaves whose new values follow those.
    read: Python values that its code has found."""

    program: torch.export.ExportedProgram
    outputs: tuple[str, ...]
    leaves: tuple[str, ...]
    guards: tuple[Guard, ...]
    assumed: Mapping[str, str]
    of_loss: bool
    fixed: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    carry: tuple[str, ...] = ()
    read: tuple[ReadValue, ...] = ()


@dataclass
class ForwardRecord:
    """What a traced forward did: apart, as export takes back changes of a module's attributes.

    assigned: the attributes that it assigned anew (`Attributes.assigned`).
    assumed: the buffers that it asked about (`KnownValues.read`)."""

    outputs: tuple[str, ...] = ()
    of_loss: bool = False  # and not of a metric
    reports: tuple[str, ...] = ()
    carry: tuple[str, ...] = ()
    assigned: Mapping[str, bool] = field(default_factory=dict)
    assumed: Mapping[str, str] = field(default_factory=dict)


class StepModule(nn.Module):
    """The training step as one module: of a batch its outputs, reports and carry leaves."""

    def __init__(
        self, model: nn.Module, function: Function, autocast: torch.dtype | None,
        numbers: Numbers = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = model
        self.function = function
        self.autocast = autocast
        self.contents = dict(model.named_buffers())  # apart from those that stand for them
        self.reads = [read for read, _ in numbers]
        for i, (_, tensor) in enumerate(numbers):
            self.register_buffer(f"{NUMBER}{i}", tensor)
        self.record = ForwardRecord()

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        """The outputs of the loss, in the order of `record.outputs`."""
        before = Attributes(self.model)
        known = KnownValues(self.model, self.contents)
        numbers = [(read, getattr(read.owner, read.key)) for read in self.reads]
        for i, (read, _) in enumerate(numbers):
            setattr(read.owner, read.key, getattr(self, f"{NUMBER}{i}"))
        try:
            with autocast_for(batch, self.autocast), known, SymbolicFunctions():
                result = self.function(self.model, batch)
        finally:
            for read, value in numbers:
                setattr(read.owner, read.key, value)
        self.record.assumed = known.read
        self.record.assigned = before.assigned()
        self.record.outputs, values = flat_outputs(result)
        self.record.of_loss = of_loss(result)
        reports, carry = reported(result), carried(result)
        self.record.reports, self.record.carry = tuple(reports), tuple(carry)
        return *values, *reports.values(), *carry.values()


def export(
    model: nn.Module, function: Function, batch: Any, autocast: torch.dtype | None,
    rows: int | None = None, numbers: Numbers = (),
) -> Export:  # fmt: skip
    """Export with symbolic rows; raises Untraceable with a sentence that names the user's line.
    rows: with how many it is traced, where the model asks for their number. numbers: what it reads
    that the trace is to read from 0-d tensors, which are among its constants."""
    reads = Reads(model, function)
    run_once(model, function, batch, autocast)
    sample = example(batch, rows)
    names = tuple(leaf.name for leaf in leaves(sample))
    module, fixed = StepModule(model, function, autocast, numbers), list[tuple[str, str]]()
    with (
        restored(model), faked(model, sample) as sample, quiet(), symbolic_lengths(),
        watched(fixed), reads.noted(),
    ):  # fmt: skip
        try:
            program = export_with(module, sample, torch.export.Dim("rows"))
        except BadOutput:
            raise
        except Exception:
            try:
                program = export_with(module, sample, torch.export.Dim.AUTO)
            except Exception as error:
                fault = own_fault(model, function, sample, autocast) or sentence(error)
                raise Untraceable(fault) from error
    if lost := untraced(module.record.assigned, constants_of(program)):
        raise Untraceable(
            f"the forward assigns {lost} anew, which a trace forgets: register a "
            "buffer and change it in place (add_, copy_), or train the model as it is under the "
            "plan 'data'"
        )
    record, guards, at = module.record, guards_of(program), next(iter(fixed), ())
    given = {read.place for read, _ in numbers}
    read = tuple(r for r in reads.unchanged() if r.place not in given)
    return Export(
        program, record.outputs, names, guards, record.assumed, record.of_loss, at,
        record.reports, record.carry, read,
    )  # fmt: skip


def constants_of(program: torch.export.ExportedProgram) -> set[str]:
    """Names of the tensors that the program reads which are neither parameters nor buffers."""
    users = {n.name: n.users for n in program.graph.find_nodes(op="placeholder")}
    return {
        (spec.target or "").removeprefix("model.")
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.CONSTANT_TENSOR and users[spec.arg.name]
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's logs and warnings about attempts that may fail: our messages report them."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


@contextmanager
def symbolic_lengths() -> Iterator[None]:
    """`len` of a tensor is its `shape[0]`, which may be a symbol; Python's own makes a number of
    it, so that a loss that asks for `len(logits)` would hold for the rows of the example alone."""
    number = builtins.len

    def length(x: Any) -> Any:
        return x.shape[0] if isinstance(x, Tensor) and x.dim() else number(x)

    with patch.object(builtins, "len", length):
        yield


class SymbolicFunctions(TorchFunctionMode):
    """Inside, functions that would fix the rows of a trace are others of the same values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.take_along_dim, Tensor.take_along_dim):
            return take_along_dim(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None, **rest: Any) -> Tensor:
    """As `torch.take_along_dim`: a gather, in front of which all other dims are broadcast."""
    if dim is None or rest or input.dim() != indices.dim():
        return torch.take_along_dim(input, indices, dim, **rest)
    sizes, wanted = list(input.shape), list(indices.shape)
    length, taken = sizes[dim], wanted[dim]
    sizes[dim] = wanted[dim] = 1
    sizes = list(torch.broadcast_shapes(sizes, wanted))
    sizes[dim], wanted = length, [*sizes]
    wanted[dim] = taken
    return input.expand(sizes).gather(dim, indices.expand(wanted))


@contextmanager
def watched(fixed: list[tuple[str, str]]) -> Iterator[None]:
    """Inside, `fixed` gets the user's line and its source wherever a size becomes a number."""
    settle = ShapeEnv._set_replacement

    def settled(shapes: ShapeEnv, symbol: Any, value: Any, *rest: Any) -> None:
        if value.is_number and symbol in shapes.backed_var_to_val:
            fixed.extend(own_frame(traceback.extract_stack()))
        settle(shapes, symbol, value, *rest)

    with patch.object(ShapeEnv, "_set_replacement", settled):
        yield


def export_with(module: StepModule, sample: Any, dim: Any) -> torch.export.ExportedProgram:
    """Export with `dim` for dim 0 of all leaves that have rows."""

    def shape(leaf: Any) -> Any:
        return {0: dim} if isinstance(leaf, Tensor) and leaf.dim() > 0 else None

    shapes = pytree.tree_map(shape, sample)
    if type(sample) in pytree.SUPPORTED_NODES.keys() - pytree.BUILTIN_TYPES:  # torch wants a list
        shapes = pytree.tree_leaves(shapes, is_leaf=lambda x: x is None or type(x) is dict)
    return torch.export.export(module, (sample,), dynamic_shapes=(shapes,), strict=False)


@contextmanager
def faked(model: nn.Module, sample: Any) -> Iterator[Any]:
    """A model on the meta device is exported as if it lay on the batch's device."""
    replaced = list(meta_tensors(model))
    if not replaced:
        yield sample
        return
    there = (x.tensor.device for x in leaves(sample) if not x.tensor.is_meta)
    device = next(there, torch.device("cpu"))
    fakes: dict[int, Tensor] = {}  # one for all the names of a shared tensor
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        for table, name, tensor in replaced:
            fake = torch.empty_like(tensor, device=device)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            table[name] = fakes.setdefault(id(tensor), fake)

        sample = pytree.tree_map_only(
            Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device=device), sample
        )
    try:
        yield sample
    finally:
        for table, name, tensor in replaced:
            table[name] = tensor


def meta_tensors(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    yield table, name, tensor


def run_once(model: nn.Module, function: Function, batch: Any, cast: torch.dtype | None) -> None:
    """Runs the model as it is, so that its code finds in its caches, outside of the model too,
    tensors of its own and leaves none of the trace's there: on two rows, or as it is traced."""
    for rows in (2, None):
        if not own_fault(model, function, example(batch, rows), cast):
            return


def own_fault(model: nn.Module, function: Function, sample: Any, cast: torch.dtype | None) -> str:
    """A sentence where the model does not run outside of a trace either; empty where it does. Of a
    model without values only what its own code raises is known to be so."""
    fakes = [t for t in (*model.parameters(), *model.buffers()) if is_fake(t)]
    if not all(isinstance(t, FakeTensor) for t in fakes):
        return ""
    training = any(module.training for module in model.modules())
    try:
        with preserved(model, training), torch.no_grad(), autocast_for(sample, cast):
            function(model, copy_of(sample))
    except Exception as error:
        where, code, why = line_and_reason(error)
        if fakes and not code.startswith(("assert", "raise")):
            return ""
        return (
            f"{where} fails on a batch of {rows_of(sample)} rows, traced or not ({code!r}: "
            f"{why}): correct the model, its configuration or the batch"
        )
    return ""


def sentence(error: BaseException) -> str:
    """One sentence about `error`: the user's line that was not traced, why, and what to do."""
    where, code, why = line_and_reason(error)
    remedy = (
        "write it with tensor operations alone (torch.where instead of a branch on values, no "
        ".item() or .tolist())"
    )
    if products(error) == LOOP:
        remedy = f'{REMEDY} ("grouped_mm" takes less memory and has no float64)'
    return (
        f"{where} could not be traced ({code!r}: {why}): {remedy}, or train it as it is under the "
        "plan 'data'"
    )


def products(error: BaseException | None) -> str:
    """The setting of the experts in which `error` was raised; empty if in none that has one."""
    if error is None:
        return ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == "transformers.integrations.moe":
            config = getattr(frame.f_locals.get("self"), "config", None)
            return str(getattr(config, "_experts_implementation", None) or LOOP)
    return products(error.__cause__ or error.__context__)


def line_and_reason(error: BaseException) -> tuple[str, str, str]:
    """The user's line, its source, and the error's first line."""
    lines = [text.strip() for text in message(error).splitlines() if text.strip()]
    why = (lines[0] if lines else type(error).__name__).rstrip(".")[:200]
    line = ("the model", "")
    seen: BaseException | None = error
    while seen is not None:
        (line,) = own_frame(traceback.extract_tb(seen.__traceback__)) or [line]
        seen = seen.__cause__ or seen.__context__
    return (*line, why)


def own_frame(frames: Sequence[traceback.FrameSummary]) -> list[tuple[str, str]]:
    """file:line and source of the deepest frame outside of torch and of this package, if any."""
    for frame in reversed(frames):
        file = frame.filename
        if not file.startswith((TORCH, HERE, "<")) and "contextlib" not in file:
            return [(f"{file}:{frame.lineno}", (frame.line or "").strip())]
    return []
