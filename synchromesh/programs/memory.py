"""Live memory: the bytes of all tensor storages that exist at once, now and at their highest.

On CUDA the allocator says it; elsewhere a dispatch mode sees every tensor that an operator makes
and is told when its storage dies. One operator costs tens of microseconds under the mode, so what
is timed is never tracked at the same time."""

import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class StorageMark(weakref.ref[Any]):
    """One storage, alive or not; equal to itself alone."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class LiveBytes(TorchDispatchMode):
    """`now` and `peak`: bytes of storages made since the start that are (were) alive at once;
    `peak_staying`: the same, had those not died that `stays` was told of.

    known: tensors that exist already; their storages count from the beginning.
    limit: bytes; MemoryError at the operator that makes more than so many alive or staying."""

    def __init__(self, known: Iterable[Tensor] = (), limit: float = float("inf")) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.peak_staying = 0
        self.limit = limit
        self._staying = 0  # bytes that have died and should have stayed
        self._stay: set[int] = set()
        self._seen: dict[int, StorageMark] = {}
        self._sizes: dict[StorageMark, int] = {}  # of those that count
        for x in known:
            self.add(x)

    def add(self, x: Tensor) -> None:
        self.know([x.untyped_storage()])

    def know(self, storages: Iterable[Any]) -> None:
        for storage in storages:
            self._know(storage)

    def stays(self, x: Tensor) -> None:
        """The storage of `x` counts for `peak_staying` when it has died, too."""
        self._stay.add(id(x.untyped_storage()))

    def _know(self, storage: Any, counts: bool = True) -> None:
        key = id(storage)
        known = self._seen.get(key)
        if known is not None and known() is storage:
            return
        size = storage.nbytes() if counts else 0

        def gone(_: Any) -> None:
            left = self._sizes.pop(mark, 0)
            self._change(mark, -left)
            if key in self._stay:
                self._stay.remove(key)
                self._staying += left
            if self._seen.get(key) is mark:
                del self._seen[key]

        mark = StorageMark(storage, gone)
        self._seen[key] = mark
        if counts:
            self._sizes[mark] = size
            self._change(mark, size)

    def __enter__(self) -> "LiveBytes":
        """Counts storages that are resized in place, too: so gathered parameters are freed."""
        resize = self._resize = torch.UntypedStorage.resize_

        def counted(storage: Any, *args: Any, **kwargs: Any) -> Any:
            result = resize(storage, *args, **kwargs)
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _resized(self, storage: Any) -> None:
        self._know(storage, counts=False)
        mark = self._seen[id(storage)]
        change = storage.nbytes() - self._sizes.get(mark, 0)
        self._sizes[mark] = storage.nbytes()
        self._change(mark, change)

    def _change(self, mark: "StorageMark", size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
        self.peak_staying = max(self.peak_staying, self.now + self._staying)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensor: what it makes is made of plain tensors
        for x in pytree.tree_leaves((args, kwargs)):
            if _has_storage(x):  # was there: views of it and writes into it make nothing
                self._know(x.untyped_storage(), counts=False)
        made = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(made):
            if _has_storage(x):
                self.add(x)
        if (alive := self.now + self._staying) > self.limit:
            raise MemoryError(f"{alive} bytes are alive, {self.limit:.0f} may be")
        return made


def _has_storage(x: Any) -> bool:
    """A sparse tensor has none of its own: its indices and values do."""
    return isinstance(x, Tensor) and x.layout is torch.strided


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def transient_bytes() -> int:
    """How much more than now this process has had once (Linux; 0 elsewhere)."""
    try:
        with open("/proc/self/status") as file:
            found = dict(line.split(":", 1) for line in file)
    except OSError:
        return 0
    most, now = (int(found[name].split()[0]) for name in ("VmHWM", "VmRSS"))
    return 1024 * (most - now)


def process_bytes() -> int:
    """Resident bytes of this process alone (Linux; 0 elsewhere): without mapped files, of which
    the processes of a host share one copy and which the system drops where memory is short."""
    try:
        with open("/proc/self/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
