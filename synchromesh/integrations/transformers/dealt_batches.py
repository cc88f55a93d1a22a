"""Dealt batches: those of an evaluation go to ranks in turns, and what ranks compute of them comes
back in the order of the data.

    batches     0 1 2 3 4 of 2 2 2 2 1 rows        3 ranks
    rank 0      0     3
    rank 1      1     4
    rank 2      2     (one row, which is not counted)"""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import find_batch_size, recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

KEPT = "collate_fn", "num_workers", "pin_memory", "prefetch_factor", "multiprocessing_context"


class DealtBatches:
    """This rank's batches of a loader; of a stream all ranks read all."""

    def __init__(self, loader: DataLoader[Any], accelerator: Accelerator) -> None:
        if getattr(loader, "_is_accelerate_prepared", False):
            raise ValueError("the DataLoader is divided over ranks: leave accelerator.prepare out")
        self.dataset, self._accelerator = loader.dataset, accelerator
        self.counts: list[int] = []  # rows of the ranks' batches in this round
        self._rounds: list[list[int]] = []
        self._rank, size = accelerator.process_index, accelerator.num_processes
        if not isinstance(loader.dataset, IterableDataset):
            batches: Any = [*loader.batch_sampler]  # type: ignore[misc]
            rounds = [batches[i : i + size] for i in range(0, len(batches), size)]
            self._rounds = [[len(b) for b in r] + [0] * (size - len(r)) for r in rounds]
            own = [r[self._rank] if self._rank < len(r) else r[0][:1] for r in rounds]
            kept = {name: getattr(loader, name) for name in KEPT}
            loader = DataLoader(loader.dataset, batch_sampler=own, **kept)
        self._loader = prepare_data_loader(
            loader, accelerator.device, num_processes=1, process_index=0, put_on_device=True,
            dispatch_batches=False,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._loader):
            self.counts = self._rounds[number] if self._rounds else [find_batch_size(batch)]
            yield batch

    def gathered(self, computed: Any) -> Any:
        """Tensors, also nested, of this round's rows on this rank: of all ranks' rows."""
        counts, most = self.counts, max(self.counts)

        def gather(x: Tensor) -> Tensor:
            if len(counts) == 1:
                return x[:most]
            filled = x.new_zeros((most, *x.shape[1:]))
            filled[: counts[self._rank]] = x[: counts[self._rank]]
            parts = self._accelerator.gather(filled).split(most)
            return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

        return recursively_apply(gather, computed)
