"""Fetching: requests through a reader, in this process, or ahead of it in worker processes.

    in this process   read 0   step 0   read 1   step 1   read 2   step 2
    with workers      read 0   read 1   read 2   read 3
      on the device            copy 0   copy 1   copy 2
      step                              step 0   step 1   step 2

Samples are read by processes, not threads: the user's code would take the interpreter's lock from
the step, and draw from the random numbers that the step has seeded."""

import atexit
import multiprocessing.util  # noqa: F401 (its exit function is registered before `_end_workers`)
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, get_worker_info

from synchromesh.data.reading import Collate, Reading, Request
from synchromesh.engine.batches import to_device

CPU = torch.device("cpu")
T = TypeVar("T")
S = TypeVar("S")


class LoadingOptions(TypedDict, total=False):
    """The keywords of `Loading`, what torch calls the loader's `collate`, and of batches whose
    rows have different lengths what fills them (`Padding.values`), and to which lengths."""

    collate_fn: Collate | None
    pad: Mapping[str, float] | None
    lengths: Sequence[int]
    num_workers: int
    timeout: float
    pin_memory: bool | None
    prefetch_factor: int | None
    persistent_workers: bool
    multiprocessing_context: Any
    worker_init_fn: Callable[[int], None] | None


@dataclass(frozen=True)
class Loading:
    """How samples are loaded; the words of `torch.utils.data.DataLoader`."""

    num_workers: int = 0  # processes that read ahead of the step; 0: this one, between steps
    timeout: float = 0.0  # seconds to wait for a worker, 0 for ever
    pin_memory: bool | None = None  # for copies beside the step; None: where workers read
    prefetch_factor: int | None = None  # batches that each worker reads ahead; None: torch's, 2
    persistent_workers: bool = False  # whether they stay from epoch to epoch
    multiprocessing_context: Any = None  # `fork`, `spawn` ..., or such a context; None: Python's
    worker_init_fn: Callable[[int], None] | None = None  # called in each with its number

    def __post_init__(self) -> None:
        faults = [
            f"{name} ({value}) should not be negative"
            for name, value in {"num_workers": self.num_workers, "timeout": self.timeout}.items()
            if value < 0
        ]
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            faults.append(f"prefetch_factor ({self.prefetch_factor}) should be at least 1")
        if not self.num_workers:
            default = Loading.__dataclass_fields__
            unused = [n for n in OF_WORKERS if getattr(self, n) != default[n].default]
            if unused:
                faults.append(f"{', '.join(unused)} need workers: give num_workers=1 or more")
        if faults:
            raise ValueError(f"the loader: {'; '.join(faults)}")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Loading":
        """From keywords. TypeError for one that there is not."""
        names = [f.name for f in fields(cls)]
        unknown = ", ".join(k for k in options if k not in names)
        if unknown:
            raise TypeError(f"loader() has no argument {unknown}; it has {', '.join(names)}")
        return cls(**options)


OF_WORKERS = (
    "timeout", "prefetch_factor", "persistent_workers", "multiprocessing_context",
    "worker_init_fn",
)  # fmt: skip


STOPS = (signal.SIGINT, signal.SIGTERM)  # launchers send them to all processes of a rank


class Fetch:
    """Answers requests by a reader, in their order; batches come on `device`."""

    def __init__(
        self, reader: Dataset[Reading], dataset: Any, loading: Loading,
        device: torch.device = CPU,
    ) -> None:  # fmt: skip
        """dataset: the user's, which `get_worker_info` shows in a worker."""
        self.reader, self.dataset, self.loading, self.device = reader, dataset, loading, device
        self._cuda = device.type == "cuda"
        self._kept: tuple[int, DataLoader[Reading], _RequestQueue] | None = None

    def readings(
        self, requests: Iterable[Request], workers: int, seed: int
    ) -> Iterator[tuple[Request, Reading]]:
        """Each request with its reading. workers: processes. seed: of what they draw."""
        if not workers:
            for request in requests:
                yield request, self._arrived(self.reader[request])
            return
        loader, upcoming = self._workers(workers)
        loader.generator.manual_seed(seed)  # ours, not the user's
        upcoming.requests, upcoming.asked = requests, deque()
        with _stops_blocked():  # a worker that begins cannot ignore them yet
            workers_read = iter(loader)
        for process in workers_read._workers:  # type: ignore[attr-defined]
            process.terminate = process.kill  # as SIGTERM is for the run (`_Begin`)
        _READING.add(workers_read)
        read = self._answers(workers_read, requests, upcoming)
        if self._cuda:
            yield from _arriving(read, self.device)
        else:
            for request, reading in read:
                yield request, self._arrived(reading)

    @staticmethod
    def _answers(
        read: Iterable[Reading], requests: Iterable[Request], upcoming: "_RequestQueue"
    ) -> Iterator[tuple[Request, Reading]]:
        """Until another iteration takes over workers that stay: what they owe is that one's."""
        for reading in read:
            yield upcoming.asked.popleft(), reading
            if upcoming.requests is not requests:
                return

    def _arrived(self, reading: Reading) -> Reading:
        if self.loading.pin_memory and self._cuda:
            reading = reading.pin_memory()
        return reading.changed(lambda batch: to_device(batch, self.device))

    def _workers(self, count: int) -> "tuple[DataLoader[Reading], _RequestQueue]":
        """The worker processes; those of the last time where they are to stay."""
        loading = self.loading
        if self._kept is not None and self._kept[0] == count:
            return self._kept[1:]
        upcoming = _RequestQueue()
        loader = DataLoader(
            self.reader,
            batch_size=None,
            collate_fn=_as_it_is,  # not of a list: a reading is a batch
            sampler=upcoming, num_workers=count, timeout=loading.timeout,
            pin_memory=self._cuda if loading.pin_memory is None else loading.pin_memory,
            prefetch_factor=loading.prefetch_factor, generator=torch.Generator(),
            persistent_workers=loading.persistent_workers,
            multiprocessing_context=loading.multiprocessing_context,
            worker_init_fn=_Begin(self.dataset, loading.worker_init_fn),
        )  # fmt: skip
        if loading.persistent_workers:
            self._kept = count, loader, upcoming
        return loader, upcoming


class _RequestQueue:
    """The requests that workers are given, lazily; `asked` are those not answered yet."""

    def __init__(self) -> None:
        self.requests: Iterable[Request] = ()
        self.asked: deque[Request] = deque()

    def __iter__(self) -> Iterator[Request]:
        for request in self.requests:
            self.asked.append(request)
            yield request


def _as_it_is(reading: Any) -> Any:
    return reading


@dataclass(frozen=True)
class _Begin:
    """The beginning of a worker, in which `get_worker_info` shows the user's data set."""

    dataset: Any
    call: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)  # for the run, which reads on until it stops
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        object.__setattr__(get_worker_info(), "dataset", self.dataset)
        if self.call is not None:
            self.call(worker)


_READING: WeakSet[Any] = WeakSet()  # iterators of torch whose workers have begun


def _end_workers() -> None:
    for workers_read in _READING:
        workers_read._shutdown_workers()


# the last one registered runs first: multiprocessing's sends SIGTERM to workers, and waits
atexit.register(_end_workers)


@contextmanager
def _stops_blocked() -> Iterator[None]:
    """Signals that stop the run wait, here and in processes that begin inside."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ahead(made: Iterator[T], change: Callable[[T], S]) -> Iterator[S]:
    """change(x) of each x, one further than was asked for: a thread makes it meanwhile."""
    end = object()

    def following() -> S | object:
        for x in made:
            return change(x)
        return end

    pool = ThreadPoolExecutor(1, "synchromesh-loader")
    try:
        upcoming = pool.submit(following)
        while (made_next := upcoming.result()) is not end:
            upcoming = pool.submit(following)
            yield cast(S, made_next)
    finally:
        pool.shutdown(cancel_futures=True)


def _arriving(
    read: Iterator[tuple[Request, Reading]], device: torch.device
) -> Iterator[tuple[Request, Reading]]:
    """Readings on a GPU, copied on a stream of their own while the step runs."""
    copies = torch.cuda.Stream(device)

    def copied(answer: tuple[Request, Reading]) -> tuple[Request, Reading, torch.cuda.Event]:
        with torch.cuda.stream(copies):
            reading = answer[1].changed(lambda b: to_device(b, device))
            return answer[0], reading, copies.record_event()

    for request, reading, event in ahead(read, copied):
        current = torch.cuda.current_stream(device)
        current.wait_event(event)
        for x in pytree.tree_leaves(reading.batch):
            if isinstance(x, Tensor):
                x.record_stream(current)  # its memory is not given away while the step uses it
        yield request, reading
