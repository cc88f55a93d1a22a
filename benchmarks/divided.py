"""What dividing a backward costs: `python -m benchmarks.divided`.

Of all components of some models a backward as a whole, and one in two parts (zero bubble): first
the gradients of inputs, later those of weights. In turns, on one core; medians. `weights`
is the later part's share of both, beside what the graph says of it (`Division.weights`).
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import deep
from benchmarks.machine import machine
from synchromesh.engine import heap
from synchromesh.programs.borders import StandIns, record
from synchromesh.programs.clock import synchronised
from synchromesh.programs.compute import Bench
from synchromesh.programs.divided_backward import DividedBackward
from synchromesh.programs.walk import walking
from synchromesh.trace.capture.capture import trace
from synchromesh.trace.partition.division import divided
from synchromesh.trace.partition.partition import partition
from synchromesh.values.layout import Layout
from synchromesh.workloads.target import load

CPU = torch.device("cpu")
Clock = Callable[[], float]
TRANSFORMERS = {  # name: width, length, rows of a micro-batch
    "transformer, 128 wide": (128, 64, 4), "transformer, 256 wide": (256, 128, 4),
}  # fmt: skip
WORKLOADS = {"cifar100/vgg_small": 16, "cifar100/resnet18": 4, "cifar100/vit_small": 16}


@dataclass(frozen=True)
class Cost:
    """Milliseconds of a model's forward and backward, and of both parts of a divided one; the
    share of the later part by the graph."""

    forward: float
    backward: float
    inputs: float
    weights: float
    by_graph: float

    @property
    def ratio(self) -> float:
        return (self.inputs + self.weights) / self.backward

    @property
    def share(self) -> float:
        return self.weights / (self.inputs + self.weights)


class DividedBench(Bench):
    """A bench of a divided graph."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        local = given[2]
        self.walk = walking(torch.fx.GraphModule({}, divided(local, local.graph.graph)))


def forwards(benches: Sequence[Bench]) -> list[Any]:
    return [bench.seeds(bench.forward()) for bench in benches]


def backwards(benches: Sequence[Bench], seeded: list[Any]) -> None:
    for bench in reversed(benches):
        bench.backward(seeded.pop())


def whole(benches: Sequence[Bench], now: Clock) -> tuple[float, float]:
    """Seconds of forward and backward of all components, one after the other."""
    began = now()
    seeded = forwards(benches)
    start = now()
    backwards(benches, seeded)
    end = now()
    for bench in benches:
        bench.clear()
    return start - began, end - start


def in_parts(benches: Sequence[Bench], now: Clock) -> tuple[float, float]:
    """Seconds of both parts of a divided backward."""
    left = DividedBackward()
    for bench in benches:
        bench.axis.divided = left
    seeded = forwards(benches)
    start = now()
    backwards(benches, seeded)
    middle = now()
    left.weights()
    end = now()
    for bench in benches:
        bench.clear()
    return middle - start, end - middle


def transformer(width: int, length: int, rows: int) -> tuple[nn.Module, Any, Any, int]:
    shape = deep.Shape(blocks=4, width=width, heads=4, length=length, rows=rows)
    return deep.build(shape), deep.loss, deep.build_batch(shape), rows


def bundled(name: str, rows: int) -> tuple[nn.Module, Any, Any, int]:
    job = load(name, synthetic=True)
    return job.build(), job.loss, job.example(rows, seed=0), rows


def cost(model: nn.Module, loss: Any, batch: Any, rows: int, rounds: int) -> Cost:
    """Of all components together."""
    step = trace(model, loss, batch, training=True)
    held: dict[str, Tensor] = {
        n: x.detach() for n, x in (*model.named_parameters(), *model.named_buffers())
    }
    tensors = StandIns(step.chain, held, CPU)
    borders = record(step, batch, tensors, CPU)
    made = partition(step, (Layout(1, 1),) * len(step.chain.components), rows=rows)
    given = [(step, made, local, tensors, borders, rows, CPU) for local in made.components]
    plain, parts = [Bench(*g) for g in given], [DividedBench(*g) for g in given]
    now = synchronised(CPU)
    taken = [(*whole(plain, now), *in_parts(parts, now)) for _ in range(rounds + 1)][1:]
    medians = [statistics.median(column) * 1e3 for column in zip(*taken, strict=True)]
    alone = [min(bench.once()[1] for _ in range(3)) for bench in plain]
    weights = [local.division.weights for local in made.components]
    by_graph = sum(w * seconds for w, seconds in zip(weights, alone, strict=True)) / sum(alone)
    forward, backward, inputs, later = medians
    return Cost(forward, backward, inputs, later, by_graph)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    heap.keep()  # as where a model trains
    jobs: dict[str, Callable[[], tuple[nn.Module, Any, Any, int]]] = {}
    jobs |= {n: lambda of=of: transformer(*of) for n, of in TRANSFORMERS.items()}  # type: ignore[misc]
    jobs |= {n: lambda n=n, r=r: bundled(n, r) for n, r in WORKLOADS.items()}  # type: ignore[misc]
    found = {name: cost(*make(), options.rounds) for name, make in jobs.items()}
    if options.json:
        rows = {n: {**asdict(c), "ratio": c.ratio, "share": c.share} for n, c in found.items()}
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
        return 0
    print(f"{machine()}\n\n{'model':24} {'backward':>9} {'divided':>9} {'ratio':>6}  weights")
    for name, c in found.items():
        print(
            f"{name:24} {c.backward:6.1f} ms {c.inputs + c.weights:6.1f} ms {c.ratio:6.3f}  "
            f"{c.share:.2f} (by the graph {c.by_graph:.2f})"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
