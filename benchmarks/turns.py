"""Strategies in turns in the same processes: `python -m benchmarks.turns JOB`, on every rank.

Each strategy is built and takes its first steps, whose losses must be those of the others; then
rounds in ABBA order, in which each takes as many steps as fit into `SECONDS`, at least one, after
one that is not counted: it finds the memory as another strategy has left it. A round's seconds are
those of a step, of the slowest rank. Rank 0 prints what was measured as JSON.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.deep import Shape
from benchmarks.strategy import Ours, Strategy, build

SECONDS = 3.0  # of one strategy's turn; a step that takes longer is taken once
MOST = 6  # steps of a turn


@dataclass(frozen=True)
class Job:
    """What the ranks of one run do. checked: first steps, whose losses are compared; at least two,
    as torch's pipelining runs a forward more in the first, to learn the shapes. steps: of a turn,
    at least."""

    strategies: tuple[str, ...]
    shape: Shape = field(default_factory=Shape)
    rounds: int = 5
    checked: int = 3
    steps: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        given = json.loads(text)
        given["strategies"] = tuple(given["strategies"])
        return cls(**{**given, "shape": Shape(**given["shape"])})


@dataclass
class Measured:
    """Of one strategy: by round, seconds of a step and processor seconds of each rank in it.

    losses      of the first steps; warm: seconds of the last of them, before the rounds
    plan        in force, of a strategy of ours; predicted: seconds of a step
    alive       micro-batches that the first stage has activations of at once
    stashed     bytes of older weights on each rank, and as predicted (stashed_due)
    """

    seconds: list[float] = field(default_factory=list)
    busy: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    warm: float = 0.0
    prepared: float = 0.0
    plan: str = ""
    predicted: float | None = None
    alive: int = 0
    stashed: list[float] = field(default_factory=list)
    stashed_due: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)


class Alive(TorchDispatchMode):
    """Counts the micro-batches between the first operator of their forward on the first stage,
    the embedding, and the last of their backward, the embedding's gradient."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        self.now += func is aten.embedding.default
        self.most = max(self.most, self.now)
        self.now -= func is aten.embedding_dense_backward.default
        return func(*args, **(kwargs or {}))


def gathered(value: float) -> list[float]:
    """The values of all ranks."""
    mine = torch.tensor(value, dtype=torch.float64)
    values = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(values, mine)
    return [float(v) for v in values]


def timed(strategy: Strategy, steps: int) -> tuple[float, list[float]]:
    """Seconds of a step of the slowest rank, and processor seconds of each; after one more."""
    strategy.step()
    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    for _ in range(steps):
        strategy.step()
    seconds, busy = time.perf_counter() - began, time.process_time() - worked
    return max(gathered(seconds)) / steps, [b / steps for b in gathered(busy)]


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def begin(name: str, job: Job) -> tuple[Strategy, Measured]:
    """The strategy after its first steps."""
    began = time.perf_counter()
    strategy = build(name, job.shape)
    found = Measured(prepared=time.perf_counter() - began)
    alive = Alive()
    for i in range(job.checked):
        began = time.perf_counter()
        with alive if i == job.checked - 1 else nullcontext():
            total = strategy.step().clone()
        dist.all_reduce(total)
        found.losses.append(total.item())
        found.warm = max(gathered(time.perf_counter() - began))
    found.alive = int(max(gathered(alive.most)))
    if isinstance(strategy, Ours):
        found.plan = str(strategy.trainer.plan)
        if strategy.trainer.choice is not None:
            found.predicted = strategy.trainer.choice.chosen.seconds
    say(f"{name}: ready after {found.prepared:.1f} s {found.plan}")
    return strategy, found


def measure(job: Job) -> dict[str, Measured]:
    """On every rank: what each strategy takes."""
    strategies: dict[str, Strategy] = {}
    found: dict[str, Measured] = {}
    for name in job.strategies:
        strategies[name], found[name] = begin(name, job)
    for turn in range(job.rounds):
        for name in job.strategies if turn % 2 == 0 else job.strategies[::-1]:
            steps = max(job.steps, min(MOST, int(SECONDS / found[name].warm)))
            seconds, busy = timed(strategies[name], steps)
            found[name].seconds.append(seconds)
            found[name].busy.append(busy)
        taken = ", ".join(f"{name} {m.seconds[-1]:.3f}" for name, m in found.items())
        say(f"round {turn + 1} of {job.rounds}: {taken} s")
    for name, strategy in strategies.items():
        if isinstance(strategy, Ours):
            found[name].stashed, found[name].stashed_due = map(gathered, strategy.stashed)
        strategy.close()
    return found


def ratios(slow: Measured, quick: Measured) -> list[float]:
    """By round, how many times as long the first takes."""
    return [a / b for a, b in zip(slow.seconds, quick.seconds, strict=True)]


def deviation(found: Sequence[Measured]) -> float:
    """The largest relative difference between losses of the same step."""
    steps = zip(*(m.losses for m in found), strict=True)
    return float(max(max(losses) / min(losses) - 1 for losses in steps))


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measure(Job.from_json(sys.argv[1]))
    if dist.get_rank() == 0:
        print(json.dumps({name: asdict(m) for name, m in found.items()}), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
