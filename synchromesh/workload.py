"""A workload, what is trained: model, loss, optimizer, data, batch size; TARGETs that name one."""

import difflib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate


class MapDataset(Protocol):
    """Rows by index: an item is a tensor, or a tuple or dict of tensors."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor]]
Metric = Callable[[nn.Module, Any], Mapping[str, Tensor]]
Parameters = Iterable[nn.Parameter]


@dataclass(frozen=True)
class Workload:
    """A training job without its plan.

    model        () -> nn.Module
    loss         (model, batch) -> scalar, the mean over the batch's rows, or (sum, weight)
    optimizer    (parameters) -> torch.optim.Optimizer
    train_data   map-style data set
    batch_size   rows of a global batch
    metric       (model, batch) -> {name: sum over the rows}; the first name decides what is `best`
    scheduler    (optimizer) -> LR scheduler, stepped once per update
    collate      (list of items) -> batch; None: torch's default
    """

    model: Callable[[], nn.Module]
    loss: Loss
    optimizer: Callable[[Parameters], torch.optim.Optimizer]
    train_data: MapDataset
    batch_size: int
    valid_data: MapDataset | None = None
    metric: Metric | None = None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    epochs: int = 1
    name: str | None = None

    def __post_init__(self) -> None:
        faults = [*self._faults()]
        if faults:
            raise ValueError(f"workload {self.name or '(without a name)'}: {'; '.join(faults)}")

    def _faults(self) -> Iterable[str]:
        for field in ("model", "loss", "optimizer", "metric", "scheduler", "collate"):
            value = getattr(self, field)
            required = field in ("model", "loss", "optimizer")
            if not callable(value) and (required or value is not None):
                yield f"{field} must be a function, not {type(value).__name__}"
        if isinstance(self.model, nn.Module):
            yield "model must be a function that builds the module, not the module itself"
        for field in ("batch_size", "epochs"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                yield f"{field} must be a whole number of at least 1, not {value!r}"
        for field in ("train_data", "valid_data"):
            data = getattr(self, field)
            if data is None and field == "valid_data":
                continue
            if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
                yield f"{field} must be a map-style data set (len and items by index), not {type(data).__name__}"  # noqa: E501
            elif len(data) == 0:
                yield f"{field} is empty (0 items)"

    def check_batch(self) -> None:
        """Raises ValueError where the data set cannot fill one global batch."""
        rows = len(self.train_data)
        if self.batch_size > rows:
            raise ValueError(
                f"the batch is larger than the training data: batch_size({self.batch_size}) > "
                f"{rows} items; use a batch size of at most {rows}"
            )

    def example(self, rows: int | None = None, seed: int = 0) -> Any:
        """A global batch of `rows` rows (default: the batch size), drawn from the data by seed."""
        count = self.batch_size if rows is None else rows
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(self.train_data), (count,), generator=generator).tolist()
        return (self.collate or default_collate)([self.train_data[i] for i in chosen])


def load(target: str, data: str | Path | None = None, synthetic: bool = False) -> Workload:
    """The workload that TARGET names: a bundled one, or `path/to/file.py:function`.

    `data` is the folder of a bundled workload's data; with `synthetic` a bundled workload makes
    seeded rows instead.
    """
    from synchromesh.workloads import BUNDLED

    path, colon, function = target.rpartition(":")
    if colon and (path.endswith(".py") or "/" in path):
        if data is not None:
            raise ValueError(
                f"--data names the folder of a bundled workload's data; {target} chooses its own "
                "data: leave --data out"
            )
        return _named(_call(path, function), function)
    if target.endswith(".py"):
        raise ValueError(f"{target} names a file but no function in it: write {target}:FUNCTION")
    if target not in BUNDLED:
        raise ValueError(
            f"there is no bundled workload {target!r}{near(target, BUNDLED)}; "
            f"bundled are {', '.join(BUNDLED)}; your own is path/to/file.py:function"
        )
    return _named(BUNDLED[target](None if data is None else Path(data), synthetic), target)


def near(name: str, names: Iterable[str]) -> str:
    """`, did you mean X?` in brackets, or nothing where no name is near."""
    found = difflib.get_close_matches(name, list(names), n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def _named(workload: Workload, name: str) -> Workload:
    from dataclasses import replace

    return workload if workload.name else replace(workload, name=name)


def _call(path: str, function: str) -> Workload:
    file = Path(path)
    if not file.is_file():
        beside = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ValueError(f"there is no file {path}{near(file.name, beside)}")
    module = _module(file)
    build = getattr(module, function, None)
    if build is None or not callable(build):
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ValueError(f"{path} has no function {function!r}{near(function, functions)}")
    try:
        workload = build()
    except Exception as error:
        raise ValueError(_blame(file, error, f"{path}:{function} failed")) from error
    if not isinstance(workload, Workload):
        raise ValueError(
            f"{path}:{function} returned {type(workload).__name__}, not a synchromesh.Workload"
        )
    return workload


def _module(file: Path) -> ModuleType:
    """The user's file as a module; its folder and the current one are importable."""
    spec = importlib.util.spec_from_file_location(
        f"synchromesh_target_{file.stem}", file.resolve()
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up by name
    for folder in (
        str(Path.cwd()),
        str(file.resolve().parent),
    ):  # as of a script
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(_blame(file, error, f"{file} could not be imported")) from error
    return module


def _blame(file: Path, error: Exception, what: str) -> str:
    """One sentence with the last line of the user's own file that took part in `error`."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{what}: line {error.lineno}: {reason}"
    frames: Sequence[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename) == file.resolve()]
    if not own:
        return f"{what}: {reason}"
    return f"{what}: line {own[-1].lineno} ({own[-1].line}): {reason}"
