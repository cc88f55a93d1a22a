"""A workload, what is trained: model, loss, optimizer, data, batch size."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
