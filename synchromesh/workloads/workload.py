"""A workload, what is trained: model, loss, optimizer, data, batch size."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import IterableDataset, default_collate


class MapDataset(Protocol):
    """Rows by index: an item is a tensor, or a tuple or dict of tensors."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Data = MapDataset | Iterable[Any]
Loss = Callable[..., Any]  # (model, batch) -> a scalar or a pair; with a carry see `Workload`
Metric = Callable[..., Any]  # (model, batch) -> {name: sum over the batch's rows}
Parameters = Iterable[nn.Parameter]


def is_stream(data: Any) -> bool:
    """Whether a data set is read by iterating over it, not by index."""
    if isinstance(data, IterableDataset):  # which inherits a __getitem__ that raises
        return True
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


def read_once(data: Any) -> bool:
    """Whether a stream is gone when it has been read, as a generator is."""
    return isinstance(data, Iterator) and not isinstance(data, IterableDataset)


@dataclass(frozen=True)
class Workload:
    """A training job without its plan.

    model        () -> nn.Module
    loss         (model, batch) -> scalar, the mean over the batch's rows, or (sum, weight)
    optimizer    (parameters) -> torch.optim.Optimizer
    train_data   map-style data set, or an iterable one, a stream
    batch_size   rows of a global batch
    metric       (model, batch) -> {name: sum over the rows}; the first name decides what is `best`
    scheduler    (optimizer) -> LR scheduler, stepped once per update
    collate      (list of items) -> batch; None: torch's default
    loading      further arguments of `Trainer.loader`, as {"num_workers": 4}
    carry        of a recurrent model: rows -> the carry at the beginning of streams, a tensor or a
                 tuple or dict of tensors whose dim 0 is rows. Then loss(model, batch, carry) ->
                 (loss, carry), metric(model, batch, carry) -> ({name: sum}, carry), and the items
                 of a data set follow each other: each row of a batch is a stream of them"""

    model: Callable[[], nn.Module]
    loss: Loss
    optimizer: Callable[[Parameters], torch.optim.Optimizer]
    train_data: Data
    batch_size: int
    valid_data: Data | None = None
    metric: Metric | None = None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    epochs: int = 1
    name: str | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)
    carry: Callable[[int], Any] | None = None

    def __post_init__(self) -> None:
        faults = [*self._faults()]
        if faults:
            raise ValueError(f"workload {self.name or '(without a name)'}: {'; '.join(faults)}")

    def _faults(self) -> Iterable[str]:
        for name in ("model", "loss", "optimizer", "metric", "scheduler", "collate", "carry"):
            value = getattr(self, name)
            required = name in ("model", "loss", "optimizer")
            if not callable(value) and (required or value is not None):
                yield f"{name} must be a function, not {type(value).__name__}"
        if isinstance(self.model, nn.Module):
            yield "model must be a function that builds the module, not the module itself"
        for name in ("batch_size", "epochs"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                yield f"{name} must be a whole number of at least 1, not {value!r}"
        yield from _data_faults("train_data", self.train_data)
        if self.valid_data is not None:
            yield from _data_faults("valid_data", self.valid_data)
        if self.name is not None and not isinstance(self.name, str):
            yield f"name must be text, not {self.name!r}"
        yield from self._carry_faults()
        if not isinstance(self.loading, Mapping):
            yield f"loading must be a dictionary, not {type(self.loading).__name__}"

    def _carry_faults(self) -> Iterable[str]:
        for name in ("train_data", "valid_data") if self.carry is not None else ():
            if is_stream(getattr(self, name)):
                yield (
                    f"{name} must be read by index (len and items), for the carry goes from an "
                    "item to the next one: give a map-style data set whose items follow each other"
                )

    def build(self) -> nn.Module:
        """A new model. ValueError where `model` returns something else."""
        built = self.model()
        self._check("model", built, isinstance(built, nn.Module), "a torch.nn.Module")
        return built

    def build_optimizer(self, parameters: Parameters) -> torch.optim.Optimizer:
        """A new optimizer. ValueError where `optimizer` returns something else."""
        built = self.optimizer(parameters)
        fits = isinstance(built, torch.optim.Optimizer)
        self._check("optimizer", built, fits, "a torch.optim.Optimizer")
        return built

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """A new scheduler, or None. ValueError where `scheduler` returns something else."""
        if self.scheduler is None:
            return None
        built = self.scheduler(optimizer)
        fits = hasattr(built, "step") and hasattr(built, "state_dict")
        self._check("scheduler", built, fits, "a scheduler of torch.optim.lr_scheduler")
        return built

    def _check(self, name: str, built: object, fits: bool, wanted: str) -> None:
        if not fits:
            raise ValueError(
                f"workload {self.name or '(without a name)'}: {name} returned "
                f"{type(built).__name__}: it should return {wanted}"
            )

    def check_batch(self) -> None:
        """Raises ValueError where the data set cannot fill one global batch."""
        data = self.train_data
        if is_stream(data) or not isinstance(data, Sized):
            return  # its end shows when it is read
        rows = len(data)
        if self.batch_size > rows:
            raise ValueError(
                f"the batch is larger than the training data: batch_size({self.batch_size}) > "
                f"{rows} items; use a batch size of at most {rows}"
            )

    def example(self, rows: int | None = None, seed: int = 0) -> Any:
        """A global batch of `rows` rows (default: the batch size), drawn by seed like torch's own
        numbers; of a stream the first ones. ValueError for a stream without items."""
        count = self.batch_size if rows is None else rows
        data: Any = self.train_data
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            if is_stream(data):
                data = list(islice(data, count))
                if not data:
                    kind = type(self.train_data).__name__
                    raise ValueError(f"the training data ({kind}) is empty")
            chosen = torch.randint(len(data), (count,)).tolist()
            return (self.collate or default_collate)([data[i] for i in chosen])


def _data_faults(name: str, data: Any) -> Iterable[str]:
    kind = type(data).__name__
    if is_stream(data):
        if read_once(data):
            yield (
                f"{name} ({kind}) can be read only once: give an object whose __iter__ begins "
                "anew, as torch.utils.data.IterableDataset"
            )
    elif not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        yield (
            f"{name} must be a map-style data set (len and items by index) or an iterable one, "
            f"not {kind}"
        )
    elif len(data) == 0:
        yield f"{name} is empty (0 items)"
