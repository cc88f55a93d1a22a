"""Peak memory of one device by kind: parameters, gradients, optimizer states, buffers, and
activations, which are all else that is alive at the peak.

A step runs once under a dispatch mode that sees every storage come and go (profiling/memory.py);
what a storage was is known after the step, so a journal of all changes is walked again up to the
peak. On CUDA the peak is the allocator's, and what it has beyond the tracked storages counts as
activations.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from synchromesh.profiling.memory import LiveBytes, Mark
from synchromesh.results.run import MemoryByKind


def peak_memory(
    step: Callable[[], object],
    parameters: Iterable[Tensor],
    buffers: Iterable[Tensor],
    optimizer: Optimizer,
    batch: Any = (),
) -> MemoryByKind:
    """Runs `step` once and returns the bytes by kind at its peak, on the device of `parameters`.

    parameters, buffers: of this rank (DTensors count what is local). batch: tensors that exist
    before and stay; they are activations. A gradient is one from when its tensor is made.
    """
    weights = [*parameters]
    device = weights[0].device if weights else torch.device("cpu")
    live = _Journal()
    live.label([*pytree.tree_leaves(batch)], "activations")
    live.label(buffers, "buffers")
    live.label(_gradients(weights), "gradients")
    live.label(_states(optimizer), "optimizer")
    live.label(weights, "parameters")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with ExitStack() as stack:
        stack.enter_context(_gradients_labelled(weights, live))
        stack.enter_context(_resizes_counted(live))
        stack.enter_context(live)
        step()
    live.name(_gradients(weights), "gradients")
    live.name(_states(optimizer), "optimizer")
    kinds = live.at_peak()
    if device.type == "cuda":
        beyond = torch.cuda.max_memory_allocated(device) - kinds.total()
        kinds["activations"] = max(0, kinds["activations"] + beyond)
    return MemoryByKind(**kinds)


class _Journal(LiveBytes):
    """Live bytes with every change of them, and the kinds of storages as far as they are named."""

    def __init__(self) -> None:
        self._changes: list[tuple[Mark, int]] = []
        self._kinds: dict[Mark, str] = {}
        super().__init__()

    def _change(self, mark: Mark, size: int) -> None:
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
            mark = self._seen.get(id(x.untyped_storage()))
            if mark is not None:
                self._kinds[mark] = kind

    def at_peak(self) -> Counter[str]:
        """Bytes by kind when most bytes were alive, for the first time."""
        now = most = length = 0
        for n, (_, size) in enumerate(self._changes, 1):
            now += size
            if now > most:
                most, length = now, n
        found = Counter[str]()
        for mark, size in self._changes[:length]:
            found[self._kinds.get(mark, "activations")] += size
        assert found.total() == most == self.peak, (found, most, self.peak)
        return found


def _plain(tensor: Any) -> Iterator[Tensor]:
    """The tensors with memory of their own that a tensor consists of: a DTensor's local one."""
    if not isinstance(tensor, Tensor):
        return
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _states(optimizer: Optimizer) -> list[Any]:
    return [x for state in optimizer.state.values() for x in pytree.tree_leaves(dict(state))]


@contextmanager
def _gradients_labelled(parameters: Iterable[Tensor], live: _Journal) -> Iterator[None]:
    """Names gradients when they are there; a step may free them again."""

    def there(p: Tensor) -> None:
        live.name(_gradients([p]), "gradients")

    hooks = [
        p.register_post_accumulate_grad_hook(there)
        for p in parameters
        if p.requires_grad and p.is_leaf
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _resizes_counted(live: LiveBytes) -> Iterator[None]:
    """Storages that change their size in place: so FSDP2 frees parameters it has gathered."""
    resize = torch.UntypedStorage.resize_

    def counted(storage: Any, *args: Any, **kwargs: Any) -> Any:
        result = resize(storage, *args, **kwargs)
        live.resized(storage)
        return result

    torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
