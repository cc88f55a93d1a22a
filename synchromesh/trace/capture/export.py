"""An export: the training step as torch.export sees it, with a symbol for the batch's rows."""

import io
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from synchromesh.trace.guards import Guard, guards_of

from .undisturbed import Attributes, forgotten, restored

Function = Callable[[nn.Module, Any], Any]

TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parents[1])


class Untraceable(Exception):
    """A step that cannot become a graph; the message is one sentence for the user."""


class BadOutput(ValueError):
    """The loss is none that can be trained (no 0-d tensors, learnable parameters of its own); the
    message is for the user."""


@dataclass(frozen=True)
class Leaf:
    """A tensor leaf of the batch: its name, and whether its dim 0 is rows."""

    name: str
    tensor: Tensor

    @property
    def has_rows(self) -> bool:
        return self.tensor.dim() > 0


@dataclass(frozen=True)
class Export:
    """The exported program, the names of its outputs, and of the batch's leaves.

    guards: the conditions on the number of rows under which it is the model.
    """

    program: torch.export.ExportedProgram
    outputs: tuple[str, ...]
    leaves: tuple[str, ...]
    guards: tuple[Guard, ...]


def leaves(batch: Any) -> list[Leaf]:
    """The tensor leaves of a batch in flattening order, named by path: `x`, `0`, `inputs.mask`."""
    found = []
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor):
            keys = (getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))) for k in path)
            found.append(Leaf(".".join(str(k) for k in keys) or "batch", leaf))
    return found


def rows_of(batch: Any) -> int:
    """Rows of the batch: the size of dim 0 of its tensors; ValueError where they disagree."""
    sizes = {leaf.name: leaf.tensor.shape[0] for leaf in leaves(batch) if leaf.has_rows}
    if not sizes:
        raise ValueError(
            f"the batch ({type(batch).__name__}) holds no tensor with rows: it should be a "
            "tensor, or a tuple or dict of tensors whose dim 0 is rows"
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise ValueError(
            f"the batch's tensors disagree about the number of rows ({listed}): dim 0 of each "
            "must be rows, or the tensor 0-d if it is common to all rows"
        )
    rows = next(iter(sizes.values()))
    if rows == 0:
        raise ValueError("the example batch has no rows (0): one row at least is needed")
    return rows


def example(batch: Any, count: int | None = None) -> Any:
    """`batch` with `count` rows, which repeat where it has fewer.

    Where no number is given it is one that no other dimension has (even, at least 6).
    """
    rows = rows_of(batch)
    taken = {n for leaf in leaves(batch) for n in leaf.tensor.shape[1:]}
    count = count or next(n for n in range(6, 6 + 2 * len(taken) + 2, 2) if n not in taken)
    pick = torch.arange(count) % rows

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        if leaf.device.type == "meta":
            return leaf.new_empty((count, *leaf.shape[1:]))
        return leaf.detach()[pick.to(leaf.device)]

    return pytree.tree_map(resize, batch)


def take(batch: Any, start: int, stop: int) -> Any:
    """Rows [start, stop) of a batch; leaves without rows stay."""
    return pytree.tree_map(
        lambda x: x[start:stop] if isinstance(x, Tensor) and x.dim() else x, batch
    )


class Seen:
    """What was seen while tracing (export takes back changes of a module's attributes)."""

    outputs: tuple[str, ...] = ()
    assigned: Mapping[str, bool] = {}  # attributes that the forward assigned anew


class Whole(nn.Module):
    """The training step as one module: forward(batch) is a flat tuple of 0-d tensors."""

    def __init__(self, model: nn.Module, function: Function, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.function = function
        self.autocast = autocast
        self.seen = Seen()

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        before = Attributes(self.model)
        with self.casts(batch):
            result = self.function(self.model, batch)
        self.seen.assigned = before.assigned()
        self.seen.outputs, values = flat_outputs(result)
        return values

    def casts(self, batch: Any) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        device = leaves(batch)[0].tensor.device.type
        return torch.autocast(device, self.autocast)


def flat_outputs(result: Any) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    """Names and 0-d tensors of what the loss returned: a loss, (sum, weight), or metrics."""
    names: tuple[str, ...]
    if isinstance(result, Tensor):
        names, values = ("loss",), [result]
    elif isinstance(result, (tuple, list)) and len(result) == 2:
        names, values = ("sum", "weight"), list(result)
    elif isinstance(result, dict) and result:
        names, values = tuple(str(k) for k in result), list(result.values())
    else:
        raise BadOutput(
            f"the loss returned {type(result).__name__}: it should return a scalar tensor, a pair "
            "(sum, weight), or for metrics a dict of scalar tensors"
        )
    like = next((v for v in values if isinstance(v, Tensor)), None)
    if like is None:
        raise BadOutput(
            f"the loss or metric returned no tensor but {result!r}: return the tensor itself, "
            "without .item()"
        )
    tensors = [
        v if isinstance(v, Tensor) else torch.full((), v, dtype=like.dtype, device=like.device)
        for v in values
    ]
    for name, value in zip(names, tensors, strict=True):
        if value.dim() > 0:
            raise BadOutput(
                f"{name} has {value.dim()} dimensions: return a scalar (0-d tensor), for example "
                "a mean over rows"
            )
    return names, tuple(tensors)


def export(
    model: nn.Module,
    function: Function,
    batch: Any,
    autocast: torch.dtype | None,
    rows: int | None = None,
) -> Export:
    """Export with symbolic rows; raises Untraceable with a sentence that names the user's line.

    rows: with how many it is traced, where the model asks for their number.
    """
    sample = example(batch, rows)
    names = tuple(leaf.name for leaf in leaves(sample))
    whole = Whole(model, function, autocast)
    with restored(model), faked(model, sample) as sample, quiet():
        try:
            program = attempt(whole, sample, torch.export.Dim("rows"))
        except BadOutput:
            raise
        except Exception:
            try:
                program = attempt(whole, sample, torch.export.Dim.AUTO)
            except Exception as error:
                raise Untraceable(sentence(error)) from error
    lost = forgotten(whole.seen.assigned, constants_of(program))
    if lost:
        raise Untraceable(
            f"the forward assigns {lost} anew, which a trace forgets: register a "
            "buffer and change it in place (add_, copy_), or train the model as it is under the "
            "plan 'data'"
        )
    return Export(program, whole.seen.outputs, names, guards_of(program))


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
    """Without remarks on what is only tried: sentences of ours say what matters of them."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with redirect_stderr(io.StringIO()):
                yield
    finally:
        logging.disable(before)


def attempt(whole: Whole, sample: Any, dim: Any) -> torch.export.ExportedProgram:
    def shape(leaf: Any) -> Any:
        return {0: dim} if isinstance(leaf, Tensor) and leaf.dim() > 0 else None

    shapes = (pytree.tree_map(shape, sample),)
    return torch.export.export(whole, (sample,), dynamic_shapes=shapes, strict=False)


@contextmanager
def faked(model: nn.Module, sample: Any) -> Iterator[Any]:
    """A model on the meta device is exported as if it lay on the batch's device."""
    tensors = [*model.parameters(), *model.buffers()]
    if not any(t.device.type == "meta" for t in tensors):
        yield sample
        return
    device = next(
        (x.tensor.device for x in leaves(sample) if x.tensor.device.type != "meta"),
        torch.device("cpu"),
    )
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    kept: list[tuple[dict[str, Any], str, Any]] = []
    swapped: dict[int, Tensor] = {}
    with mode:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None or tensor.device.type != "meta":
                        continue
                    fake = torch.empty_like(tensor, device=device)
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    kept.append((table, name, tensor))
                    table[name] = swapped.setdefault(id(tensor), fake)  # type: ignore[assignment]

        def fake_leaf(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            return leaf

        sample = pytree.tree_map(fake_leaf, sample)
    try:
        yield sample
    finally:
        for table, name, tensor in kept:
            table[name] = tensor


def sentence(error: BaseException) -> str:
    """One sentence about `error`: the user's line that was not traced, why, and what to do."""
    where, code = user_line(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = (lines[0] if lines else type(error).__name__).rstrip(".")[:200]
    return (
        f"{where} could not be traced ({code!r}: {why}): write it with tensor operations alone "
        "(torch.where instead of a branch on values, no .item() or .tolist()), or train it as it "
        "is under the plan 'data'"
    )


def user_line(error: BaseException) -> tuple[str, str]:
    """file:line and source of the deepest frame outside of torch and of this package."""
    best: tuple[str, str] = ("the model", "")
    seen: BaseException | None = error
    while seen is not None:
        frames: Sequence[traceback.FrameSummary] = traceback.extract_tb(seen.__traceback__)
        for frame in reversed(frames):
            if (
                not frame.filename.startswith((TORCH, HERE, "<"))
                and "contextlib" not in frame.filename
            ):
                best = (f"{frame.filename}:{frame.lineno}", (frame.line or "").strip())
                break
        seen = seen.__cause__ or seen.__context__
    return best
