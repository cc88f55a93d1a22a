"""The groups of ranks of a world (engine/world.py).

Tensors of a step are sent through a `Group`, which counts them in the ledger. A group of one rank
never communicates and needs no process group, so one rank is no special case elsewhere."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from synchromesh.engine import reduce_scatter
from synchromesh.engine.control_channel import EXCHANGE, ControlChannel, checked_gather
from synchromesh.engine.ledger import Ledger
from synchromesh.engine.movable import movable, resolved
from synchromesh.programs.communicator import Finish, Op

T = TypeVar("T")
Messages = Sequence[tuple[int, Tensor]]  # to or from a member, by its index
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# torch 2.13 renamed it and warns at the old name
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Ranks(Protocol):
    """What a group needs of its world (engine/world.py)."""

    rank: int
    device: torch.device
    ledger: Ledger
    waited: float
    choices: dict[tuple[int, ...], str]
    control: ControlChannel | None
    timeout: timedelta

    @property
    def lost(self) -> bool: ...

    def advance(self) -> None: ...

    def after(self, work: Any, result: Callable[[], T]) -> Callable[[], T]: ...

    def wait(self, work: Any) -> None: ...

    def receive(self, works: Sequence[Any]) -> None: ...

    def apart(self, call: Callable[[], T]) -> T: ...

    @property
    def elastic(self) -> bool: ...

    def finish(self, work: Any) -> None: ...


class Group:
    """Some ranks of the world, in order; all members call its collectives in equal order."""

    def __init__(self, world: Ranks, ranks: tuple[int, ...], handle: Any, messages: Any) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.index = ranks.index(world.rank) if world.rank in ranks else -1
        self.world = world
        self.handle = handle  # the process group, None where nothing is to be sent
        self.messages = messages  # the one for messages between two ranks: another in debugging
        self.ring: Any = None  # the process group of rings, where there is one
        self.rings: list[reduce_scatter.Ring] = []  # under way, in order

    def __repr__(self) -> str:
        return f"Group({self.ranks}, index={self.index})"

    def _ready(self) -> bool:
        """Whether there is another rank to send to; an error where this rank is no member."""
        assert self.index >= 0, f"rank {self.world.rank} is no member of {self.ranks}"
        if self.size > 1 and self.handle is None:
            raise RuntimeError(
                "this trainer is closed and its ranks no longer reach each other: prepare the "
                "model again to go on"
            )
        return self.size > 1

    def handles(self) -> list[Any]:
        """Its process groups, of which it has none any more."""
        handles = {id(h): h for h in (self.handle, self.messages, self.ring) if h is not None}
        self.handle = self.messages = self.ring = None
        self.rings.clear()
        return list(handles.values())

    def _run(self, call: Callable[..., Any], *args: Any, asynchronous: bool = False) -> Any:
        """A collective, until its end unless it is asynchronous."""
        apart = asynchronous or self.world.elastic
        work = call(*args, group=self.handle, async_op=apart)
        return self.world.finish(work) if apart and not asynchronous else work

    def all_reduce(
        self, x: Tensor, op: Op = "sum", asynchronous: bool = False, counted: bool = True
    ) -> Any:
        """Sum or maximum over the ranks, in place; the work to wait for where asynchronous."""
        if not self._ready():
            return None
        if counted:
            self.world.ledger.add("all_reduce", x.nbytes, self.size)
        lazy = x.is_conj() or x.is_neg()
        if x.is_contiguous() and x.dtype is not torch.int16 and not lazy:
            return self._run(dist.all_reduce, x, _OPS[op], asynchronous=asynchronous)
        assert not asynchronous, "an asynchronous all-reduce needs a contiguous tensor"
        total = resolved(x.to(torch.int32 if x.dtype is torch.int16 else x.dtype)).contiguous()
        self._run(dist.all_reduce, total, _OPS[op])
        x.copy_(total)
        return None

    def all_gather(self, x: Tensor, counted: bool = True) -> Tensor:
        """(size, *x.shape): `x`, of equal shape everywhere, of each rank."""
        return self.start_all_gather(x, counted)()

    def start_all_gather(self, x: Tensor, counted: bool = True) -> Finish:
        """Begins an all-gather; the function that waits for it and returns its result."""
        if not self._ready():
            return lambda: x.detach().unsqueeze(0)
        if counted:
            self.world.ledger.add("all_gather", x.nbytes * self.size, self.size)
        part = movable(x)
        gathered = part.new_empty((self.size, *part.shape))
        flat = gathered.view(-1), part.view(-1)
        work = _all_gather_single(*flat, group=self.handle, async_op=True)
        if gathered.dtype is x.dtype:
            return self.world.after(work, lambda: gathered)
        return self.world.after(work, lambda: gathered.view(x.dtype).view(self.size, *x.shape))

    def start_all_reduce(self, x: Tensor) -> Finish:
        """Begins the sum of a copy of `x` over the ranks."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        if total.dtype is torch.int16:
            self.all_reduce(total)
            return lambda: total
        work = self.all_reduce(total, asynchronous=True)
        return self.world.after(work, lambda: total) if work is not None else lambda: total

    def start_reduce_scatter(self, x: Tensor, payload: int | None = None) -> Finish:
        """x: (size, *rest) -> rest, this rank's part of the sum over the ranks, in the quickest
        way as measured. payload: bytes to count (None: of `x`)."""
        assert x.shape[0] == self.size, f"{tuple(x.shape)} over {self.size} ranks"
        if not self._ready():
            return lambda: x.detach()[0]
        way = self.world.choices.get(self.ranks)
        if way is None:
            way = self.world.choices[self.ranks] = reduce_scatter.quickest(self, x.nbytes)
        self.world.ledger.add("reduce_scatter", payload or x.nbytes, self.size)
        return reduce_scatter.begin(self, x, way)

    def start_all_to_all(
        self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]] | None = None,
        payload: int | None = None,
    ) -> Callable[[], list[Tensor]]:  # fmt: skip
        """Begins to send part i to rank i; what each rank sent to this one comes back.

        shapes: of the tensors that come back, one a rank; the shapes of `parts` where not given.
        payload: bytes that all ranks count, where their parts differ."""
        assert len(parts) == self.size
        if not self._ready():
            return lambda: [parts[0].detach()]
        dtype = parts[0].dtype
        sends = [movable(p) for p in parts]
        wanted = [tuple(s) for s in (shapes or [p.shape for p in parts])]
        counted = sum(p.nbytes for p in sends) if payload is None else payload
        self.world.ledger.add("all_to_all", counted, self.size)
        wide = dtype.itemsize if sends[0].dtype is not dtype else 1
        outward = [p.numel() for p in sends]
        inward = [torch.Size(s).numel() * wide for s in wanted]
        packed = torch.cat([p.view(-1) for p in sends])
        made = packed.new_empty(sum(inward))
        work = dist.all_to_all_single(
            made, packed, inward, outward, group=self.handle, async_op=True
        )
        parts_of = [*zip(made.split(inward), wanted, strict=True)]
        return self.world.after(work, lambda: [p.view(dtype).view(s) for p, s in parts_of])

    def start_transpose(self, x: Tensor, payload: int) -> Finish:
        """x: (size, n), row i for rank i -> (size, n), row i from rank i. payload: bytes to
        count."""
        assert self._ready() and x.shape[0] == self.size
        self.world.ledger.add("all_to_all", payload, self.size)
        made = torch.empty_like(x)
        work = dist.all_to_all_single(made, x, group=self.handle, async_op=True)
        return self.world.after(work, lambda: made)

    def exchange(self, sends: Messages, receives: Messages, payload: int | None = None) -> None:
        """Point to point by index in the group: sends, and fills contiguous `receives`, at once.
        Messages between two ranks match in order, of sizes known on both sides; empty ones are not
        sent, a rank's own are copied. Only who sends or receives must call."""
        self.start_exchange(sends, receives, payload)()

    def start_exchange(
        self, sends: Messages, receives: Messages, payload: int | None = None, tag: int = 0
    ) -> Callable[[], None]:
        """Begins an exchange; `receives` are full when the returned function returns. payload:
        bytes to count (None: of `sends`). tag: exchanges of one tag come in their order."""
        assert self.index >= 0
        own = [x for i, x in sends if i == self.index]
        for target, x in zip((y for i, y in receives if i == self.index), own, strict=True):
            target.copy_(x)
        outward, inward = _movable(sends, self.index), _movable(receives, self.index, filled=True)
        if not outward and not inward:
            return lambda: None
        self._ready()
        sent = sum(x.nbytes for _, x in outward) if payload is None else payload
        self.world.ledger.add("send", sent, 2)
        work = [dist.P2POp(dist.isend, x, self.ranks[i], self.messages, tag) for i, x in outward]
        work += [dist.P2POp(dist.irecv, y, self.ranks[i], self.messages, tag) for i, y in inward]
        begun = dist.batch_isend_irecv(work)
        return Posted(self.world, begun, [x for _, x in outward]).wait

    def post(self, sends: Messages, receives: Messages) -> "Posted":
        """Begins messages one by one: between two ranks they match in the order of posting."""
        outward = _movable(sends)
        inward = _movable(receives, filled=True)
        self._ready()
        if outward:
            self.world.ledger.add("send", sum(x.nbytes for _, x in outward), 2)
        work = [dist.isend(x, self.ranks[i], self.messages) for i, x in outward]
        work += [dist.irecv(y, self.ranks[i], self.messages) for i, y in inward]
        return Posted(self.world, work, [x for _, x in outward])

    def barrier(self) -> None:
        if self._ready():
            self.all_reduce(torch.zeros(1, device=self.world.device), counted=False)
            if self.world.device.type == "cuda":
                torch.cuda.synchronize(self.world.device)

    def all_gather_json(self, value: Any) -> list[Any]:
        """A value of each rank, as JSON: nothing is unpickled."""
        if not self._ready():
            return [json.loads(json.dumps(value))]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [n for (n,) in checked_gather(self, EXCHANGE, [len(text)])]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = text
        rows = self.all_gather(padded.to(self.world.device), counted=False).cpu()
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]

    def broadcast_json(self, value: Any, root: int = 0) -> Any:
        """The value of the rank at index `root`; other ranks' argument is ignored."""
        if not self._ready():
            return json.loads(json.dumps(value))
        device, source = self.world.device, self.ranks[root]
        data = json.dumps(value).encode() if self.index == root else b""
        length = torch.tensor(len(data), device=device)
        self._run(dist.broadcast, length, source)
        text = torch.empty(int(length), dtype=torch.uint8, device=device)
        if self.index == root:
            text.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._run(dist.broadcast, text, source)
        return json.loads(bytes(text.tolist()))


def _movable(
    messages: Iterable[tuple[int, Tensor]], but: int | None = None, filled: bool = False
) -> list[tuple[int, Tensor]]:
    """Those that are not empty. but: a rank to leave out. filled: they are what is received."""
    sent = [(i, x) for i, x in messages if i != but and x.numel()]
    assert not filled or all(x.is_contiguous() for _, x in sent)
    return [(i, movable(x)) for i, x in sent]


@dataclass
class Posted:
    """Messages under way, those that are sent first; what is being sent lives as long."""

    world: Ranks
    work: list[Any]
    sent: list[Tensor]

    def wait(self) -> None:
        if self.work:
            self.world.receive(self.work)
        self.work, self.sent = [], []
