"""A deep narrow model: where pipeline stages pay, and what each strategy must send for it.

A byte-level language model of pre-norm transformer blocks, as GPT-2's, without dropout. What each
of n hosts sends in a step, P being the bytes of the parameters and A those of the activations
between two blocks for all rows of the step:

    data parallelism      2 (n-1)/n P             all-reduce of gradients
    sharded data (FSDP2)  2 (n-1)/n P             all-gather and reduce-scatter; gloo's
                                                  reduce-scatter is an all-reduce: 3 (n-1)/n P
    tensor parallelism    8 (n-1)/n A per block   four all-reduces
    stages                A                       to the next, and as much back
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # bytes
FLOAT = 4  # bytes
RATE = 1e-3  # of AdamW
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """The size of the model and of a step."""

    blocks: int = 24
    width: int = 128
    heads: int = 4
    length: int = 32  # bytes of a sequence
    rows: int = 64  # sequences of a step

    @property
    def border_bytes(self) -> int:
        """A: what passes between two blocks, for all rows."""
        return self.rows * self.length * self.width * FLOAT

    @property
    def parameter_bytes(self) -> int:
        """P: of all parameters."""
        with torch.device("meta"):
            return sum(p.numel() * FLOAT for p in build(self).parameters())


class Embedding(nn.Module):
    """Of bytes and of their places."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.places = nn.Parameter(torch.randn(shape.length, shape.width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bytes(tokens) + self.places  # type: ignore[no-any-return]


class Block(nn.Module):
    """Causal self-attention and a perceptron of four times the width, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, width = shape.heads, shape.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


def build(shape: Shape) -> nn.Sequential:
    """The same weights on every rank and for every strategy."""
    torch.manual_seed(0)
    layers: OrderedDict[str, nn.Module] = OrderedDict(embedding=Embedding(shape))
    layers.update((f"block{i}", Block(shape)) for i in range(shape.blocks))
    norm, linear = nn.LayerNorm(shape.width), nn.Linear(shape.width, VOCABULARY)
    layers["head"] = nn.Sequential(norm, linear)
    return nn.Sequential(layers)


def build_batch(shape: Shape) -> Batch:
    """Bytes and the bytes that follow them."""
    generator = torch.Generator().manual_seed(1)
    size = (shape.rows, shape.length + 1)
    text = torch.randint(0, VOCABULARY, size, generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def next_byte(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over all places of all rows."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return next_byte(model(batch[0]), batch[1])


def cuts(shape: Shape, stages: int) -> list[str]:
    """The first layer of each of so many stages with equally many blocks."""
    firsts = [shape.blocks * s // stages for s in range(1, stages)]
    return ["embedding", *(f"block{i}" for i in firsts)]
