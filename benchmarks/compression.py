"""Seconds that compressors compute, over those of copying as much: `python -m
benchmarks.compression [--rows N] [--columns N] [--ranks N] [--json]`.

One rank's side of a sum of one matrix in float32, whose messages come back at once. first: until
its first collective begins. rest: from then on. Least of several runs. `cost/compression.py` has
these figures."""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from benchmarks.machine import machine
from synchromesh.compression import compressors
from synchromesh.compression.compressor import CollectiveCall
from synchromesh.values.compression import CompressedSizes

WORDS = ("fp16", "int8", "onebit", "topk:0.01", "topk:0.1", "powersgd:1", "powersgd:4")
RUNS = 9


@dataclass(frozen=True)
class Row:
    """Of one word: passes, and megabytes of gradients a second."""

    word: str
    first: float
    rest: float
    megabytes: float


def clocked(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def answer(call: CollectiveCall, ranks: int) -> torch.Tensor:
    """What the others would send, were they this rank."""
    return torch.stack([call.sent] * ranks) if call.kind == "all_gather" else call.sent.clone()


def measure(word: str, shape: tuple[int, int], ranks: int) -> Row:
    size = shape[0] * shape[1]
    x, y = torch.randn(size), torch.empty(size)
    copy = min(clocked(lambda: y.copy_(x)) for _ in range(RUNS))
    side = compressors.of(CompressedSizes.of(word, (shape,), "float32", ranks), 0, x)
    firsts, rests = [], []
    for _ in range(RUNS):
        rounds = side.sum(torch.randn(size) * 0.01, [True])
        calls: list[CollectiveCall] = []
        firsts.append(clocked(lambda: calls.append(next(rounds))))  # noqa: B023
        rests.append(0.0)
        try:
            while True:
                got = answer(calls[-1], ranks)
                began = time.perf_counter()
                try:
                    calls.append(rounds.send(got))
                finally:
                    rests[-1] += time.perf_counter() - began
        except StopIteration:
            pass
    first, rest = min(firsts), min(rests)
    return Row(word, first / copy, rest / copy, 4 * size / (first + rest) / 1e6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(word, (asked.rows, asked.columns), asked.ranks) for word in WORDS]
    if asked.json:
        print(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}))
        return 0
    print(machine())
    print(f"{'':12}{'first':>8}{'rest':>8}{'MB/s':>8}")
    for row in rows:
        print(f"{row.word:12}{row.first:8.1f}{row.rest:8.1f}{row.megabytes:8.0f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
