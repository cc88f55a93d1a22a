"""Random models, their batches, and plans for them: what no test was made for.

Every model is of a seed: several layers of odd sizes with residuals, norms, tables of embeddings
that are tied, frozen and unused parameters, numbers, and layers of a second data type.
"""

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.values.schedule import PIPELINES
from tests.plain import Case

WORDS, LENGTH = 13, 3
KINDS = ("linear", "residual", "norm", "gated", "table", "number", "single", "tied", "attention")


class Layer(nn.Module):
    """One layer of width `w`, of a kind."""

    def __init__(self, kind: str, w: int) -> None:
        super().__init__()
        self.kind = kind
        match kind:
            case "linear" | "residual" | "tied":
                self.a = nn.Linear(w, w)
            case "norm":
                self.norm, self.a = nn.LayerNorm(w), nn.Linear(w, w, bias=False)
            case "gated":
                self.a, self.b = nn.Linear(w, 2 * w + 2), nn.Linear(w + 1, w)
            case "table":
                self.table = nn.Embedding(WORDS, w)
            case "number":
                self.scale, self.shift = (
                    nn.Parameter(torch.tensor(1.5)),
                    nn.Parameter(torch.ones(w)),
                )
            case "single":
                self.a = nn.Linear(w, w)
            case "attention":
                self.q, self.k, self.v, self.out = (nn.Linear(w, w) for _ in range(4))

    def forward(self, h: Tensor, words: Tensor) -> Tensor:
        match self.kind:
            case "linear" | "tied":
                return torch.tanh(self.a(h))
            case "residual":
                return h + torch.tanh(self.a(h))
            case "norm":
                return h + self.a(self.norm(h))
            case "gated":
                return h + self.b(F.glu(self.a(h)))
            case "table":
                return h + self.table(words)
            case "number":
                return h * self.scale + self.shift
            case "single":  # parameters of another type, which computes in the model's own
                return h + torch.tanh(F.linear(h, self.a.weight.to(h.dtype)) + self.a.bias)
            case "attention":
                found = F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h))
                return h + self.out(found)
        raise AssertionError(self.kind)


class Drawn(nn.Module):
    """Layers of random kinds between a table of words and scores of words."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        width = draw.choice((5, 8, 12, 15))
        often = draw.choice(((), ("tied",) * 6, ("single",) * 4))
        kinds = [draw.choice((*KINDS, *often)) for _ in range(draw.randint(3, 6))]
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(kind, width) for kind in kinds)
        self.head = nn.Linear(width, WORDS)
        self.double()
        tied = [layer.a for layer in self.layers if layer.kind == "tied"]
        for other in tied[1:]:
            other.weight = tied[0].weight
        if draw.random() < 0.3:
            self.head.weight = self.embed.weight
        if draw.random() < 0.3:
            self.unused = nn.Linear(3, 2).double()
        for layer in self.layers:
            if layer.kind == "single":
                layer.float()
            if draw.random() < 0.15:
                next(layer.parameters()).requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        h = self.embed(words)
        for layer in self.layers:
            h = layer(h, words)
        return torch.tanh(self.head(h))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """eps: gradients that are rounding alone are not divided by their own size."""
    live = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(live, lr=0.01, eps=1e-3)


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Drawn(seed)


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    words, targets, _ = batch
    return F.cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=0)


def row_loss(model: nn.Module, batch: Any) -> Tensor:
    words, _, values = batch
    return (model(words)[:, 0, 0] - values).square().mean()


def pair_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    words, targets, values = batch
    losses = F.cross_entropy(model(words).flatten(0, 1), targets.flatten(), reduction="none")
    weights = values.abs().repeat_interleave(LENGTH)
    return (losses * weights).sum(), weights.sum()


def batch_of(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(97 * seed + rows)
    words, targets = (torch.randint(0, WORDS, (rows, LENGTH), generator=g) for _ in range(2))
    targets[:, 0].clamp_(min=1)  # every row has a target
    return words, targets, torch.randn(rows, generator=g, dtype=torch.float64)


@dataclass(frozen=True)
class Sample:
    """A model, a plan for `ranks`, and how its gradients are accumulated."""

    seed: int
    ranks: int
    plan: str
    case: Case
    halves: bool  # each batch is given in two calls of `backward`
    limit: float

    def __str__(self) -> str:
        calls = "two calls" if self.halves else f"micro_batches={self.case.micro_batches}"
        return f"seed {self.seed}, {self.ranks} ranks, {self.plan}, {calls}"


def sample(seed: int, ranks: int) -> Sample:
    """The model and the plan of a seed."""
    draw = random.Random(1000 * seed + ranks)
    model = build(seed)
    names = ["embed", *(f"layers.{i}" for i in range(len(model.layers))), "head"]
    words, staged = _layouts(draw, ranks), draw.random() < 0.4
    plan = [draw.choice(words)]
    stages = _stages(draw, ranks, names) if staged else []
    if staged:
        words = plan = [_of_stages(draw, stages)]
    plan += [f"{n}={draw.choice(words)}" for n in names if not staged and draw.random() < 0.35]
    own = draw.choice((1, 1, 2, 3))
    if staged:
        own = draw.choice((2, 3, 4))
        turns = "/".join(f"{group}:{first}" for group, first in stages)
        plan += [f"@stages={turns}"]
        if len({group for group, _ in stages}) < len(stages):
            own = 2 * len({group for group, _ in stages})
            plan += ["@schedule=interleaved"]
        else:
            sharded = any(word in plan[0] for word in ("zero", "sharded", "states"))
            divided = ("zero-bubble", "zero-bubble-2")  # which no sharded states go with
            left_out = ("interleaved", *(divided if sharded else ()))
            plan += [f"@schedule={draw.choice([x for x in PIPELINES if x not in left_out])}"]
    elif draw.random() < 0.25 and plan[0].split(":")[0] in ("data", "sharded-data", "zero1"):
        plan += ["@rows=" + ",".join(str(draw.randint(1, 3)) for _ in range(ranks))]
    if own > 1:
        plan += [f"@micro_batches={own}"]
    elif draw.random() < 0.3:
        plan += ["@pieces=2"]
    by_hand = draw.choice((1, 2, 3)) if own == 1 and not staged else 1
    sizes = draw.choice(((8, 7, 3), (12, 12, 5), (9, 4, 1)))
    single = any(layer.kind == "single" for layer in model.layers)
    case = Case(
        partial(build, seed), draw.choice((mean_loss, row_loss, pair_loss)),
        [batch_of(n, seed) for n in sizes], sgd if single else draw.choice((sgd, adamw)),
        micro_batches=by_hand,
    )  # fmt: skip
    halves = by_hand == 1 and draw.random() < 0.3
    return Sample(seed, ranks, "; ".join(plan), case, halves, 1e-6 if single else 1e-10)


def _layouts(draw: random.Random, ranks: int) -> list[str]:
    words = ["data", "tensor", "zero1", "zero2", "sharded-data", "sharded-data", "zero2"]
    words += [f"{w}:recompute=yes" for w in ("data", "sharded-data", "zero1")]
    if ranks == 4:
        level = draw.choice(("optimizer", "gradients", "parameters"))
        words += ["hybrid:tensor=2", f"hybrid:tensor=2,states={level}"]
    return words


def _stages(draw: random.Random, ranks: int, names: list[str]) -> list[tuple[str, str]]:
    """Groups of ranks and the first component of each."""
    groups = draw.choice(
        {2: [["0", "1"]], 3: [["0-1", "2"], ["0", "1", "2"]], 4: [["0-1", "2-3"], ["0-2", "3"]]}[
            ranks
        ]
    )
    equal = len({len(g) for g in groups}) == 1
    turns = groups * 2 if equal and draw.random() < 0.5 else groups
    turns = turns if len(turns) <= len(names) else groups
    cuts = sorted(draw.sample(range(1, len(names)), len(turns) - 1))
    return [(g, names[i]) for g, i in zip(turns, [0, *cuts], strict=True)]


def _of_stages(draw: random.Random, stages: list[tuple[str, str]]) -> str:
    alone = any("-" not in group for group, _ in stages)
    return draw.choice(
        ("data", "data:recompute=yes")
        if alone
        else ("data", "zero1", "zero2", "sharded-data", "tensor", "sharded-data:recompute=yes")
    )
