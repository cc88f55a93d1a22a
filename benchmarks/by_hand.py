"""The hybrid step by hand: `torch.distributed` calls for one model, what an engine can reach.

n ranks, B rows in all, H = 1024 features; convolutions `data`, linear layers `tensor`. What each
rank sends in a step is 4 (n-1)/n B H numbers, and little besides:

                              forward                                    backward
    features        B/n x H   rows     --all-gather-->      B x H        reduce-scatter
    linear1, relu   B x H/n   the weight's rows split
    linear2         B x H     partial  --reduce-scatter-->  B x H/n      all-gather
    linear3         B x 100   partial  --reduce-scatter-->  B/n x 100    all-gather

gloo's reduce-scatter takes as long as its all-reduce, so one is an all-to-all and a local sum.

With several pieces of the rows each part of the model runs for all pieces before the next part:

    piece 0   features  [message..............]  linear1, 2  [message.........]
    piece 1             features  [message..............]  linear1, 2  [message.........]

A move is two autograd nodes, departure and arrival. Backward visits nodes in reverse order of
their making, so it launches the messages of all pieces at the arrivals before it waits at the
first departure: one backward call overlaps as forward does, without threads.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Message:
    """One asynchronous collective under way; it holds what is sent until it has arrived."""

    def __init__(self, kind: Literal["gather", "scatter"], dim: int) -> None:
        self.kind, self.dim = kind, dim
        self.work: Any = None
        self.sent: Tensor | None = None

    def launch(self, tensor: Tensor, kind: str) -> Tensor:
        """Start it; the result, one entry a rank, is valid after `wait`."""
        ranks = dist.get_world_size()
        if kind == "gather":
            self.sent = tensor.contiguous()
            received = tensor.new_empty(ranks, *tensor.shape)
            self.work = dist.all_gather(list(received.unbind()), self.sent, async_op=True)
        else:
            self.sent = torch.stack(tensor.chunk(ranks, self.dim))
            received = torch.empty_like(self.sent)
            self.work = dist.all_to_all_single(received, self.sent, async_op=True)
        return received

    def wait(self, received: Tensor, kind: str) -> Tensor:
        self.work.wait()
        self.work = self.sent = None
        return torch.cat(received.unbind(), self.dim) if kind == "gather" else received.sum(0)

    @property
    def mirror(self) -> str:
        return "scatter" if self.kind == "gather" else "gather"


class Departure(torch.autograd.Function):
    """Launches a message; in backward waits for its mirror image."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, message: Message) -> Tensor:
        context.message = message
        return message.launch(tensor, message.kind)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return context.message.wait(gradients[0], context.message.mirror), None


class Arrival(torch.autograd.Function):
    """Waits for a message; in backward launches its mirror image."""

    @staticmethod
    def forward(context: Any, received: Tensor, message: Message) -> Tensor:
        context.message = message
        return message.wait(received, message.kind)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return context.message.launch(gradients[0], context.message.mirror), None


Moving = tuple[Tensor, Message]


def depart(tensor: Tensor, kind: Literal["gather", "scatter"], dim: int) -> Moving:
    message = Message(kind, dim)
    return Departure.apply(tensor, message), message  # type: ignore[no-untyped-call]


def arrive(moving: Moving) -> Tensor:
    tensor: Tensor = Arrival.apply(*moving)  # type: ignore[no-untyped-call]
    return tensor


class ByHand:
    """The hybrid with plain SGD, its rows in `pieces` that overlap."""

    def __init__(self, model: nn.Module, rate: float, pieces: int = 1) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        layers: Any = model.classifier
        features: Any = model.features
        self.features: nn.Module = features

        def own(tensor: Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(tensor.detach().chunk(ranks, dim)[rank].clone())

        self.weight1, self.bias1 = own(layers.linear1.weight, 0), own(layers.linear1.bias, 0)
        self.weight2, self.bias2 = own(layers.linear2.weight, 1), own(layers.linear2.bias, 0)
        self.weight3, self.bias3 = own(layers.linear3.weight, 1), layers.linear3.bias
        self.replicated = [*self.features.parameters(), self.bias3]
        split = [self.weight1, self.bias1, self.weight2, self.bias2, self.weight3]
        self.optimizer = torch.optim.SGD([*self.replicated, *split], rate)
        self.pieces = pieces

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Sum over this rank's rows."""
        moving = [depart(self.features(piece), "gather", 0) for piece in images.chunk(self.pieces)]
        moving = [depart(self._linear1_and_2(arrive(piece)), "scatter", 1) for piece in moving]
        moving = [depart(self._linear3(arrive(piece)), "scatter", 0) for piece in moving]
        logits = torch.cat([arrive(piece) for piece in moving]) + self.bias3
        return F.cross_entropy(logits, labels, reduction="sum")

    def _linear1_and_2(self, gathered: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(gathered, self.weight1, self.bias1)), self.weight2)

    def _linear3(self, scattered: Tensor) -> Tensor:
        return F.linear(F.relu(scattered + self.bias2), self.weight3)

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """One step on this rank's rows; this rank's part of the global loss."""
        self.optimizer.zero_grad()
        loss = self._loss(*batch) / (len(batch[0]) * dist.get_world_size())
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in self.replicated if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        totals = torch.split(flat, [g.numel() for g in gradients])
        for gradient, total in zip(gradients, totals, strict=True):
            gradient.copy_(total.view_as(gradient))
        self.optimizer.step()
        return loss.detach()
