"""Peak memory of one device by kind; activations are all else that is alive at the peak.

A step runs once under a dispatch mode that sees every storage come and go (programs/memory.py);
what a storage was is known after the step, so a journal of all changes is walked again up to the
peak. On CUDA the peak is the allocator's; what it has beyond storages counts as activations."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from synchromesh.programs.memory import LiveBytes, StorageMark
from synchromesh.values.memory_by_kind import MemoryByKind


class MemoryTracker:
    """`with MemoryTracker(...) as memory: step()`, then `memory.by_kind`: bytes by kind at the
    peak of what ran inside, on the device of `parameters`.

    parameters, buffers: of this rank (DTensors count what is local). batch: tensors that exist
    before and stay; they are activations. A gradient is one from when its tensor is made."""

    def __init__(
        self, parameters: Iterable[Tensor], buffers: Iterable[Tensor], optimizer: Optimizer,
        batch: Any = (), states: Iterable[Tensor] = (),
    ) -> None:  # fmt: skip
        """states: besides those of the optimizer."""
        self.parameters, self.optimizer = [*parameters], optimizer
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.by_kind = MemoryByKind()
        self._live = _Journal()
        self._live.label(pytree.tree_leaves(batch), "activations")
        self._live.label(buffers, "buffers")
        self._live.label(states, "states")
        self._stack = ExitStack()

    def __enter__(self) -> "MemoryTracker":
        live = self._live
        live.label(_gradients(self.parameters), "gradients")
        live.label(_states(self.optimizer), "states")
        live.label(self.parameters, "parameters")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        for p in self.parameters:
            if p.requires_grad and p.is_leaf:
                hook = p.register_post_accumulate_grad_hook(self._gradient_made)
                self._stack.callback(hook.remove)
        self._stack.enter_context(live)
        return self

    def _gradient_made(self, parameter: Tensor) -> None:
        self._live.name(_gradients([parameter]), "gradients")

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        self._live.name(_gradients(self.parameters), "gradients")
        self._live.name(_states(self.optimizer), "states")
        kinds = self._live.at_peak()
        if self.device.type == "cuda":
            beyond = torch.cuda.max_memory_allocated(self.device) - kinds.total()
            kinds["activations"] = max(0, kinds["activations"] + beyond)
        self.by_kind = MemoryByKind(**{str(kind): size for kind, size in kinds.items()})


class _Journal(LiveBytes):
    """Live bytes with every change of them, and the kinds of storages as far as they are named."""

    def __init__(self) -> None:
        self._changes: list[tuple[StorageMark, int]] = []
        self._kinds: dict[StorageMark, str] = {}
        super().__init__()

    def _know(self, storage: Any, counts: bool = True) -> None:
        """What is traced meanwhile, as a metric is behind an epoch, takes no memory."""
        super()._know(storage, counts and storage.device.type != "meta")

    def _change(self, mark: StorageMark, size: int) -> None:
        super()._change(mark, size)
        self._changes.append((mark, size))

    def label(self, tensors: Iterable[Any], kind: str) -> None:
        """Counts tensors that exist already, and names their kind."""
        local = [x for tensor in tensors for x in _plain(tensor)]
        for x in local:
            self.add(x)
        self.name(local, kind)

    def name(self, tensors: Iterable[Any], kind: str) -> None:
        """Names the kind of those that are counted."""
        for x in (x for tensor in tensors for x in _plain(tensor)):
            if (mark := self._seen.get(id(x.untyped_storage()))) is not None:
                self._kinds[mark] = kind

    def at_peak(self) -> Counter[str]:
        """Bytes by kind when most bytes were alive, for the first time."""
        now = most = length = 0
        for n, (_, size) in enumerate(self._changes, 1):
            now += size
            if now > most:
                most, length = now, n
        kinds = Counter[str]()
        for mark, size in self._changes[:length]:
            kinds[self._kinds.get(mark, "activations")] += size
        assert kinds.total() == most == self.peak, (kinds, most, self.peak)
        return kinds


def _plain(tensor: Any) -> Iterator[Tensor]:
    """The tensors with memory of their own that a tensor consists of: a DTensor's local one."""
    if not isinstance(tensor, Tensor):
        return
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _states(optimizer: Optimizer) -> list[Any]:
    return [x for state in optimizer.state.values() for x in pytree.tree_leaves(dict(state))]
