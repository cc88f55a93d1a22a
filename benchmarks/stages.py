"""Made-up transformers for the search of stages: `python -m benchmarks.planning --stages`.

Facts of every component by the usual laws, in the classes that the planner makes of profiles:
12 h^2 parameters a block, 2 operations a parameter and token and those of attention, at 150
Tflop/s (half of an A100's rate); two all-reduces of the block's value in each direction under a
tensor degree, at 200 GB/s; gradients and messages at 20 GB/s; 18 bytes held a parameter (float16
with Adam, Rajbhandari et al. 2020), 34 s h bytes kept a sequence (Korthikanti et al. 2022, without
the scores of attention). `all different`: every component has 0.5 to 1.5 times the parameters.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from synchromesh.planner.stages.problem import (
    StageFacts,
    StageProblem,
    group_sizes,
    micro_batch_numbers,
    stage_costs,
)

FLOPS, TENSOR, NETWORK, MEMORY = 150e12, 200e9, 20e9, 1e11  # operations, bytes a second
DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Transformer:
    """`blocks` of width `width` with an embedding before and a head behind them."""

    blocks: int
    width: int
    rows: int  # sequences of a global batch
    tokens: int = 2048
    words: int = 51_200
    different: bool = False

    def problem(self, devices: int, limit: float) -> StageProblem:
        """The problem of its stages on equal devices of `limit` bytes."""
        sizes, count = group_sizes(devices), self.blocks + 2
        costs = cache(lambda m: stage_costs(self.facts, m, sizes, DEGREES, count))
        numbers = micro_batch_numbers(self.rows)
        equal = (1.0,) * devices
        return StageProblem(count, sizes, (limit,) * devices, equal, numbers, costs)

    def facts(self, size: int, degree: int, micro_batches: int) -> StageFacts | None:
        """What components take on `size` devices; None where a device would have no row."""
        data, count = size // degree, self.blocks + 2
        if micro_batches * data > self.rows:
            return None
        rows = -(-self.rows // (micro_batches * data))
        parameters = np.full(count, 12.0 * self.width**2)
        if self.different:
            parameters *= np.random.default_rng(0).uniform(0.5, 1.5, count)
        parameters[0] = parameters[-1] = self.words * self.width
        operations = 2 * self.tokens * parameters + 4 * self.tokens**2 * self.width
        operations[0] = 0.0  # rows are looked up
        value = 2.0 * rows * self.tokens * self.width  # bytes between components
        blocking = 2 * (2 * (degree - 1) / degree * value / TENSOR + 2e-5 * (degree > 1))
        forward = rows * operations / degree / FLOPS + blocking
        message = np.full(count + 1, value / degree / NETWORK)
        message[0] = message[-1] = 0.0
        return StageFacts(
            forward,
            forward + rows * operations / degree / FLOPS,
            gradient=2 * (data - 1) / data * 2 * parameters / degree / NETWORK,
            update=parameters / degree / MEMORY,
            resident=18 * parameters / degree,
            kept=np.full(count, 34.0 * rows * self.tokens * self.width / degree),
            message=message,
        )


LARGE = Transformer(blocks=96, width=12_288, rows=1536)  # GPT-3
SMALL = Transformer(blocks=98, width=2048, rows=1024)
VARIED = Transformer(blocks=98, width=2048, rows=1024, different=True)
Case = tuple[str, Transformer, int, tuple[float, ...], float]  # devices, bytes, goal in seconds
CASES: tuple[Case, ...] = (
    ("100 components, 64 devices", SMALL, 64, (1e18, 24e9, 6e9), 5.0),
    ("100 components, 64 devices, all different", VARIED, 64, (1e18, 24e9, 6e9), 5.0),
    ("96 transformer blocks, 1,024 devices", LARGE, 1024, (1e18, 80e9, 24e9), 30.0),
)
