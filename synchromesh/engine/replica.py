"""A replica: the parameters that a worker computes with under an asynchronous word, all of them,
while servers keep the parts that the optimizer steps (engine/asynchronous.py).

    worker       whole     [ part 0 | part 1 | - ]      pushes gradients, fetches parameters
    server 0     part 0    [ flags ]                    by the first ranks of its column

A column is the ranks that have the same part of the model, one of each worker. Where all tensor
ranks of a worker have the same parameter, the first one's column serves it, and tells the others.
"""

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.engine.servers import FetchUnderWay
from synchromesh.engine.sharding import parts_of
from synchromesh.values.holding import Holding
from synchromesh.values.traffic import Servers


class Replica:
    """Of this rank. A vector has, for one server, what it keeps of each parameter, as long as the
    largest part of it, and behind all a number for each, whether there was a gradient."""

    def __init__(
        self, held: Mapping[str, Holding], parameters: Mapping[str, nn.Parameter],
        groups: PlanGroups,
    ) -> None:  # fmt: skip
        position = groups.position
        assert position is not None, "an idle rank has no replica"
        here = {n: h for n, h in held.items() if h.replica and position in h.positions}
        self.whole = {n: _whole(h, position, parameters[n]) for n, h in here.items()}
        self.whole_of = {parameters[n]: whole for n, whole in self.whole.items()}
        self._told = [self.whole[n] for n, h in here.items() if not h.placement.sharded]
        self._tensor = self.column = groups.alone
        for h in here.values():  # of one layout
            self._tensor = groups.tensor_group(h.layout)
        self._served = {n: h for n, h in here.items() if position in h.sharing(position)}
        self.parameters = {n: parameters[n] for n in self._served}
        self._lengths = [h.part_entries_at(position) for h in self._served.values()]
        self.serving, self.dtype = Servers(0), torch.float32
        if served := [*self._served.values()]:
            self.column = groups.served_group(served[0])
            self.serving = served[0].serving or self.serving
            self.dtype = reduce(torch.promote_types, (p.dtype for p in self.parameters.values()))

    @property
    def servers(self) -> int:
        return self.serving.count

    @property
    def length(self) -> int:
        """Numbers of a vector."""
        return sum(self._lengths) + len(self._lengths)

    @property
    def part_bytes(self) -> int:
        """Of a vector, without what says which gradients there are."""
        return sum(self._lengths) * self.dtype.itemsize

    @property
    def serves(self) -> bool:
        return self.column.index < self.servers

    @property
    def computes(self) -> bool:
        """Whether there are rows for this rank."""
        return self.column.index >= self.serving.first

    def gradients(self) -> Tensor:
        """(servers, length): of this worker's step."""
        vectors = torch.zeros(self.servers, self.length, dtype=self.dtype)
        self._pack(vectors, {n: p.grad for n, p in self.whole.items()})
        return vectors

    @torch.no_grad()
    def _pack(self, vectors: Tensor, tensors: Mapping[str, Tensor | None]) -> None:
        start, flags = 0, vectors[:, sum(self._lengths) :]
        for number, (length, (name, h)) in enumerate(
            zip(self._lengths, self._served.items(), strict=True)
        ):
            x = tensors[name]
            if x is not None:
                x = x.to_dense() if x.is_sparse else x
                for ranks, view in parts_of(x, h.part_placement, h.parts):
                    size = view[0].numel()
                    vectors[ranks, start : start + size] = view.flatten(1).to(vectors.dtype)
                flags[:, number] = 1
            start += length

    def part(self) -> Tensor:
        """(length,): what this server keeps."""
        vector = torch.zeros(self.length, dtype=self.dtype)
        for start, p in self._own():
            vector[start : start + p.numel()] = p.detach().reshape(-1)
        return vector

    def give_gradients(self, vector: Tensor) -> bool:
        """The server's parameters get the gradients of a vector; whether there are any."""
        flags = vector[sum(self._lengths) :].tolist()
        for flag, (start, p) in zip(flags, self._own(), strict=True):
            own = vector[start : start + p.numel()].to(p.dtype).view(p.shape)
            p.grad = own if flag else None
        return any(flags)

    def forget_gradients(self) -> None:
        """Of the server's parameters: they are of one worker, which is none of the user's."""
        for p in self.parameters.values():
            p.grad = None

    def _own(self) -> Sequence[tuple[int, nn.Parameter]]:
        starts = [sum(self._lengths[:i]) for i in range(len(self._lengths))]
        return list(zip(starts, self.parameters.values(), strict=True))

    @torch.no_grad()
    def take(self, vectors: Tensor, shares: Sequence[float] = ()) -> None:
        """The worker's parameters become those of all servers, (servers, length); shares: how much
        of the way they go to each."""
        start, of = 0, torch.tensor(shares, dtype=torch.float64)
        for length, (name, h) in zip(self._lengths, self._served.items(), strict=True):
            for ranks, view in parts_of(self.whole[name].data, h.part_placement, h.parts):
                shape = view.shape[1:]
                new = vectors[ranks, start : start + shape.numel()].unflatten(1, shape)
                if shares:
                    some = of[ranks].to(view.dtype).view(-1, *[1] * len(shape))
                    new = view.lerp(new.to(view.dtype), some)
                view.copy_(new)
            start += length
        self._tell()

    def _tell(self) -> None:
        """What all tensor ranks have comes from the first one."""
        group = self._tensor
        if group.size == 1 or not self._told:
            return
        first, values = group.index == 0, [p.data for p in self._told]
        others = range(1, group.size)
        group.exchange(
            [(i, x) for i in others for x in values] if first else [],
            [] if first else [(0, x) for x in values],
        )

    def refresh(self) -> None:
        """All have what servers keep. All ranks of the column call."""
        if self.servers:
            self.take(FetchUnderWay(self.column, Servers(self.servers), self.part())())
        else:
            self._tell()


def _whole(holding: Holding, position: int, like: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(like.new_zeros(holding.local_shape_at(position)))
