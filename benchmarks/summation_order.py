"""How far the order of a float32 sum goes: `python -m benchmarks.summation_order`.

T5's norms compute in float32 whatever the model's type. A plan that shards the hidden dimension
adds up their means in parts. Here one process does the same, without any plan: two equal models
in float64, of which one sums each norm's mean in four parts, five steps, the largest difference
of parameters over the largest parameter. What comes out no exactness of ours can undercut.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh.training.verify import Deviation, cast, global_batches, without_dropout
from tests.targets import target

PARTS, STEPS = 4, 5
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "SGD, momentum 0.9": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def in_parts(norm: Any, hidden: Tensor) -> Tensor:
    """T5's layer norm with the mean of squares summed in parts."""
    squares = hidden.to(torch.float32).pow(2)
    sums = [part.sum(-1, keepdim=True) for part in squares.chunk(PARTS, -1)]
    variance = torch.stack(sums).sum(0) / squares.shape[-1]
    scaled: Tensor = norm.weight * (hidden * torch.rsqrt(variance + norm.variance_epsilon))
    return scaled


def deviation(optimizer: str) -> float:
    workload = target("t5")
    torch.manual_seed(0)
    model = workload.model().double().train()
    without_dropout(model)
    other = copy.deepcopy(model)
    for module in other.modules():
        if type(module).__name__ == "T5LayerNorm":
            module.__dict__["forward"] = lambda hidden, norm=module: in_parts(norm, hidden)
    trained: list[tuple[nn.Module, torch.optim.Optimizer]] = [
        (m, OPTIMIZERS[optimizer](m.parameters())) for m in (model, other)
    ]
    for batch in global_batches(workload, STEPS, torch.float64):
        for module, steps in trained:
            result = workload.loss(module, cast(batch, torch.float64))
            value = result[0] / result[1] if isinstance(result, tuple) else result
            steps.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            steps.step()
    found = Deviation()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        found.add(b.detach(), a.detach())
    return found.relative


def main() -> int:
    torch.set_num_threads(1)
    for optimizer in OPTIMIZERS:
        print(
            f"{optimizer:18} parameters differ by {deviation(optimizer):.1e} after {STEPS} steps"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
